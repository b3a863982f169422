"""Flips: how many answers of a pipeline change with the order of the passages, and how many with nothing changed.

A server's noise, rounding within a batch and load change answers too. So every question is also asked several times
with the passages in one order, and that share, the control, is subtracted. Source: Facet-Probe,
https://arxiv.org/abs/2606.26079
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from rag_posfix.assembly.documents import checked_document
from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.contracts.answer import Answer, Question
from rag_posfix.contracts.filters import filter_key
from rag_posfix.contracts.generator import ChatMessage
from rag_posfix.errors import EvaluationError, RerankingError
from rag_posfix.evaluation.answers.answering import device_of
from rag_posfix.evaluation.answers.experiment import Arrangement
from rag_posfix.evaluation.data.questions import PositionExample
from rag_posfix.evaluation.grading import normalize
from rag_posfix.evaluation.journal import LineJournal
from rag_posfix.evaluation.statistics import difference_interval, mean, randomisation_p, wilson_interval
from rag_posfix.generation.batching.scheduler import unbatched
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.reranking.deadline import UNRANKED
from rag_posfix.text import content_hash

JOURNAL = "flips-journal.jsonl"
BELOW_MINIMUM = "fewer than two passages above the minimum relevance; --min-relevance off reads all"
ALMOST_NONE = 0.1
"""With at most this share of changed questions, at the upper end of its interval, the order hardly matters."""

Judge = Callable[[str, str, str], bool]
"""Whether two answers to a question say the same."""


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """A question and the passages that it is answered from, with their relevance."""

    id: str
    text: str
    passages: tuple[Document, ...]
    history: tuple[ChatMessage, ...] = ()


@dataclass(frozen=True, slots=True)
class StackAnswer:
    """An answer of the pipeline, as the journal keeps it.

    ``first_token_seconds`` is the time from the question to the first text, the reranker's time included. It is None
    where other questions were open at the same time.
    """

    text: str
    well_formed: bool
    seconds: float
    first_token_seconds: float | None
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class FlipRow:
    """One answer to one question.

    Attributes:
        question: The question's id.
        condition: Label of the arrangement.
        kind: ``order`` for a random order, ``repeat`` for the first order again.
        order: The passages, by their rank in what the retriever found, from 0.
        changed: Whether the answer, normalised, differs from that in the first order.
        judged_changed: Whether the judge says so too; None without a judge.
        asked: The text of the question.
        passages: Ids of the passages in this order.
    """

    question: str
    condition: str
    kind: str
    order: tuple[int, ...]
    changed: bool
    judged_changed: bool | None
    answer: str
    well_formed: bool
    seconds: float
    prompt_tokens: int
    completion_tokens: int
    asked: str
    passages: tuple[str, ...]


class StackJournal(LineJournal[StackAnswer]):
    """Answers of pipelines by key (see ``LineJournal``)."""

    def __init__(self, path: Path | None = None, *, fresh: bool = False) -> None:
        super().__init__("answer", _read_answer, path, fresh=fresh)


def _read_answer(row: Any) -> StackAnswer | None:
    return StackAnswer(**row) if set(row) == {field.name for field in fields(StackAnswer)} else None


def find_questions(
    pipeline: Pipeline, texts: Sequence[tuple[str, Question]], tell: Callable[[str], object] = lambda text: None
) -> tuple[list[AskedQuestion], Counter[str]]:
    """Return the questions with the passages that the pipeline finds, best first, and why others were dropped.

    Args:
        texts: Id and question; its history and filter are used. Of equal questions with equal both the first is kept.
        tell: Gets why no passage of a question is read, and what reads all.
    """
    kept: list[AskedQuestion] = []
    dropped: Counter[str] = Counter()
    seen: set[str] = set()
    for identity, question in texts:
        asked = json.dumps([normalize(question.text), *question.history, filter_key(question.filter)])
        if asked in seen:
            dropped["asked before"] += 1
            continue
        seen.add(asked)
        read = replace(question, mitigation="none", order="relevance")
        passages = pipeline.find_passages(read)
        if len(passages) < 2:
            preview = pipeline.preview(read)
            is_irrelevant = any(reason == "min_relevance" for _, reason in preview.dropped)
            dropped[BELOW_MINIMUM if is_irrelevant else "fewer than two passages found"] += 1
            for warning in preview.warnings:
                tell(f"question {identity}: {warning}")
            continue
        kept.append(AskedQuestion(identity, question.text, passages, tuple(question.history)))
    return kept, dropped


def from_examples(examples: Sequence[PositionExample], documents: int) -> list[AskedQuestion]:
    """Return labelled questions with all of their passages."""
    return [AskedQuestion(e.id, e.question, tuple(e.documents(documents)), e.history) for e in examples]


def draw_orders(question: AskedQuestion, count: int, seed: int) -> list[tuple[int, ...]]:
    """Return up to ``count`` distinct random orders of the passages of a question; fewer if there are not as many."""
    draw, size = random.Random(f"{seed}:{question.id}"), len(question.passages)
    orders: dict[tuple[int, ...], None] = {}
    for _ in range(20 * count):
        if len(orders) < count:
            orders[tuple(draw.sample(range(size), size))] = None
    return list(orders)


def ask_in_orders(
    pipeline: Pipeline,
    questions: Sequence[AskedQuestion],
    arrangement: Arrangement,
    *,
    orders: int,
    repeats: int,
    seed: int,
    journal: StackJournal,
    judge: Judge | None = None,
) -> list[FlipRow]:
    """Ask each question with its passages in ``orders`` random orders, the first of them ``repeats`` more times.

    The prompts of all questions are open at the same time, so that repetitions meet other load, as in a service.
    """
    plan = [
        (question, kind, order, repeat)
        for question in questions
        for kind, order, repeat in _asks(draw_orders(question, orders, seed), repeats)
    ]
    keys = [_key(pipeline, arrangement, question, order, repeat) for question, _, order, repeat in plan]
    missing = [index for index, key in enumerate(keys) if journal.get(key) is None]
    prompts = [prompt_of(plan[index][0], plan[index][2], arrangement) for index in missing]
    with closing(pipeline.batch_as_completed(prompts)) as results:
        for number, result in results:
            if isinstance(result, Exception):
                raise result
            journal.add(keys[missing[number]], _stack_answer(result, None, arrangement))
    rows: list[FlipRow] = []
    first: StackAnswer | None = None
    for (question, kind, order, _), key in zip(plan, keys, strict=True):
        answer = journal.get(key)
        if answer is None:
            continue
        if first is None or not rows or rows[-1].question != question.id:
            first = answer
        rows.append(_row(question, arrangement.label, kind, order, answer, first, judge))
    return rows


def time_first_tokens(
    pipeline: Pipeline,
    questions: Sequence[AskedQuestion],
    arrangement: Arrangement,
    *,
    seed: int,
    journal: StackJournal,
) -> list[float]:
    """Ask each question alone, in its first order, and return the seconds until its first text.

    The answers go to the journal, where ``ask_in_orders`` finds them.
    """
    seconds = []
    for question in questions:
        order = draw_orders(question, 1, seed)[0]
        key = _key(pipeline, arrangement, question, order, 0)
        answer = journal.get(key)
        if answer is None or answer.first_token_seconds is None:
            answer = _ask_alone(pipeline, question, order, arrangement)
            journal.add(key, answer)
        seconds.append(answer.first_token_seconds or 0.0)
    return seconds


def _ask_alone(
    pipeline: Pipeline, question: AskedQuestion, order: Sequence[int], arrangement: Arrangement
) -> StackAnswer:
    begun, first = time.perf_counter(), 0.0
    for chunk in pipeline.stream(prompt_of(question, order, arrangement)):
        first = first or time.perf_counter() - begun
        if chunk.answer is not None:
            return _stack_answer(chunk.answer, first, arrangement)
    raise EvaluationError(f"the answer to {question.text!r} ended without its last part; ask again")


def _asks(orders: Sequence[tuple[int, ...]], repeats: int) -> list[tuple[str, tuple[int, ...], int]]:
    """Return kind, order and number of the repetition of each prompt: the first order, then both kinds in turn.

    There are at most as many repetitions as other orders: with more chances to change, the control would be above.
    """
    result = [("order", orders[0], 0)]
    for number in range(len(orders) - 1):
        result.append(("order", orders[number + 1], 0))
        if number < repeats:
            result.append(("repeat", orders[0], number + 1))
    return result


def prompt_of(question: AskedQuestion, order: Sequence[int], arrangement: Arrangement) -> Question:
    """Return the question to the pipeline, with its passages in an order."""
    return Question(
        question.text,
        [question.passages[index] for index in order],
        history=question.history,
        mitigation=arrangement.mitigation,
        order=arrangement.order,
        reranker=arrangement.reranker,
        use_cache=False,
        allow_unsupported=True,  # the fixed text would be an answer that never changes
    )


def template_of(pipeline: Pipeline, question: str, history: Sequence[ChatMessage] = ()) -> PromptTemplate:
    """Return the prompt template of a question: that of its language, if the pipeline has one."""
    return pipeline.defaults.template_of(question, history) or pipeline.assembler.template


def _key(
    pipeline: Pipeline, arrangement: Arrangement, question: AskedQuestion, order: Sequence[int], repeat: int
) -> str:
    """Return a digest of everything that an answer depends on, and the number of its repetition."""
    passages = [checked_document(question.passages[index]) for index in order]
    parts = {
        "model": pipeline.generator.fingerprint,
        "method": pipeline.generator.describe(arrangement.mitigation).fingerprint,
        "arrangement": arrangement.label,
        "device": device_of(unbatched(pipeline.generator)),
        "template": template_of(pipeline, question.text, question.history).fingerprint(),
        "budget": repr(pipeline.assembler.budget),
        "sampling": repr(pipeline.defaults.sampling),
        "question": [question.text, *question.history],
        "passages": [[passage.key, passage.relevance] for passage in passages],
        "repeat": repeat,
    }
    return content_hash(json.dumps(parts, sort_keys=True))


def _stack_answer(answer: Answer, first_token_seconds: float | None, arrangement: Arrangement) -> StackAnswer:
    """Return what is kept of an answer.

    Raises:
        RerankingError: the reranker of the arrangement left the passages in their order, so the answer is of another.
    """
    failed = next((text for text in answer.warnings if text.endswith(UNRANKED)), None)
    if failed is not None and arrangement.reranker is not None:
        raise RerankingError(f"{failed}; if it is late, raise RAG_POSFIX_RERANKER_DEADLINE_SECONDS")
    return StackAnswer(
        text=answer.text,
        well_formed=answer.well_formed,
        seconds=sum(answer.timings.values()) - answer.timings.get("queue", 0.0),
        first_token_seconds=first_token_seconds,
        prompt_tokens=answer.usage.prompt_tokens,
        completion_tokens=answer.usage.completion_tokens,
    )


def _row(
    question: AskedQuestion,
    condition: str,
    kind: str,
    order: tuple[int, ...],
    answer: StackAnswer,
    first: StackAnswer,
    judge: Judge | None,
) -> FlipRow:
    changed = normalize(answer.text) != normalize(first.text)
    return FlipRow(
        question=question.id, condition=condition, kind=kind, order=order, changed=changed,
        judged_changed=None if judge is None else changed and not judge(question.text, first.text, answer.text),
        answer=answer.text, well_formed=answer.well_formed, seconds=answer.seconds,
        prompt_tokens=answer.prompt_tokens, completion_tokens=answer.completion_tokens, asked=question.text,
        passages=tuple(str(question.passages[index].id) for index in order),
    )  # fmt: skip


LEAST_CHANGED = 6
"""Questions that must change under another order and not under the same one: p = 2 / 2^6 = .03; five have .06."""


def least_change(n: int) -> float:
    """Return the smallest share of changed questions that n questions tell from no change, at most 1."""
    return min(1.0, LEAST_CHANGED / n) if n else 1.0


def by_question(rows: Sequence[FlipRow], kind: str, changed: str = "changed") -> list[float]:
    """Return for each question whether an answer of a kind changed, 0 or 1, in the order of the rows."""
    result: dict[str, float] = {}
    for row in rows:
        result.setdefault(row.question, 0.0)
        if row.kind == kind and getattr(row, changed):
            result[row.question] = 1.0
    return list(result.values())


def summarize_flips(rows: Sequence[FlipRow]) -> dict[str, Any]:
    """Return the flips of the rows of one arrangement.

    ``rate`` is the share of questions with another answer in at least one other order, ``control`` that with another
    answer in at least one repetition of the first order, each with Wilson's interval. ``difference`` is rate minus
    control, paired by question, with its bootstrap interval, and ``p`` that of the paired randomisation test.
    ``answers`` and ``control_answers`` are the shares of single answers that changed.
    """
    flipped, repeated = by_question(rows, "order"), by_question(rows, "repeat")
    differences = [a - b for a, b in zip(flipped, repeated, strict=True)]
    others = [row for row in rows if row.kind == "order"]
    first_order = {row.question: row.order for row in reversed(others)}
    pairs = [float(row.changed) for row in others if row.order != first_order[row.question]]
    judged = [row.judged_changed is not None for row in rows]
    return {
        "rate": mean(flipped),
        "interval": list(wilson_interval(int(sum(flipped)), len(flipped))),
        "control": mean(repeated),
        "control_interval": list(wilson_interval(int(sum(repeated)), len(repeated))),
        "difference": mean(differences),
        "difference_interval": list(difference_interval(differences)),
        "p": randomisation_p(differences),
        "answers": mean(pairs),
        "control_answers": mean([float(row.changed) for row in rows if row.kind == "repeat"]),
        "judged_rate": mean(by_question(rows, "order", "judged_changed")) if all(judged) else None,
        "n": len(flipped),
        "least_change": least_change(len(flipped)),
    }


def order_matters(flips: dict[str, Any]) -> bool | None:
    """Return whether the order changes answers beyond the control; None if the questions do not tell."""
    if flips["p"] < 0.05 and flips["difference_interval"][0] > 0:
        return True
    highest = max(flips["difference_interval"][1], wilson_interval(0, flips["n"])[1])
    return False if highest <= ALMOST_NONE else None
