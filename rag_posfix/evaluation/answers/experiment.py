"""Common parts of the answer experiments: arrangements, loaded models, and the head of the record.

Runs cases: prompts as in the pipeline, greedy answers, their scores and form, and a journal.

On an engine answers are batched and scored. Any other generator answers several at a time, without log-probabilities.

The key of an answer in the journal includes everything that the answer depends on: weights, method, prompt template,
question, passages, their relevance, tokens. It does not include the version of this library, which is stored in the
line. After a change to the code of a method, use ``fresh``.

Rows of the position experiment, and their summary: per position, worst, mean, spread, and against ``none``.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from torch import Tensor

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.assembly.documents import checked_document, content_key
from rag_posfix.assembly.orders import ORDERS, create_order
from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.assembly.tokenization import PROMPT_VERSION
from rag_posfix.contracts.answer import WORDS, repeats
from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.method_spec import GIVEN_ORDER, MethodSpec, parse_method, read_arrangement
from rag_posfix.contracts.request import Generation, GenerationRequest, MitigationChoice, Sampling
from rag_posfix.contracts.retrieval import Reranker
from rag_posfix.errors import ConfigError, EvaluationError
from rag_posfix.evaluation.data.questions import GoldPosition, PositionExample, data_facts, position_label
from rag_posfix.evaluation.ranking.rankings import (
    OpenedReranker,
    QueryCandidates,
    RankJournal,
    local_ranker,
    rerank,
    rerank_or_raise,
    reranker_identity,
)
from rag_posfix.evaluation.record import LineJournal, Progress, environment, model_facts
from rag_posfix.evaluation.statistics import (
    best_subspan_em,
    bootstrap_interval,
    first_line,
    mcnemar_p,
    mean,
    mean_if_known,
)
from rag_posfix.generation.batching.scheduler import generate_batch, in_batches, score_batch
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.generation.engine import Engine
from rag_posfix.mitigations import MITIGATIONS, create
from rag_posfix.plan.layout import Layout
from rag_posfix.reranking import RERANKERS
from rag_posfix.reranking.base import ScoringReranker
from rag_posfix.reranking.deadline import GuardedReranker
from rag_posfix.settings import Settings
from rag_posfix.text import content_hash

__all__ = ["Arrangement", "check_arrangements", "parse_arrangement"]


OWN_SCORER = ""
"""Label of the experiment's own scorer, for arrangements that name none."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Reranker, order and method together, as a user runs them.

    Attributes:
        mitigation: The method that reads the prompt.
        order: The order of the passages in the prompt; ``original`` leaves them as the experiment puts them.
        reranker: What scores the passages; None is the experiment's own scorer. ``top_n`` keeps the best few.
    """

    mitigation: MethodSpec
    order: str = GIVEN_ORDER
    reranker: MethodSpec | None = None

    @property
    def scorer(self) -> str:
        """Label of what scores the passages; empty for the experiment's own scorer."""
        return OWN_SCORER if self.reranker is None else self.reranker.label

    @property
    def label(self) -> str:
        """Text that ``parse_arrangement`` reads back; the label of the method for a bare method."""
        if self.reranker is None and self.order == GIVEN_ORDER:
            return self.mitigation.label
        scorer = "" if self.reranker is None else _reranker_label(self.reranker)
        return f"{scorer}/{self.order}/{self.mitigation.label}"

    @property
    def order_free(self) -> bool:
        """Whether the answer does not depend on the order in which the passages were given.

        Either the method does not depend on the order, or the order in the prompt follows from scores and content.
        Scores do not depend on the given order where a reranker reads all passages (``window``).
        """
        if create(self.mitigation.name, self.mitigation.parameters).is_order_invariant:
            return True
        return ORDERS.get(parse_method(self.order, "order", "slots=[0.4,0.2,0.4]").name).by_content


