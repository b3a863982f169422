"""Which arrangement to use: chosen on one half of the questions, confirmed on the other half, and told in sentences.

What a measurement takes and can tell is said before it goes on, so that it can be stopped.

Each half chooses once and confirms once: all questions confirm, each an arrangement that was chosen without it. The
half that chooses also says which position is the worst of each arrangement. The lowest of several noisy means is too
low, and an order-free arrangement, with one mean, would beat an unbiased model by that alone.

Flips: how many answers of a pipeline change with the order of the passages, and how many with nothing changed.

A server's noise, rounding within a batch and load change answers too. So every question is also asked several times
with the passages in one order, and that share, the control, is subtracted. Source: Facet-Probe,
https://arxiv.org/abs/2606.26079
"""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from rag_posfix.assembly.documents import checked_document
from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.contracts.answer import Answer, Question
from rag_posfix.contracts.generator import ChatMessage
from rag_posfix.contracts.retrieval import filter_key
from rag_posfix.errors import ConfigError, EvaluationError, PromptTooLongError, RerankingError, UnsupportedModelError
from rag_posfix.evaluation.answers.experiment import (
    BASELINE,
    Arrangement,
    PositionRow,
    device_of,
    is_sound,
    parse_arrangement,
)
from rag_posfix.evaluation.data.questions import PositionExample
from rag_posfix.evaluation.record import LineJournal
from rag_posfix.evaluation.statistics import difference_interval, mean, normalize, randomisation_p, wilson_interval
from rag_posfix.generation.batching.scheduler import unbatched
from rag_posfix.mitigations import MITIGATIONS
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


def answer_alone(
    pipeline: Pipeline, question: AskedQuestion, arrangement: Arrangement, *, seed: int, journal: StackJournal
) -> StackAnswer:
    """Return the answer to a question that was asked alone, in its first order, with the time to its first text.

    It goes to the journal, where ``ask_in_orders`` finds it.
    """
    order = draw_orders(question, 1, seed)[0]
    key = _key(pipeline, arrangement, question, order, 0)
    answer = journal.get(key)
    if answer is None or answer.first_token_seconds is None:
        answer = _ask_alone(pipeline, question, order, arrangement)
        journal.add(key, answer)
    return answer


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


def significance_text(n: int) -> str:
    """Return which changes of n questions are significant, and what to do where none is."""
    if n < LEAST_CHANGED:
        return f"with {n} questions even a change in all of them is not significant: ask more, or raise --minutes"
    return f"a change in at least {least_change(n):.0%} of {n} questions is significant"


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


CANDIDATES = (
    "none",
    "yes_no:top_n=3/reverse/none",
    "default",
    "committee:contrast=0.3",
    "passage_answers",
    "embedding:top_n=3/reverse/none",
    "canonical_rotations:rows=3",
    "/reverse/none",
    "embedding:top_n=1/reverse/none",
    "inter_document",
    "/relevance/repeated_passages:repeat=best",
    "sorted_inter_document",
    "/relevance/none",
    "multi_base",
    "stable_mask",
    "/relevance/repeated_passages:repeat=all",
    "layer_scaling",
    "parallel_encoding",
    "shifted_rotary",
    "head_scaling",
    "set_prompting",
    "parallel_windows",
    "calibrated_attention",
)
"""Arrangements that are tried after the default; the first is the model as it is.

In the order of what they gained on other models: accuracy at the worst position minus that of ``none``, mean over the
questions of the records benchmarks/results/positions-*.json with 20 questions or more. Parameters are those of the
records that gained most.
"""

REFUSALS = (ConfigError, PromptTooLongError, RerankingError, UnsupportedModelError)
"""What an arrangement raises that the model, the prompt or the reranker cannot serve; the others are still tried."""

RESAMPLES = 2000

OUT_OF_TIME = "out of time"

STABLE_MARGIN = 0.1
"""How far the default's share of stable answers may be below the best: batching changes some in bfloat16."""

