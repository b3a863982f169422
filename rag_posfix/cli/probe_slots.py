"""``rag-posfix probe slot-attention``: how much attention each place of a prompt gets, whatever stands there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_posfix.cli.options import AsJson, ModelName, settings_from
from rag_posfix.cli.output import emit_json, out, progress_bar, status
from rag_posfix.errors import EvaluationError

if TYPE_CHECKING:
    from rag_posfix.evaluation.data.datasets import PositionExample
    from rag_posfix.generation.engine import Engine
    from rag_posfix.plan.layout import Layout

__all__ = ["slot_attention"]


def slot_attention(
    data: Annotated[Path, typer.Option("--data", help="Lost-in-the-Middle rows, .jsonl or .jsonl.gz.")],
    output: Annotated[Path, typer.Option("--out", help="Folder for the profile.")],
    documents: Annotated[int, typer.Option("--documents", min=2, help="Passages per prompt.")] = 10,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Questions at most.")] = 20,
    skip: Annotated[int, typer.Option("--skip", min=0, help="Questions to leave out at the start.")] = 0,
    model: ModelName = None,
    as_json: AsJson = False,
) -> None:
    """Measure the attention to a dummy passage in each place, and write a profile for calibrated_attention."""
    from rag_posfix.evaluation.data.datasets import load_examples

    examples = load_examples(data, limit=limit, skip=skip)
    for example in examples:  # before the model: too few passages are told at once
        example.documents(documents, 0)
    settings = settings_from(model=model)
    with status("loading the model"):
        from rag_posfix.evaluation.record import environment, file_digest, write_record
        from rag_posfix.generation.load import load_engine
        from rag_posfix.probing.slot_attention import measure_slots

        engine = load_engine(
            settings.model, dtype=settings.dtype, device=settings.device, cache_dir=settings.cache_dir
        )
    layouts = [_layout(engine, example, documents, i % documents) for i, example in enumerate(examples)]
    with progress_bar("reading prompts") as progress:
        measured = measure_slots(engine.loaded, layouts, progress)
    record: dict[str, Any] = {
        "profile": measured,
        "model": engine.model_id,
        "model_fingerprint": engine.fingerprint,
        "data": {"name": data.name, "sha256": file_digest(data)},
        "settings": {"documents": documents, "limit": limit, "skip": skip},
        "n": len(examples),
        "environment": environment(),
    }
    path = str(write_record(output, "slot-attention", record))
    if as_json:
        emit_json({"profile": path, "slots": measured, "n": len(examples)})
        return
    _show(measured, path)


def _layout(engine: Engine, example: PositionExample, count: int, gold_position: int) -> Layout:
    """Return the prompt of a question, the gold passage at a place that differs from question to question."""
    from rag_posfix.assembly.assembler import Assembler

    assembled = Assembler(engine.encoder, engine.context_window).assemble(
        example.question, example.documents(count, gold_position), order="original", max_new_tokens=1
    )
    if assembled.layout.n_passages != count or assembled.truncated:
        raise EvaluationError(
            f"question {example.id}: {count} passages do not fit the context window or repeat; use fewer documents"
        )
    return assembled.layout


def _show(measured: tuple[float, ...], path: str) -> None:
    from rich.table import Table

    mean = sum(measured) / len(measured)
    table = Table("place", "attention per token", "relative to the mean")
    for place, value in enumerate(measured):
        table.add_row(str(place), f"{value:.3g}", f"{value / mean:.2f}")
    out().print(table)
    out().print(f"profile: {path}", highlight=False, soft_wrap=True)
    out().print(f"to use it: --mitigation calibrated_attention:profile={path}", highlight=False, soft_wrap=True)
    out().print(f"or, to order passages by it: --order profile:file={path}", highlight=False, soft_wrap=True)
