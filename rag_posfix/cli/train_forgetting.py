"""``rag-posfix train forgetting``: the perplexity of texts before and after training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_posfix.cli.options import AsJson, DeviceName, ModelName, checked_output, settings_from
from rag_posfix.cli.output import emit_json, experiment_step, out, status, table

if TYPE_CHECKING:
    from rag_posfix.generation.engine import Engine
    from rag_posfix.settings import Settings

SEGMENT_WORDS = 300


def forgetting(
    tuned: Annotated[
        list[Path],
        typer.Option(
            "--tuned", help="Folder of an adapter or of a model, as rag-posfix train writes it; may be repeated."
        ),
    ],
    texts: Annotated[
        str, typer.Option("--texts", help="A file, a folder of texts, an index, or demo for the shipped corpus.")
    ],
    output: Annotated[Path, typer.Option("--out", callback=checked_output, help="Folder for the record.")],
    limit: Annotated[int, typer.Option("--limit", min=2, help="Most texts.")] = 100,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Most tokens of a text.")] = 256,
    model: ModelName = None,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Compare the perplexity of texts before and after training: what a model forgot.

    Give texts that have nothing to do with the training data. A text is at most 300 words of a document.
    """
    from rag_posfix.training.data.pair import read_segments
    from rag_posfix.training.forgetting import BASE, compare_perplexity

    read = [one.text for one in read_segments(texts, SEGMENT_WORDS)][:limit]
    chosen = settings_from(model=model, device=device)
    engines = {BASE: _loaded(chosen, None)}
    for folder in tuned:
        engines[str(folder)] = _loaded(chosen, folder)
    record = compare_perplexity(engines, read, tokens, output, experiment_step)
    if as_json:
        emit_json(record.to_json())
    else:
        _show(record.summary, record.to_json())


def _loaded(chosen: Settings, folder: Path | None) -> Engine:
    from rag_posfix.pipeline.build import build_engine

    found: dict[str, Any] = {"adapter": None}
    if folder is not None:
        is_adapter = (folder / "adapter_config.json").exists()
        found |= {"adapter": folder} if is_adapter else {"model": str(folder)}
    with status("loading the model"):
        return build_engine(chosen.model_copy(update=found))


def _show(summary: Any, written: dict[str, Any]) -> None:
    shown = table("model", "perplexity", "log-probability per token, less base", "95 % interval", title="forgetting")
    for name, found in summary.items():
        low, high = found["difference_ci95"]
        shown.add_row(name, f"{found['perplexity']:.2f}", f"{found['difference']:+.3f}", f"{low:+.3f} to {high:+.3f}")
    console = out()
    console.print(shown)
    console.print(f"record: {written['record']}", highlight=False, soft_wrap=True)