def parse_arrangement(text: str) -> Arrangement:
    """Read ``reranker/order/method``, each ``name`` or ``name:parameter=value``.

    A bare method keeps the default reranker and order. An empty reranker is the experiment's own scorer, an empty
    order ``original``. ``likelihood+embedding`` fuses. Nothing is looked up, and no file is read.

    Raises:
        ConfigError: two parts or more than three, or a part that cannot be read.
    """
    reranker, order, mitigation = read_arrangement(text)
    return Arrangement(mitigation, order, reranker)


def with_baselines(arrangements: Sequence[Arrangement]) -> list[Arrangement]:
    """Return the arrangements, and for each of their scorers the plain prompts that a method has to beat.

    All passages best first, best last and with the best at both ends; the best 1, 3 and 5 alone; all passages twice,
    and the best once more at the end. The experiment's own scorer is ``embedding`` where passages are selected. A
    scorer that selects, such as ``yes_no:top_n=3``, sorts all passages here.
    """
    result, plain = list(arrangements), MethodSpec("none")
    scorers = [_without_selection(arrangement.reranker) for arrangement in arrangements]
    for scorer in {"" if scorer is None else scorer.label: scorer for scorer in scorers}.values():
        selecting = scorer or MethodSpec("embedding")
        result += [
            *(Arrangement(plain, order, scorer) for order in ("relevance", "reverse", "ends_first")),
            *(
                Arrangement(plain, "reverse", MethodSpec(selecting.name, {**selecting.parameters, "top_n": count}))
                for count in (1, 3, 5)
            ),
            *(
                Arrangement(MethodSpec("repeated_passages", {"repeat": repeat}), "relevance", scorer)
                for repeat in ("all", "best")
            ),
        ]
    return list({arrangement.label: arrangement for arrangement in result}.values())


def _without_selection(scorer: MethodSpec | None) -> MethodSpec | None:
    if scorer is None:
        return None
    selection = getattr(RERANKERS.get(scorer.name), "selection", ())
    return MethodSpec(scorer.name, {name: value for name, value in scorer.parameters.items() if name not in selection})


def check_arrangements(choices: Sequence[MethodSpec | Arrangement]) -> list[Arrangement]:
    """Return methods and arrangements as arrangements, checked before a model is loaded.

    Raises:
        ConfigError: an unknown name or parameter, a value outside of what is allowed, or an arrangement twice.
    """
    arrangements = [choice if isinstance(choice, Arrangement) else Arrangement(choice) for choice in choices]
    for index, arrangement in enumerate(arrangements):
        MITIGATIONS.check(arrangement.mitigation)
        create_order(arrangement.order)
        if arrangement.reranker is not None:
            RERANKERS.check(arrangement.reranker)
        if arrangement in arrangements[:index]:
            raise ConfigError(f"{arrangement.label!r} occurs twice with the same parameters; remove one of them")
    return arrangements


def arrangement_rerankers(
    arrangements: Sequence[Arrangement], engine: Generator, settings: Settings | None
) -> dict[str, Reranker]:
    """Return the rerankers that ``arrangements`` name, by label; ``settings`` name their embeddings."""
    from rag_posfix.pipeline.build import build_embeddings, model_loader
    from rag_posfix.pipeline.retrievers_and_servers import connect_with
    from rag_posfix.reranking.build import RerankerModels, build_reranker

    specs = {choice.reranker.label: choice.reranker for choice in arrangements if choice.reranker is not None}
    settings = settings or Settings()
    embeddings = functools.cache(lambda: build_embeddings(settings))
    models = RerankerModels(embeddings, lambda: engine, connect_with(settings), model_loader(settings))
    return {label: build_reranker(spec, models) for label, spec in specs.items()}


