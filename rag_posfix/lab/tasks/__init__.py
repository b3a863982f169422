"""Tasks of the laboratory: generated sequences, one task per file, found by name in ``TASKS``."""

from rag_posfix.lab.tasks import (  # noqa: F401
    counting,
    flip_flop,
    key_value,
    language,
    last_sentence,
    selective_copy,
    text,
)
from rag_posfix.lab.tasks.base import IGNORED, TASKS, TRAINED, Batch, Task

__all__ = ["IGNORED", "TASKS", "TRAINED", "Batch", "Task"]
