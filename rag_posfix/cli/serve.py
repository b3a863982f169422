"""``rag-posfix serve`` and ``keys``: start the HTTP service, and manage its API keys.

``rag-posfix mcp``: search and ask as tools of an agent, on stdin and stdout.
"""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rag_posfix import __version__
from rag_posfix.cli.options import (
    AsJson,
    Index,
    check_answer_fits,
    check_index,
    check_searchable,
    emit,
    err,
    filter_of,
    follows,
    out,
    say,
    service_settings_from,
    setting_option,
    status,
    table,
    with_settings,
)
from rag_posfix.errors import ConfigError
from rag_posfix.process import keep_running_on_hangup
from rag_posfix.settings import ServiceSettings, Settings, TorchrunSettings

if TYPE_CHECKING:
    from rag_posfix_api.keys.store import KeyStore


def _service_option(flag: str, help: str, **limits: Any) -> Any:
    return setting_option(flag, help, of=ServiceSettings, **limits)


@with_settings(
    "index", "retriever", "min_relevance", "model", "adapter", "device", "tp", "mitigation", "template", "query",
    "writer", "profile",
)  # fmt: skip
def serve(
    settings: Settings,
    host: Annotated[str | None, _service_option("--host", "Listen on this address.")] = None,
    port: Annotated[
        int | None, _service_option("--port", "Listen on this port; 0 takes a free one.", min=0, max=65535)
    ] = None,
    served_model_name: Annotated[
        str | None, _service_option("--served-model-name", "Name the model like this in responses and requests.")
    ] = None,
    log_format: Annotated[
        Literal["json", "text"] | None, _service_option("--log-format", "Log JSON objects, or lines of text.")
    ] = None,
    tls_cert: Annotated[
        Path | None, _service_option("--tls-cert", "Serve TLS with this PEM file and --tls-key.")
    ] = None,
    tls_key: Annotated[Path | None, _service_option("--tls-key", "Use this private key of the certificate.")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser when it is ready.")] = False,
) -> None:
    """Serve OpenAI-compatible HTTP: chat, rerank, metrics, a page.

    Serves /v1/chat/completions, /v1/rerank, /v1/models, /livez, /readyz, /metrics and a page at /.
    """
    keep_running_on_hangup()
    options = {"tls_cert": tls_cert, "tls_key": tls_key, "served_model_name": served_model_name}
    service = service_settings_from(**options, host=host, port=port, log_format=log_format)
    if settings.index is not None:
        check_index(settings.index)
    if TorchrunSettings().rank in (None, 0):  # follower ranks listen on no port
        from rag_posfix_api.server import listen

        listen(service).close()
    from rag_posfix.pipeline.build import resolve_methods

    resolve_methods(settings)
    from rag_posfix_api.server import run

    if not follows(settings):
        run(settings, service=service, opens_page=open_page)


keys = typer.Typer(help="Create, list, revoke and prune API keys.", no_args_is_help=True)

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", help="Keep keys and collections in this folder.", show_default="RAG_POSFIX_SERVICE_DATA_DIR"
    ),
]


@keys.command("create")
def create(
    tenant: Annotated[str, typer.Argument(help="Name its tenant: a-z, 0-9, - and _.")],
    name: Annotated[str, typer.Option("--name", help="Describe the key in free text.")] = "",
    scopes: Annotated[
        str, typer.Option("--scopes", help="Allow read, write, admin, metrics, comma-separated.")
    ] = "read,write",
    requests_per_minute: Annotated[
        int | None,
        typer.Option("--requests-per-minute", min=1, help="Limit the requests per minute.", show_default="none"),
    ] = None,
    max_concurrent: Annotated[
        int | None, typer.Option("--max-concurrent", min=1, help="Limit concurrent requests.", show_default="none")
    ] = None,
    filters: Annotated[
        list[str] | None,
        typer.Option("--filter", help="Let it read matching passages alone.", show_default="none"),
    ] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it, once: only its hash is stored."""
    key, secret = _store(data_dir).create(
        tenant,
        name=name,
        scopes=[scope.strip() for scope in scopes.split(",") if scope.strip()],
        requests_per_minute=requests_per_minute,
        max_concurrent=max_concurrent,
        filter=filter_of(filters),
    )

    def show(_: dict[str, Any]) -> None:
        err().print(
            f"key {key.id} of tenant {key.tenant} may {', '.join(key.scopes)}; it is not shown again:",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        typer.echo(secret)

    try:
        emit({**key.to_dict(), "key": secret}, as_json, show)
    except OSError as error:  # a full disk, a closed pipe
        _store(data_dir).revoke(key.id)
        raise ConfigError(
            f"key {key.id} could not be printed ({error.strerror or error}) and is revoked; create another one"
        ) from error


@keys.command("list")
def list_keys(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List all keys, with revoked ones and without secrets."""
    entries = list(_store(data_dir).read().keys.values())

    def show(_: dict[str, Any]) -> None:
        rows = table("id", "tenant", "name", "scopes", "requests/min", "at once", "filter", "created", "revoked")
        for key in entries:
            limits = ["-" if limit is None else str(limit) for limit in (key.requests_per_minute, key.max_concurrent)]
            days = _day(key.created_at), _day(key.revoked_at)
            shown_filter = "-" if key.filter is None else json.dumps(key.filter, ensure_ascii=False)
            rows.add_row(key.id, key.tenant, key.name, ", ".join(key.scopes), *limits, shown_filter, *days)
        out().print(rows, markup=False)

    emit({"keys": [key.to_dict() for key in entries]}, as_json, show)


@keys.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(help="Revoke the key with this id.")],
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a key permanently; running services reject it."""
    key = _store(data_dir).revoke(key_id)
    emit(key.to_dict(), as_json, lambda _: say(f"revoked key {key.id} of tenant {key.tenant}"))


@keys.command("prune")
def prune(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Remove revoked keys from the key file."""
    removed = _store(data_dir).prune()
    emit({"removed": removed}, as_json, lambda _: say(f"removed {removed} revoked keys"))


def _store(data_dir: Path | None) -> KeyStore:
    from rag_posfix_api.keys.store import KeyStore

    return KeyStore(service_settings_from(data_dir=data_dir).data_dir)


def _day(seconds: int | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d", time.gmtime(seconds))


@with_settings(
    "mitigation", "reranker", "order", "k", "retriever", "min_relevance", "allow_ungrounded", "max_tokens", "template",
    "model", "adapter", "device", "profile",
)  # fmt: skip
def mcp(settings: Settings, index: Index = None) -> None:
    """Serve search and ask as MCP tools of an agent, on stdio.

    An agent starts this command and talks to it on stdin and stdout. The model is loaded with the first question. A
    running service has the same tools at /mcp.
    """
    check_searchable(index, settings)
    check_answer_fits(settings)
    import asyncio

    from rag_posfix.mcp.server import serve_stdio
    from rag_posfix.pipeline.build import build_pipeline, resolve_methods

    methods = resolve_methods(settings)
    with status("loading the embeddings and the tokenizer"):
        pipeline = build_pipeline(settings, index=index, deferred=True, methods=methods)
    with closing(pipeline):
        asyncio.run(serve_stdio(pipeline, __version__))
