"""Mitigations: one published correction per file, found by name in ``MITIGATIONS``.

Importing this package registers every method. A new method is one file and one line here.
"""

from rag_posfix.mitigations import (
    context_experts,
    inter_document,
    none,
    parallel_windows,
)
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation, create

__all__ = ["MITIGATIONS", "Mitigation", "context_experts", "create", "inter_document", "none", "parallel_windows"]
