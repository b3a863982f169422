"""``rag-posfix serve``: start the HTTP service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rag_posfix.cli.options import DeviceName, ModelName, Split, check_arrangement, check_index, follows, settings_from
from rag_posfix.errors import missing_extra

__all__ = ["serve"]


def serve(
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on.")] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = None,
    index: Annotated[Path | None, typer.Option("--index", help="Index folder, written by `rag-posfix index`.")] = None,
    model: ModelName = None,
    device: DeviceName = None,
    tp: Split = None,
    mitigation: Annotated[str | None, typer.Option("--mitigation", help="Default method of requests.")] = None,
    log_format: Annotated[
        Literal["json", "text"] | None,
        typer.Option("--log-format", help="Log JSON objects, or lines for people.", show_default="json"),
    ] = None,
) -> None:
    """Serve /v1/chat/completions, /v1/rerank, /v1/models, /livez, /readyz and /metrics."""
    settings = settings_from(model=model, device=device, index=index, mitigation=mitigation, tp=tp)
    if settings.index is not None:
        check_index(settings.index)
    check_arrangement(settings)
    try:
        from rag_posfix_api.server import run
    except ImportError as error:
        raise missing_extra(error.name or "fastapi", "server") from error
    if not follows(settings):
        run(settings, host=host, port=port, log_format=log_format)
