"""Mitigations: one published correction per file, found by name in ``MITIGATIONS``.

Importing this package registers every method. A new method is one file and one line here.
"""

from rag_posfix.mitigations import (  # noqa: F401
    blended,
    calibrated_attention,
    canonical_rotations,
    committee,
    context_experts,
    head_scaling,
    hidden_scaling,
    inter_document,
    layer_scaling,
    multi_base,
    none,
    parallel_encoding,
    parallel_windows,
    passage_answers,
    repeated_passages,
    set_prompting,
    shifted_rotary,
    sorted_inter_document,
    stable_mask,
    stack,
)
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation, create

__all__ = ["MITIGATIONS", "Mitigation", "create"]
