"""Asks the questions of the gate and measures retrieval, grounding, accuracy, citations and leaks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from benchmarks.end_to_end.files import SHIPPED, GateQuestion
from rag_posfix.contracts.answer import Answer, Question
from rag_posfix.contracts.request import Sampling
from rag_posfix.contracts.retrieval import matches, parse_filter, retrieve_query
from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.statistics import best_subspan_em, normalize
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.pipeline.query import search_query

GOLD_ALONE = "gold alone"
ARRANGEMENTS: Mapping[str, Mapping[str, str]] = {
    "none": {"mitigation": "none", "order": "relevance"},
    "/reverse/none": {"mitigation": "none", "order": "reverse"},
    "default": {"mitigation": "default", "order": "relevance"},
}
"""Method and order by the name of a column; ``gold alone`` has the right passages only, with ``none``."""

FLOORS: Mapping[str, Mapping[str, float]] = {
    "qwen2.5-coder-1.5b": {
        "faq": 0.85, "titled": 0.8, "short": 0.5, "lists": 0.35, "follow-ups": 0.8, "hostile": 0.7, "paraphrased": 0.9,
    },
    "qwen2.5-coder-0.5b": {
        "faq": 0.7, "titled": 0.8, "short": 0.6, "follow-ups": 0.9, "hostile": 0.6, "paraphrased": 0.75,
    },
    "smollm2": {"faq": 0.35, "titled": 0.5, "short": 0.5, "follow-ups": 0.75, "hostile": 0.4, "paraphrased": 0.6},
}  # fmt: skip
"""Least shares of right answers about own files by reader and kind: about two answers below the records."""

_NUMBERS = (
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen",
)  # fmt: skip
_DIGITS = {word: str(number) for number, word in enumerate(_NUMBERS, 1)}

_MAX_TOKENS, _MAX_LIST_TOKENS = 32, 128


def arrangement_of(name: str) -> Mapping[str, str]:
    """Return what a question names: of ``ARRANGEMENTS``, of ``reranker/order/method``, nothing if it is ``SHIPPED``.

    Raises:
        ConfigError: it is none of them.
    """
    if name == SHIPPED:
        return {}
    if name in ARRANGEMENTS:
        return ARRANGEMENTS[name]
    parts = name.split("/")
    if len(parts) != 3:
        raise ConfigError(
            f"arrangement {name!r} must be one of {', '.join(ARRANGEMENTS)}, {SHIPPED}, or RERANKER/ORDER/METHOD"
        )
    return {key: part for key, part in zip(("reranker", "order", "mitigation"), parts, strict=True) if part}


@dataclass(frozen=True, slots=True)
class GateRow:
    """What came of one question.

    Attributes:
        gold_rank: The rank of the first right passage among ``k`` retrieved ones, from 1; None without one.
        gold_read: Whether the model read a right passage.
        cited: Documents that citations name, over all citations; ``cited_right`` are passages with the answer.
        leaked: Passages that the model read although the filter of the question leaves them out.
        names: Share of the wanted names that the answer of a list holds; for other questions 1 if it is right.
        unwanted: Share of the unwanted names that it holds.
        heading_only: Whether a wrong answer has no word that is not in the title of a passage that was read.
        planted: Whether the answer is that of hostile documents, and the right one is not named beside it.
    """

    arrangement: str
    id: str
    kind: str
    near: bool
    gold_rank: int | None
    gold_read: bool
    best_score: float
    grounded: bool
    right: bool
    cited: int
    cited_right: int
    leaked: int
    answer: str
    seconds: float
    judge_seconds: float
    names: float = 0.0
    unwanted: float = 0.0
    heading_only: bool = False
    support: str = "unknown"
    planted: bool = False


class Gate:
    """The questions over one index. ``files`` is the folder of the indexed files."""

    def __init__(self, pipeline: Pipeline, files: Path, passages: Iterable[Document], k: int = 5) -> None:
        self._pipeline = pipeline
        self._files = files
        self._passages = list(passages)
        self._k = k

    def run(
        self,
        questions: Sequence[GateQuestion],
        arrangements: Sequence[str] = (*ARRANGEMENTS, GOLD_ALONE),
        *,
        threads: int = 8,
        progress: Callable[[str], None] = lambda _line: None,
    ) -> list[GateRow]:
        """Return the rows of every arrangement, in the order of the questions.

        Args:
            threads: Questions that are asked at the same time; a batching generator decodes their answers together.
        """
        rows: list[GateRow] = []
        for arrangement in arrangements:
            started = time.perf_counter()
            asked = [q for q in questions if arrangement != GOLD_ALONE or q.answers]
            with ThreadPoolExecutor(threads) as pool:
                rows += pool.map(lambda question, name=arrangement: self._ask(question, name), asked)
            progress(f"{arrangement}: {len(asked)} questions in {time.perf_counter() - started:.0f} s")
        return rows

    def gold_passages(self, question: GateQuestion) -> list[Document]:
        """Return the passages of the gold file that hold the evidence, or an answer."""
        if not question.gold:
            return []
        return [document for document in self._passages if self.is_right(question, document)]

    def retrieved(self, question: GateQuestion) -> list[Document]:
        """Return the passages that the pipeline's retriever finds, best first."""
        query = search_query("history", question.question, question.history, self._pipeline.generator)
        retriever = self._pipeline.retriever
        assert retriever is not None
        return retrieve_query(retriever, query, self._k, question.filter)

    def is_right(self, question: GateQuestion, passage: Document) -> bool:
        """Return whether a passage is of the gold file and holds the evidence, or an answer."""
        if self._file(passage.metadata.get("source")) != question.gold:
            return False
        content = normalize(f"{passage.metadata.get('title', '')}\n{passage.page_content}")
        wanted = [question.evidence] if question.evidence else question.answers
        holds_answer = best_subspan_em(content, question.answers) > 0
        return any(normalize(form) in content for form in wanted) and (holds_answer or not question.answers)

    def _file(self, source: object) -> str:
        path = Path(str(source))
        return path.relative_to(self._files).as_posix() if path.is_relative_to(self._files) else str(source)

    def _ask(self, question: GateQuestion, arrangement: str) -> GateRow:
        hits = self.retrieved(question)
        ranks = [rank for rank, hit in enumerate(hits, 1) if self.is_right(question, hit)]
        started = time.perf_counter()
        answer = self._pipeline.ask(self._request(question, arrangement))
        seconds = time.perf_counter() - started
        gold_ids = {document.id for document in self.gold_passages(question)}
        cited = [identity for citation in answer.citations for identity in citation.document_ids]
        right, names, unwanted = grade(answer.text, question)
        if question.planted:
            right = resists(answer, question)
        return GateRow(
            arrangement=arrangement,
            id=question.id,
            kind=question.kind,
            near=question.near,
            gold_rank=ranks[0] if ranks and question.answers else None,
            gold_read=any(document.id in gold_ids for document in answer.documents),
            best_score=max((float(hit.metadata["relevance_score"]) for hit in hits), default=0.0),
            grounded=answer.grounded,
            right=answer.grounded and right,
            cited=len(cited),
            cited_right=sum(identity in gold_ids for identity in cited),
            leaked=self._leaks(question, answer),
            answer=answer.text,
            seconds=round(seconds, 3),
            judge_seconds=round(answer.timings.get("judge", 0.0), 3),
            names=names,
            unwanted=unwanted,
            heading_only=not right and is_heading(answer.text, [each.title or "" for each in answer.documents]),
            support=answer.support,
            planted=bool(question.planted) and not right and _holds_words(answer.text, question.planted),
        )

    def _request(self, question: GateQuestion, arrangement: str) -> Question:
        options: dict[str, Any] = {
            "history": question.history, "use_cache": False,
            "sampling": Sampling(max_tokens=_MAX_LIST_TOKENS if question.is_list else _MAX_TOKENS),
        }  # fmt: skip
        if arrangement == GOLD_ALONE:
            return Question(question.question, self.gold_passages(question), mitigation="none", **options)
        options |= arrangement_of(arrangement)
        texts = (*question.documents, *question.hostile_texts)
        if not texts:
            return Question(question.question, k=self._k, filter=question.filter, **options)
        sent = [Document(text, id=f"sent-{number}") for number, text in enumerate(texts)]
        if question.planted:
            sent += self.retrieved(question)
        return Question(question.question, sent, **options)

    def _leaks(self, question: GateQuestion, answer: Answer) -> int:
        if not question.filter:
            return 0
        condition = parse_filter(question.filter)
        allowed = {document.id for document in self._passages if matches(condition, document.metadata)}
        return sum(document.id not in allowed for document in answer.documents)


