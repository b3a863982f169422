"""Asks the engine: prompts as pipelines make them, greedy answers in batches, and how good each answer is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from langchain_core.documents import Document
from torch import Tensor

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.contracts.generator import Reranker
from rag_posfix.contracts.request import Generation, GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.answers.answer_metrics import best_subspan_em, first_line
from rag_posfix.evaluation.data.datasets import PositionExample
from rag_posfix.generation.batching.session_batch import generate_batch, in_batches, score_batch
from rag_posfix.generation.decode.session import Session
from rag_posfix.generation.engine import Engine
from rag_posfix.plan.layout import Layout

__all__ = ["QUESTIONS_TOGETHER", "Answer", "Asked", "answer_all", "answer_and_score", "scored"]

QUESTIONS_TOGETHER = 8
"""Questions of one condition are answered together, so an answer has the same neighbours in every condition."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One question about passages in one order, for one mitigation."""

    example: PositionExample
    documents: tuple[Document, ...]
    choice: MitigationChoice


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it.

    Attributes:
        answer: What the model wrote.
        accuracy: best_subspan_em of the first line.
        accuracy_full_text: best_subspan_em of the whole answer.
        log_probability: Mean log-probability per token of the first accepted answer.
        seconds: Time to read the prompt, and an equal share of the time that its batch took to score and write.
    """

    answer: str
    accuracy: float
    accuracy_full_text: float
    log_probability: float
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class _Opened:
    example: PositionExample
    request: GenerationRequest
    session: Session
    expected: list[int]


def answer_and_score(
    engine: Engine, layout: Layout, choice: MitigationChoice, expected: str, max_new_tokens: int
) -> tuple[Generation, float]:
    """Return the greedy answer and the mean log-probability per token of ``expected``, from one reading."""
    tokens = engine.encoder.encode_text(expected)
    session = engine.open(layout, choice, max(max_new_tokens, len(tokens)))
    scores = session.score(tokens)
    request = GenerationRequest(layout, choice, Sampling(max_tokens=max_new_tokens))
    generation = [chunk.generation for chunk in engine.resume(session, request)][-1]
    if generation is None:
        raise EvaluationError("the engine ended without a generation; please report this")
    return generation, sum(scores) / len(scores)


def answer_all(engine: Engine, asked: Iterable[Asked], max_new_tokens: int) -> Iterator[tuple[Answer, Tensor]]:
    """Yield each answer in order, with the log-probabilities of its first token, (V,) float32.

    Prompts are read one by one, and answers scored and written in batches.

    Raises:
        EvaluationError: passages do not fit the context window.
    """
    assembler = Assembler(engine.encoder, engine.context_window)
    opened = (_open(engine, assembler, one, max_new_tokens) for one in asked)
    for batch in in_batches(opened, lambda one: one.session):
        sessions = [one.session for one in batch]
        started = time.perf_counter()
        first = [session.next_log_probs() for session in sessions]
        scores = score_batch(sessions, [one.expected for one in batch])
        generations = generate_batch(engine, sessions, [one.request for one in batch])
        share = (time.perf_counter() - started) / len(batch)
        for one, log_probs, score, generation in zip(batch, first, scores, generations, strict=True):
            answer = Answer(
                answer=generation.text,
                accuracy=best_subspan_em(first_line(generation.text), one.example.answers),
                accuracy_full_text=best_subspan_em(generation.text, one.example.answers),
                log_probability=sum(score) / len(score),
                seconds=one.session.prefill_seconds + share,
            )
            yield answer, log_probs


def _open(engine: Engine, assembler: Assembler, asked: Asked, max_new_tokens: int) -> _Opened:
    example, given = asked.example, len(asked.documents)
    assembled = assembler.assemble(
        example.question, asked.documents, order="original", max_new_tokens=max_new_tokens
    )  # fmt: skip
    if len(assembled.documents) != given:
        raise EvaluationError(
            f"question {example.id}: {given - len(assembled.documents)} of {given} passages do "
            "not fit or repeat; use fewer documents"
        )
    expected = engine.encoder.encode_text(example.answers[0])
    session = engine.open(assembled.layout, asked.choice, max(max_new_tokens, len(expected)))
    request = GenerationRequest(assembled.layout, asked.choice, Sampling(max_tokens=max_new_tokens))
    return _Opened(example, request, session, expected)


def scored(reranker: Reranker, example: PositionExample, count: int) -> dict[str, Document]:
    """Return the passages of a question with relevance, by id.

    Relevance comes from ``reranker``, which sees the same passages in the same order whatever is asked afterwards.
    """
    return {str(d.id): d for d in reranker.compress_documents(example.documents(count, 0), example.question)}
