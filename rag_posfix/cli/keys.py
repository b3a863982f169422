"""``rag-posfix keys``: create, list and revoke the API keys of the service."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rag_posfix.cli.options import AsJson, service_settings_from
from rag_posfix.cli.output import emit_json, err, out, table
from rag_posfix.errors import missing_extra

if TYPE_CHECKING:
    from rag_posfix_api.keys.store import KeyStore

app = typer.Typer(help="Create, list and revoke API keys of the service.", no_args_is_help=True)

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Folder of keys and collections.", show_default="RAG_POSFIX_SERVICE_DATA_DIR"),
]


@app.command("create")
def create(
    tenant: Annotated[str, typer.Argument(help="Its tenant: a-z, 0-9, - and _.")],
    name: Annotated[str, typer.Option("--name", help="Free text, to tell keys apart.")] = "",
    scopes: Annotated[str, typer.Option("--scopes", help="read, write and admin, comma-separated.")] = "read,write",
    requests_per_minute: Annotated[
        int | None, typer.Option("--requests-per-minute", min=1, help="Limit of requests.", show_default="none")
    ] = None,
    max_concurrent: Annotated[
        int | None,
        typer.Option("--max-concurrent", min=1, help="Limit of requests at the same time.", show_default="none"),
    ] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it. It is shown this once: what is kept is its hash."""
    made, whole = _store(data_dir).create(
        tenant,
        name=name,
        scopes=[scope.strip() for scope in scopes.split(",") if scope.strip()],
        requests_per_minute=requests_per_minute,
        max_concurrent=max_concurrent,
    )
    if as_json:
        emit_json({**made.to_dict(), "key": whole})
        return
    err().print(
        f"key {made.id} of tenant {made.tenant} may {', '.join(made.scopes)}; it is not shown again:",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    typer.echo(whole)


@app.command("list")
def list_keys(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List all keys, revoked ones included. Their secrets are not kept."""
    keys = _store(data_dir).table().keys.values()
    if as_json:
        emit_json({"keys": [key.to_dict() for key in keys]})
        return
    shown = table("id", "tenant", "name", "scopes", "requests/min", "at once", "created", "revoked")
    for key in keys:
        limits = ["-" if limit is None else str(limit) for limit in (key.requests_per_minute, key.max_concurrent)]
        shown.add_row(
            key.id, key.tenant, key.name, ", ".join(key.scopes), *limits, _day(key.created_at), _day(key.revoked_at)
        )
    out().print(shown, markup=False)


@app.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(help="Id of the key, as `rag-posfix keys list` shows it.")],
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a key, for ever. Running services refuse its next request."""
    key = _store(data_dir).revoke(key_id)
    if as_json:
        emit_json(key.to_dict())
        return
    out().print(f"revoked key {key.id} of tenant {key.tenant}", highlight=False)


def _store(data_dir: Path | None) -> KeyStore:
    try:
        from rag_posfix_api.keys.store import KeyStore
    except ImportError as error:
        raise missing_extra(error.name or "fastapi", "server") from error
    return KeyStore(service_settings_from(data_dir=data_dir).data_dir)


def _day(seconds: int | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d", time.gmtime(seconds))
