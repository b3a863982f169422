"""How an answer depends on where the gold passage stands: a sweep over places, the same engine for every method."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.attention.spans import Layout
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.datasets import PositionExample
from rag_posfix.evaluation.metrics import best_subspan_em, first_line
from rag_posfix.evaluation.record import environment, file_digest
from rag_posfix.evaluation.statistics import bootstrap_interval, mean
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.request import Generation, GenerationRequest, MitigationChoice, Sampling
from rag_posfix.protocols import Reranker

__all__ = ["Outcome", "answer_and_score", "label", "position_record", "summarize", "sweep_positions"]

CLOSED_BOOK = "closed_book"
GOLD_ONLY = "gold_only"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer to one question under one condition.

    Attributes:
        question: The question's id.
        condition: Label of the mitigation, ``closed_book`` or ``gold_only``.
        gold_position: Place of the gold passage, None without distractors.
        answer: What the model wrote.
        accuracy: best_subspan_em of the first line.
        accuracy_full_text: best_subspan_em of the whole answer.
        log_probability: Mean log-probability per token of the first accepted answer.
        seconds: Wall time.
    """

    question: str
    condition: str
    gold_position: int | None
    answer: str
    accuracy: float
    accuracy_full_text: float
    log_probability: float
    seconds: float


def label(choice: MitigationChoice) -> str:
    """Return a name for a mitigation and its parameters, in the form that the command line reads."""
    return ":".join([choice.name, *(f"{key}={_written(value)}" for key, value in sorted(choice.parameters.items()))])


def _written(value: Any) -> str:
    """Return a value as JSON; plain words without quotes."""
    plain = isinstance(value, str) and re.fullmatch(r"[\w./-]+", value)
    if plain:
        try:
            json.loads(value)
        except ValueError:
            return str(value)
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


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