FORM_MARGIN = 0.02
"""How far the share of well-formed answers may be below that of ``none``."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What was measured of one arrangement, for the same questions in the same order as of all others.

    Attributes:
        values: For each question, its score at each position; without labels one value, 1 if no answer changed.
        second: For each question, the mean over positions; without labels the agreement with the unmodified model.
        cost: Seconds to the first token, relative to ``none``.
        well_formed: For each question, the share of well-formed answers.
    """

    values: Sequence[Sequence[float]]
    second: Sequence[float]
    cost: float
    well_formed: Sequence[float]

    def worst(self, questions: Sequence[int]) -> int:
        """Return the position with the lowest mean over some questions."""
        columns = range(len(self.values[0]))
        return min(columns, key=lambda column: mean([self.values[question][column] for question in questions]))

    def at(self, column: int, questions: Sequence[int]) -> list[float]:
        """Return the scores of some questions at a position."""
        return [self.values[question][column] for question in questions]


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen arrangement: one that is better than ``none`` beyond noise, else the default or ``none``.

    Attributes:
        name: Label of the arrangement to use.
        best: Label of the best arrangement on all questions.
        is_better: Whether it is better than ``none`` beyond noise.
        difference: Score of the arrangement that the other half of the questions chose, at its worst position, minus
            that of ``none``, mean over all questions. Of the default where that is used without being better.
        interval: 95 % interval of the difference, questions resampled.
        p: Of the paired randomisation test.
        n: Number of questions.
    """

    name: str
    best: str
    is_better: bool
    difference: float
    interval: tuple[float, float]
    p: float
    n: int


def default_arrangement(pipeline: Pipeline) -> Arrangement:
    """Return what a pipeline uses for ``auto`` while nothing was measured: on large models the judge's best three."""
    measured = pipeline.defaults.measured
    if measured is None:
        return parse_arrangement("default")
    return Arrangement(measured.mitigation, measured.order, measured.reranker)


def supported_candidates(pipeline: Pipeline) -> list[Arrangement]:
    """Return what is tried: ``none``, the default, the other ``CANDIDATES``, then every other method by its name.

    Without those that the generator does not support: a remote one supports plain prompts.
    """
    generator, supported = unbatched(pipeline.generator), []
    baseline, *others = map(parse_arrangement, CANDIDATES)
    tried = {MITIGATIONS.resolve(each.mitigation.name) for each in (baseline, *others)}
    others += [parse_arrangement(name) for name in MITIGATIONS.names() if name not in tried]
    arrangements = {
        arrangement.label: arrangement for arrangement in (baseline, default_arrangement(pipeline), *others)
    }
    for arrangement in arrangements.values():
        try:
            generator.describe(arrangement.mitigation)
        except UnsupportedModelError:
            continue
        supported.append(arrangement)
    return supported


