"""Claims of three texts: each with its measurement, and the rule by which its verdict follows from the numbers."""

from rag_posfix.claims.base import Claim, Condition, Evidence, Outcome, reproduce
from rag_posfix.claims.without_positions import WITHOUT_POSITIONS

CLAIMS = (*WITHOUT_POSITIONS,)
"""All claims, in the order of the texts."""

__all__ = ["CLAIMS", "Claim", "Condition", "Evidence", "Outcome", "reproduce"]
