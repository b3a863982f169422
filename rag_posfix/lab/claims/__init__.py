"""Claims of three texts: each with its measurement, and the rule by which its verdict follows from the numbers."""

from rag_posfix.lab.claims.base import Claim, Condition, Evidence, Outcome, reproduce, with_sizes
from rag_posfix.lab.claims.causes import CAUSES_CLAIM
from rag_posfix.lab.claims.contextual import CONTEXTUAL
from rag_posfix.lab.claims.longbench import with_longbench
from rag_posfix.lab.claims.position_bias import POSITION_BIAS
from rag_posfix.lab.claims.real_text import REAL_TEXT
from rag_posfix.lab.claims.without_model import WITHOUT_MODEL
from rag_posfix.lab.claims.without_positions import WITHOUT_POSITIONS

CLAIMS = (*POSITION_BIAS, *WITHOUT_MODEL, CAUSES_CLAIM, *WITHOUT_POSITIONS, *CONTEXTUAL, *REAL_TEXT)
"""All claims, in the order of the texts."""

__all__ = ["CLAIMS", "Claim", "Condition", "Evidence", "Outcome", "reproduce", "with_longbench", "with_sizes"]
