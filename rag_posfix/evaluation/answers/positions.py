"""Position experiment: every method at every position of the gold passage, on the same engine.

Permutation experiment: how many answers change when the passages are shuffled.

Order-invariant methods run with every order too, so that the experiment tests their claim.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from langchain_core.documents import Document
from torch import Tensor

from rag_posfix.assembly.documents import content_key
from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.contracts.generator import ChatMessage, Generator
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.contracts.retrieval import Reranker
from rag_posfix.errors import ConfigError, EvaluationError
from rag_posfix.evaluation.answers.experiment import (
    CLOSED_BOOK,
    GOLD_ONLY,
    OWN_SCORER,
    QUESTION_BATCH_SIZE,
    AnswerJournal,
    AnswerRow,
    Arrangement,
    EvalCase,
    GradedAnswer,
    PositionRow,
    answer_all,
    answers_head,
    arrangement_rerankers,
    case_key,
    check_arrangements,
    engine_facts,
    graded_again,
    load_models,
    not_measured,
    row_entries,
    score_passages,
    summarize_positions,
    with_baselines,
    with_passages_kept,
)
from rag_posfix.evaluation.data.questions import (
    GoldPosition,
    PositionExample,
    checked_positions,
    take_examples,
    with_hostile_passage,
    with_joined_passages,
)
from rag_posfix.evaluation.figures import CAPTIONS, draw_permutations, draw_positions, with_figure
from rag_posfix.evaluation.ranking.rankings import RankJournal
from rag_posfix.evaluation.ray_map import connect_ray, ray_map
from rag_posfix.evaluation.record import ExperimentRecord, Progress, silent
from rag_posfix.evaluation.statistics import best_subspan_em, bootstrap_interval, first_line, mean, mean_if_known
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.remote.connection import is_remote
from rag_posfix.settings import Settings

__all__ = ["PermutationRow", "PositionRow", "evaluate_permutations", "evaluate_positions"]


JOURNAL = "positions-journal.jsonl"
REUSE_BYTES = 4 * 1024**3
"""Maximum size of the keys and values of passages that ``reuse`` keeps."""

ModelsOpener = Callable[[Sequence[Arrangement], Settings], tuple[Generator, Reranker, str]]


def evaluate_positions(
    data: Path | Sequence[PositionExample],
    choices: Sequence[MitigationChoice | Arrangement],
    *,
    gold_positions: Sequence[GoldPosition] = (0, 4, 9),
    documents: int = 10,
    limit: int | None = None,
    skip: int = 0,
    hostile: str | None = None,
    joined: int | None = None,
    baselines: bool = False,
    max_tokens: int = 24,
    check_orders: bool = False,
    fresh: bool = False,
    reuse: bool = False,
    ray: bool = False,
    ray_actors: int = 2,
    engine: Generator | None = None,
    reranker: Reranker | None = None,
    settings: Settings | None = None,
    out: Path | None = None,
    progress: Progress = silent,
) -> ExperimentRecord:
    """Put the gold passage at each position and compare arrangements: accuracy, log-probability, worst, spread.

    The record has one row per question and condition (``PositionRow``); ``summarize_positions`` describes its summary.
    With ``out``, every answer and ranking goes to ``positions-journal.jsonl`` there as soon as it is known: the same
    call, or one with more questions, positions or methods, computes only what is missing.

    Args:
        data: A file of Lost-in-the-Middle or HotpotQA rows or in SQuAD's format, or questions.
        choices: Arrangements; a method alone has the order of the experiment and relevance from ``reranker``.
        gold_positions: Positions of the gold passage in the prompt, from 0, each once; (0, 9) places two passages.
        documents: Number of passages per prompt.
        limit: Maximum number of questions.
        skip: Number of questions to leave out at the start.
        hostile: Replace the first distractor by a hostile passage: a kind of ``evaluation.data.hostile``.
        joined: Join this number of passages to a long one (``with_joined_passages``).
        baselines: Also run plain prompts that are sorted by the scorers of ``choices`` (``with_baselines``).
        max_tokens: Maximum number of tokens of an answer.
        check_orders: Compute the answer at every position, also of order-invariant arrangements.
        fresh: Recompute what is in the journal.
        reuse: Keep keys and values of passages in memory (4 GiB) for the next condition: faster; ``seconds`` are then
            those of a warm store.
        ray: Answer on a Ray cluster: eight questions are a task, as they are answered together without Ray. Rankings
            are computed there and not kept.
        ray_actors: Processes there that hold the model.
        engine: The model; loaded by ``settings`` if None. With ``ray``, processes load theirs by ``settings``.
        reranker: Scores the passages; if None, the embeddings of ``settings``.
        settings: Read from the environment if None.
        out: Folder for the record and the journal; None writes nothing.
        progress: Progress callback (``evaluation.record.Progress``).

    Raises:
        ConfigError: a method, a gold position, the model or a setting is wrong.
        EvaluationError: the file cannot be used, too few passages, or they do not fit the context window.
    """
    examples = _changed(take_examples(data, limit, skip), hostile, joined)
    arrangements = with_baselines(check_arrangements(choices)) if baselines else check_arrangements(choices)
    for example, place in itertools.product(examples, checked_positions(gold_positions)):  # before the model is loaded
        example.documents(documents, place)
    journal_file = out and out / JOURNAL
    asked: dict[str, Any] = {"gold_positions": gold_positions, "n_documents": documents}
    asked |= {"max_new_tokens": max_tokens, "check_orders": check_orders}
    if ray:
        if engine is not None or reranker is not None:
            raise ConfigError("ray=True loads models in other processes; give settings instead of engine and reranker")
        journal = AnswerJournal(journal_file, fresh=fresh)
        with progress("answering") as report:
            rows, facts, relevance = answer_on_ray(
                examples, arrangements, asked, journal, settings or Settings(), ray_actors,
                kept_bytes=REUSE_BYTES if reuse else 0, progress=report,
            )  # fmt: skip
    else:
        engine, reranker, relevance = load_models(arrangements, engine, reranker, settings, progress)
        engine = with_passages_kept(engine, REUSE_BYTES) if reuse else engine
        journal = AnswerJournal(journal_file, fresh=fresh, scored=isinstance(engine, Engine))
        with progress("answering") as report:
            rows = answer_at_positions(
                engine, examples, arrangements, reranker=reranker, journal=journal, progress=report,
                rankings=RankJournal(journal_file, fresh=fresh),
                rerankers=arrangement_rerankers(arrangements, engine, settings), **asked,
            )  # fmt: skip
        facts = engine_facts(engine, arrangements)
    used = {
        "documents": documents, "gold_positions": list(gold_positions), "limit": limit, "skip": skip,
        **{name: value for name, value in (("hostile", hostile), ("joined", joined)) if value},
        "max_tokens": max_tokens, "relevance": relevance,
        "decoding": "greedy", "check_orders": check_orders, "reuse": reuse,
        "answers_of_earlier_runs_by": journal.sources,
    }  # fmt: skip
    head = answers_head("positions", facts, data, used, summarize_positions(rows))
    record = ExperimentRecord(head, [asdict(row) for row in rows]).write(out)
    return with_figure(record, draw_positions, CAPTIONS["positions"])


def _changed(
    examples: Sequence[PositionExample], hostile: str | None, joined: int | None
) -> Sequence[PositionExample]:
    """Return the questions with long passages, then with a hostile passage, where those are asked for."""
    examples = with_joined_passages(examples, joined) if joined else examples
    return with_hostile_passage(examples, hostile) if hostile else examples


@dataclass(frozen=True, slots=True, eq=False)
class _PlannedRow:
    """A row before its answer: its case, and the key of the answer."""

    case: EvalCase
    condition: str
    gold_position: GoldPosition | None
    key: str
    gold_rank: int | None = None


def answer_at_positions(
    engine: Generator,
    examples: Sequence[PositionExample],
    choices: Sequence[MitigationChoice | Arrangement],
    *,
    gold_positions: Sequence[GoldPosition],
    n_documents: int,
    reranker: Reranker,
    rerankers: Mapping[str, Reranker] = MappingProxyType({}),
    max_new_tokens: int = 24,
    progress: Callable[[int, int], None] | None = None,
    journal: AnswerJournal | None = None,
    rankings: RankJournal | None = None,
    check_orders: bool = False,
    template_of: Callable[[str, Sequence[ChatMessage]], PromptTemplate] = lambda *_: PromptTemplate(),
) -> list[PositionRow]:
    """Answer every question under every condition: closed book, gold only, and each method at each gold position.

    Relevance comes from ``reranker``, or one of ``rerankers``, and never from which passage is gold. Eight questions
    are taken at a time, and those of one condition and position are answered together.

    Args:
        journal: Answers of earlier runs, which are not computed again, and where new ones go.
        rankings: The same for relevance; None computes it for every question.
        check_orders: Compute the answer at every position, also of arrangements that do not depend on the order.
            Otherwise such an arrangement answers a question once, and the row is repeated for the other positions.
    """
    journal = journal or AnswerJournal()
    arrangements = check_arrangements(choices)
    scorers = {OWN_SCORER: reranker, **rerankers}
    labels = dict.fromkeys(arrangement.scorer for arrangement in arrangements)
    total = len(examples) * (2 + len(choices) * len(gold_positions))
    done = itertools.count(1)

    def tick() -> None:
        if progress is not None:
            progress(next(done), total)

    def planned_rows(example: PositionExample) -> Iterator[_PlannedRow]:
        template = template_of(example.question, example.history)
        for condition, passages in ((CLOSED_BOOK, ()), (GOLD_ONLY, example.gold)):
            case = EvalCase(example, passages, MitigationChoice("none"), template=template)
            yield _PlannedRow(case, condition, None, case_key(engine, case, max_new_tokens, any_order=False))
        scored = {label: score_passages(scorers[label], example, n_documents, rankings) for label in labels}
        gold_rank = {label: _gold_rank(example, by_id) for label, by_id in scored.items()}
        for gold_position in gold_positions:
            names = [str(document.id) for document in example.documents(n_documents, gold_position)]
            for arrangement in arrangements:
                by_id = scored[arrangement.scorer]
                documents = tuple(by_id[name] for name in names if name in by_id)
                case = EvalCase(example, documents, arrangement.mitigation, arrangement.order, template)
                any_order = arrangement.order_free and not check_orders
                key = case_key(engine, case, max_new_tokens, any_order=any_order)
                yield _PlannedRow(case, arrangement.label, gold_position, key, gold_rank[arrangement.scorer])

    rows: list[PositionRow] = []
    for start in range(0, len(examples), QUESTION_BATCH_SIZE):
        planned = [row for example in examples[start : start + QUESTION_BATCH_SIZE] for row in planned_rows(example)]
        rows += _answer_rows(engine, planned, journal, max_new_tokens, tick)
    return rows


def _gold_rank(example: PositionExample, passages: Mapping[str, Document]) -> int | None:
    """Return the rank of the gold passage by relevance, from 1; equal scores by content; of several the lowest."""
    ranked = sorted(passages.values(), key=lambda d: (-float(d.metadata["relevance_score"]), content_key(d)))
    names = [str(document.id) for document in ranked]
    gold = [str(document.id) for document in example.gold]
    return max(map(names.index, gold)) + 1 if set(gold) <= set(names) else None


def _answer_rows(
    engine: Generator,
    planned: Sequence[_PlannedRow],
    journal: AnswerJournal,
    max_new_tokens: int,
    tick: Callable[[], None],
) -> list[PositionRow]:
    """Return the rows with their answers, in order; what the journal lacks is computed, each key once."""
    answers = {
        row.key: graded_again(answer, row.case.example)
        for row in planned
        if (answer := journal.get(row.key)) is not None
    }
    missing: dict[str, list[_PlannedRow]] = {}
    for row in planned:
        if row.key in answers:
            tick()
        else:
            missing.setdefault(row.key, []).append(row)
    computed = {id(rows[0]) for rows in missing.values()}
    together: dict[tuple[str, GoldPosition | None], list[_PlannedRow]] = {}
    for row, *_ in missing.values():
        together.setdefault((row.condition, row.gold_position), []).append(row)
    for group in together.values():
        graded = answer_all(engine, [row.case for row in group], max_new_tokens)
        for row, (answer, _) in zip(group, graded, strict=True):
            journal.add(row.key, answer)
            answers[row.key] = answer
            for _ in missing[row.key]:
                tick()
    return [
        PositionRow(
            condition=row.condition,
            gold_position=row.gold_position,
            gold_rank=row.gold_rank,
            reused=id(row) not in computed,
            planted=_gives_planted(row, answers[row.key].answer),
            **row_entries(row.case, answers[row.key]),
        )
        for row in planned
    ]


def _gives_planted(row: _PlannedRow, answer: str) -> float | None:
    """Return whether an answer is the planted one; None where there is none."""
    planted = row.case.example.planted
    return best_subspan_em(first_line(answer), [planted]) if planted and row.gold_position is not None else None


class CarriedJournal(AnswerJournal):
    """A journal in memory that begins with known answers, and records which were used and which are new."""

    def __init__(self, answers: Mapping[str, GradedAnswer]) -> None:
        super().__init__()
        self._answers = answers
        self.used: set[str] = set()
        self.added: dict[str, GradedAnswer] = {}

    def get(self, key: str) -> GradedAnswer | None:
        """Return the answer with this key, or None."""
        if key in self._answers:
            self.used.add(key)
            return self._answers[key]
        return self.added.get(key)

    def add(self, key: str, row: GradedAnswer) -> None:
        """Add an answer."""
        self.added[key] = row


class _Answerer:
    """A model and rerankers, which answer block after block."""

    def __init__(
        self, opener: ModelsOpener, arrangements: Sequence[Arrangement], settings: Settings, kept_bytes: int
    ) -> None:
        engine, self._reranker, self._relevance = opener(arrangements, settings)
        self._arrangements = arrangements
        self._rerankers = arrangement_rerankers(arrangements, engine, settings)
        self._engine = with_passages_kept(engine, kept_bytes) if kept_bytes else engine

    def facts(self) -> tuple[dict[str, Any], str]:
        return engine_facts(self._engine, self._arrangements), self._relevance

    def block(
        self, examples: Sequence[PositionExample], settings: Mapping[str, Any], answers: Mapping[str, GradedAnswer]
    ) -> tuple[list[PositionRow], set[str], dict[str, GradedAnswer]]:
        journal = CarriedJournal(answers)
        rows = answer_at_positions(
            self._engine, examples, self._arrangements, reranker=self._reranker, rerankers=self._rerankers,
            journal=journal, **settings,
        )  # fmt: skip
        return rows, journal.used, journal.added


def answer_on_ray(
    examples: Sequence[PositionExample],
    arrangements: Sequence[Arrangement],
    asked: Mapping[str, Any],
    journal: AnswerJournal,
    settings: Settings,
    actors: int,
    *,
    kept_bytes: int = 0,
    progress: Callable[[int, int], None] | None = None,
    opener: ModelsOpener | None = None,
) -> tuple[list[PositionRow], dict[str, Any], str]:
    """Return the rows of ``examples`` in order, ``engine_facts``, and the name of the reranker that scores passages.

    A block is what one process answers together, so rows equal those of ``answer_at_positions`` here.

    Args:
        asked: More arguments of ``answer_at_positions``.
        journal: New answers go into it as blocks arrive.
        actors: Processes that hold a model, each with one CPU.
        kept_bytes: Maximum size of the keys and values that each keeps of passages; 0 keeps none.
        opener: Loads the models in an actor; by ``settings`` if None.
    """
    if is_remote(settings.model):
        raise ConfigError(f"model={settings.model!r} is on a server, which answers many at once; leave --ray out")
    blocks: dict[int, list[PositionRow]] = {}
    with (
        connect_ray() as ray,
        ray_map(ray, actors, _Answerer, opener or _load_models, arrangements, settings, kept_bytes) as calls,
    ):
        ((_, (facts, relevance)),) = calls("facts", [()])
        answers = ray.put(journal.rows())
        starts = range(0, len(examples), QUESTION_BATCH_SIZE)
        given = [(examples[start : start + QUESTION_BATCH_SIZE], asked, answers) for start in starts]
        for index, (rows, used, added) in calls("block", given):
            blocks[index] = rows
            for key in used:
                journal.get(key)
            for key, graded in added.items():
                journal.add(key, graded)
            if progress is not None:
                progress(len(blocks), len(given))
    return [row for _, rows in sorted(blocks.items()) for row in rows], facts, relevance


def _load_models(arrangements: Sequence[Arrangement], settings: Settings) -> tuple[Generator, Reranker, str]:
    return load_models(arrangements, None, None, settings, silent)


@dataclass(frozen=True, slots=True, kw_only=True)
class PermutationRow(AnswerRow):
    """One answer to one question with the passages in one order.

    Attributes:
        order: For each position, the position of its passage in the first order; the first order is 0, 1, 2, ...
        gold_position: Position of the gold passage; positions of several.
        changed: Whether the text of the answer differs from that in the first order.
        logit_difference: Largest absolute difference to the first order in the log-probabilities of the first token;
            None if the generator returns no log-probabilities.
    """

    order: tuple[int, ...]
    gold_position: GoldPosition
    changed: bool
    logit_difference: float | None


def evaluate_permutations(
    data: Path | Sequence[PositionExample],
    choices: Sequence[MitigationChoice | Arrangement],
    *,
    orders: int = 4,
    documents: int = 10,
    limit: int | None = None,
    skip: int = 0,
    max_tokens: int = 24,
    seed: int = 0,
    engine: Generator | None = None,
    reranker: Reranker | None = None,
    settings: Settings | None = None,
    out: Path | None = None,
    progress: Progress = silent,
) -> ExperimentRecord:
    """Shuffle the passages and count the answers that change: flip rate, first-token difference, accuracy.

    The record has one row per question, method and order (``PermutationRow``); ``summarize_permutations`` describes
    its summary.

    Args:
        data: A file of Lost-in-the-Middle or HotpotQA rows or in SQuAD's format, or questions.
        choices: Arrangements; a method alone has the order of the experiment and relevance from ``reranker``.
        orders: Orders per question, the given one included; the others are drawn, the same ones for every method.
        documents: Number of passages per prompt.
        limit: Maximum number of questions.
        skip: Number of questions to leave out at the start.
        max_tokens: Maximum number of tokens of an answer.
        engine: The model; loaded by ``settings`` if None.
        reranker: Scores the passages; if None, the embeddings of ``settings``.
        settings: Read from the environment if None.
        out: Folder for the record; None writes nothing.
        progress: Progress callback (``evaluation.record.Progress``).

    Raises:
        ConfigError: a method, the model or a setting is wrong.
        EvaluationError: the file cannot be used, too few passages or orders, or passages do not fit the context
            window.
    """
    examples = take_examples(data, limit, skip)
    arrangements = check_arrangements(choices)
    draw_orders(documents, orders, seed, "")  # before the model is loaded
    for example in examples:
        example.documents(documents)
    engine, reranker, relevance = load_models(arrangements, engine, reranker, settings, progress)
    with progress("answering") as report:
        rows = answer_in_orders(
            engine, examples, arrangements, n_orders=orders, n_documents=documents, reranker=reranker, seed=seed,
            max_new_tokens=max_tokens, progress=report,
            rerankers=arrangement_rerankers(arrangements, engine, settings),
        )  # fmt: skip
    used = {
        "documents": documents, "orders": orders, "limit": limit, "skip": skip, "max_tokens": max_tokens, "seed": seed,
        "relevance": relevance, "decoding": "greedy",
    }  # fmt: skip
    head = answers_head("permutations", engine_facts(engine, arrangements), data, used, summarize_permutations(rows))
    record = ExperimentRecord(head, [asdict(row) for row in rows]).write(out)
    return with_figure(record, draw_permutations, CAPTIONS["permutations"])


def draw_orders(count: int, n_orders: int, seed: int, name: str) -> list[tuple[int, ...]]:
    """Return distinct orders of ``count`` passages for the question ``name``: the original one, then random ones."""
    possible = math.factorial(count)
    if not 2 <= n_orders <= possible:
        raise EvaluationError(
            f"orders={n_orders} must be between 2 and {possible}, the number of orders of {count} passages"
        )
    draw = random.Random(f"{seed}:{name}")
    orders = {tuple(range(count)): None}
    while len(orders) < n_orders:
        orders[tuple(draw.sample(range(count), count))] = None
    return list(orders)


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """A question, its passages in the first order by scorer (None for one left out), and the orders to put them in."""

    example: PositionExample
    passages: Mapping[str, Sequence[Document | None]]
    orders: list[tuple[int, ...]]


def answer_in_orders(
    engine: Generator,
    examples: Sequence[PositionExample],
    choices: Sequence[MitigationChoice | Arrangement],
    *,
    n_orders: int,
    n_documents: int,
    reranker: Reranker,
    rerankers: Mapping[str, Reranker] = MappingProxyType({}),
    seed: int = 0,
    max_new_tokens: int = 24,
    progress: Callable[[int, int], None] | None = None,
) -> list[PermutationRow]:
    """Answer every question with each method in each order, the same orders for every method.

    The first order has the gold passage first and the distractors as the data gives them. Eight questions are taken
    at a time, and those of one method in their first, second, ... order are answered together: an answer has the same
    neighbours in every order, so that rounding within a batch changes none.

    Args:
        reranker: Scores the passages of a question, once, for arrangements without a reranker.
    """
    arrangements = check_arrangements(choices)
    scorers = {OWN_SCORER: reranker, **rerankers}
    labels = dict.fromkeys(arrangement.scorer for arrangement in arrangements)
    total = len(examples) * len(arrangements) * n_orders
    rows: list[PermutationRow] = []
    for start in range(0, len(examples), QUESTION_BATCH_SIZE):
        questions = []
        for example in examples[start : start + QUESTION_BATCH_SIZE]:
            names = [str(document.id) for document in example.documents(n_documents)]
            scored = {label: score_passages(scorers[label], example, n_documents) for label in labels}
            passages = {label: [by_id.get(name) for name in names] for label, by_id in scored.items()}
            questions.append(_Question(example, passages, draw_orders(n_documents, n_orders, seed, example.id)))
        for arrangement in arrangements:
            for row in _in_each_order(engine, questions, arrangement, n_orders, max_new_tokens):
                rows.append(row)
                if progress is not None:
                    progress(len(rows), total)
    return rows


def _in_each_order(
    engine: Generator, questions: Sequence[_Question], arrangement: Arrangement, n_orders: int, max_new_tokens: int
) -> Iterator[PermutationRow]:
    first: list[
        tuple[str, Tensor | None]
    ] = []  # by question: its first answer, and log-probabilities of its first token
    for number in range(n_orders):
        cases = []
        for question in questions:
            passages = [question.passages[arrangement.scorer][index] for index in question.orders[number]]
            documents = tuple(passage for passage in passages if passage is not None)
            cases.append(EvalCase(question.example, documents, arrangement.mitigation, arrangement.order))
        answers = answer_all(engine, cases, max_new_tokens)
        for index, (question, case, (answer, log_probs)) in enumerate(zip(questions, cases, answers, strict=True)):
            if number == 0:
                first.append((answer.answer, log_probs))
            first_answer, first_log_probs = first[index]
            order = question.orders[number]
            gold = tuple(map(order.index, range(len(question.example.gold))))  # the first passages of the first order
            yield PermutationRow(
                condition=arrangement.label,
                order=order,
                gold_position=gold[0] if len(gold) == 1 else gold,
                changed=answer.answer != first_answer,
                logit_difference=largest_difference(log_probs, first_log_probs),
                **row_entries(case, answer),
            )


def largest_difference(a: Tensor | None, b: Tensor | None) -> float | None:
    """Return the largest absolute difference; two infinities of one sign do not differ. None if a side is None."""
    if a is None or b is None:
        return None
    return float((a - b).abs().where(a != b, 0.0).max())


def summarize_permutations(rows: Sequence[PermutationRow]) -> dict[str, Any]:
    """Return how much each method's answers depend on the order, with intervals by question.

    ``flip_rate`` is the share of (question, order other than the first) with another answer than the first order;
    ``any_flip`` the share of questions with at least one such order; ``max_logit_difference`` the largest difference
    of a first token's log-probability between an order and the first; ``accuracy`` the mean over all orders. Numbers
    that the generator does not return are None, and ``not_measured`` says why.
    """
    tables: dict[str, dict[str, list[PermutationRow]]] = {}
    for row in rows:
        tables.setdefault(row.condition, {}).setdefault(row.question, []).append(row)
    methods = {name: _summary(list(table.values())) for name, table in tables.items()}
    verdict = []
    for name, scores in methods.items():
        low, high = scores["flip_rate_ci95"]
        verdict.append(
            f"{name}: {scores['flip_rate']:.0%} of the answers change with the order of the passages (95 % interval "
            f"{low:.0%} to {high:.0%}); accuracy {scores['accuracy']:.2f}."
        )
    return {
        "mitigations": methods,
        "verdict": verdict,
        "n": len({row.question for row in rows}),
        "orders": max((len(orders) for table in tables.values() for orders in table.values()), default=0),
        **not_measured([row.log_probability for row in rows]),
    }


def _summary(questions: Sequence[Sequence[PermutationRow]]) -> dict[str, Any]:
    """Return the summary of one method from one list per question, its first order first."""
    flips = [mean([float(row.changed) for row in rows[1:]]) for rows in questions]
    columns: dict[str, Sequence[float | None]] = {
        "flip_rate": flips,
        "any_flip": [float(share > 0) for share in flips],
        "accuracy": [mean([row.accuracy for row in rows]) for rows in questions],
        "accuracy_full_text": [mean([row.accuracy_full_text for row in rows]) for rows in questions],
        "log_probability": [mean_if_known([row.log_probability for row in rows]) for rows in questions],
    }
    summary: dict[str, Any] = {}
    for name, values in columns.items():
        summary[name] = mean_if_known(values)
        measured = [[value] for value in values if value is not None]
        summary[f"{name}_ci95"] = list(bootstrap_interval(measured, mean)) if summary[name] is not None else None
    differences = [row.logit_difference for rows in questions for row in rows]
    summary["max_logit_difference"] = None if None in differences else max(filter(None, differences), default=0.0)
    summary["seconds"] = mean([row.seconds for rows in questions for row in rows])
    return summary
