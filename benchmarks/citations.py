"""Precision and recall of citations on 100 labelled answers of our own writing, by the rule in use and a former one.

    python -m benchmarks.citations

``citations.jsonl`` has a group of passages in each line, with questions, answers, and the passages that are evidence
for the answer (``gold``, from 0): none for answers that no passage holds, and for yes, no and repeated questions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rag_posfix.pipeline.citations import find_quotes

ANSWERS = Path(__file__).with_name("citations.jsonl")

Cite = Callable[[str, Sequence[str], str], set[int]]
"""Returns the cited passages of an answer, from (answer, passages, question)."""


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


def cite(answer: str, passages: Sequence[str], question: str) -> set[int]:
    """Return the passages that are cited now."""
    return {index for quote in find_quotes(answer, passages, question) for index in quote.passages}


def cite_word_runs(answer: str, passages: Sequence[str], question: str) -> set[int]:
    """Return the passages that the former rule cited: those with the longest runs of three words of the answer.

    A run ended at the end of the answer or where no passage had one more word; a shorter answer was one run.
    """
    words = re.findall(r"\w+", answer.lower())
    texts = [" ".join(["", *re.findall(r"\w+", passage.lower()), ""]) for passage in passages]
    least, first = min(3, len(words)), 0
    cited: set[int] = set()
    while least and first + least <= len(words):
        length, holders = 0, set[int]()
        for size in range(least, len(words) - first + 1):
            run = f" {' '.join(words[first : first + size])} "
            now = {index for index, text in enumerate(texts) if run in text}
            if not now:
                break
            length, holders = size, now
        cited |= holders
        first += max(length, 1)
    return cited


def count_citations(answers: Sequence[LabelledAnswer], rule: Cite) -> CitationCounts:
    """Return the counts of a rule over ``answers``."""
    pairs = [(rule(row.answer, row.passages, row.question), row.gold) for row in answers]
    return CitationCounts(
        sum(len(cited) for cited, _ in pairs),
        sum(len(cited & gold) for cited, gold in pairs),
        sum(len(gold) for _, gold in pairs),
    )


def main() -> None:
    """Print a table: each language and all of them, by the former rule and by the one in use."""
    answers = read_answers()
    print("language  answers  precision before  recall before  precision  recall  wrong  missed")
    for language in [*dict.fromkeys(row.language for row in answers), "all"]:
        rows = [row for row in answers if language in (row.language, "all")]
        before, now = count_citations(rows, cite_word_runs), count_citations(rows, cite)
        print(
            f"{language:8}  {len(rows):7}  {before.precision:16.2f}  {before.recall:13.2f}  {now.precision:9.2f}  "
            f"{now.recall:6.2f}  {now.cited - now.right:5}  {now.gold - now.right:6}"
        )


if __name__ == "__main__":
    main()
