"""Precision and recall of citations on 100 labelled answers of our own writing.

    python -m benchmarks.citations

``citations.jsonl`` has a group of passages in each line, with questions, answers, and the passages that are evidence
for the answer (``gold``, from 0): none for answers that no passage holds, and for yes, no and repeated questions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rag_posfix.pipeline.citations import find_quotes

ANSWERS = Path(__file__).with_name("citations.jsonl")


@dataclass(frozen=True, slots=True)
class LabelledAnswer:
    """An answer, the passages that were read, and those that are evidence for it."""

    language: str
    question: str
    answer: str
    passages: tuple[str, ...]
    gold: frozenset[int]


@dataclass(frozen=True, slots=True)
class CitationCounts:
    """Citations of a set of answers: how many there are, how many are right, and how many there should be."""

    cited: int
    right: int
    gold: int

    @property
    def precision(self) -> float:
        """Share of the citations whose passage is evidence."""
        return self.right / max(self.cited, 1)

    @property
    def recall(self) -> float:
        """Share of the evidence that is cited."""
        return self.right / max(self.gold, 1)


def read_answers(path: Path = ANSWERS) -> list[LabelledAnswer]:
    """Return the labelled answers."""
    groups = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        LabelledAnswer(
            group["language"], row["question"], row["answer"], tuple(group["passages"]), frozenset(row["gold"])
        )
        for group in groups
        for row in group["answers"]
    ]


def count_citations(answers: Sequence[LabelledAnswer]) -> CitationCounts:
    """Return the counts over ``answers``."""
    quotes = [(find_quotes(row.answer, row.passages, row.question), row.gold) for row in answers]
    pairs = [({index for quote in found for index in quote.passages}, gold) for found, gold in quotes]
    return CitationCounts(
        sum(len(cited) for cited, _ in pairs),
        sum(len(cited & gold) for cited, gold in pairs),
        sum(len(gold) for _, gold in pairs),
    )


def main() -> None:
    """Print a table: each language and all of them."""
    answers = read_answers()
    print("language  answers  precision  recall  wrong  missed")
    for language in [*dict.fromkeys(row.language for row in answers), "all"]:
        rows = [row for row in answers if language in (row.language, "all")]
        counts = count_citations(rows)
        print(
            f"{language:8}  {len(rows):7}  {counts.precision:9.2f}  {counts.recall:6.2f}  "
            f"{counts.cited - counts.right:5}  {counts.gold - counts.right:6}"
        )


if __name__ == "__main__":
    main()
