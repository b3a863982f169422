"""Tasks of the laboratory: generated sequences, one task per file, found by name in ``TASKS``."""

from rag_posfix.laboratory.tasks import counting, flip_flop, key_value, language, selective_copy  # noqa: F401
from rag_posfix.laboratory.tasks.base import IGNORED, TASKS, TRAINED, Batch, Task

__all__ = ["IGNORED", "TASKS", "TRAINED", "Batch", "Task"]
