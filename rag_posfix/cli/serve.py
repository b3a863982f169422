"""``rag-posfix serve``: start the HTTP service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rag_posfix.cli.options import DeviceName, ModelName, Split, check_arrangement, check_index, follows, settings_from
from rag_posfix.errors import missing_extra
from rag_posfix.settings import ServiceSettings

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
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", help="Certificate in PEM format, to serve over TLS; needs --tls-key.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="Private key of the certificate.")] = None,
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
    files: dict[str, Any] = {"tls_cert": tls_cert, "tls_key": tls_key}
    service = ServiceSettings(**{name: path for name, path in files.items() if path is not None})
    if not follows(settings):
        run(settings, host=host, port=port, service=service)