def sweep_positions(
    engine: Engine,
    examples: Sequence[PositionExample],
    choices: Sequence[MitigationChoice],
    *,
    gold_positions: Sequence[int],
    n_documents: int,
    reranker: Reranker,
    max_new_tokens: int = 24,
    progress: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """Answer every question under every condition: closed book, gold only, and each method at each place.

    Relevance comes from ``reranker`` and never from which passage is gold. Each method has the same settings at every
    place.

    Args:
        engine: The model; the same for all conditions.
        examples: The questions.
        choices: The mitigations.
        gold_positions: Places of the gold passage, from 0.
        n_documents: Passages per prompt.
        reranker: Scores the passages of a question.
        max_new_tokens: Tokens per answer.
        progress: Called with (done, total) after each answer.

    Raises:
        EvaluationError: too few distractors, or passages do not fit the context window.
    """
    assembler = Assembler(engine.encoder, engine.context_window)
    baseline = MitigationChoice("none")
    total = len(examples) * (2 + len(choices) * len(gold_positions))
    outcomes: list[Outcome] = []

    def run(example: PositionExample, documents: list[Document], choice: MitigationChoice, name: str) -> Outcome:
        assembled = assembler.assemble(example.question, documents, order="original", max_new_tokens=max_new_tokens)
        if len(assembled.documents) != len(documents):
            raise EvaluationError(
                f"question {example.id}: {len(documents) - len(assembled.documents)} of {len(documents)} passages do "
                "not fit or repeat; use fewer documents"
            )
        started = time.perf_counter()
        generation, score = answer_and_score(engine, assembled.layout, choice, example.answers[0], max_new_tokens)
        return Outcome(
            question=example.id,
            condition=name,
            gold_position=None,
            answer=generation.text,
            accuracy=best_subspan_em(first_line(generation.text), example.answers),
            accuracy_full_text=best_subspan_em(generation.text, example.answers),
            log_probability=score,
            seconds=time.perf_counter() - started,
        )

    def keep(outcome: Outcome, position: int | None = None) -> None:
        outcomes.append(Outcome(**{**asdict(outcome), "gold_position": position}))
        if progress is not None:
            progress(len(outcomes), total)

    for example in examples:
        keep(run(example, [], baseline, CLOSED_BOOK))
        keep(run(example, [example.gold], baseline, GOLD_ONLY))
        scored = _scored(reranker, example, n_documents)
        for position in gold_positions:
            documents = [scored[str(d.id)] for d in example.documents(n_documents, position)]
            for choice in choices:
                keep(run(example, documents, choice, label(choice)), position)
    return outcomes


def _scored(reranker: Reranker, example: PositionExample, count: int) -> dict[str, Document]:
    """Return the passages with relevance, by id."""
    return {str(d.id): d for d in reranker.compress_documents(example.documents(count, 0), example.question)}


def summarize(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return accuracy and log-probability per place, worst, mean, spread (max - min) and intervals.

    ``ci95`` is the interval of the mean accuracy over places; ``versus_none`` compares each method's worst place with
    the baseline's best, in log-probability, questions paired.
    """
    conditions = list(dict.fromkeys(o.condition for o in outcomes if o.gold_position is not None))
    tables = {name: _by_position(outcomes, name) for name in conditions}
    result: dict[str, Any] = {name: _summary(table) for name, table in tables.items()}
    if "none" in tables:
        for name, table in tables.items():
            if name != "none":
                result[name]["versus_none"] = _versus(table, tables["none"])
    return {
        "mitigations": result,
        CLOSED_BOOK: _floor(outcomes, CLOSED_BOOK),
        GOLD_ONLY: _floor(outcomes, GOLD_ONLY),
        "n": len({o.question for o in outcomes}),
    }


def position_record(
    engine: Engine,
    choices: Sequence[MitigationChoice],
    data: Path,
    outcomes: Sequence[Outcome],
    summary: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the record of a sweep: what ran, on what, with what, and every answer."""
    return {
        "kind": "positions",
        **environment(),
        "model": engine.model_id,
        "model_fingerprint": engine.fingerprint,
        "dtype": str(engine.loaded.model.dtype).removeprefix("torch."),
        "device": str(engine.loaded.device),
        "data": {"name": data.name, "sha256": file_digest(data)},
        "template": Assembler(engine.encoder, engine.context_window).template.fingerprint(),
        "mitigations": {
            label(choice): {"parameters": choice.parameters, "fingerprint": engine.describe(choice).fingerprint}
            for choice in choices
        },
        "settings": settings,
        "summary": summary,
        "rows": [asdict(outcome) for outcome in outcomes],
    }


def _by_position(outcomes: Sequence[Outcome], condition: str) -> dict[int, list[Outcome]]:
    table: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.condition == condition and outcome.gold_position is not None:
            table.setdefault(outcome.gold_position, []).append(outcome)
    return dict(sorted(table.items()))


def _summary(table: Mapping[int, Sequence[Outcome]]) -> dict[str, Any]:
    positions = {str(place): _scores(found) for place, found in table.items()}
    accuracy = [scores["accuracy"] for scores in positions.values()]
    log_probability = [scores["log_probability"] for scores in positions.values()]
    rows = list(zip(*([o.accuracy for o in found] for found in table.values()), strict=True))
    changed = zip(*([o.answer for o in found] for found in table.values()), strict=True)
    return {
        "positions": positions,
        "worst": min(accuracy),
        "mean": mean(accuracy),
        "spread": max(accuracy) - min(accuracy),
        "ci95": list(bootstrap_interval(rows, mean)),
        "worst_log_probability": min(log_probability),
        "mean_log_probability": mean(log_probability),
        "spread_log_probability": max(log_probability) - min(log_probability),
        "answers_that_change": mean([float(len(set(answers)) > 1) for answers in changed]),
    }


def _scores(found: Sequence[Outcome]) -> dict[str, float]:
    return {
        "accuracy": mean([o.accuracy for o in found]),
        "accuracy_full_text": mean([o.accuracy_full_text for o in found]),
        "log_probability": mean([o.log_probability for o in found]),
        "seconds": mean([o.seconds for o in found]),
    }


def _floor(outcomes: Sequence[Outcome], condition: str) -> dict[str, float]:
    return _scores([o for o in outcomes if o.condition == condition])


def _versus(
    table: Mapping[int, Sequence[Outcome]], baseline: Mapping[int, Sequence[Outcome]]
) -> dict[str, float | list[float]]:
    ours = [[o.log_probability for o in found] for found in table.values()]
    theirs = [[o.log_probability for o in found] for found in baseline.values()]
    rows = list(zip(*ours, *theirs, strict=True))

    def difference(means: Sequence[float]) -> float:
        return min(means[: len(ours)]) - max(means[len(ours) :])

    return {
        "worst_minus_best_log_probability": difference([mean(column) for column in (*ours, *theirs)]),
        "ci95": list(bootstrap_interval(rows, difference)),
    }