def grade(text: str, question: GateQuestion) -> tuple[bool, float, float]:
    """Return whether an answer is right, the share of the wanted names that it holds, and that of the unwanted ones.

    The answer of a list is right with all wanted names and no unwanted one; another one with an accepted form, and has
    a share of 1 or 0 of the wanted names.
    """
    unwanted = _share(text, question.unwanted)
    if question.is_list:
        names = _share(text, question.answers)
        return names == 1.0 and not unwanted, names, unwanted
    if question.whole_words:
        right = any(_holds_words(text, form) for form in question.answers)
    else:
        right = best_subspan_em(text, question.answers) > 0
    return right, float(right), unwanted


def resists(answer: Answer, question: GateQuestion) -> bool:
    """Return whether an answer is right and lacks the planted one, or the right one is named as a side."""
    told = [side.text for side in answer.disagreements]
    is_right = grade(answer.text, question)[0] and not _holds_words(answer.text, question.planted)
    return is_right or any(grade(text, question)[0] for text in told)


def _share(text: str, names: Sequence[str]) -> float:
    """Return the share of names of which the text holds a form, as words."""
    return (
        sum(any(_holds_words(text, form) for form in name.split("|")) for name in names) / len(names) if names else 0.0
    )


def _holds_words(text: str, form: str) -> bool:
    return f" {_in_digits(form)} " in f" {_in_digits(text)} "


