"""Probe of the attention that a model pays to each slot of a prompt, independently of the content.

Depends on loaded models, layouts and evaluation data, on no method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.errors import ConfigError, EvaluationError
from rag_posfix.evaluation.data.questions import PositionExample, data_facts, take_examples
from rag_posfix.evaluation.figures import OTHER_COLORS, finish_axes, new_column, whiskers, with_figure
from rag_posfix.evaluation.record import ExperimentRecord, Progress, counted, environment, silent
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.generation.prefill.prefill import passage_attention
from rag_posfix.lab.probing.base import PROBES, Probe, ProfileRecord, estimate, shown
from rag_posfix.lab.probing.subject import Subject, language_model
from rag_posfix.parameters import Integer
from rag_posfix.plan.bias_profile import with_dummy
from rag_posfix.plan.layout import Layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def probe_slot_attention(
    engine: Engine,
    data: Path | Sequence[PositionExample],
    *,
    documents: int = 10,
    limit: int | None = 24,
    skip: int = 0,
    out: Path | None = None,
    progress: Progress = silent,
) -> ProfileRecord:
    """Measure the attention to a dummy passage in each slot, averaged over questions (``dummy_attention``).

    The position of the gold passage changes from question to question; several gold passages are first.

    Args:
        data: A file of Lost-in-the-Middle or HotpotQA rows or in SQuAD's format, or questions.

    Returns:
        The record, whose head is the profile that ``calibrated_attention`` reads.
    """
    examples = take_examples(data, limit, skip)
    for example in examples:  # too few passages are told at once
        example.documents(documents)
    layouts = [_layout(engine, example, documents, i % documents) for i, example in enumerate(examples)]
    with progress("reading prompts") as report:
        slots = dummy_attention(engine.loaded, layouts, report)
    profile = {
        "profile": slots.mean(dim=0).tolist(),
        "ci95": [estimate(values)["ci95"] for values in slots.unbind(dim=1)],
        "model": engine.model_id,
        "model_fingerprint": engine.fingerprint,
        "data": data_facts(data),
        "settings": {"documents": documents, "limit": limit, "skip": skip},
        "n": len(examples),
        "environment": environment(),
    }
    return ProfileRecord(profile, printed={"slots": "profile", "n": "n"}).write_profile(out, "slot-attention")


@PROBES.register("slot-attention")
@dataclass(frozen=True)
class SlotAttention(Probe):
    """Measure attention per slot; write a calibrated_attention profile.

    Source: Hsieh et al. (2024), Found in the Middle, section 3, https://arxiv.org/abs/2406.16008
    Formula: mean over prompts of Attn(dummy, k), the attention per token of a dummy in slot k, over layers and heads.

    Args:
        data: Lost-in-the-Middle rows, .jsonl or .jsonl.gz.
        documents: Number of passages per prompt.
        limit: Maximum number of questions.
        skip: Number of questions to leave out at the start.
    """

    name: ClassVar[str] = "slot-attention"
    caption: ClassVar[str] = (
        "The attention per token to a dummy passage in each slot; do not conclude that the answers have the same "
        "curve."
    )
    reads_text: ClassVar[bool] = True

    data: Path
    documents: Annotated[int, Integer(2)] = 10
    limit: Annotated[int, Integer(1)] = 24
    skip: Annotated[int, Integer(0)] = 0

    def check(self) -> None:
        """Check that the file has questions with so many passages."""
        for example in take_examples(self.data, self.limit, self.skip):
            example.documents(self.documents)

    def run(self, subject: Subject, *, out: Path | None = None, progress: Progress = silent) -> ExperimentRecord:
        """Return the record of ``probe_slot_attention``, with a figure."""
        engine = language_model(subject, self.name).engine
        record = probe_slot_attention(
            engine, self.data, documents=self.documents, limit=self.limit, skip=self.skip, out=out, progress=progress,
        )  # fmt: skip
        return with_figure(record, self.draw, self.caption)

    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return a bar per slot."""
        figure, (axes,) = new_column(1)
        measured = [{"value": value, "ci95": ci95} for value, ci95 in zip(head["profile"], head["ci95"], strict=True)]
        axes.bar(
            range(len(measured)), head["profile"], yerr=whiskers(measured), color=OTHER_COLORS[1], ecolor="#222222",
            capsize=3,
        )  # fmt: skip
        title = f"{head['n']} questions, 95 % interval"
        finish_axes(axes, title, "slot of the dummy passage, from 0", "attention per token", legend=False)
        return figure

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return a row per slot."""
        mean = sum(head["profile"]) / len(head["profile"])
        rows = [
            (str(slot), shown({"value": value, "ci95": ci95}, ".3g"), f"{value / mean:.2f}")
            for slot, (value, ci95) in enumerate(zip(head["profile"], head["ci95"], strict=True))
        ]
        return [("slot", f"attention per token, n = {head['n']}", "relative to the mean"), *rows]

    def lines(self, record: ExperimentRecord) -> Sequence[str]:
        """Return how the profile is used."""
        path = record.files["profile"]
        return [
            f"profile: {path}",
            f"to use it: --mitigation calibrated_attention:profile={path}",
            f"or, to order passages by it: --order profile:file={path}",
        ]


@torch.inference_mode()
def dummy_attention(
    loaded: LoadedModel, layouts: Sequence[Layout], progress: Callable[[int, int], None] | None = None
) -> Tensor:
    """Return the attention of the last token to a dummy passage in each slot, by prompt.

    Source: Hsieh et al. (2024), Found in the Middle, section 3, https://arxiv.org/abs/2406.16008
    Formula: Attn(dummy, k), the mean attention per token of a dummy in slot k, averaged over
        layers and heads; the other passages stay.
    Cost: each prompt is read once, and again from each dummy on.

    Args:
        layouts: Prompts with the same number of passages, two or more.

    Shapes:
        returns: (len(layouts), passages) float32.
    """
    counts = sorted({layout.n_passages for layout in layouts})
    if len(counts) != 1 or counts[0] < 2:
        raise ConfigError(
            f"{len(layouts)} prompts with {counts} passages cannot be averaged; give at least one, all with the same "
            "number of passages, two or more"
        )
    measured_slots = []
    for layout in counted(layouts, progress):
        prompts = [layout, *(with_dummy(layout, slot) for slot in range(counts[0]))]
        measured, _ = passage_attention(loaded.reading(max(len(prompt.token_ids) for prompt in prompts)), prompts)
        measured_slots.append(measured[1:].diagonal())
    return torch.stack(measured_slots)


def _layout(engine: Engine, example: PositionExample, count: int, gold_position: int) -> Layout:
    documents = example.documents(count, gold_position if len(example.gold) == 1 else None)
    assembled = Assembler(engine.encoder, engine.context_window).assemble(
        example.question, documents, order="original", max_new_tokens=1
    )
    if assembled.layout.n_passages != count or assembled.truncated:
        raise EvaluationError(
            f"question {example.id}: {count} passages do not fit the context window or repeat; use fewer documents"
        )
    return assembled.layout
