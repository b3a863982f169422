"""Measures a pipeline on questions: flips, accuracy by position where there are labels, and what to use.

Questions with labels that a model writes from passages, and checks that do not ask the measured model.

A question is kept because of its text: its answer is in its passage and in no other passage that is found for it. A
writer that is not the measured model must also answer it from the passage. What the measured model answers from the
passage alone decides nothing: that filter would favour methods that read each passage alone.

Small models write few questions. A sentence with a gap needs no writer.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import orjson
from langchain_core.documents import Document

from rag_posfix.assembly.documents import checked_document
from rag_posfix.contracts.answer import Question
from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.contracts.retrieval import Reranker
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.answers.causes import LEAST_QUESTIONS, compare_causes, correcting_methods, explain
from rag_posfix.evaluation.answers.experiment import (
    BASELINE,
    CLOSED_BOOK,
    GOLD_ONLY,
    AnswerJournal,
    Arrangement,
    PositionRow,
    parse_arrangement,
    summarize_positions,
)
from rag_posfix.evaluation.answers.positions import answer_at_positions
from rag_posfix.evaluation.data.questions import GoldPosition, PositionExample, key_value_questions
from rag_posfix.evaluation.ranking.rankings import RankJournal
from rag_posfix.evaluation.record import (
    ExperimentRecord,
    LineJournal,
    environment,
    model_facts,
    save_record,
    write_whole,
)
from rag_posfix.evaluation.statistics import best_subspan_em, mean, normalize, overconfidence, wilson_interval
from rag_posfix.generation.batching.scheduler import unbatched
from rag_posfix.generation.engine import Engine
from rag_posfix.measuring.choice import (
    JOURNAL,
    OUT_OF_TIME,
    REFUSALS,
    AskedQuestion,
    Budget,
    Choice,
    FlipRow,
    Judge,
    Scores,
    StackAnswer,
    StackJournal,
    answer_alone,
    ask_in_orders,
    choose,
    default_arrangement,
    estimate_text,
    measured,
    order_matters,
    plan_text,
    scores_with_labels,
    scores_without_labels,
    summarize_flips,
    supported_candidates,
    template_of,
    tokens_text,
    usual_answers,
    verdict_of,
)
from rag_posfix.pipeline.defaults import PROFILE_KIND
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.pipeline.query import text_request
from rag_posfix.text import content_hash

POSITIONS_JOURNAL = "positions-journal.jsonl"
TOGETHER = 3
"""Questions that are asked at the same time, with all of their orders."""
BLOCK = 8
"""Labelled questions that are answered at the same time."""
FLIPS_SHARE, FLIPS_SHARE_WITH_LABELS, POSITIONS_SHARE = 0.5, 0.25, 0.55
"""Until which share of the time the unmodified model is measured; the candidates get what is left."""
CAUSE_QUESTIONS, CAUSE_PASSAGES = 24, 5
"""Maximum number of questions for the causes of the bias, and passages of one without labels."""
FITTING = 0.8
"""Share of a candidate's questions that must fit into the time: a run ends at most a fifth later than its limit."""