def load_models(
    arrangements: Sequence[Arrangement],
    engine: Generator | None,
    reranker: Reranker | None,
    settings: Settings | None,
    progress: Progress,
) -> tuple[Generator, Reranker, str]:
    """Return the model, the reranker that scores the passages, and the name of the reranker in the record.

    Args:
        reranker: Scores the passages; if None, the embeddings of ``settings``.
    """
    relevance = type(reranker).__name__
    if engine is None or reranker is None:
        chosen = settings or Settings()
        with progress("loading the model and the embeddings"):
            from rag_posfix.pipeline.build import build_embeddings, build_generator
            from rag_posfix.reranking.embedding import EmbeddingReranker

            engine = engine or build_generator(chosen)
            if reranker is None:
                reranker, relevance = EmbeddingReranker(embeddings=build_embeddings(chosen)), chosen.embedding_model
    for arrangement in arrangements:
        engine.describe(arrangement.mitigation)
    return engine, reranker, relevance


def with_passages_kept(engine: Generator, max_bytes: int) -> Engine:
    """Return the engine with a passage KV store in memory, so that the next condition reuses passages of this one."""
    from rag_posfix.caching.kv.store import PassageStore
    from rag_posfix.caching.tier import MemoryTier
    from rag_posfix.generation.engine import Engine

    if not isinstance(engine, Engine):
        raise ConfigError(f"reuse keeps keys and values in this process, and {engine.model_id} is on a server")
    return engine.with_passages(PassageStore([MemoryTier(max_bytes)]))


def engine_facts(engine: Generator, arrangements: Sequence[Arrangement]) -> dict[str, Any]:
    """Return what the head of a record says of ``engine``, and under ``mitigations`` of ``arrangements`` on it."""
    mitigations = {
        arrangement.label: {
            "parameters": arrangement.mitigation.parameters,
            "fingerprint": engine.describe(arrangement.mitigation).fingerprint,
            "order": arrangement.order,
            "reranker": None if arrangement.reranker is None else arrangement.reranker.label,
            "order_free": arrangement.order_free,
        }
        for arrangement in arrangements
    }
    return {**environment(), **model_facts(engine), "mitigations": mitigations}


