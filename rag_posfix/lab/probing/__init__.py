"""Probes: measurements of what a model does with positions, one per file, found by name in ``PROBES``.

Importing this package registers every probe in ``PROBES``. A new probe is one file and one line here.
"""

from rag_posfix.lab.probing import (  # noqa: F401
    attention_edit,
    attention_mass,
    bias_at_init,
    causal_perturbation,
    hidden_geometry,
    norm_by_position,
    positional_dimensions,
    positional_vectors,
    retrieval_heads,
    rope_waveform,
    score_advantage,
    slot_attention,
    word_counting,
)
from rag_posfix.lab.probing.base import PROBES, Found, MeasuredProbe, Probe
from rag_posfix.lab.probing.subject import Change, Subject, Watch, open_subject

__all__ = ["PROBES", "Change", "Found", "MeasuredProbe", "Probe", "Subject", "Watch", "open_subject"]
