"""``rag-posfix cache``: what the answer cache holds, and emptying it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from rag_posfix.cli.options import AsJson, settings_from
from rag_posfix.cli.output import emit_json, out
from rag_posfix.errors import CacheError

if TYPE_CHECKING:
    from rag_posfix.caching.tiered import TieredAnswerCache

__all__ = ["app", "clear", "stats"]

app = typer.Typer(help="The answer cache.", no_args_is_help=True)


def _open() -> TieredAnswerCache:
    from rag_posfix.caching.build import build_answer_cache

    settings = settings_from()
    cache = build_answer_cache(settings.cache, settings.cache_dir)
    if cache is None:
        raise CacheError("the answer cache is turned off by the settings; turn a tier on to look into it")
    return cache


@app.command()
def stats(as_json: AsJson = False) -> None:
    """Show entries and bytes of each tier."""
    cache = _open()
    try:
        found = cache.stats()
    finally:
        cache.close()
    if as_json:
        emit_json(found)
        return
    from rich.table import Table

    table = Table("tier", "entries", "bytes")
    for tier in found["tiers"]:
        table.add_row(tier["name"], str(tier.get("entries", "-")), str(tier.get("bytes", "-")))
    out().print(table)


@app.command()
def clear(as_json: AsJson = False) -> None:
    """Drop every answer of every tier."""
    cache = _open()
    try:
        dropped = cache.clear()
    finally:
        cache.close()
    if as_json:
        emit_json({"cleared": dropped})
    else:
        out().print(f"dropped {dropped} answers", highlight=False)