Row = TypeVar("Row", FlipRow, PositionRow)
Report = Callable[[int, int, str], None]
"""Called with questions done, all questions, and a text; one that ends with a line break is to stay visible."""


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """How much is measured.

    Attributes:
        minutes: Time limit, without loading the model; a run may take a fifth longer.
        orders: Random orders of the passages of a question, the first included.
        documents: Passages of a labelled question.
        seed: Seed of the orders.
        fresh: Answer again what is in the journal.
        prices: Of a million tokens of prompts, and of answers; for a line that tells the cost of a remote model.
    """

    minutes: float = 10.0
    orders: int = 3
    documents: int = 10
    seed: int = 0
    fresh: bool = False
    prices: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """The parts of a measurement that its steps share."""

    pipeline: Pipeline
    options: MeasureOptions
    budget: Budget
    journal: StackJournal
    answers: AnswerJournal
    rankings: RankJournal
    report: Report
    judge: Judge | None = None

    def ask(self, questions: Sequence[AskedQuestion], arrangement: Arrangement, *, repeats: int) -> list[FlipRow]:
        """Ask questions in random orders: all of them with repetitions, else the first two."""
        return ask_in_orders(
            self.pipeline, questions, arrangement, orders=self.options.orders if repeats else 2, repeats=repeats,
            seed=self.options.seed, journal=self.journal, judge=self.judge if repeats else None,
        )  # fmt: skip

    def time_alone(self, questions: Sequence[AskedQuestion], arrangement: Arrangement) -> tuple[float, float, float]:
        """Ask the first questions, each alone: one at least, and others while that takes a tenth of the time.

        Returns the median time to the first token, that of an answer now, without the first one, which may load what
        others use, and that of an answer when it was asked: for answers of the journal the second is near 0.
        """
        answers, seconds, begun = list[StackAnswer](), list[float](), self.budget.used
        for question in questions[:TOGETHER]:
            since = self.budget.used
            answers.append(
                answer_alone(self.pipeline, question, arrangement, seed=self.options.seed, journal=self.journal)
            )
            seconds.append(self.budget.used - since)
            if self.budget.left() < seconds[-1] or self.budget.used - begun > 0.1 * self.budget.seconds:
                break
        first_token = median([answer.first_token_seconds or 0.0 for answer in answers])
        return first_token, median(seconds[1:] or seconds), median([answer.seconds for answer in answers])

    def answer(self, examples: Sequence[PositionExample], arrangement: Arrangement) -> list[PositionRow]:
        """Answer labelled questions with the gold passage at each position."""
        spec = arrangement.reranker
        return answer_at_positions(
            unbatched(self.pipeline.generator), examples, [arrangement],
            gold_positions=gold_positions(self.options.documents, len(examples[0].gold)),
            n_documents=self.options.documents, reranker=_reranker(self.pipeline),
            rerankers={} if spec is None else {spec.label: _reranker(self.pipeline, spec)},
            max_new_tokens=self.pipeline.defaults.sampling.max_tokens, journal=self.answers,
            rankings=self.rankings, template_of=partial(template_of, self.pipeline),
        )  # fmt: skip