def usual_answers(answers: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the most frequent answer to each question, normalised; of equally frequent answers the first."""
    return {name: Counter(map(normalize, texts)).most_common(1)[0][0] for name, texts in answers.items()}


def scores_with_labels(rows: Mapping[str, Sequence[PositionRow]], cost: float) -> Scores:
    """Return the scores of an arrangement with labels, from the answers to each question: accuracy by position."""
    values = [[row.accuracy for row in group] for group in rows.values()]
    return Scores(
        values=values,
        second=[mean(columns) for columns in values],
        cost=cost,
        well_formed=[mean([float(is_sound(row.answer)) for row in group]) for group in rows.values()],
    )


def scores_without_labels(
    answers: Mapping[str, Sequence[str]], usual: Mapping[str, str], *, cost: float, well_formed: Sequence[float]
) -> Scores:
    """Return the scores of an arrangement without labels: stable answers, and agreement with the usual answers.

    Args:
        answers: For each question, the answers in different orders of its passages.
        usual: For each question, what the unmodified model usually answers (``usual_answers``).
    """
    normalized = {name: [normalize(text) for text in texts] for name, texts in answers.items()}
    return Scores(
        values=[[float(len(set(texts)) == 1)] for texts in normalized.values()],
        second=[mean([float(text == usual[name]) for text in texts]) for name, texts in normalized.items()],
        cost=cost,
        well_formed=well_formed,
    )


def choose(table: Mapping[str, Scores], *, default: str, labels: bool, order_matters: bool | None) -> Choice:
    """Return which arrangement to use: one that is better than ``none`` beyond noise, else the default or ``none``.

    The best arrangement has the best worst position, then ``second``, then cost; its answers must be as well formed as
    those of ``none``. The best one of the questions with even numbers is compared with ``none`` on the others, and the
    other way round, each at its worst position. Over all questions the difference must be above 0: 95 % interval and
    p < .05. The arrangement to use is then the best one of all questions; with labels it must not be below ``none`` in
    ``second`` beyond noise.

    Args:
        default: Label of the default. Where nothing is better and the order matters, it is used if its score is not
            below that of ``none``, and its ``second`` with labels not beyond noise. Without labels it also comes first
            of those that are about equally stable, because nothing that is measured says which of them is right
            (``docs/measure.md``); where it is not among them, the cheapest one does.
        labels: Whether the scores are accuracies.
        order_matters: Whether the order changes answers of ``none``; None if the questions do not tell.
    """
    questions = range(len(table[BASELINE].values))
    preferred = None if labels else default
    best, halves = _best(table, questions, preferred), (questions[::2], questions[1::2])
    splits = [(_best(table, half, preferred), half, other) for half, other in (halves, halves[::-1])]
    choice, not_below = _against_none(table, splits, labels)
    if best != BASELINE and choice.interval[0] > 0 and choice.p < 0.05 and not_below:
        return replace(choice, name=best, best=best, is_better=True)
    if order_matters and default in _worst_scores(table, questions):
        of_default, not_below = _against_none(table, [(default, questions, questions)], labels)
        if of_default.difference >= 0 and not_below:
            return replace(of_default, name=default, best=best)
    return replace(choice, best=best)


def _against_none(
    table: Mapping[str, Scores], splits: Sequence[tuple[str, Sequence[int], Sequence[int]]], labels: bool
) -> tuple[Choice, bool]:
    """Compare arrangements with ``none``; return the difference, and whether ``second`` is not below beyond noise.

    Args:
        splits: An arrangement, the questions that choose its worst position and that of ``none``, and the questions
            that are compared.
    """
    baseline = table[BASELINE]
    differences, seconds = [0.0] * len(baseline.values), [0.0] * len(baseline.values)
    for name, choosing, confirming in splits:
        scores = table[name]
        column, baseline_column = scores.worst(choosing), baseline.worst(choosing)
        for question in confirming:
            differences[question] = scores.values[question][column] - baseline.values[question][baseline_column]
            seconds[question] = scores.second[question] - baseline.second[question]
    interval = difference_interval(differences, resamples=RESAMPLES)
    p = randomisation_p(differences, resamples=RESAMPLES)
    not_below = not labels or difference_interval(seconds, resamples=RESAMPLES)[1] >= 0
    return Choice(BASELINE, BASELINE, False, mean(differences), interval, p, len(differences)), not_below


def _worst_scores(table: Mapping[str, Scores], questions: Sequence[int]) -> dict[str, float]:
    """Return the score at the worst position of each arrangement with well-formed answers, and of ``none``."""
    sound = mean([table[BASELINE].well_formed[question] for question in questions]) - FORM_MARGIN
    return {
        name: round(mean(scores.at(scores.worst(questions), questions)), 9)
        for name, scores in table.items()
        if mean([scores.well_formed[question] for question in questions]) >= sound
    }


def _best(table: Mapping[str, Scores], questions: Sequence[int], preferred: str | None) -> str:
    """Return the best arrangement on some questions, among those with well-formed answers."""
    worst = _worst_scores(table, questions)
    if preferred in worst and worst[preferred] >= max(worst.values()) - STABLE_MARGIN:
        return preferred

    def rank(name: str) -> tuple[float, float, float]:
        scores = table[name]
        second = 0.0 if preferred else mean([scores.second[question] for question in questions])
        return -worst[name], -round(second, 9), round(scores.cost, 1)  # smaller differences of time are noise

    return min(worst, key=rank)


def measured(table: Mapping[str, Scores]) -> dict[str, dict[str, Any]]:
    """Return ``measured`` of ``measure --json``: worst, mean and best over positions, on all questions."""
    result = {}
    for name, scores in table.items():
        questions = range(len(scores.values))
        columns = [mean(scores.at(column, questions)) for column in range(len(scores.values[0]))]
        result[name] = {
            "worst": min(columns),
            "mean": mean(columns),
            "best": max(columns),
            "second": mean(scores.second),
            "well_formed": mean(scores.well_formed),
            "ttft_ratio": scores.cost,
            "interval": list(difference_interval(scores.at(scores.worst(questions), questions), resamples=RESAMPLES)),
        }
    return result


def verdict_of(summary: Mapping[str, Any]) -> str:
    """Return two sentences: whether the order of the passages changes answers, and what to use."""
    return f"{_about_the_order(summary)} {_about_the_choice(summary)}"


def _about_the_order(summary: Mapping[str, Any]) -> str:
    flips = summary["flips"]
    low, high = flips["interval"]
    share = f"{flips['rate']:.0%} of the answers ({low:.0%} to {high:.0%}, n {flips['n']})"
    control = f"{flips['control']:.0%} when the same order is asked again"
    if summary["order_matters"] is None:
        return (
            f"Not enough questions ({flips['n']}) to decide whether the order of the passages matters; "
            f"{_enough(flips['n'], flips['difference'])} would do: {share} change with it, and {control}."
        )
    if summary["order_matters"]:
        return f"The order of the passages changes {share}, against {control}."
    return f"The order of the passages changes almost nothing: {share} change with it, and {control}."


def _enough(n: int, difference: float) -> str:
    """Return how many questions may decide, if as many change beyond the control: six that do, else none that does."""
    if difference > 0:
        needed = math.ceil(round(LEAST_CHANGED / difference, 6))
        return f"about {needed if needed > n else 2 * n} questions"
    enough = next(count for count in range(n + 1, n + 1000) if wilson_interval(0, count)[1] <= ALMOST_NONE)
    return f"about {enough} questions of which none changes"


def _about_the_choice(summary: Mapping[str, Any]) -> str:
    choice = summary["choice"]
    name, best = choice["name"], choice["best"]
    what = "accuracy at the worst position" if summary["labels"] else "stable answers"
    low, high = choice["interval"]
    seen = "unseen " if choice["is_better"] or name == BASELINE else ""
    sure = f"{low:+.2f} to {high:+.2f}, p = {choice['p']:.3f}, {choice['n']} {seen}questions"
    difference = f"{choice['difference']:+.2f} in {what} ({sure})"
    hint = "" if summary["labels"] else " Without labels this says which answers are stable, not which are right."
    nothing = "Nothing beats your model beyond noise"
    if name != BASELINE:
        reason = "" if choice["is_better"] else f"{nothing}, and its answers change with the order. "
        return f"{reason}Use {name}: {difference} against the model as it is.{hint}"
    if len(summary["measured"]) == 1:
        if OUT_OF_TIME in summary["not_measured"].values():
            return "No time was left for other pipeline variants: give more --minutes, and the same command goes on."
        return "Keep your model as it is; nothing else was measured."
    free = summary["order_free"]
    beside = f" The cheapest pipeline variant that no order changes is {free}." if free else ""
    tried = "" if best == BASELINE else f" (the best, {best}: {difference})"
    return f"{nothing}{tried}: keep it.{beside}{hint}"


class Budget:
    """The time of a measurement; ``clock`` returns seconds."""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock, self._started = 60 * minutes, clock, clock()

    @property
    def used(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._started

    def left(self, share: float = 1.0) -> float:
        """Return the seconds until a share of the time is used."""
        return share * self.seconds - self.used

    def remaining(self) -> Budget:
        """Return a budget of the time that is left, from now on."""
        return Budget(self.minutes_left, self._clock)

    def fitting(self, done: int, since: float, share: float = 1.0) -> float:
        """Return how many questions fit into a share of the time, at the pace of ``done`` since ``since`` seconds."""
        return self.left(share) * done / max(self.used - since, 1e-9)

    @property
    def minutes_left(self) -> float:
        """Minutes until the whole time is used, for people."""
        return max(self.left(), 0.0) / 60


def estimate_text(
    seconds: float, questions: int, prompts: int, flip_prompts: int, variants: int, budget: Budget
) -> str:
    """Return how long a measurement takes, from the time of one answer.

    Args:
        seconds: Time of one answer.
        questions: Number of questions.
        prompts: Maximum number of prompts per question.
        flip_prompts: Of these, prompts of the unmodified model that show whether the order matters.
        variants: Number of pipeline variants.
        budget: What is left of the time.
    """
    minutes, left = questions * prompts * seconds / 60, budget.minutes_left
    begins = f"an answer takes about {seconds:.1f} s: {questions} questions with {variants} pipeline variants take"
    if minutes <= left:
        return f"{begins} about {minutes:.1f} min"
    reachable = min(questions, max(1, int(30 * left / (flip_prompts * seconds))))
    tried = int(30 * left / (seconds * reachable * (prompts - flip_prompts) / max(variants - 1, 1)))
    return (
        f"{begins} about {minutes:.0f} min; this run ends after {left:.1f} min, which is enough for about {reachable} "
        f"questions and {min(tried, variants - 1)} other variants"
    )


def plan_text(reachable: int, total: int, minutes: float) -> str:
    """Return how many questions fit, and what they can tell."""
    low, high = wilson_interval(reachable // 2, reachable)
    return (
        f"about {reachable} of {total} questions fit into {minutes:g} minutes: shares will be known to within "
        f"{(high - low) / 2:.0%}; {significance_text(reachable)}"
    )


def tokens_text(
    pipeline: Pipeline, questions: Sequence[AskedQuestion], per_question: int, prices: tuple[float, float] | None
) -> str:
    """Return how many tokens are sent and written at most, and with ``prices`` what they cost.

    Args:
        questions: All questions; the prompts of the first three are counted, as the generator's encoder counts.
        per_question: Maximum number of prompts per question.
        prices: Of a million tokens of prompts, and of answers.
    """
    baseline = parse_arrangement(BASELINE)
    previews = [pipeline.preview(prompt_of(each, range(len(each.passages)), baseline)) for each in questions[:3]]
    prompts = per_question * len(questions)
    sent = prompts * mean([preview.tokens for preview in previews])
    written = prompts * pipeline.defaults.sampling.max_tokens
    cost = "" if prices is None else f", {(sent * prices[0] + written * prices[1]) / 1e6:.2f} by --prices"
    return f"at most {prompts:,} prompts: about {sent:,.0f} tokens of prompts, {written:,} of answers{cost}"
