"""``rag-posfix index``: build or update an index from files."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_posfix.cli.options import AsJson, checked_choice, load_engine, with_settings
from rag_posfix.cli.output import emit, progress_bar, progress_bars, say, status
from rag_posfix.errors import ConfigError, RagPosfixError, RetrievalError
from rag_posfix.folders import PASSAGES_FOLDER
from rag_posfix.settings import Settings

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

    from rag_posfix.contracts.request import MitigationChoice
    from rag_posfix.retrieval.indexing import IndexUpdate

_SHOWN_FILES = 10
_SKIPPED = {
    "unreadable": "cannot be read",
    "binary": "not text",
    "empty": "no text in it",
    "duplicate": "the same content as another file",
    "unsupported": "type not supported",
}
"""The kinds of skipped files in the order of the summary."""


@with_settings("embedding_model", "model", "adapter", "device")
def index(
    paths: Annotated[list[Path], typer.Argument(help="Read these files or folders.")],
    output: Annotated[Path, typer.Option("--out", help="Write or update this index folder.")],
    settings: Settings,
    precompute: Annotated[
        str | None,
        typer.Option(
            "--precompute",
            help="Store keys and values of each passage for this method.",
            show_default="no keys and values are computed",
        ),
    ] = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Ignore an existing index; embed everything again.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first file that cannot be read.")] = False,
    as_json: AsJson = False,
) -> None:
    """Build or update an index from files.

    Reads .txt, .md, .html, .pdf, .docx, .csv, .jsonl and .jsonl.gz, splits files into passages and embeds new ones. An
    existing index is updated: passages of files that no longer exist are removed. Files that cannot be read are
    skipped and listed at the end. Vectors are kept while they are computed: the same command continues after it was
    interrupted. With --precompute the first question is warm; it takes 3.5 MB per 150 tokens with the packaged model.
    """
    choice = None if precompute is None else checked_choice(precompute)
    if choice is not None:
        _check_store(settings)
    _check_paths(paths, output)
    started = time.perf_counter()
    with status("loading the embeddings"):
        from rag_posfix.generation.load import quiet_loading
        from rag_posfix.pipeline.build import build_embeddings
        from rag_posfix.retrieval.indexing import update_index

        embeddings = build_embeddings(settings, many=True)
        with quiet_loading():
            _ = embeddings.identity  # loads the weights
    try:
        with progress_bars("reading", "embedding") as (reading, progress):
            update = update_index(
                paths, output, embeddings, rebuild=rebuild, progress=progress, reading=reading, strict=strict
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted; the index {str(output)!r} is as it was, and computed vectors are kept: the same command "
            "continues"
        ) from None
    data = {"index": str(output), **_summarize_update(update, settings), "seconds": time.perf_counter() - started}
    if choice is not None:
        data["precomputed"] = _precompute(output, embeddings, choice, settings)
    emit(data, as_json, _show)


def _check_paths(paths: list[Path], output: Path) -> None:
    """Raise for paths that are missing and a folder that cannot be used, before anything is loaded."""
    from rag_posfix.retrieval.index.storage import check_writable

    for path in paths:
        if not path.exists():
            raise RetrievalError(f"no such file or folder: {str(path)!r}")
    check_writable(output)


def _summarize_update(update: IndexUpdate, settings: Settings) -> dict[str, Any]:
    """Drop cached answers and passages of removed documents, and return the numbers of the update."""
    from rag_posfix.pipeline.build import invalidate_stored

    answers, passages = invalidate_stored(update.removed_documents, settings)
    invalidated = {"answers": answers, "passages": passages}
    return {
        "passages": update.manifest.count,
        "dimension": update.manifest.dimension,
        "embedding": update.manifest.embedding,
        "added": update.added,
        "changed": update.changed,
        "unchanged": update.unchanged,
        "removed": update.removed,
        "continued": update.continued,
        "skipped": [asdict(file) for file in update.skipped],
        "invalidated": invalidated,
        "forgotten": invalidated,  # the former name, until 1.0
    }


def _show(data: dict[str, Any]) -> None:
    say(f"indexed {data['passages']} passages in {data['seconds']:.1f} s: {data['index']}")
    if data["added"] < data["passages"] or data["removed"] or data["skipped"]:
        say(", ".join(f"{data[name]} {name}" for name in ("added", "changed", "unchanged", "removed")))
    if "precomputed" in data:
        stored = data["precomputed"]
        say(
            f"precomputed {stored['tokens']} tokens for {stored['mitigation']} in {stored['seconds']:.1f} s; the "
            f"passage KV store holds {stored['bytes'] / 1e6:.0f} MB"
        )
    if data["continued"]:
        say(f"{data['continued']} vectors were kept from a run that did not finish")
    say(*_skipped_lines(data["skipped"]))


def _skipped_lines(skipped: list[dict[str, str]]) -> list[str]:
    """Return one line per kind of reason, and one per file up to a limit; unsupported files are only counted."""
    lines = []
    for kind, reason in _SKIPPED.items():
        files = [file for file in skipped if file["kind"] == kind]
        if not files:
            continue
        lines.append(f"skipped, {reason}: {len(files)} {'file' if len(files) == 1 else 'files'}")
        if kind == "unsupported":
            suffixes = Counter(Path(file["file"]).suffix.lower() or "no suffix" for file in files)
            lines.append("  " + ", ".join(f"{count} {suffix}" for suffix, count in sorted(suffixes.items())))
            continue
        lines += [f"  {file['file']}: {file['reason']}" for file in files[:_SHOWN_FILES]]
        if len(files) > _SHOWN_FILES:
            lines.append(f"  and {len(files) - _SHOWN_FILES} more; --json lists all")
    return lines


def _check_store(settings: Settings) -> None:
    """Raise if the settings have no tier on disk or in Redis, before any work is done."""
    store = settings.passages
    if not store.enabled or (store.disk_bytes == 0 and store.redis_url is None):
        raise ConfigError(
            "--precompute needs a passage KV store on disk or in Redis, and the settings turn both off; set "
            "RAG_POSFIX_PASSAGES_ENABLED=true and RAG_POSFIX_PASSAGES_DISK_BYTES or RAG_POSFIX_PASSAGES_REDIS_URL"
        )


@contextmanager
def _disk_on(settings: Settings) -> Iterator[None]:
    """Create the folder of the disk tier, which turns the tier on by default; remove a new folder after an error."""
    folder = settings.cache_dir / PASSAGES_FOLDER
    is_new = not folder.exists()
    if settings.passages.disk_bytes is None and settings.passages.redis_url is None:
        try:
            settings.cache_dir.mkdir(parents=True, exist_ok=True)
            folder.mkdir(exist_ok=True, mode=0o700)  # passages are private
        except OSError as error:
            raise ConfigError(
                f"the folder of the passage KV store, {str(folder)!r}, cannot be created: {error.strerror or error}; "
                "set RAG_POSFIX_CACHE_DIR to a writable folder"
            ) from error
    try:
        yield
    except RagPosfixError:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        with suppress(OSError):
            folder.rmdir()  # fails if the folder is not empty


def _precompute(folder: Path, embeddings: Embeddings, choice: MitigationChoice, settings: Settings) -> dict[str, Any]:
    """Compute keys and values of the passages of an index into the stored tiers; return tokens, bytes and seconds."""
    from rag_posfix.pipeline.build import precompute_stored
    from rag_posfix.retrieval.faiss_store import FaissVectorStore

    started = time.perf_counter()
    engine = load_engine(settings)
    documents = FaissVectorStore.load(folder, embeddings).documents()
    with _disk_on(settings), progress_bar("reading passages") as progress:
        tokens, stored_bytes = precompute_stored(engine, documents, choice, settings, progress)
    return {
        "mitigation": choice.name,
        "tokens": tokens,
        "bytes": stored_bytes,
        "seconds": time.perf_counter() - started,
    }
