"""Pairs from files of questions: Lost-in-the-Middle and Natural Questions rows, HotpotQA rows, SQuAD and XQuAD."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

from langchain_core.documents import Document

from rag_posfix.demo_data import load_passages, load_questions
from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.data.questions import PositionExample, load_examples, take_examples
from rag_posfix.training.data.pair import SHIPPED, Contamination, Pair, Segment, seeded_random, segments_of


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
                "passages lack the answers; give other pairs or other evaluation files"
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
    return load_examples(Path(source), limit=limit, skip=skip)


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
    """Return the pair of a question, or None if a single gold passage does not have the answer in one segment."""
    gold_segments = []
    for document in example.gold:
        segments = segments_of([document], words)
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
    around = [segments_of([document], words)[0] for document in example.distractors] if own_distractors else []
    return Pair(example.question, example.answers, tuple(gold_segments), tuple(around))
