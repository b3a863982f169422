"""How training data is made."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Annotated, Any

from rag_posfix.errors import ConfigError
from rag_posfix.parameters import Integer, Number, check_parameters


@dataclasses.dataclass(frozen=True, slots=True)
class DataSettings:
    """How training data is made.

    Attributes:
        samples: Number of samples.
        min_tokens: Fewest tokens of the segments of a sample together.
        max_tokens: About the most tokens of the segments of a sample together.
        length_bins: Parts of that range that get equally many samples.
        segment_words: Maximum number of words of a segment.
        multi: Share of samples whose answer needs several segments.
        own_distractors: Use a pair's own distractors first.
        n_gram: Reject samples that share this many words with evaluation.
        seed: Seed of everything that is drawn.

    Raises:
        ConfigError: a value is out of range.
    """

    samples: Annotated[int, Integer(1)] = 1000
    min_tokens: Annotated[int, Integer(1)] = 512
    max_tokens: Annotated[int, Integer(1)] = 1536
    length_bins: Annotated[int, Integer(1)] = 4
    segment_words: Annotated[int, Integer(10)] = 100
    multi: Annotated[float, Number(0, 1)] = 0.2
    own_distractors: bool = False
    n_gram: Annotated[int, Integer(3)] = 10
    seed: Annotated[int, Integer(0)] = 0

    def __post_init__(self) -> None:
        check_parameters(self, "train data")
        if self.max_tokens < self.min_tokens:
            raise ConfigError(f"max_tokens={self.max_tokens} must be >= min_tokens={self.min_tokens}")

    def length_bin(self, index: int) -> int:
        """Return which part of the range of lengths the sample ``index`` of its source is in."""
        return index % self.length_bins

    def bounds(self, length_bin: int) -> tuple[int, int]:
        """Return the fewest and the most tokens of a part of the range."""
        width = (self.max_tokens - self.min_tokens) / self.length_bins
        return self.min_tokens + round(width * length_bin), self.min_tokens + round(width * (length_bin + 1))

    def digest(self, **more: Any) -> str:
        """Return a digest of the settings and of whatever else decides the samples."""
        content = json.dumps([dataclasses.asdict(self), more], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
