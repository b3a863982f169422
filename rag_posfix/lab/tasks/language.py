"""Language modelling on a small generated text with sentence and paragraph ends."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch

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
    """Predict the next word of a generated text.

    The text has sentences and paragraphs (``sentences``); the person of a sentence follows from the same sentence of
    the paragraph before. The perplexity is that of the last quarter of the trained length, so at every length each
    counted word has much context. Out of the distribution the context is two and five times as long as in training.

    Source: the lengths are those of Golovneva et al. (2024), figure of longer contexts,
        https://arxiv.org/abs/2405.18719 (trained at 512, evaluated to 2,560)
    Differs from the paper: a generated text with 45 words instead of Wikitext-103.

    Args:
        length: Words of a sequence in training, 8 or more.
        people: Number of different people in the text, 2 to 12.

    Raises:
        ConfigError: there are not so many names.
    """

    name: ClassVar[str] = "language"
    caption: ClassVar[str] = (
        "The perplexity by length of the context, a line per seed; do not conclude that natural text gives this "
        "order, as the text is generated from few words."
    )
    metric: ClassVar[Literal["error", "perplexity"]] = "perplexity"

    length: Annotated[int, Integer(8)] = 128
    people: Annotated[int, Integer(2)] = len(NAMES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.people > len(NAMES):
            raise ConfigError(f"language: people={self.people} must be at most {len(NAMES)}; there are so many names")

    @property
    def vocabulary(self) -> int:
        """Number of words, with the ends of sentences and paragraphs."""
        return len(WORDS)

    @property
    def splits(self) -> Mapping[str, str]:
        """The trained length, and longer contexts."""
        return {TRAINED: f"{self.length} words"} | {
            f"x{factor}": f"{factor * self.length} words" for factor in FACTORS
        }

    def batch(self, split: str, size: int, generator: torch.Generator) -> Batch:
        """Return sequences that begin somewhere in a text."""
        length = self.length * (1 if split == TRAINED else int(split[1:]))
        seeds = torch.randint(0, 2**62, (size,), generator=generator).tolist()
        ids = torch.tensor([token_ids_of(_excerpt(random.Random(seed), length, self.people)) for seed in seeds])
        wanted = torch.ones_like(ids, dtype=torch.bool)
        scored = wanted.clone()
        scored[:, : -max(1, self.length // 4)] = False
        return create_batch(ids, wanted, scored)


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
