"""Language modelling on a small generated text with sentence and paragraph ends, or on a text file."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError
from rag_posfix.lab.tasks.base import TASKS, TRAINED, Batch, Task, create_batch
from rag_posfix.parameters import Integer

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ian", "June", "Kim", "Lee")
VERBS = ("sees", "finds", "paints", "sells", "moves", "keeps")
ADJECTIVES = ("small", "red", "old", "heavy", "new", "blue")
NOUNS = ("boat", "chair", "lamp", "stone", "book", "wheel", "map", "coat")
PLACES = ("garden", "harbour", "market", "station", "library", "field")
END, PARAGRAPH = ".", "¶"
KINDS = {
    "person": NAMES,
    "verb": VERBS,
    "adjective": ADJECTIVES,
    "thing": NOUNS,
    "place": PLACES,
    "other word": ("the", "a", "in", "again", "today"),
    "sentence end": (END,),
    "paragraph end": (PARAGRAPH,),
}
"""The words of each kind."""

WORDS = (*NAMES, *VERBS, *ADJECTIVES, *NOUNS, *PLACES, "the", "a", "in", "again", "today", END, PARAGRAPH)

KEPT = 0.9
PARAGRAPH_SENTENCES = 4
FACTORS = (2, 5)
HELD_OUT = 0.1
"""Share of a text file, its end, that measures; the decoder is trained on the rest."""


def sentences(draw: random.Random, people: int = len(NAMES)) -> Iterator[list[str]]:
    """Yield the sentences of an endless text, each with its end; every fourth one with the end of a paragraph too.

    A sentence names a person, a verb, a thing and, half of the time, a place; in between stand words that make its
    length vary. The person of a sentence is that of the same sentence of the paragraph before, nine times in ten, and
    the place of a paragraph is the same in all its sentences. So who comes next depends on the number of sentence ends
    since the last paragraph end, and not on a number of words. With few different people the one who came after this
    person before says little.
    """
    names = NAMES[:people]
    chosen = [draw.choice(names) for _ in range(PARAGRAPH_SENTENCES)]
    while True:
        place = draw.choice(PLACES)
        for number in range(PARAGRAPH_SENTENCES):
            if draw.random() >= KEPT:
                chosen[number] = draw.choice(names)
            words = [chosen[number], draw.choice(VERBS), draw.choice(("the", "a"))]
            words += draw.sample(ADJECTIVES, draw.choice((0, 1, 2)))
            words.append(draw.choice(NOUNS))
            words += ["in", "the", place] if draw.random() < 0.5 else []
            words += [draw.choice(("again", "today"))] if draw.random() < 0.3 else []
            yield [*words, END, *([PARAGRAPH] if number == PARAGRAPH_SENTENCES - 1 else [])]


@TASKS.register("language", aliases=("lm",), presets={"language_published": {"length": 512}})
@dataclass(frozen=True)
class Language(Task):
    """Predict the next word of a generated text, or of a text file.

    The generated text has sentences and paragraphs (``sentences``); the person of a sentence follows from the same
    sentence of the paragraph before. A file's words are runs of letters, marks, and line ends with the indentation
    that follows; rare ones are one unknown word. The last tenth of the file measures, with the same counted words at
    every length; the rest trains.

    The perplexity is that of the last quarter of the trained length, so at every length each counted word has much
    context. Out of the distribution the context is two and five times as long as in training.

    Source: the lengths are those of Golovneva et al. (2024), figure of longer contexts,
        https://arxiv.org/abs/2405.18719 (trained at 512, evaluated to 2,560)
    Differs from the paper: a generated text with 45 words, or a file, instead of Wikitext-103.

    Args:
        length: Words of a sequence in training, 8 or more.
        people: Number of different people in the generated text, 2 to 12.
        text: A text file in UTF-8; "" generates the text.
        words: Different words of the file, the most frequent ones; all others are the unknown word.

    Raises:
        ConfigError: there are not so many names, or the file cannot be read or is too short.
    """

    name: ClassVar[str] = "language"
    metric: ClassVar[Literal["error", "perplexity"]] = "perplexity"

    length: Annotated[int, Integer(8)] = 128
    people: Annotated[int, Integer(2)] = len(NAMES)
    text: str = ""
    words: Annotated[int, Integer(2)] = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.people > len(NAMES):
            raise ConfigError(f"language: people={self.people} must be at most {len(NAMES)}; there are so many names")
        if not isinstance(self.text, str):
            raise ConfigError(f"language: text={self.text!r} must be the path of a text file")
        if self.text and len(self._file.held_out) < (needed := max(FACTORS) * self.length):
            raise ConfigError(
                f"language: the last tenth of text={self.text} has {len(self._file.held_out)} words and "
                f"length={self.length} needs {needed}; give a longer text or a smaller length"
            )

    @property
    def _file(self) -> TextFile:
        return read_text(self.text, self.words)

    @property
    def data(self) -> Mapping[str, str]:
        """Name and digest of the text file."""
        return {"name": Path(self.text).name, "sha256": self._file.sha256} if self.text else {}

    @property
    def vocabulary(self) -> int:
        """Number of words, with the ends of sentences and paragraphs."""
        return self._file.vocabulary if self.text else len(WORDS)

    @property
    def splits(self) -> Mapping[str, str]:
        """The trained length, and longer contexts."""
        return {TRAINED: f"{self.length} words"} | {
            f"x{factor}": f"{factor * self.length} words" for factor in FACTORS
        }

    def batch(self, split: str, size: int, generator: torch.Generator) -> Batch:
        """Return sequences that begin somewhere in a text; of a file, those that end at evenly spaced words."""
        length = self.length * (1 if split == TRAINED else int(split[1:]))
        if self.text:
            text = self._file.held_out
            ends = torch.linspace(max(FACTORS) * self.length, len(text), size).long()[:, None]
            return self._scored(text[ends - length + torch.arange(length)])
        seeds = torch.randint(0, 2**62, (size,), generator=generator).tolist()
        ids = torch.tensor([token_ids_of(_excerpt(random.Random(seed), length, self.people)) for seed in seeds])
        return self._scored(ids)

    def training_batch(self, size: int, generator: torch.Generator) -> Batch:
        """Return sequences to train on; those of a file are from its beginning."""
        if not self.text:
            return self.batch(TRAINED, size, generator)
        text = self._file.trained
        starts = torch.randint(0, len(text) - self.length + 1, (size, 1), generator=generator)
        return self._scored(text[starts + torch.arange(self.length)])

    def _scored(self, ids: Tensor) -> Batch:
        """Return the batch with the last quarter of the trained length scored."""
        wanted = torch.ones_like(ids, dtype=torch.bool)
        scored = wanted.clone()
        scored[:, : -max(1, self.length // 4)] = False
        return create_batch(ids, wanted, scored)


@dataclass(frozen=True, slots=True, eq=False)
class TextFile:
    """The token ids of a text file; id 0 is the unknown word.

    Attributes:
        trained: Those to train on.
        held_out: Those that measure.
        vocabulary: Number of different token ids.
        sha256: Of the file.

    Shapes:
        trained, held_out: (words,).
    """

    trained: Tensor
    held_out: Tensor
    vocabulary: int
    sha256: str


@lru_cache(maxsize=2)
def read_text(path: str, words: int) -> TextFile:
    """Return the token ids of a text file, with the most frequent words of the part to train on.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        content = Path(path).read_bytes()
        pieces = re.findall(r"\n\s*|\w+|[^\w\s]", content.decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"language: text={path} cannot be read: {error}; give a text file in UTF-8") from error
    first = len(pieces) - int(HELD_OUT * len(pieces))
    number = {word: index + 1 for index, (word, _) in enumerate(Counter(pieces[:first]).most_common(words - 1))}
    ids = torch.tensor([number.get(word, 0) for word in pieces])
    return TextFile(ids[:first], ids[first:], len(number) + 1, hashlib.sha256(content).hexdigest())


def token_ids_of(words: Iterable[str]) -> list[int]:
    """Return the token ids of words."""
    number = {word: index for index, word in enumerate(WORDS)}
    return [number[word] for word in words]


def _excerpt(draw: random.Random, length: int, people: int) -> list[str]:
    """Return so many words of a text, from a random word of its first paragraphs on."""
    skip = draw.randrange(60)
    words: list[str] = []
    text = sentences(draw, people)
    while len(words) < skip + length:
        words += next(text)
    return words[skip : skip + length]
