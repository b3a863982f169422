"""Runs trials: prompts as in the pipeline, greedy answers, their scores, and a journal.

On an engine answers are batched and scored. Any other generator answers one by one, without log-probabilities.

The key of an answer in the journal includes everything that the answer depends on: weights, method, prompt template,
question, passages, their relevance, tokens. It does not include the version of this library, which is stored in the
line. After a change to the code of a method, use ``fresh``.
"""

from __future__ import annotations

import json
import re
import string
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from torch import Tensor

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.assembly.documents import checked_document, content_key
from rag_posfix.assembly.prompt import PromptTemplate
from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import Generation, GenerationRequest, MitigationChoice, Sampling
from rag_posfix.contracts.retrieval import Reranker
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.position_example import PositionExample
from rag_posfix.evaluation.journal import LineJournal
from rag_posfix.evaluation.strict_reranking import rerank_or_raise
from rag_posfix.generation.batching.session_batch import generate_batch, in_batches, score_batch
from rag_posfix.generation.decode.session import Session
from rag_posfix.generation.engine import Engine
from rag_posfix.plan.layout import Layout
from rag_posfix.text import content_hash

QUESTIONS_TOGETHER = 8
"""Questions of one condition are answered together, so an answer has the same neighbours in every condition."""

KEY_VERSION = 2
"""2: prompts have the tokens of the stock model."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Return ``text`` in lower case without punctuation, articles and surplus spaces, as SQuAD compares answers."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def first_line(text: str) -> str:
    """Return the text before the first line break, as Lost in the Middle scores it."""
    return text.split("\n", 1)[0].strip()


def best_subspan_em(answer: str, accepted: Sequence[str]) -> float:
    """Return 1.0 if ``answer`` contains any accepted answer after normalisation, else 0.0.

    Source: Liu et al. (2024), Lost in the Middle, section 2.2, https://arxiv.org/abs/2307.03172. Their scripts cut the
    answer at the first line break before this; use ``first_line`` for that.
    """
    normalized = normalize(answer)
    return float(any((gold := normalize(candidate)) and gold in normalized for candidate in accepted))


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One question about scored passages, for one order and one mitigation.

    Attributes:
        example: The question.
        documents: Its passages, as the experiment gives them.
        choice: The mitigation.
        order: The order that the passages have in the prompt.
    """

    example: PositionExample
    documents: tuple[Document, ...]
    choice: MitigationChoice
    order: str = "original"


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


_FIELDS = {field.name: str if field.name == "answer" else float for field in fields(GradedAnswer)}


@dataclass(frozen=True, slots=True, eq=False)
class _Prefilled:
    """A trial after its prefill."""

    example: PositionExample
    request: GenerationRequest
    session: Session
    expected: list[int]


