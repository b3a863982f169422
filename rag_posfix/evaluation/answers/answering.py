"""Runs trials: prompts as in the pipeline, greedy answers, their scores and form, and a journal.

On an engine answers are batched and scored. Any other generator answers several at a time, without log-probabilities.

The key of an answer in the journal includes everything that the answer depends on: weights, method, prompt template,
question, passages, their relevance, tokens. It does not include the version of this library, which is stored in the
line. After a change to the code of a method, use ``fresh``.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from torch import Tensor

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.assembly.documents import checked_document, content_key
from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.assembly.tokenization import PROMPT_VERSION
from rag_posfix.contracts.answer import WORDS, repeats
from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import Generation, GenerationRequest, MitigationChoice, Sampling
from rag_posfix.contracts.retrieval import Reranker
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.questions import PositionExample
from rag_posfix.evaluation.grading import best_subspan_em, first_line
from rag_posfix.evaluation.journal import LineJournal
from rag_posfix.evaluation.ranking.rankings import (
    OpenedReranker,
    QueryCandidates,
    RankJournal,
    local_ranker,
    rerank,
    reranker_identity,
)
from rag_posfix.evaluation.strict_reranking import rerank_or_raise
from rag_posfix.generation.batching.requests import generate_batch, in_batches, score_batch
from rag_posfix.generation.decode.session import Session
from rag_posfix.generation.engine import Engine
from rag_posfix.plan.layout import Layout
from rag_posfix.reranking.base import RERANKERS, ScoringReranker
from rag_posfix.reranking.deadline import GuardedReranker
from rag_posfix.text import content_hash

QUESTIONS_TOGETHER = 8
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
class Trial:
    """One question about scored passages as the experiment orders them, for one order in the prompt and one method."""

    example: PositionExample
    documents: tuple[Document, ...]
    choice: MitigationChoice
    order: str = "original"
    template: PromptTemplate = field(default_factory=PromptTemplate)


@dataclass(frozen=True, slots=True)
class GradedAnswer:
    """The answer to a trial and its scores.

    Attributes:
        answer: The generated answer.
        accuracy: best_subspan_em of the first line.
        accuracy_full_text: best_subspan_em of the whole answer.
        log_probability: Mean log-probability per token of the first accepted answer; None from a generator that does
            not score given answers.
        seconds: Time of the prefill, plus an equal share of the time to score and generate its batch.
    """

    answer: str
    accuracy: float
    accuracy_full_text: float
    log_probability: float | None
    seconds: float


_FIELDS = {each.name: str if each.name == "answer" else float for each in fields(GradedAnswer)}


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
    engine: Generator, trials: Iterable[Trial], max_new_tokens: int
) -> Iterator[tuple[GradedAnswer, Tensor | None]]:
    """Yield each answer in order, with the log-probabilities of its first token, (V,) float32, or None.

    On an engine prompts are prefilled one by one; answers are scored and generated in batches. A remote model is sent
    ``QUESTIONS_TOGETHER`` prompts at a time.
    """
    assembler = Assembler(engine.encoder, engine.context_window)
    requests = ((trial, _request(assembler, trial, max_new_tokens)) for trial in trials)
    if not isinstance(engine, Engine):

        def answer(asked: tuple[Trial, GenerationRequest]) -> GradedAnswer:
            trial, request = asked
            started = time.perf_counter()
            return _grade(engine.generate(request), trial.example, None, time.perf_counter() - started)

        with ThreadPoolExecutor(QUESTIONS_TOGETHER) as pool:
            while block := list(itertools.islice(requests, QUESTIONS_TOGETHER)):
                yield from ((graded, None) for graded in pool.map(answer, block))
        return

    def prefill(
        trial: Trial, request: GenerationRequest
    ) -> tuple[PositionExample, GenerationRequest, list[int], Session]:
        expected = engine.encoder.encode_answer(trial.example.answers[0])
        session = engine.open(request.layout, trial.choice, max(max_new_tokens, len(expected)))
        return trial.example, request, expected, session

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


def _request(assembler: Assembler, trial: Trial, max_new_tokens: int) -> GenerationRequest:
    count = len(trial.documents)
    assembled = assembler.with_template(trial.template).assemble(
        trial.example.question,
        trial.documents,
        order=trial.order,
        max_new_tokens=max_new_tokens,
        history=trial.example.history,
    )
    if len(assembled.documents) != count:
        raise EvaluationError(
            f"question {trial.example.id}: {count - len(assembled.documents)} of {count} passages do "
            "not fit or repeat; use fewer documents"
        )
    return GenerationRequest(assembled.layout, trial.choice, Sampling(max_tokens=max_new_tokens))


def _grade(
    generation: Generation, example: PositionExample, log_probability: float | None, seconds: float
) -> GradedAnswer:
    return graded_again(GradedAnswer(generation.text, 0.0, 0.0, log_probability, seconds), example)


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
    complete = set(row) == set(_FIELDS) and all(isinstance(row[name], kind) for name, kind in _FIELDS.items())
    return GradedAnswer(**row) if complete else None


def _read_unscored(row: Any) -> GradedAnswer | None:
    """Read an answer of a generator that does not score: its log-probability is None."""
    if row.get("log_probability", 0.0) is not None:
        return None
    answer = _read_answer({**row, "log_probability": 0.0})
    return None if answer is None else replace(answer, log_probability=None)


def device_of(engine: Generator) -> str:
    """Return the type of the device that answers, for keys of journals."""
    return engine.loaded.device.type if isinstance(engine, Engine) else "remote"


def answer_key(engine: Generator, trial: Trial, max_new_tokens: int, *, any_order: bool) -> str:
    """Return a digest of everything that an answer depends on; with ``any_order`` all orders have the same."""
    passages: Iterable[list[Any]] = ([p.key, p.relevance] for p in map(checked_document, trial.documents))
    fields = {
        "version": PROMPT_VERSION,
        "model": engine.fingerprint,
        "device": device_of(engine),
        "method": engine.describe(trial.choice).fingerprint,
        "template": trial.template.fingerprint(),
        "question": trial.example.question,
        "answers": trial.example.answers,
        "passages": sorted(passages, key=str) if any_order else list(passages),
        "any_order": any_order,
        "max_new_tokens": max_new_tokens,
        **({} if not isinstance(engine, Engine) or engine.encoder.has_chat_template else {"scored": "after a space"}),
        **({} if trial.order == "original" else {"order": trial.order}),
        **({"history": trial.example.history} if trial.example.history else {}),
    }
    return content_hash(json.dumps(fields, sort_keys=True))
