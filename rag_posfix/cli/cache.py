"""``rag-posfix cache``: statistics of the answer cache and the passage KV store, and clearing them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import typer

from rag_posfix.cli.options import AsJson, settings_from
from rag_posfix.cli.output import emit_json, out, table
from rag_posfix.errors import CacheError

if TYPE_CHECKING:
    from rag_posfix.caching.answers.tiered import TieredAnswerCache
    from rag_posfix.caching.kv.store import PassageStore

app = typer.Typer(help="Show or clear the answer cache and the passage KV store.", no_args_is_help=True)


@contextmanager
def _opened() -> Iterator[tuple[TieredAnswerCache | None, PassageStore | None]]:
    from rag_posfix.caching.answers.tiered import build_answer_cache
    from rag_posfix.caching.kv.store import build_passage_store

    settings = settings_from()
    with ExitStack() as stack:
        answers = build_answer_cache(settings.cache, settings.cache_dir)
        if answers is not None:
            stack.callback(answers.close)
        passages = build_passage_store(settings.passages, settings.cache_dir)
        if passages is not None:
            stack.callback(passages.close)
        if answers is None and (passages is None or not settings.passages.is_persistent(settings.cache_dir)):
            raise CacheError(
                "no cache outlives a process: the settings turn the answer cache off, and the passage KV store has "
                "no disk or Redis tier; turn one on, for example with RAG_POSFIX_CACHE_ENABLED=true"
            )
        yield answers, passages


@app.command()
def stats(as_json: AsJson = False) -> None:
    """Show the number of entries and bytes of each tier."""
    with _opened() as (answers, passages):
        found: dict[str, Any] = {"tiers": []} if answers is None else answers.stats()
        found["passages"] = None if passages is None else passages.stats()
    if as_json:
        emit_json(found)
        return

    shown = table("cache", "tier", "entries", "bytes")
    for name, tiers in (("answers", found["tiers"]), ("passages", (found["passages"] or {"tiers": []})["tiers"])):
        for tier in tiers:
            shown.add_row(name, tier["name"], str(tier.get("entries", "-")), str(tier.get("bytes", "-")))
    out().print(shown)


@app.command()
def clear(as_json: AsJson = False) -> None:
    """Delete all answers, and all keys and values of passages, in every tier."""
    with _opened() as (answers, passages):
        dropped = 0 if answers is None else answers.clear()
        dropped_passages = 0 if passages is None else passages.clear()
    if as_json:
        emit_json({"cleared": dropped, "cleared_passages": dropped_passages})
    else:
        out().print(f"dropped {dropped} answers and {dropped_passages} passages", highlight=False)
