"""``rag-posfix index``: build or update an index from files."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_posfix.cli.options import (
    AdapterFolder,
    AsJson,
    DeviceName,
    EmbeddingModel,
    ModelName,
    checked_choice,
    settings_from,
)
from rag_posfix.cli.output import emit_json, out, progress_bar, progress_bars, status
from rag_posfix.errors import ConfigError, RetrievalError
from rag_posfix.folders import PASSAGES_FOLDER

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

    from rag_posfix.contracts.request import MitigationChoice
    from rag_posfix.retrieval.indexing import IndexUpdate
    from rag_posfix.settings import Settings

_SHOWN_FILES = 10
_SKIPPED = {
    "unreadable": "cannot be read",
    "binary": "not text",
    "empty": "no text in it",
    "duplicate": "the same content as another file",
    "unsupported": "type not supported",
}
"""The kinds of skipped files in the order of the summary."""


def index(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Files (.txt, .md, .html, .pdf, .docx, .csv, .jsonl, .jsonl.gz) or folders."),
    ],
    output: Annotated[Path, typer.Option("--out", help="Index folder; an existing index is updated.")],
    embedding_model: EmbeddingModel = None,
    precompute: Annotated[
        str | None,
        typer.Option(
            "--precompute",
            help="Method whose keys and values are computed for every passage and stored in the passage KV store, so "
            "that the first question is warm. Takes 3.5 MB per 150 tokens with the packaged model.",
            show_default="no keys and values are computed",
        ),
    ] = None,
    model: ModelName = None,
    adapter: AdapterFolder = None,
    device: DeviceName = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Ignore an existing index and embed every passage again.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at the first file that cannot be read, instead of skipping it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Split files into passages, embed new passages, and write an index.

    An existing index is updated: passages of files that no longer exist are removed. Files that cannot be read are
    skipped and listed at the end. Vectors are kept while they are computed: the same command continues after it was
    interrupted.
    """
    settings = settings_from(embedding_model=embedding_model, model=model, adapter=adapter, device=device)
    chosen = None if precompute is None else checked_choice(precompute)
    if chosen is not None:
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
    found = {"index": str(output), **_described(update, settings), "seconds": time.perf_counter() - started}
    if chosen is not None:
        found["precomputed"] = _precompute(output, embeddings, chosen, settings)
    if as_json:
        emit_json(found)
    else:
        _show(found, chosen)


def _check_paths(paths: list[Path], output: Path) -> None:
    """Raise for paths that are missing and a folder that cannot be used, before anything is loaded."""
    from rag_posfix.retrieval.index.storage import check_writable

    for path in paths:
        if not path.exists():
            raise RetrievalError(f"no such file or folder: {str(path)!r}")
    check_writable(output)


def _described(update: IndexUpdate, settings: Settings) -> dict[str, Any]:
    """Drop cached answers and passages of removed documents, and return the numbers of the update."""
    from rag_posfix.pipeline.build import invalidate_stored

    answers, passages = invalidate_stored(update.gone, settings)
    return {
        "passages": update.manifest.count,
        "dimension": update.manifest.dimension,
        "embedding": update.manifest.embedding,
        "added": update.added,
        "changed": update.changed,
        "unchanged": update.unchanged,
        "removed": update.removed,
        "continued": update.continued,
        "skipped": [asdict(one) for one in update.skipped],
        "forgotten": {"answers": answers, "passages": passages},
    }


def _show(found: dict[str, Any], chosen: MitigationChoice | None) -> None:
    lines = [f"indexed {found['passages']} passages in {found['seconds']:.1f} s: {found['index']}"]
    if found["added"] < found["passages"] or found["removed"] or found["skipped"]:
        counts = (f"{found[name]} {name}" for name in ("added", "changed", "unchanged", "removed"))
        lines.append(", ".join(counts))
    if chosen is not None:
        read = found["precomputed"]
        lines.append(
            f"precomputed {read['tokens']} tokens for {chosen.name} in {read['seconds']:.1f} s; the passage store "
            f"holds {read['bytes'] / 1e6:.0f} MB"
        )
    if found["continued"]:
        lines.append(f"{found['continued']} vectors were kept from a run that did not finish")
    for line in (*lines, *_skipped_lines(found["skipped"])):
        out().print(line, highlight=False, markup=False, soft_wrap=True)


def _skipped_lines(skipped: list[dict[str, str]]) -> list[str]:
    """Return one line per kind of reason, and one per file up to a limit; unsupported files are only counted."""
    lines = []
    for kind, told in _SKIPPED.items():
        found = [one for one in skipped if one["kind"] == kind]
        if not found:
            continue
        lines.append(f"skipped, {told}: {len(found)} {'file' if len(found) == 1 else 'files'}")
        if kind == "unsupported":
            suffixes = Counter(Path(one["file"]).suffix.lower() or "no suffix" for one in found)
            lines.append("  " + ", ".join(f"{count} {suffix}" for suffix, count in sorted(suffixes.items())))
            continue
        lines += [f"  {one['file']}: {one['reason']}" for one in found[:_SHOWN_FILES]]
        if len(found) > _SHOWN_FILES:
            lines.append(f"  and {len(found) - _SHOWN_FILES} more; --json lists all")
    return lines


def _check_store(settings: Settings) -> None:
    """Raise if the settings have no tier on disk or in Redis, before any work is done."""
    kept = settings.passages
    if not kept.enabled or (kept.disk_bytes == 0 and kept.redis_url is None):
        raise ConfigError(
            "--precompute needs a passage KV store on disk or in Redis, and the settings turn both off; set "
            "RAG_POSFIX_PASSAGES_ENABLED=true and RAG_POSFIX_PASSAGES_DISK_BYTES or RAG_POSFIX_PASSAGES_REDIS_URL"
        )


@contextmanager
def _disk_on(settings: Settings) -> Iterator[None]:
    """Create the folder of the disk tier, which turns the tier on by default; remove the folder if it stays empty."""
    folder = settings.cache_dir / PASSAGES_FOLDER
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
    finally:
        with suppress(OSError):
            folder.rmdir()  # fails if the folder is not empty


def _precompute(folder: Path, embeddings: Embeddings, choice: MitigationChoice, settings: Settings) -> dict[str, Any]:
    """Compute keys and values of the passages of an index into the stored tiers; return tokens, bytes and seconds."""
    from rag_posfix.pipeline.build import build_engine, precompute_stored
    from rag_posfix.retrieval.faiss_store import FaissVectorStore

    started = time.perf_counter()
    with status("loading the model"):
        engine = build_engine(settings)
    documents = FaissVectorStore.load(folder, embeddings).documents()
    with _disk_on(settings), progress_bar("reading passages") as progress:
        tokens, held = precompute_stored(engine, documents, choice, settings, progress)
    return {
        "mitigation": choice.name,
        "tokens": tokens,
        "bytes": held,
        "seconds": time.perf_counter() - started,
    }
