"""Questions with gold segments to train on: of files, and generated from templates; evaluation data among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

from langchain_core.documents import Document

from rag_posfix.demo_data import load_passages, load_questions
from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.data.questions import PositionExample, load_examples, take_examples
from rag_posfix.retrieval.index.storage import read_entries
from rag_posfix.retrieval.ingest.ingest import read_documents
from rag_posfix.retrieval.ingest.passages import PassageSize, split_passages
from rag_posfix.text import split_words


@dataclass(frozen=True, slots=True)
class Segment:
    """A short text with the title of its document.

    Attributes:
        title: The title; may be empty.
        text: The text.
    """

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Pair:
    """A question that its segments answer, and nothing else does.

    Attributes:
        question: The question.
        answers: Accepted answers; the first is trained on.
        segments: What the answer depends on, all of them.
        around: Distractors that are used before any others.
    """

    question: str
    answers: tuple[str, ...]
    segments: tuple[Segment, ...]
    around: tuple[Segment, ...] = ()


class PairSource(Protocol):
    """Makes pairs and distractors for them. Equal generators give equal results."""

    @property
    def name(self) -> str:
        """Name in rows and statistics."""

    def pair(self, index: int, random: Random, segments: int) -> Pair | None:
        """Return the pair of a sample, or None if the draw gave no usable one.

        Args:
            index: Which pair of this source, from 0.
            segments: How many segments the answer should depend on, if this source can choose.
        """

    def filler(self, random: Random) -> Segment:
        """Return a distractor for any pair of this source."""


def seeded_random(*values: object) -> Random:
    """Return a generator that these values alone decide, in every process."""
    return Random(":".join(map(str, values)))  # a string is hashed by SHA-512, not by hash()


class Contamination:
    """The sequences of n words (``split_words``) of evaluation questions and their gold passages.

    A text with fewer words than n counts as one sequence, so that short questions are found by equality.

    Source: An et al. (2024), IN2/FILM, section 3.2, 10-gram decontamination, https://arxiv.org/abs/2404.16811
    """

    def __init__(self, examples: Iterable[PositionExample] = (), n: int = 10) -> None:
        self._n = n
        texts = (
            text for example in examples for text in (example.question, *(gold.page_content for gold in example.gold))
        )
        self._evaluation_grams = {gram for text in texts for gram in self._grams(text)}

    def __len__(self) -> int:
        return len(self._evaluation_grams)

    def in_pair(self, pair: Pair) -> bool:
        """Return whether the question or a segment of a pair is known."""
        return self._has(pair.question) or any(map(self.in_segment, pair.segments))

    def in_segment(self, segment: Segment) -> bool:
        """Return whether a segment shares a sequence of n words with evaluation data."""
        return self._has(segment.text)

    def _has(self, text: str) -> bool:
        return bool(self._evaluation_grams) and any(gram in self._evaluation_grams for gram in self._grams(text))

    def _grams(self, text: str) -> Iterator[tuple[str, ...]]:
        words = split_words(text)
        if not words:
            return
        for start in range(max(1, len(words) - self._n + 1)):
            yield tuple(words[start : start + self._n])


SHIPPED = "demo"
"""In place of a path: the corpus that the package brings along."""
_MANIFEST = "manifest.json"


def read_segments(source: str, words: int) -> list[Segment]:
    """Return the segments of ``demo``, of a file, of a folder of texts or of an index, in a fixed order.

    Args:
        source: The name of the shipped corpus, or a path.
        words: Maximum number of words of a segment; 100 words are about 128 tokens.
    """
    path = Path(source)
    if source == SHIPPED and not path.exists():
        return segments_of(load_passages(), words)
    if (path / _MANIFEST).is_file():
        return segments_of([entry.document for entry in read_entries(path).values()], words)
    return segments_of(read_documents([path], size=PassageSize(words, 10 * words)), words)


def segments_of(documents: Sequence[Document], words: int) -> list[Segment]:
    """Return the segments of documents, each with the title of its document."""
    size = PassageSize(words, 10 * words)
    return [
        Segment(str(document.metadata.get("title", "") or ""), document.page_content[span.start : span.end])
        for document in documents
        for span in split_passages(document.page_content, size)
    ]


class FilePairs:
    """Pairs of a file, in an order that the seed decides; when all were used, they come in another order.

    A gold passage of more words than a segment is cut to the part with the answer.

    Args:
        words: Maximum number of words of a segment.
        contamination: Pairs that it knows are left out.
        own_distractors: Use the distractors of a question before any others.

    Raises:
        ConfigError: no pair is left.
    """

    name = "pairs"

    def __init__(
        self,
        examples: Sequence[PositionExample],
        seed: int,
        words: int,
        contamination: Contamination,
        own_distractors: bool = False,
    ) -> None:
        pairs = [_pair(example, words, own_distractors) for example in examples]
        self._pairs = [pair for pair in pairs if pair is not None and not contamination.in_pair(pair)]
        self.removed = len(examples) - len(self._pairs)
        if not self._pairs:
            raise ConfigError(
                f"none of {len(examples)} question-answer pairs is left: all are in the evaluation files, or their "
                "gold passages are empty or lack the answers; give other pairs or other evaluation files"
            )
        documents = [document for example in examples for document in (*example.gold, *example.distractors)]
        self._fillers = sorted(set(segments_of(documents, words)), key=lambda segment: (segment.title, segment.text))
        self._seed = seed

    def pair(self, index: int, random: Random, segments: int) -> Pair:
        """Return the pair of a sample; the file decides how many segments it has."""
        turn, position = divmod(index, len(self._pairs))
        order = list(range(len(self._pairs)))
        seeded_random("order", self._seed, turn).shuffle(order)
        return self._pairs[order[position]]

    def filler(self, random: Random) -> Segment:
        """Return a segment of another passage of the file."""
        return random.choice(self._fillers)


def read_examples(source: str, skip: int, limit: int | None) -> list[PositionExample]:
    """Return the questions of a file, or of the shipped corpus for ``demo``."""
    if source == SHIPPED and not Path(source).exists():
        return take_examples(demo_examples(), limit, skip)
    return load_examples(Path(source), limit=limit, skip=skip, every_gold=True)


def demo_examples() -> list[PositionExample]:
    """Return the questions of the shipped corpus with their gold passages and distractors."""
    passages = {passage.id: passage for passage in load_passages()}

    def named(identity: str) -> Document:
        return passages[identity]

    return [
        PositionExample(
            question.id,
            question.question,
            question.answers,
            (named(question.gold),),
            tuple(named(name) for name in question.distractors),
        )
        for question in load_questions()
    ]


def _pair(example: PositionExample, words: int, own_distractors: bool) -> Pair | None:
    """Return the pair of a question; None if a gold passage is empty, or no segment of the only one has the answer."""
    gold_segments = []
    for document in example.gold:
        segments = segments_of([document], words)
        if not segments:  # an empty paragraph
            return None
        having = [
            segment
            for segment in segments
            if any(answer.lower() in segment.text.lower() for answer in example.answers)
        ]
        if len(segments) == 1:
            gold_segments += segments
        elif having:
            gold_segments.append(having[0])
        elif len(example.gold) > 1:  # of several passages, one leads to the other and lacks the answer
            gold_segments.append(segments[0])
        else:
            return None
    distractors = example.distractors if own_distractors else ()
    around = [segment for document in distractors for segment in segments_of([document], words)[:1]]
    return Pair(example.question, example.answers, tuple(gold_segments), tuple(around))


_NAMES = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "garnet", "harbour", "indigo", "juniper", "kestrel",
    "laurel", "meadow", "nickel", "orchid", "pepper", "quartz", "raven", "saffron", "timber", "umber", "violet",
    "willow", "zinc",
)  # fmt: skip
_TOWN_ENDINGS = ("ford", "ton", "by", "ham")
_KINDS = ("pump", "valve", "lamp", "motor", "sensor", "filter", "relay", "cable", "panel", "bracket")
_COLOURS = ("red", "green", "blue", "white", "black", "yellow", "grey", "brown")
_OPERATIONS = ("adds", "multiplies by", "subtracts", "divides by")
_SIGNS = {"adds": "+", "multiplies by": "*", "subtracts": "-", "divides by": "/"}


class KeyValue:
    """Records of a key and a value of hexadecimal digits; the value of a key is asked for.

    Source: Liu et al. (2023), Lost in the Middle, section 3, https://arxiv.org/abs/2307.03172
    """

    name = "key_value"

    def pair(self, index: int, random: Random, segments: int) -> Pair:
        """Return a question for the value of each of ``segments`` keys."""
        keys, values = ([_hexadecimal(random) for _ in range(segments)] for _ in range(2))
        key_list = " and of the key ".join(keys)
        question = f"What is the value of the key {key_list}?"
        records = tuple(self._record(key, value) for key, value in zip(keys, values, strict=True))
        return Pair(question, (" and ".join(values),), records)

    def filler(self, random: Random) -> Segment:
        """Return another record."""
        return self._record(_hexadecimal(random), _hexadecimal(random))

    @staticmethod
    def _record(key: str, value: str) -> Segment:
        return Segment("", f"The value of the key {key} is {value}.")


class CodeFunction:
    """Short Python functions; the name of the function that does something is asked for.

    Source: An et al. (2024), IN2/FILM, section 3.1 (code), https://arxiv.org/abs/2404.16811
    """

    name = "function"

    def pair(self, index: int, random: Random, segments: int) -> Pair:
        """Return a question for the names of ``segments`` functions, by what they compute."""
        functions, conditions, names = [], [], []
        for _ in range(segments):
            name, operation, number = self._draw(random)
            functions.append(self._function(name, operation, number))
            conditions.append(f"{operation} {number}")
            names.append(name)
        question = f"Which function {' and which function '.join(conditions)}?"
        return Pair(question, (" and ".join(names),), tuple(functions))

    def filler(self, random: Random) -> Segment:
        """Return another function."""
        return self._function(*self._draw(random))

    @staticmethod
    def _draw(random: Random) -> tuple[str, str, int]:
        name = f"{random.choice(_NAMES)}_{random.choice(_KINDS)}_{random.randrange(1000)}"
        return name, random.choice(_OPERATIONS), random.randrange(10_000, 10_000_000)

    @staticmethod
    def _function(name: str, operation: str, number: int) -> Segment:
        sign = _SIGNS[operation]
        return Segment("", f"def {name}(x):\n    # {operation} {number}\n    return x {sign} {number}")


class DatabaseRow:
    """Rows of a stock list; a field of a row is asked for by its number.

    Source: An et al. (2024), IN2/FILM, section 3.1 (structured data), https://arxiv.org/abs/2404.16811
    """

    name = "database"

    def pair(self, index: int, random: Random, segments: int) -> Pair:
        """Return a question for one field of each of ``segments`` rows."""
        rows = [self._row(random) for _ in range(segments)]
        field = random.choice(("supplier", "city", "price"))
        item_list = " and of item ".join(row["item"] for row in rows)
        question = f"What is the {field} of item {item_list}?"
        return Pair(question, (" and ".join(row[field] for row in rows),), tuple(map(self._text, rows)))

    def filler(self, random: Random) -> Segment:
        """Return another row."""
        return self._text(self._row(random))

    @staticmethod
    def _row(random: Random) -> dict[str, str]:
        return {
            "item": str(random.randrange(10**6, 10**7)),
            "name": f"{random.choice(_COLOURS)} {random.choice(_KINDS)}",
            "supplier": f"{random.choice(_NAMES).title()} {random.randrange(1000)}",
            "city": f"{random.choice(_NAMES).title()}{random.choice(_TOWN_ENDINGS)} {random.randrange(100)}",
            "price": f"{random.randrange(1, 1000)}.{random.randrange(100):02d}",
        }

    @staticmethod
    def _text(row: dict[str, str]) -> Segment:
        return Segment("", " | ".join(f"{name}: {value}" for name, value in row.items()))


def _hexadecimal(random: Random) -> str:
    return f"{random.getrandbits(32):08x}"


TEMPLATES: dict[str, type[PairSource]] = {"key_value": KeyValue, "function": CodeFunction, "database": DatabaseRow}
"""The templates by name."""


def template_sources(text: str) -> list[PairSource]:
    """Return the templates that a list separated by commas names."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in TEMPLATES:
            raise ConfigError(f"unknown template {name!r}; available: {', '.join(TEMPLATES)}")
    if len(set(names)) < len(names):
        raise ConfigError(f"--templates {text!r} names a template twice; name each once")
    return [TEMPLATES[name]() for name in names]
