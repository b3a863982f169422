"""Which known cause explains a model's position bias: a method corrects each, and the bias that is left says how much.

Every method answers the same questions at the same positions; nothing is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from langchain_core.documents import Document

from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.contracts.generator import ChatMessage, Generator
from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.errors import ConfigError, EvaluationError, UnsupportedModelError
from rag_posfix.evaluation.answers.experiment import AnswerJournal, PositionRow
from rag_posfix.evaluation.answers.positions import answer_at_positions
from rag_posfix.evaluation.data.questions import GoldPosition, PositionExample
from rag_posfix.evaluation.statistics import bootstrap_interval, mean
from rag_posfix.mitigations import MITIGATIONS

CAUSES = MappingProxyType(
    {
        "blended": "causal mask",
        "inter_document": "causal mask and positions",
        "set_prompting": "causal mask and positions",
        "multi_base": "RoPE's distance decay",
        "head_scaling": "RoPE's distance decay",
        "hidden_scaling": "hidden channel",
        "stable_mask": "attention sink",
        "calibrated_attention": "bias of slots",
    }
)
"""The cause that each method corrects. ``blended`` hides passages from each other and keeps their positions."""
PARAMETERS: Mapping[str, Mapping[str, Any]] = MappingProxyType({"blended": {"fraction": 0.0, "choose": "first"}})
REMOVED, WORST, MEAN = "share of the spread removed", "worst position gains", "mean gains"
LEAST_QUESTIONS = 4
"""Questions that are answered together, the fewest that give an interval."""

Estimate = dict[str, Any]
"""``value``, ``ci95`` and ``n`` of a number."""


class EqualRelevance:
    """Scores all passages alike, so that no method learns from the scorer which passage has the answer."""

    def compress_documents(self, documents: Sequence[Document], query: str, callbacks: Any = None) -> list[Document]:
        return [d.model_copy(update={"metadata": {**d.metadata, "relevance_score": 0.5}}) for d in documents]


def correcting_methods(parameters: Mapping[str, Mapping[str, Any]] = MappingProxyType({})) -> list[MethodSpec]:
    """Return the methods of ``CAUSES``, without those that need parameters of the model that are not given."""
    known = {**PARAMETERS, **parameters}
    return [
        MethodSpec(name, dict(known.get(name, {})))
        for name in CAUSES
        if name in known or not MITIGATIONS.get(name).needs_calibration
    ]


def log_probabilities(rows: Sequence[PositionRow], condition: str) -> list[list[float]]:
    """Return the log-probability of the answer, a row per question and a column per position of the gold passage.

    Raises:
        EvaluationError: a log-probability is missing.
    """
    table: dict[str, list[float]] = {}
    for row in rows:
        if row.condition == condition:
            if row.log_probability is None:
                raise EvaluationError(f"{condition}: log_probability=None; use a model in this process")
            table.setdefault(row.question, []).append(row.log_probability)
    return list(table.values())


def compare_bias(method: Sequence[Sequence[float]], unmodified: Sequence[Sequence[float]]) -> dict[str, Estimate]:
    """Return what a method changes in the bias of the unmodified model, with intervals; questions stay paired.

    Formula: with a_p and b_p the means at position p of the method and of the unmodified model:
        1 - (max a - min a) / (max b - min b); min a - min b; mean a - mean b.

    Shapes:
        method, unmodified: (questions, positions).
    """
    count = len(unmodified[0])
    both = [[*changed, *plain] for changed, plain in zip(method, unmodified, strict=True)]
    statistics: dict[str, Callable[[Sequence[float], Sequence[float]], float]] = {
        REMOVED: lambda a, b: 1 - _spread(a) / max(_spread(b), 1e-12),
        WORST: lambda a, b: min(a) - min(b),
        MEAN: lambda a, b: mean(a) - mean(b),
    }
    return {
        name: _estimate(both, lambda means, of=statistic: of(means[:count], means[count:]))  # type: ignore[misc]
        for name, statistic in statistics.items()
    }


def _spread(means: Sequence[float]) -> float:
    return max(means) - min(means)


def _estimate(rows: Sequence[Sequence[float]], statistic: Callable[[Sequence[float]], float]) -> Estimate:
    value = statistic([mean(column) for column in zip(*rows, strict=True)])
    return {"value": value, "ci95": list(bootstrap_interval(rows, statistic)), "n": len(rows)}


def compare_causes(
    engine: Generator,
    examples: Sequence[PositionExample],
    methods: Sequence[MethodSpec],
    *,
    gold_positions: Sequence[GoldPosition],
    documents: int,
    template_of: Callable[[str, Sequence[ChatMessage]], PromptTemplate] = lambda *_: PromptTemplate(),
    in_time: Callable[[int], bool] = lambda done: True,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Answer questions with each method and with none, and return the share of the spread that each method removes.

    Formula: see ``compare_bias``; the number is the log-probability of the accepted answer.

    Args:
        examples: Four at a time are answered with all methods; all passages get the same relevance.
        methods: Those that the model does not support are left out.
        in_time: Called with the questions done; whether there is time for four more.

    Returns:
        ``questions``; ``spread``, of the unmodified model; ``methods``: by label ``name``, ``cause`` and the numbers;
        ``left_out``: why methods are missing, by label.
    """
    journal, done, left_out = AnswerJournal(), 0, dict[str, str]()
    rows: dict[str, list[PositionRow]] = {spec.label: [] for spec in (MethodSpec("none", {}), *methods)}
    while done < len(examples) and (not done or in_time(done)):
        block = examples[done : done + LEAST_QUESTIONS]
        for spec in (MethodSpec("none", {}), *methods):
            try:
                rows[spec.label] += answer_at_positions(
                    engine, block, [spec], gold_positions=gold_positions, n_documents=documents, max_new_tokens=1,
                    reranker=EqualRelevance(), journal=journal, template_of=template_of,
                )  # fmt: skip
            except (ConfigError, UnsupportedModelError) as error:
                if spec.name == "none":
                    raise
                left_out[spec.label] = str(error)
        done += len(block)
        if progress is not None:
            progress(done, len(examples))
    unmodified = log_probabilities(rows["none"], "none")
    of_methods = {
        spec.label: {
            "name": spec.name,
            "cause": CAUSES[spec.name],
            **compare_bias(log_probabilities(rows[spec.label], spec.label), unmodified),
        }
        for spec in methods
        if spec.label not in left_out
    }
    spread = _estimate(unmodified, _spread)
    return {"questions": done, "spread": spread, "methods": of_methods, "left_out": left_out}


