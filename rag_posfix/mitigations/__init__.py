"""Mitigations: one published correction per file, found by name in ``MITIGATIONS``.

Importing this package registers every method. A new method is one file and one line here.
"""

from rag_posfix.mitigations import (
    calibrated_attention,
    context_experts,
    none,
    parallel_windows,
    shifted_rotary,
    stable_mask,
)
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation, create

__all__ = [
    "MITIGATIONS",
    "Mitigation",
    "calibrated_attention",
    "context_experts",
    "create",
    "none",
    "parallel_windows",
    "shifted_rotary",
    "stable_mask",
]