def gold_positions(documents: int, n_gold: int = 1) -> list[GoldPosition]:
    """Return the first, middle and last position, or positions next to each other for several gold passages."""
    starts = sorted({0, (documents - n_gold) // 2, documents - n_gold})
    return [start if n_gold == 1 else tuple(range(start, start + n_gold)) for start in starts]


def _reranker(pipeline: Pipeline, spec: MethodSpec | None = None) -> Reranker:
    reranker = pipeline.reranker if spec is None else pipeline.choose_reranker and pipeline.choose_reranker(spec)
    if reranker is None:
        raise EvaluationError("the pipeline has no reranker, and labelled passages need scores; use build_pipeline")
    return reranker


def measure(
    pipeline: Pipeline,
    questions: Sequence[AskedQuestion],
    *,
    examples: Sequence[PositionExample] = (),
    options: MeasureOptions | None = None,
    data: Mapping[str, Any] | None = None,
    dropped: Mapping[str, int] | None = None,
    judge: Judge | None = None,
    command: str | None = None,
    out: Path | None = None,
    report: Report = lambda done, total, text: None,
    budget: Budget | None = None,
) -> ExperimentRecord:
    """Measure whether answers depend on the order of the passages, where the model reads best, and what to use.

    With ``out``, every answer goes to a journal there as soon as it is known, and the same call continues after an
    interruption. The record, the profile and the report are written at the end.

    Args:
        questions: The questions, with the passages that they are answered from (``find_questions``).
        examples: The same questions with labels; with them the arrangement is chosen by accuracy.
        data: Name and digest of the questions, for the record.
        dropped: Number of questions that were dropped, by reason.
        judge: Whether two answers say the same.
        command: The shell command that measures, for the record.
        out: Folder of journal, record, profile and report; None writes nothing.
        budget: The time that is left, where some was used before; None is that of ``options``.

    Raises:
        EvaluationError: no question is left.
    """
    options = options or MeasureOptions()
    if not questions:
        raise EvaluationError(f"no question is left to ask (dropped: {dict(dropped or {})}); give other questions")
    scored = isinstance(unbatched(pipeline.generator), Engine)
    run = Measurement(
        pipeline, options, budget or Budget(options.minutes), StackJournal(out and out / JOURNAL, fresh=options.fresh),
        AnswerJournal(out and out / POSITIONS_JOURNAL, fresh=options.fresh, scored=scored),
        RankJournal(out and out / POSITIONS_JOURNAL, fresh=options.fresh), report, judge,
    )  # fmt: skip
    if not scored:
        report(0, len(questions), f"{tokens_text(pipeline, questions, _prompts(run, examples), options.prices)}\n")
    _, seconds, asked_seconds = run.time_alone(questions, parse_arrangement(BASELINE))
    prompts, in_orders, variants = _prompts(run, examples), 2 * options.orders - 1, len(supported_candidates(pipeline))
    estimate = estimate_text(max(seconds, asked_seconds), len(questions), prompts, in_orders, variants, run.budget)
    report(0, len(questions), f"{estimate}\n")
    rows = _measure_flips(run, questions, seconds, FLIPS_SHARE_WITH_LABELS if examples else FLIPS_SHARE)
    flips = summarize_flips(rows)
    position_rows: list[PositionRow] = []
    skipped: dict[str, str] = {}
    if examples:
        table, position_rows = _by_positions(run, questions, examples, seconds, skipped)
    else:
        asked = {row.question for row in rows}
        usable = [question for question in questions if question.id in asked]
        table = _by_flips(run, usable, rows, flips, seconds, skipped)
    matters, default = order_matters(flips), default_arrangement(pipeline).label
    choice = choose(table, default=default, labels=bool(examples), order_matters=matters)
    summary = _summary(flips, table, choice, position_rows, skipped, dropped or {})
    summary["causes"] = name_causes(run, examples, max(seconds, asked_seconds), matters=matters)
    head = {
        "kind": "measure",
        "command": command,
        **environment(),
        **model_facts(unbatched(pipeline.generator)),
        "data": dict(data or {"name": None, "sha256": None}),
        "template": pipeline.assembler.template.fingerprint(),
        "settings": {
            **asdict(options),
            "max_tokens": pipeline.defaults.sampling.max_tokens,
            "seconds": run.budget.used,
        },
        "summary": summary,
    }
    all_rows = [{"table": "flips", **asdict(row)} for row in rows]
    all_rows += [{"table": "positions", **asdict(row)} for row in position_rows]
    return _write(ExperimentRecord(head, all_rows), out)


def _prompts(run: Measurement, examples: Sequence[PositionExample]) -> int:
    """Return the maximum number of prompts of a question."""
    candidates = len(supported_candidates(run.pipeline))
    in_orders = 2 * run.options.orders - 1
    if not examples:
        return in_orders + 2 * (candidates - 1)
    return in_orders + 2 + candidates * len(gold_positions(run.options.documents, len(examples[0].gold)))


def _measure_flips(
    run: Measurement, questions: Sequence[AskedQuestion], seconds: float, share: float
) -> list[FlipRow]:
    """Ask questions of the unmodified model in random orders, and in one order again, until the time is used.

    Args:
        seconds: Time of an answer, which says how many questions are asked at first.
    """
    rows: list[FlipRow] = []
    repeats, total, begun, done = run.options.orders - 1, len(questions), run.budget.used, 0
    fitting = run.budget.left(share) / max(seconds * (2 * run.options.orders - 1), 1e-9)
    size = max(1, min(TOGETHER, int(fitting)))
    while done < total:
        block = questions[done : done + size]
        rows += run.ask(block, parse_arrangement(BASELINE), repeats=repeats)
        is_first, done = done == 0, done + len(block)
        block_seconds, begun = run.budget.used - begun, run.budget.used
        if is_first:
            further = max(0, int(run.budget.left(share) / max(block_seconds, 1e-3)))
            reachable = min(total, size + further * size)
            run.report(done, total, f"{plan_text(reachable, total, run.options.minutes)}\n")
        changed = len({row.question for row in rows if row.kind == "order" and row.changed})
        low, high = wilson_interval(changed, done)
        left = min(run.budget.left(share), (total - done) / size * block_seconds)
        run.report(
            done, total, f"{changed} of {done} change, {low:.0%} to {high:.0%}, {max(left, 0) / 60:.1f} min left"
        )
        if run.budget.left(share) < block_seconds:
            break
    return rows


def _by_flips(
    run: Measurement,
    questions: Sequence[AskedQuestion],
    rows: Sequence[FlipRow],
    flips: dict[str, Any],
    seconds: float,
    skipped: dict[str, str],
) -> dict[str, Scores]:
    """Return the scores of arrangements without labels: stable answers, and agreement with the unmodified model.

    Args:
        seconds: Time of an answer of the unmodified model; a candidate is tried if there is as much time.
    """
    usual = usual_answers(_answers([row for row in rows if row.kind == "order"]))
    baseline = parse_arrangement(BASELINE)
    first_token, *_ = run.time_alone(questions, baseline)
    table = {BASELINE: _flip_scores(run.ask(questions, baseline, repeats=0), usual, 1.0)}
    candidates = supported_candidates(run.pipeline)[1:]
    if order_matters(flips) is False:
        skipped |= dict.fromkeys([candidate.label for candidate in candidates], "the order changes almost no answer")
        return table
    for candidate in candidates:
        candidate_rows: list[FlipRow] = []
        if run.budget.left() < seconds:
            skipped[candidate.label] = OUT_OF_TIME
            continue
        try:
            own_first_token, own_seconds, _ = run.time_alone(questions, candidate)
            cost, since = own_first_token / max(first_token, 1e-9), run.budget.used
            for start in range(0, len(questions), TOGETHER):
                fits = run.budget.fitting(start, since) >= FITTING * (len(questions) - start)
                if not (fits if start else run.budget.left() >= own_seconds * min(TOGETHER, len(questions))):
                    skipped[candidate.label] = OUT_OF_TIME
                    break
                candidate_rows += run.ask(questions[start : start + TOGETHER], candidate, repeats=0)
                done = min(start + TOGETHER, len(questions))
                run.report(done, len(questions), f"trying {candidate.label}, {run.budget.minutes_left:.1f} min left")
            else:
                table[candidate.label] = _flip_scores(candidate_rows, usual, cost)
        except REFUSALS as error:
            skipped[candidate.label] = str(error)
    return table


def rows_by_question(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each question."""
    questions: dict[str, list[Row]] = {}
    for row in rows:
        questions.setdefault(row.question, []).append(row)
    return questions


def _answers(rows: Sequence[FlipRow]) -> dict[str, list[str]]:
    return {name: [row.answer for row in group] for name, group in rows_by_question(rows).items()}


def _flip_scores(rows: Sequence[FlipRow], usual: Mapping[str, str], cost: float) -> Scores:
    well_formed = [mean([float(row.well_formed) for row in group]) for group in rows_by_question(rows).values()]
    return scores_without_labels(_answers(rows), usual, cost=cost, well_formed=well_formed)


def _by_positions(
    run: Measurement,
    questions: Sequence[AskedQuestion],
    examples: Sequence[PositionExample],
    seconds: float,
    skipped: dict[str, str],
) -> tuple[dict[str, Scores], list[PositionRow]]:
    """Return the scores of arrangements with labels, accuracy by position, and every row (see ``_by_flips``)."""
    rows, table, taken = list[PositionRow](), dict[str, Scores](), 0
    first_token, *_ = run.time_alone(questions, parse_arrangement(BASELINE))
    for candidate in supported_candidates(run.pipeline):
        is_first = candidate.label == BASELINE
        if not is_first and run.budget.left() < seconds:
            skipped[candidate.label] = OUT_OF_TIME
            continue
        try:
            own = (first_token, seconds) if is_first else run.time_alone(questions, candidate)[:2]
            cost = own[0] / max(first_token, 1e-9)
            candidate_rows, stop = _answer_in_blocks(run, candidate, examples, own[1], None if is_first else taken)
        except REFUSALS as error:
            if is_first:  # every arrangement needs these scores
                raise
            skipped[candidate.label] = str(error)
            continue
        if stop < taken:
            skipped[candidate.label] = OUT_OF_TIME
            continue
        taken = stop
        answered = [row for row in candidate_rows if row.gold_position is not None]
        rows += candidate_rows if is_first else answered
        table[candidate.label] = scores_with_labels(rows_by_question(answered), cost)
    return table, rows


def _answer_in_blocks(
    run: Measurement, candidate: Arrangement, examples: Sequence[PositionExample], seconds: float, taken: int | None
) -> tuple[list[PositionRow], int]:
    """Return the rows of as many questions as there is time for, and their number.

    ``taken`` is how many questions the unmodified model has answered, None for that model itself. A candidate that
    will not be done with them leaves its time to the next. ``seconds`` is the time of an answer.
    """
    rows: list[PositionRow] = []
    stop, total, since = 0, len(examples) if taken is None else taken, run.budget.used
    share = POSITIONS_SHARE if taken is None else 1.0
    prompts = 1 if candidate.order_free else len(gold_positions(run.options.documents))
    fitting = run.budget.left(share) / max(seconds * (prompts + (2 if taken is None else 0)), 1e-9)
    while stop < total:
        if stop:
            fitting = run.budget.fitting(stop, since, share)
        if taken is None:
            needed = 1.0 if stop else fitting  # some questions are always answered
        else:
            needed = FITTING * (total - stop) if stop else min(TOGETHER, total)
        if fitting < needed:
            break
        block = examples[stop:total][: min(BLOCK if stop else TOGETHER, max(int(fitting), 1))]
        rows += run.answer(block, candidate)
        stop += len(block)
        run.report(stop, len(examples), f"{candidate.label} by position, {run.budget.minutes_left:.1f} min left")
    return rows, stop


def name_causes(
    run: Measurement, examples: Sequence[PositionExample], seconds: float, *, matters: bool | None
) -> dict[str, Any]:
    """Return which known causes explain the bias (``compare_causes``) with the sentence ``text``, or why not, there.

    Questions with labels are asked again, others are for the value of a key; nothing is asked unless four questions
    fit into the time.

    Args:
        seconds: Time of an answer of the unmodified model.
        matters: Whether the order changes its answers; None if the questions do not tell.
    """
    missing = "Causes of position bias were not measured: "
    if matters is False:
        return {"text": f"{missing}the order changes almost no answer."}
    generator = unbatched(run.pipeline.generator)
    if not isinstance(generator, Engine):
        return {"text": f"{missing}they need a model in this process."}
    documents = run.options.documents if examples else CAUSE_PASSAGES
    asked = examples[:CAUSE_QUESTIONS] or key_value_questions(CAUSE_QUESTIONS, CAUSE_PASSAGES)
    positions, methods = gold_positions(documents, len(asked[0].gold)), correcting_methods()
    prompts = LEAST_QUESTIONS * (2 + len(positions) * (1 + len(methods)))
    if run.budget.left() < prompts * seconds:
        return {"text": f"{missing}they take about {prompts * seconds / 60:.0f} more minutes."}
    since = run.budget.used

    def in_time(done: int) -> bool:
        run.report(done, len(asked), f"causes of the bias, {run.budget.minutes_left:.1f} min left")
        return run.budget.fitting(done, since) >= LEAST_QUESTIONS

    try:
        found = compare_causes(
            generator, asked, methods, gold_positions=positions, documents=documents,
            template_of=partial(template_of, run.pipeline), in_time=in_time,
        )  # fmt: skip
    except REFUSALS as error:
        return {"text": f"{missing}{error}"}
    return {"text": explain(found), **found}


def _summary(
    flips: dict[str, Any],
    table: Mapping[str, Scores],
    choice: Choice,
    rows: Sequence[PositionRow],
    skipped: Mapping[str, str],
    dropped: Mapping[str, int],
) -> dict[str, Any]:
    chosen = parse_arrangement(choice.name)
    reports = measured(table)
    if not rows:  # the only value of an arrangement is the share of questions whose answers do not change
        for name, values in reports.items():
            reports[name] = {**values, "flip_rate": 1 - values["worst"], "agreement": values["second"]}
    free = [name for name in table if parse_arrangement(name).order_free]
    summary = {
        "flips": flips,
        "order_matters": order_matters(flips),
        "chosen": {
            "mitigation": chosen.mitigation.name,
            "parameters": dict(chosen.mitigation.parameters),
            "order": chosen.order,
            "reranker": None if chosen.reranker is None else chosen.reranker.label,
        },
        "choice": asdict(choice),
        "order_free": min(free, key=lambda name: table[name].cost, default=None),
        "measured": reports,
        "not_measured": dict(skipped),
        "labels": bool(rows),
        "n": flips["n"],
        "kept": flips["n"],
        "dropped": dict(dropped),
    }
    if rows:
        positions = summarize_positions(rows)
        summary["positions"] = {name: scores["positions"] for name, scores in positions["mitigations"].items()}
        for name, scores in positions["mitigations"].items():
            reports[name]["flip_rate"] = scores["answers_that_change"]
            reports[name]["recall_at_1"] = scores["recall_at_1"]
            answered = [row for row in rows if row.condition == name and row.gold_position is not None]
            reports[name]["overconfidence"] = overconfidence(
                [row.confidence for row in answered], [row.accuracy for row in answered]
            )
        summary["ceiling"], summary["floor"] = positions[GOLD_ONLY], positions[CLOSED_BOOK]
        summary["n"] = positions["n"]
    return {"verdict": verdict_of(summary), **summary}


def _spec(spec: MethodSpec | None) -> dict[str, Any] | None:
    return None if spec is None else {"name": spec.name, "parameters": dict(spec.parameters)}


def _write(record: ExperimentRecord, out: Path | None) -> ExperimentRecord:
    """Return the record with its files: ``record.json``, ``profile.json``, ``report.html`` and what is beside it."""
    if out is None:
        return record
    from rag_posfix.measuring.report import write_report

    summary = record.summary
    chosen = parse_arrangement(summary["choice"]["name"])
    profile = {
        "kind": PROFILE_KIND,
        "model": record.head["model"],
        "model_fingerprint": record.head["model_fingerprint"],
        "template": record.head["template"],
        "data": record.head["data"],
        "arrangement": {
            "mitigation": _spec(chosen.mitigation),
            "order": chosen.order,
            "reranker": _spec(chosen.reranker),
        },
        "verdict": summary["verdict"],
        "tried": summary["measured"],
        "not_tried": summary["not_measured"],
        "versions": record.head["versions"],
        "git": record.head["git"],
        "at": record.head["at"],
    }
    files = {name: out / f"{name}.json" for name in ("record", "profile")}
    save_record(files["record"], record.head, record.rows)
    write_whole(files["profile"], [orjson.dumps(profile, option=orjson.OPT_INDENT_2), b"\n"])
    return replace(record, files={**files, **write_report([record], out / "report.html")})


WRITTEN_JOURNAL = "questions-journal.jsonl"
MAX_ANSWER_WORDS = 8
_TOKENS = 80
_CHARACTERS = 1500
_INSTRUCTION = """\
Write one question that only the text answers, and its answer in a few words of the text.

Text: The Ostrel bridge crosses the river Venn. It was opened in 1931 and is 210 metres long.
Question: In which year was the Ostrel bridge opened?
Answer: 1931

Text: {text}
Question:"""
GAP = "____"
_SENTENCE = re.compile(r"[^.!?\u3002\uff01\uff1f\n]+[.!?\u3002\uff01\uff1f]?")
_WORD = re.compile(r"\w+")
_WRITTEN = re.compile(r"\s*(?:Question:)?\s*(?P<question>[^\n]+?)\s*\n+\s*Answer:\s*(?P<answer>[^\n]+)")


@dataclass(frozen=True, slots=True)
class WrittenQuestion:
    """What the writer wrote for a passage; ``answered`` is its own answer from the passage, if it was asked."""

    text: str
    answered: str | None


class WrittenJournal(LineJournal[WrittenQuestion]):
    """What writers wrote, by writer and passage (see ``LineJournal``)."""

    def __init__(self, path: Path | None = None, *, fresh: bool = False) -> None:
        super().__init__("written", _read_written, path, fresh=fresh)


def _read_written(row: Any) -> WrittenQuestion | None:
    return WrittenQuestion(**row) if set(row) == {field.name for field in fields(WrittenQuestion)} else None


def write_text(writer: Generator, text: str, max_tokens: int) -> str:
    """Return what a generator answers to a text without passages."""
    return writer.generate(text_request(writer, text, max_tokens)).text


def same_by(writer: Generator) -> Callable[[str, str, str], bool]:
    """Return a judge that asks a generator whether two answers say the same; only "yes" counts."""

    def judge(question: str, first: str, second: str) -> bool:
        text = (
            f"Question: {question}\nFirst answer: {first}\nSecond answer: {second}\n\n"
            "Do both answers say the same? Answer with yes or no."
        )
        return normalize(write_text(writer, text, 4)).startswith("yes")

    return judge


def write_questions(
    pipeline: Pipeline,
    passages: Sequence[Document],
    count: int,
    *,
    documents: int,
    seed: int = 0,
    journal: WrittenJournal | None = None,
    in_time: Callable[[], bool] = lambda: True,
    report: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> tuple[list[PositionExample], Counter[str]]:
    """Return up to ``count`` questions that the pipeline's writer wrote from passages, and why others were dropped.

    Args:
        passages: The passages of the index; each is used at most once, in an order drawn by ``seed``.
        documents: Passages of a question: its own, and the best others that the pipeline finds for it.
        journal: What was written in earlier runs.
        in_time: Whether there is time for one more.
    """
    writer = pipeline.writer or pipeline.generator
    journal = journal or WrittenJournal()
    examples: list[PositionExample] = []
    dropped: Counter[str] = Counter()
    seen: set[str] = set()
    for passage in _shuffled(passages, seed):
        if len(examples) == count or not in_time():
            break
        written = _written(writer, passage, journal, asks_again=pipeline.writer is not None)
        match = _WRITTEN.match(written.text)
        question, answer = (match["question"].strip(), match["answer"].strip(" .\"'")) if match else ("", "")
        reason = _fault(question, answer, passage, written, seen)
        example = reason or _example(pipeline, question, answer, passage, documents)
        if isinstance(example, str):
            dropped[example] += 1
        else:
            seen.add(normalize(question))
            examples.append(example)
        report(len(examples), count, f"writing questions, {dropped.total()} dropped")
    return examples, dropped


def gap_questions(
    pipeline: Pipeline,
    passages: Sequence[Document],
    count: int,
    *,
    documents: int,
    seed: int,
    leave_out: Collection[str],
) -> list[PositionExample]:
    """Return up to ``count`` sentences of the passages with a gap, whose answer is the word that stood there.

    The sentence is one with two words or more that no other passage has; the gap takes the last of them.

    Args:
        leave_out: Ids of passages that are not used.
    """
    examples: list[PositionExample] = []
    holders = Counter(word for passage in passages for word in {*_WORD.findall(passage.page_content.casefold())})
    for passage in _shuffled(passages, seed):
        if len(examples) == count:
            break
        for sentence in _SENTENCE.findall(passage.page_content):
            own = [match for match in _WORD.finditer(sentence) if holders[match[0].casefold()] == 1]
            if str(passage.id) in leave_out or len(own) < 2:
                continue
            question = f"Fill the gap: {sentence[: own[-1].start()].lstrip()}{GAP}{sentence[own[-1].end() :]}"
            example = _example(pipeline, question, own[-1][0], passage, documents)
            if isinstance(example, PositionExample):
                examples.append(example)
                break
    return examples


def _shuffled(passages: Sequence[Document], seed: int) -> list[Document]:
    """Return the passages in an order drawn by a seed, each text once."""
    distinct = list({checked_document(passage).key: passage for passage in passages}.values())
    return random.Random(seed).sample(distinct, len(distinct))


def _written(writer: Generator, passage: Document, journal: WrittenJournal, *, asks_again: bool) -> WrittenQuestion:
    key = content_hash(writer.fingerprint, checked_document(passage).key, _INSTRUCTION, str(asks_again))
    written = journal.get(key)
    if written is None:
        text = passage.page_content[:_CHARACTERS]
        reply = write_text(writer, _INSTRUCTION.format(text=text), _TOKENS)
        match = _WRITTEN.match(reply) if asks_again else None
        answered = None
        if match is not None:
            answered = write_text(writer, f"{text}\n\nAnswer in a few words: {match['question']}", _TOKENS)
        written = WrittenQuestion(reply, answered)
        journal.add(key, written)
    return written


def _fault(question: str, answer: str, passage: Document, written: WrittenQuestion, seen: set[str]) -> str | None:
    """Return why a question cannot be used, by its text; None if it can."""
    if not question.endswith(("?", "\uff1f")) or not normalize(answer):
        return "no question with an answer was written"
    if len(answer.split()) > MAX_ANSWER_WORDS:
        return f"the answer has more than {MAX_ANSWER_WORDS} words"
    if not best_subspan_em(passage.page_content, [answer]):
        return "the answer is not in the passage"
    if best_subspan_em(question, [answer]):
        return "the question holds its answer"
    if normalize(question) in seen:
        return "the question was written before"
    if written.answered is not None and not best_subspan_em(written.answered, [answer]):
        return "the writer answers otherwise"
    return None


def _example(pipeline: Pipeline, question: str, answer: str, gold: Document, documents: int) -> PositionExample | str:
    """Return the question with the best other passages that the pipeline finds for it, or why it cannot be used."""
    found = pipeline.find_passages(
        Question(question, k=documents, min_relevance="off", mitigation="none", order="relevance")
    )
    key = checked_document(gold).key
    others = tuple(document for document in found if checked_document(document).key != key)[: documents - 1]
    if any(best_subspan_em(document.page_content, [answer]) for document in others):
        return "another passage holds the answer"
    if len(others) < documents - 1:
        return "too few other passages are found"
    return PositionExample(str(gold.id), question, (answer,), (gold,), others)
