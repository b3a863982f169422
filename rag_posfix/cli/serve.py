"""``rag-posfix serve``: start the HTTP service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rag_posfix.cli.options import (
    AdapterFolder,
    DeviceName,
    ModelName,
    Split,
    check_arrangement,
    check_index,
    follows,
    setting_option,
    settings_from,
)
from rag_posfix.errors import missing_extra
from rag_posfix.settings import ServiceSettings


def serve(
    host: Annotated[str | None, setting_option("--host", "Address to listen on.", of=ServiceSettings)] = None,
    port: Annotated[
        int | None,
        setting_option("--port", "Port to listen on; 0 takes a free one.", of=ServiceSettings, min=0, max=65535),
    ] = None,
    index: Annotated[Path | None, setting_option("--index", "Index folder, written by `rag-posfix index`.")] = None,
    model: ModelName = None,
    served_model_name: Annotated[
        str | None,
        setting_option("--served-model-name", "Name of the model in responses and requests.", of=ServiceSettings),
    ] = None,
    adapter: AdapterFolder = None,
    device: DeviceName = None,
    tp: Split = None,
    mitigation: Annotated[str | None, setting_option("--mitigation", "Default method of requests.")] = None,
    log_format: Annotated[
        Literal["json", "text"] | None,
        setting_option("--log-format", "Log JSON objects, or lines for people.", of=ServiceSettings),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        setting_option(
            "--tls-cert", "Certificate in PEM format, to serve over TLS; needs --tls-key.", of=ServiceSettings
        ),
    ] = None,
    tls_key: Annotated[
        Path | None, setting_option("--tls-key", "Private key of the certificate.", of=ServiceSettings)
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser once it is ready.")] = False,
) -> None:
    """Serve /v1/chat/completions, /v1/rerank, /v1/models, /livez, /readyz, /metrics and a page at /."""
    settings = settings_from(model=model, adapter=adapter, device=device, index=index, mitigation=mitigation, tp=tp)
    if settings.index is not None:
        check_index(settings.index)
    check_arrangement(settings)
    try:
        from rag_posfix_api.server import run
    except ImportError as error:
        raise missing_extra(error.name or "fastapi", "server") from error
    given: dict[str, Any] = {"tls_cert": tls_cert, "tls_key": tls_key, "served_model_name": served_model_name}
    service = ServiceSettings(**{name: value for name, value in given.items() if value is not None})
    if not follows(settings):
        run(settings, host=host, port=port, service=service, log_format=log_format, opens_page=open_page)