def answers_head(
    kind: str,
    facts: Mapping[str, Any],
    data: Path | Sequence[PositionExample],
    settings: Mapping[str, Any],
    summary: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the head of the record: versions, model, data, prompts, settings and summary."""
    return {
        "kind": kind,
        **{name: value for name, value in facts.items() if name != "mitigations"},
        "data": data_facts(data),
        "template": PromptTemplate().fingerprint(),
        "prompt_version": PROMPT_VERSION,
        "mitigations": facts["mitigations"],
        "settings": settings,
        "summary": summary,
    }


def _reranker_label(spec: MethodSpec) -> str:
    scorers = spec.parameters.get("scorers")
    if spec.name != "fused" or not isinstance(scorers, list) or not all(isinstance(name, str) for name in scorers):
        return spec.label
    parameters = {name: value for name, value in spec.parameters.items() if name != "scorers"}
    return MethodSpec("+".join(scorers), parameters).label


QUESTION_BATCH_SIZE = 8
"""Questions of one condition are answered together, so an answer has the same neighbours in every condition."""

MAX_WORDS = 30
"""A short answer has at most this many words in its first line."""


def is_sound(answer: str) -> bool:
    """Return whether an answer is well formed: its first line has 1 to 30 words, and no run of words is repeated."""
    first = answer.split("\n", 1)[0]
    return 1 <= len(WORDS.findall(first)) <= MAX_WORDS and not repeats(answer)


def summarize_form(answers: Sequence[str]) -> dict[str, float]:
    """Return shares: ``sound`` answers, those that ``repeat``, and the mean number of ``words``."""
    count = max(len(answers), 1)
    return {
        "sound": sum(map(is_sound, answers)) / count,
        "repeats": sum(map(repeats, answers)) / count,
        "words": sum(len(WORDS.findall(answer)) for answer in answers) / count,
    }


@dataclass(frozen=True, slots=True, eq=False)
class EvalCase:
    """One question about scored passages as the experiment orders them, for one order in the prompt and one method."""

    example: PositionExample
    documents: tuple[Document, ...]
    choice: MitigationChoice
    order: str = "original"
    template: PromptTemplate = field(default_factory=PromptTemplate)


@dataclass(frozen=True, slots=True)
class GradedAnswer:
    """The answer to a case and its scores.

    Attributes:
        answer: The generated answer.
        accuracy: best_subspan_em of the first line.
        accuracy_full_text: best_subspan_em of the whole answer.
        log_probability: Mean log-probability per token of the first accepted answer; None from a generator that does
            not score given answers.
        seconds: Time of the prefill, plus an equal share of the time to score and generate its batch.
        confidence: Geometric mean of the probabilities of the tokens of the answer's first line; None from a generator
            that does not return them.
    """

    answer: str
    accuracy: float
    accuracy_full_text: float
    log_probability: float | None
    seconds: float
    confidence: float | None = None


_FIELDS = {
    each.name: {"answer": str, "confidence": float | None}.get(each.name, float) for each in fields(GradedAnswer)
}


def answer_and_score(
    engine: Engine, layout: Layout, choice: MitigationChoice, expected: str, max_new_tokens: int
) -> tuple[Generation, float]:
    """Return the greedy answer and the mean log-probability per token of ``expected``, from one prefill."""
    tokens = engine.encoder.encode_answer(expected)
    session = engine.open(layout, choice, max(max_new_tokens, len(tokens)))
    scores = session.score(tokens)
    request = GenerationRequest(layout, choice, Sampling(max_tokens=max_new_tokens))
    generation = [chunk.generation for chunk in engine.resume(session, request)][-1]
    if generation is None:
        raise EvaluationError("the engine ended without a generation; please report this")
    return generation, sum(scores) / len(scores)


def answer_all(
    engine: Generator, cases: Iterable[EvalCase], max_new_tokens: int
) -> Iterator[tuple[GradedAnswer, Tensor | None]]:
    """Yield each answer in order, with the log-probabilities of its first token, (V,) float32, or None.

    On an engine prompts are prefilled one by one; answers are scored and generated in batches. A remote model is sent
    ``QUESTION_BATCH_SIZE`` prompts at a time.
    """
    assembler = Assembler(engine.encoder, engine.context_window)
    scored = isinstance(engine, Engine)
    requests = ((case, _request(assembler, case, max_new_tokens, scored)) for case in cases)
    if not isinstance(engine, Engine):

        def answer(asked: tuple[EvalCase, GenerationRequest]) -> GradedAnswer:
            case, request = asked
            started = time.perf_counter()
            return _grade(engine.generate(request), case.example, None, time.perf_counter() - started)

        with ThreadPoolExecutor(QUESTION_BATCH_SIZE) as pool:
            while block := list(itertools.islice(requests, QUESTION_BATCH_SIZE)):
                yield from ((graded, None) for graded in pool.map(answer, block))
        return

    def prefill(
        case: EvalCase, request: GenerationRequest
    ) -> tuple[PositionExample, GenerationRequest, list[int], Session]:
        expected = engine.encoder.encode_answer(case.example.answers[0])
        session = engine.open(request.layout, case.choice, max(max_new_tokens, len(expected)))
        return case.example, request, expected, session

    for batch in in_batches((prefill(*pair) for pair in requests), lambda prefilled: prefilled[-1]):
        examples, batch_requests, expected, sessions = zip(*batch, strict=True)
        started = time.perf_counter()
        first = [session.next_log_probs() for session in sessions]
        scores = score_batch(sessions, expected)
        generations = generate_batch(engine, sessions, batch_requests)
        share = (time.perf_counter() - started) / len(batch)
        for example, session, log_probs, score, generation in zip(
            examples, sessions, first, scores, generations, strict=True
        ):
            yield _grade(generation, example, sum(score) / len(score), session.prefill_seconds + share), log_probs


def _request(assembler: Assembler, case: EvalCase, max_new_tokens: int, scored: bool) -> GenerationRequest:
    count = len(case.documents)
    assembled = assembler.with_template(case.template).assemble(
        case.example.question,
        case.documents,
        order=case.order,
        max_new_tokens=max_new_tokens,
        history=case.example.history,
    )
    if len(assembled.documents) != count:
        raise EvaluationError(
            f"question {case.example.id}: {count - len(assembled.documents)} of {count} passages do "
            "not fit or repeat; use fewer documents"
        )
    sampling = Sampling(max_tokens=max_new_tokens, top_logprobs=0 if scored else None)
    return GenerationRequest(assembled.layout, case.choice, sampling)


def _grade(
    generation: Generation, example: PositionExample, log_probability: float | None, seconds: float
) -> GradedAnswer:
    confidence = _confidence(generation)
    return graded_again(GradedAnswer(generation.text, 0.0, 0.0, log_probability, seconds, confidence), example)


def _confidence(generation: Generation) -> float | None:
    """Return the geometric mean of the probabilities of the tokens of the first line, the line that is graded."""
    end = len(generation.text.split("\n", 1)[0])
    scored = [each for each in generation.log_probs if each.start < end] or generation.log_probs
    scores = [each.token.log_prob for each in scored if each.token.log_prob is not None]
    return math.exp(mean(scores)) if scores else None


def graded_again(answer: GradedAnswer, example: PositionExample) -> GradedAnswer:
    """Return an answer with the grades of this version: a journal may have those of an earlier one."""
    return replace(
        answer,
        accuracy=best_subspan_em(first_line(answer.answer), example.answers),
        accuracy_full_text=best_subspan_em(answer.answer, example.answers),
    )


def score_passages(
    reranker: Reranker, example: PositionExample, count: int, journal: RankJournal | None = None
) -> dict[str, Document]:
    """Return the passages of a question with relevance, by id; a reranker with ``top_n`` returns fewer.

    The reranker sees the same passages in the same order whatever is asked afterwards: by content hash, so that the
    gold passage has no position of its own.

    Args:
        journal: Rankings of earlier runs, which are not computed again, and where new ones go. Rerankers that differ
            in how many passages they return (``ScoringReranker.selection``) score them once.
    """
    documents = tuple(sorted(example.documents(count), key=content_key))
    name = getattr(reranker, "name", type(reranker).__name__)
    scorer = reranker.reranker if isinstance(reranker, GuardedReranker) else reranker
    if journal is None or not isinstance(scorer, ScoringReranker) or name not in RERANKERS.names():
        ranked = rerank_or_raise(reranker, documents, example.query, label=name, query=example.id)
        return {str(d.id): d for d in ranked}
    whole = scorer.model_copy(update=dict.fromkeys(scorer.selection))
    guarded = reranker.model_copy(update={"reranker": whole}) if isinstance(reranker, GuardedReranker) else whole
    ranker = local_ranker(OpenedReranker(name, reranker_identity(name, whole), guarded))
    candidates = QueryCandidates(example.id, example.query, documents)
    ranking = rerank(ranker, [candidates], journal).rankings[example.id]
    by_id = {str(d.id): d for d in documents}
    kept = scorer.kept(ranking.scores)
    return {
        key: by_id[key].model_copy(update={"metadata": {**by_id[key].metadata, "relevance_score": score}})
        for key, score in zip(ranking.ids[:kept], ranking.scores[:kept], strict=True)
    }


class AnswerJournal(LineJournal[GradedAnswer]):
    """Answers by key, in memory and, with a path, in a file that only grows (see ``LineJournal``).

    Args:
        fresh: Start without the answers of earlier runs. They stay in the file.
        scored: Whether answers have a log-probability; one without is then computed again.
    """

    def __init__(self, path: Path | None = None, *, fresh: bool = False, scored: bool = True) -> None:
        super().__init__("answer", _read_answer if scored else _read_unscored, path, fresh=fresh)


def _read_answer(row: Any) -> GradedAnswer | None:
    values = {"confidence": None, **row}  # journals of earlier versions have none
    complete = set(values) == set(_FIELDS) and all(isinstance(values[name], kind) for name, kind in _FIELDS.items())
    return GradedAnswer(**values) if complete else None


def _read_unscored(row: Any) -> GradedAnswer | None:
    """Read an answer of a generator that does not score: its log-probability is None."""
    if row.get("log_probability", 0.0) is not None:
        return None
    answer = _read_answer({**row, "log_probability": 0.0})
    return None if answer is None else replace(answer, log_probability=None)


def device_of(engine: Generator) -> str:
    """Return the type of the device that answers, for keys of journals."""
    return engine.loaded.device.type if isinstance(engine, Engine) else "remote"


def case_key(engine: Generator, case: EvalCase, max_new_tokens: int, *, any_order: bool) -> str:
    """Return a digest of everything that an answer depends on; with ``any_order`` all orders have the same."""
    passages: Iterable[list[Any]] = ([p.key, p.relevance] for p in map(checked_document, case.documents))
    fields = {
        "version": PROMPT_VERSION,
        "model": engine.fingerprint,
        "device": device_of(engine),
        "method": engine.describe(case.choice).fingerprint,
        "template": case.template.fingerprint(),
        "question": case.example.question,
        "answers": case.example.answers,
        "passages": sorted(passages, key=str) if any_order else list(passages),
        "any_order": any_order,
        "max_new_tokens": max_new_tokens,
        **({} if not isinstance(engine, Engine) or engine.encoder.has_chat_template else {"scored": "after a space"}),
        **({} if case.order == "original" else {"order": case.order}),
        **({"history": case.example.history} if case.example.history else {}),
    }
    return content_hash(json.dumps(fields, sort_keys=True))


BASELINE = "none"
CLOSED_BOOK = "closed_book"
GOLD_ONLY = "gold_only"
NOT_SCORED = "a remote generator answers with text and does not score given answers; accuracy and changes are measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRow(GradedAnswer):
    """A graded answer of a record.

    Attributes:
        question: The question's id.
        condition: Label of the arrangement, ``closed_book`` or ``gold_only``.
        asked: The text of the question.
        accepted: The accepted answers.
        passages: Ids of the passages, in input order.
    """

    question: str
    condition: str
    asked: str = ""
    accepted: tuple[str, ...] = ()
    passages: tuple[str, ...] = ()


def row_entries(case: EvalCase, answer: GradedAnswer) -> dict[str, Any]:
    """Return the entries of ``AnswerRow`` but the condition."""
    example = case.example
    texts = {"question": example.id, "asked": example.question, "accepted": example.answers}
    return {**texts, "passages": tuple(str(document.id) for document in case.documents), **asdict(answer)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionRow(AnswerRow):
    """One answer to one question under one condition.

    Attributes:
        gold_position: Position of the gold passage, positions of several; None without distractors.
        reused: Whether the answer was not computed for this row. It is from the journal, or from another order of the
            same passages under an order-invariant arrangement.
        gold_rank: Rank of the gold passage among the scored ones, from 1; of several the lowest. None if the reranker
            left one out, and without distractors.
        planted: best_subspan_em of the first line with the wrong answer that a hostile passage gives; None without.
    """

    gold_position: GoldPosition | None
    reused: bool = False
    gold_rank: int | None = None
    planted: float | None = None


Table = Mapping[GoldPosition, Sequence[PositionRow]]


def summarize_positions(rows: Sequence[PositionRow]) -> dict[str, Any]:
    """Return accuracy and log-probability per gold position, worst, mean, spread (max - min) and intervals.

    ``ci95`` is the interval of the mean accuracy over positions. ``versus_none`` compares each method's worst position
    with the baseline's best and worst, questions paired: ``worst_minus_best_log_probability`` with its interval
    ``ci95``, and the same of accuracy, each with an interval of its own; ``mcnemar_p`` is the chance of such a
    difference in accuracy between these two positions if there were none. ``sound`` and ``repeats`` are shares of
    answers (``answering.is_sound``), ``recall_at_k`` is the scorer's. ``by_scorer`` splits the questions by whether
    the scorer ranks the gold passage first (of several: before all others), with the accuracy at the worst position
    and with the gold passage alone. ``planted`` is the share of answers that give the answer of a hostile passage.
    ``reused`` counts the rows that were not computed anew. Numbers that the generator does not return are None, and
    ``not_measured`` says why.
    """
    tables = {
        name: _by_position(rows, name)
        for name in dict.fromkeys(row.condition for row in rows if row.gold_position is not None)
    }
    alone = {row.question: row.accuracy for row in rows if row.condition == GOLD_ONLY}
    methods: dict[str, Any] = {
        name: {**_summary(table), "by_scorer": _by_scorer(table, alone)} for name, table in tables.items()
    }
    if BASELINE in tables:
        for name, table in tables.items():
            if name != BASELINE:
                methods[name]["versus_none"] = _versus(table, tables[BASELINE])
    return {
        "mitigations": methods,
        "verdict": position_verdicts(methods),
        CLOSED_BOOK: _scores([row for row in rows if row.condition == CLOSED_BOOK]),
        GOLD_ONLY: _scores([row for row in rows if row.condition == GOLD_ONLY]),
        "n": len({row.question for row in rows}),
        "reused": sum(row.reused for row in rows),
        **not_measured([row.log_probability for row in rows]),
    }


def not_measured(log_probabilities: Sequence[float | None]) -> dict[str, dict[str, str]]:
    """Return ``not_measured`` of a summary of all rows: which numbers are None, and why; nothing without None."""
    return {"not_measured": {"log_probability": NOT_SCORED}} if None in log_probabilities else {}


def _by_position(rows: Sequence[PositionRow], condition: str) -> dict[GoldPosition, list[PositionRow]]:
    table: dict[GoldPosition, list[PositionRow]] = {}
    for row in rows:
        if row.condition == condition and row.gold_position is not None:
            table.setdefault(row.gold_position, []).append(row)
    return dict(sorted(table.items(), key=lambda item: item[0] if isinstance(item[0], tuple) else (item[0],)))


def _summary(table: Table) -> dict[str, Any]:
    positions = {position_label(position): _scores(rows) for position, rows in table.items()}
    by_position = _accuracies(table)
    accuracy = [mean(scores) for scores in by_position]
    log_probability = [scores["log_probability"] for scores in positions.values()]
    measured = [value for value in log_probability if value is not None]
    scored = len(measured) == len(positions)
    answers = zip(*([row.answer for row in rows] for rows in table.values()), strict=True)
    ranks = [row.gold_rank for row in next(iter(table.values()))]
    planted = [row.planted for rows in table.values() for row in rows if row.planted is not None]
    return {
        "positions": positions,
        "worst": min(accuracy),
        "mean": mean(accuracy),
        "spread": max(accuracy) - min(accuracy),
        "ci95": list(bootstrap_interval(list(zip(*by_position, strict=True)), mean)),
        "worst_log_probability": min(measured) if scored else None,
        "mean_log_probability": mean(measured) if scored else None,
        "spread_log_probability": max(measured) - min(measured) if scored else None,
        "answers_that_change": mean([float(len(set(texts)) > 1) for texts in answers]),
        **({"planted": mean(planted)} if planted else {}),
        **summarize_form([row.answer for rows in table.values() for row in rows]),
        **{f"recall_at_{k}": mean([float(rank is not None and rank <= k) for rank in ranks]) for k in (1, 2, 3)},
    }


def _by_scorer(table: Table, alone: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return share and accuracy of the questions with the gold passages ranked first, and of the other questions."""
    position = next(iter(table))
    n_gold = len(position) if isinstance(position, tuple) else 1
    worst = min(table.values(), key=lambda rows: mean([row.accuracy for row in rows]))
    split = {}
    for key, first in (("gold_first", True), ("gold_later", False)):
        rows = [row for row in worst if (row.gold_rank is not None and row.gold_rank <= n_gold) is first]
        split[key] = {
            "share": len(rows) / len(worst),
            "accuracy": mean([row.accuracy for row in rows]),
            "gold_only_accuracy": mean([alone[row.question] for row in rows if row.question in alone]),
        }
    return split


def _scores(rows: Sequence[PositionRow]) -> dict[str, float | None]:
    return {
        "accuracy": mean([row.accuracy for row in rows]),
        "accuracy_full_text": mean([row.accuracy_full_text for row in rows]),
        "log_probability": mean_if_known([row.log_probability for row in rows]),
        "seconds": mean([row.seconds for row in rows]),
    }


def _versus(table: Table, baseline: Table) -> dict[str, float | list[float] | None]:
    method_scores, baseline_scores = _accuracies(table), _accuracies(baseline)
    to_worst = _difference(method_scores, baseline_scores, min)
    to_best = _difference(method_scores, baseline_scores, max)
    method_logs, baseline_logs = _log_probabilities(table), _log_probabilities(baseline)
    logs: tuple[float | None, list[float] | None] = (None, None)
    if method_logs is not None and baseline_logs is not None:
        logs = _difference(method_logs, baseline_logs, max)
    return {
        "worst_minus_best_log_probability": logs[0],
        "ci95": logs[1],
        "worst_minus_worst_accuracy": to_worst[0],
        "worst_minus_worst_accuracy_ci95": to_worst[1],
        "worst_minus_best_accuracy": to_best[0],
        "worst_minus_best_accuracy_ci95": to_best[1],
        "mcnemar_p": mcnemar_p(min(method_scores, key=sum), max(baseline_scores, key=sum)),
    }


def _accuracies(table: Table) -> list[list[float]]:
    """Return the accuracy of each question, by position."""
    return [[row.accuracy for row in rows] for rows in table.values()]


def _log_probabilities(table: Table) -> list[list[float]] | None:
    """Return the log-probability of each question, by position; None if one was not measured."""
    scores = [[row.log_probability for row in rows] for rows in table.values()]
    measured = [[score for score in row if score is not None] for row in scores]
    return measured if list(map(len, measured)) == list(map(len, scores)) else None


def _difference(
    method_scores: Sequence[Sequence[float]],
    baseline_scores: Sequence[Sequence[float]],
    pick: Callable[[Sequence[float]], float],
) -> tuple[float, list[float]]:
    """Return a method's worst position minus the baseline's worst (``min``) or best (``max``), and the interval."""

    def difference(means: Sequence[float]) -> float:
        return min(means[: len(method_scores)]) - pick(means[len(method_scores) :])

    by_question = list(zip(*method_scores, *baseline_scores, strict=True))
    value = difference([mean(column) for column in (*method_scores, *baseline_scores)])
    return value, list(bootstrap_interval(by_question, difference))


def position_verdicts(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a sentence per method of ``eval positions``, with a comparison if ``none`` is among them."""
    sentences = []
    for name, scores in methods.items():
        share = scores["answers_that_change"]
        of = " of the unmodified model" if name == BASELINE else ""
        if share == 0:
            sentence = "no answer changes with the position of the gold passage"
        else:
            sentence = f"{share:.0%} of the answers{of} change with the position of the gold passage"
            spread, measure = scores["spread_log_probability"], "mean log-probability"
            if spread is None:
                spread, measure = scores["spread"], "accuracy"
            sentence += f", by {spread:.2f} in {measure} between the best and the worst position"
        sentences.append(f"{name}: {sentence}{_comparison(scores.get('versus_none'))}.")
    return sentences


def _comparison(versus: Mapping[str, Any] | None) -> str:
    if versus is None:
        return ""
    accuracy = f"accuracy {versus['worst_minus_best_accuracy']:+.2f} (p = {versus['mcnemar_p']:.2f})"
    if versus["ci95"] is None:
        return f"; at its worst position against none at its best: {accuracy}"
    low, high = versus["ci95"]
    how = "higher than" if low > 0 else "lower than" if high < 0 else "not distinguishable from"
    return (
        f"; its log-probability at its worst position is {how} that of none at its best "
        f"({versus['worst_minus_best_log_probability']:+.2f}, 95 % interval {low:+.2f} to {high:+.2f}), its {accuracy}"
    )
