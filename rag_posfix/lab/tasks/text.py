"""Language modelling on real text: the reference of the Python language, the code of its library, or a file."""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError
from rag_posfix.lab.tasks.base import TASKS, TRAINED, Batch, Task, create_batch
from rag_posfix.parameters import Integer

PROSE, CODE = "prose", "code"
OTHER, LINE, PARAGRAPH = "<other>", "<line>", "¶"
SENTENCE_ENDS = (".", "?", "!")
HELD_OUT = 10
"""One in so many words, those at the end of the text, is never trained on."""
FACTORS = (2, 5)


@TASKS.register("text", presets={"text_published": {"length": 1024, "words": 4096}})
@dataclass(frozen=True)
class Text(Task):
    """Predict the next word of a real text.

    Words, signs and paragraph ends are tokens, in code line ends too; words beyond the most frequent ones are one
    token. The last tenth of the text is held out, and all splits are of it. The perplexity is that of the last quarter
    of the trained length, with the trained context, and one two and five times as long.

    Source: the lengths are those of Golovneva et al. (2024), language modelling and code,
        https://arxiv.org/abs/2405.18719
    Differs from the paper: other and smaller texts than Wikitext-103 and GitHub; whole words as tokens.

    Args:
        source: ``prose`` (reference of the Python language), ``code`` (modules of its library), both of the Python
            that runs this, or the path of a text.
        length: Words of a sequence in training, 8 or more; 1,024 in the paper.
        words: Number of different tokens, 8 or more.

    Raises:
        ConfigError: the text cannot be read, or is too short for the longest context.
    """

    name: ClassVar[str] = "text"
    caption: ClassVar[str] = (
        "The perplexity of the held-out tenth of a text by length of the context, a line per seed; do not conclude "
        "that larger decoders or other texts give this order."
    )
    metric: ClassVar[Literal["error", "perplexity"]] = "perplexity"

    source: str = PROSE
    length: Annotated[int, Integer(8)] = 128
    words: Annotated[int, Integer(8)] = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        held_out, needed = len(tokens_of(self.source)) // HELD_OUT, self.length * FACTORS[-1]
        if held_out <= needed:
            raise ConfigError(
                f"text: length={self.length} needs a held-out tenth of more than {needed} words, that of "
                f"{self.source!r} has {held_out}; give a shorter length or a longer text"
            )

    @property
    def vocabulary(self) -> int:
        """Number of tokens, with that of other words."""
        return len(vocabulary_of(self.source, self.words))

    @property
    def splits(self) -> Mapping[str, str]:
        """The trained length, and longer contexts, all of held-out text."""
        return {TRAINED: f"{self.length} words"} | {
            f"x{factor}": f"{factor * self.length} words" for factor in FACTORS
        }

    @property
    def data(self) -> Mapping[str, str]:
        """Name and digest of the text: that of a Python differs by its version."""
        words = "\0".join(tokens_of(self.source))
        return {"name": Path(self.source).name, "sha256": hashlib.sha256(words.encode()).hexdigest()}

    def training_batch(self, size: int, generator: torch.Generator) -> Batch:
        """Return sequences of the text that is not held out; see ``Task.training_batch``."""
        return self._scored(self._drawn(split_ids(self.source, self.words)[0], self.length, size, generator))

    def batch(self, split: str, size: int, generator: torch.Generator) -> Batch:
        """Return sequences that end at evenly spaced words of the held-out text: each length scores the same words."""
        text, length = split_ids(self.source, self.words)[1], self._length(split)
        ends = torch.linspace(self.length * FACTORS[-1], len(text), size).long()
        return self._scored(text[ends[:, None] - length + torch.arange(length)])

    def excerpts(self, split: str, size: int, generator: torch.Generator) -> Tensor:
        """Return sequences that begin somewhere in the held-out text, (size, T)."""
        return self._drawn(split_ids(self.source, self.words)[1], self._length(split), size, generator)

    def _length(self, split: str) -> int:
        return self.length * (1 if split == TRAINED else int(split[1:]))

    def _drawn(self, text: Tensor, length: int, size: int, generator: torch.Generator) -> Tensor:
        starts = torch.randint(0, len(text) - length + 1, (size, 1), generator=generator)
        return text[starts + torch.arange(length)]

    def _scored(self, ids: Tensor) -> Batch:
        wanted = torch.ones_like(ids, dtype=torch.bool)
        scored = wanted.clone()
        scored[:, : -max(1, self.length // 4)] = False
        return create_batch(ids, wanted, scored)


@cache
def tokens_of(source: str) -> tuple[str, ...]:
    """Return the words, signs and ends of a text; see ``Text``."""
    text = _read(source)
    words = r"\n|\w+" if source == CODE else r"\w+(?:\.\w+)*"  # a dotted name has no sentence end
    tokens = re.findall(rf"\n\s*\n|{words}|[^\w\s]", text)
    return tuple(PARAGRAPH if "\n" in token[1:] else LINE if token == "\n" else token for token in tokens)


def _read(source: str) -> str:
    try:
        if source == PROSE:
            from pydoc_data.topics import topics

            return "\n\n".join(topics[name] for name in sorted(topics))
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if source == CODE else [Path(source)]
        return "\n\n".join(file.read_text("utf-8") for file in files)
    except (OSError, UnicodeDecodeError, ImportError) as error:
        raise ConfigError(
            f"text: source={source!r} cannot be read ({type(error).__name__}: {error}); give prose, code, or the path "
            "of a text in UTF-8"
        ) from error


@cache
def vocabulary_of(source: str, words: int) -> tuple[str, ...]:
    """Return the tokens by id: ``OTHER``, then the most frequent ones of the text that is not held out."""
    tokens = tokens_of(source)
    counts = Counter(tokens[: len(tokens) - len(tokens) // HELD_OUT])
    return (OTHER, *sorted(counts, key=lambda token: (-counts[token], token))[: words - 1])


@cache
def split_ids(source: str, words: int) -> tuple[Tensor, Tensor]:
    """Return the token ids of the text that is trained on, and of the held-out one."""
    tokens, number = tokens_of(source), {token: index for index, token in enumerate(vocabulary_of(source, words))}
    ids = torch.tensor([number.get(token, 0) for token in tokens])
    first = len(tokens) - len(tokens) // HELD_OUT
    return ids[:first], ids[first:]