def explain(found: Mapping[str, Any]) -> str:
    """Return the result of ``compare_causes`` in one or two sentences: the causes that are seen, what follows.

    A cause is seen if the whole interval of the share that its best method removes is above 0. Order-invariant methods
    remove all by construction, so they name no cause; one follows if it raises the worst position the most.
    """
    methods: Mapping[str, Mapping[str, Any]] = found["methods"]
    best: dict[str, str] = {}
    for label, numbers in sorted(methods.items(), key=lambda item: -item[1][REMOVED]["value"]):
        if not MITIGATIONS.get(numbers["name"]).order_invariant and numbers[REMOVED]["ci95"][0] > 0:
            best.setdefault(numbers["cause"], label)
    shares = [
        f"{cause} explains {_percent(methods[label][REMOVED])} of the spread ({label})"
        for cause, label in best.items()
    ]
    begin = f"Causes, by {found['questions']} questions with a spread of {found['spread']['value']:.2f} over positions"
    text = f"{begin}: {'; '.join(shares) or 'no known cause is seen beyond noise'}."
    gaining = [(n[WORST]["value"], label) for label, n in methods.items() if n[WORST]["ci95"][0] > 0]
    if not gaining:
        return f"{text} No method raises the log-probability at the worst position beyond noise."
    gain, label = max(gaining)
    low, high = methods[label][WORST]["ci95"]
    return f"{text} The worst position gains most with {label}: {gain:+.2f} ({low:+.2f} to {high:+.2f})."


def _percent(share: Estimate) -> str:
    value, (low, high) = share["value"], share["ci95"]
    return f"{value:.0%} ({low:.0%} to {high:.0%})"