def answer_and_score(
    engine: Engine, layout: Layout, choice: MitigationChoice, expected: str, max_new_tokens: int
) -> tuple[Generation, float]:
    """Return the greedy answer and the mean log-probability per token of ``expected``, from one prefill."""
    tokens = engine.encoder.encode_text(expected)
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

    On an engine prompts are prefilled one by one; answers are scored and generated in batches.

    Raises:
        EvaluationError: passages do not fit the context window.
    """
    assembler = Assembler(engine.encoder, engine.context_window)
    if not isinstance(engine, Engine):
        for trial in trials:
            yield _asked(engine, assembler, trial, max_new_tokens), None
        return
    prefilled = (_prefill(engine, assembler, trial, max_new_tokens) for trial in trials)
    for batch in in_batches(prefilled, lambda one: one.session):
        sessions = [one.session for one in batch]
        started = time.perf_counter()
        first = [session.next_log_probs() for session in sessions]
        scores = score_batch(sessions, [one.expected for one in batch])
        generations = generate_batch(engine, sessions, [one.request for one in batch])
        share = (time.perf_counter() - started) / len(batch)
        for one, log_probs, score, generation in zip(batch, first, scores, generations, strict=True):
            seconds = one.session.prefill_seconds + share
            yield _graded(generation, one.example, sum(score) / len(score), seconds), log_probs


def _asked(engine: Generator, assembler: Assembler, trial: Trial, max_new_tokens: int) -> GradedAnswer:
    layout = _layout(assembler, trial, max_new_tokens)
    started = time.perf_counter()
    generation = engine.generate(GenerationRequest(layout, trial.choice, Sampling(max_tokens=max_new_tokens)))
    return _graded(generation, trial.example, None, time.perf_counter() - started)


def _graded(
    generation: Generation, example: PositionExample, log_probability: float | None, seconds: float
) -> GradedAnswer:
    return GradedAnswer(
        answer=generation.text,
        accuracy=best_subspan_em(first_line(generation.text), example.answers),
        accuracy_full_text=best_subspan_em(generation.text, example.answers),
        log_probability=log_probability,
        seconds=seconds,
    )


def _layout(assembler: Assembler, trial: Trial, max_new_tokens: int) -> Layout:
    example, given = trial.example, len(trial.documents)
    assembled = assembler.assemble(
        example.question, trial.documents, order=trial.order, max_new_tokens=max_new_tokens
    )  # fmt: skip
    if len(assembled.documents) != given:
        raise EvaluationError(
            f"question {example.id}: {given - len(assembled.documents)} of {given} passages do "
            "not fit or repeat; use fewer documents"
        )
    return assembled.layout


def _prefill(engine: Engine, assembler: Assembler, trial: Trial, max_new_tokens: int) -> _Prefilled:
    layout = _layout(assembler, trial, max_new_tokens)
    expected = engine.encoder.encode_text(trial.example.answers[0])
    session = engine.open(layout, trial.choice, max(max_new_tokens, len(expected)))
    request = GenerationRequest(layout, trial.choice, Sampling(max_tokens=max_new_tokens))
    return _Prefilled(trial.example, request, session, expected)


def score_passages(reranker: Reranker, example: PositionExample, count: int) -> dict[str, Document]:
    """Return the passages of a question with relevance, by id.

    Relevance comes from ``reranker``, which sees the same passages in the same order whatever is asked afterwards: by
    content hash, so that the gold passage has no place of its own. A reranker with ``top_n`` returns fewer.

    Raises:
        EvaluationError: the reranker failed.
    """
    given = sorted(example.documents(count), key=content_key)
    name = getattr(reranker, "name", type(reranker).__name__)
    ranked = rerank_or_raise(reranker, given, example.question, label=name, query=example.id)
    return {str(d.id): d for d in ranked}


class AnswerJournal(LineJournal[GradedAnswer]):
    """Answers by key, in memory and, with a path, in a file that only grows (see ``LineJournal``).

    Args:
        path: The file; it and its folder are created with the first answer. None: answers are held in memory only.
        fresh: Start without the answers of earlier runs. They stay in the file.
        scored: Whether answers have a log-probability; one without is then computed again.

    Raises:
        EvaluationError: the file exists and cannot be read.
    """

    def __init__(self, path: Path | None = None, *, fresh: bool = False, scored: bool = True) -> None:
        super().__init__("answer", _read_answer if scored else _read_unscored, path, fresh=fresh)


def _read_answer(row: Any) -> GradedAnswer | None:
    whole = set(row) == set(_FIELDS) and all(isinstance(row[name], kind) for name, kind in _FIELDS.items())
    return GradedAnswer(**row) if whole else None


def _read_unscored(row: Any) -> GradedAnswer | None:
    """Read an answer of a generator that does not score: what stands in place of the score is None."""
    found = _read_answer({**row, "log_probability": 0.0}) if row.get("log_probability", 0.0) is None else None
    return None if found is None else replace(found, log_probability=None)


def answer_key(engine: Generator, trial: Trial, max_new_tokens: int, *, any_order: bool) -> str:
    """Return a digest of everything that an answer depends on.

    Args:
        trial: The question, its passages and the mitigation.
        max_new_tokens: Maximum number of tokens of the answer.
        any_order: Whether every order of the passages has the same key.
    """
    passages: Iterable[list[Any]] = ([one.key, one.relevance] for one in map(checked_document, trial.documents))
    parts = {
        "version": KEY_VERSION,
        "model": engine.fingerprint,
        "device": engine.loaded.device.type if isinstance(engine, Engine) else "remote",
        "method": engine.describe(trial.choice).fingerprint,
        "template": PromptTemplate().fingerprint(),
        "question": trial.example.question,
        "answers": trial.example.answers,
        "passages": sorted(passages, key=str) if any_order else list(passages),
        "any_order": any_order,
        "max_new_tokens": max_new_tokens,
        **({} if trial.order == "original" else {"order": trial.order}),
    }
    return content_hash(json.dumps(parts, sort_keys=True))
