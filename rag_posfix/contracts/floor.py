"""Between which similarities a judge decides whether a retrieved passage is read."""

from __future__ import annotations

from dataclasses import dataclass

from rag_posfix.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SimilarityRange:
    """Similarities of an embedding model between which another judge decides.

    Attributes:
        low: A passage below it is not about the question.
        clear: With a passage from here on, the passages are about the question.
    """

    low: float
    clear: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.clear <= 1:
            raise ConfigError(f"similarities low={self.low}, clear={self.clear} must be 0 <= low <= clear <= 1")