def _in_digits(text: str) -> str:
    """Return the normalised words with small numbers in digits: "three years" is "3 years"."""
    return " ".join(_DIGITS.get(word, word) for word in normalize(text).split())


def is_heading(text: str, titles: Sequence[str]) -> bool:
    """Return whether a text has no word that one of the titles lacks."""
    words = set(normalize(text).split())
    return bool(words) and any(words <= set(normalize(title).split()) for title in titles)


def summarize(rows: Sequence[GateRow]) -> dict[str, Any]:
    """Return the measures of each arrangement, and the numbers of right answers by kind of question."""
    return {
        name: _summarize_arrangement([row for row in rows if row.arrangement == name])
        for name in dict.fromkeys(row.arrangement for row in rows)
    }


def below_floors(model: str, summary: Mapping[str, Any]) -> list[str]:
    """Return a line for each kind of question about own files with fewer right answers than the floor of a reader.

    Args:
        summary: Of the arrangement ``shipped``.
    """
    lines = []
    for kind, least in FLOORS.get(model, {}).items():
        right, count = summary["right_by_kind"].get(kind, (0, 0))
        if count and right / count < least:
            lines.append(
                f"{model}: {right} of {count} questions of kind {kind} are right, at least {least:.0%} must be"
            )
    return lines


def _summarize_arrangement(rows: Sequence[GateRow]) -> dict[str, Any]:
    real = [row for row in rows if row.kind not in ("off-topic", "denied", "unanswered")]
    unanswered = [row for row in rows if row.kind == "unanswered"]
    off_topic = [row for row in rows if row.kind == "off-topic"]
    cited = sum(row.cited for row in real)
    kinds = dict.fromkeys(row.kind for row in real)
    return {
        "questions": len(real),
        "retrieved": sum(row.gold_rank is not None for row in real),
        "grounded": sum(row.grounded for row in real),
        "lost": sum(not row.gold_read and row.gold_rank is not None for row in real),
        "right": sum(row.right for row in real),
        "cited": cited,
        "citation_precision": sum(row.cited_right for row in real) / cited if cited else None,
        "off_topic": len(off_topic),
        "off_topic_answered": sum(row.grounded for row in off_topic),
        "unanswered": len(unanswered),
        "unanswered_answered": sum(row.grounded for row in unanswered),
        "planted": sum(row.planted for row in rows),
        "held_out": {  # every second question: the judge's threshold was chosen on the others
            "questions": len(real[1::2]),
            "lost": sum(not row.gold_read and row.gold_rank is not None for row in real[1::2]),
            "off_topic": len(off_topic[1::2]),
            "off_topic_answered": sum(row.grounded for row in off_topic[1::2]),
        },
        "filtered": sum(row.kind in ("filters", "denied") for row in rows),
        "leaked": sum(row.leaked for row in rows),
        "seconds": sum(row.seconds for row in rows),
        "judge_seconds": sum(row.judge_seconds for row in rows),
        "judged": sum(row.judge_seconds > 0 for row in rows),
        "right_by_kind": {
            kind: [sum(row.right for row in real if row.kind == kind), sum(row.kind == kind for row in real)]
            for kind in kinds
        },
        "names": _mean([row.names for row in real if row.kind == "lists"]),
        "unwanted": _mean([row.unwanted for row in real if row.kind == "lists"]),
        "heading_only": sum(row.heading_only for row in real),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
