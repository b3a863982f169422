"""Options that several commands share, and how their values are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rag_posfix.contracts.method_spec import parse_method, split_outside
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import ConfigError
from rag_posfix.settings import Settings

__all__ = [
    "AsJson",
    "DeviceName",
    "ModelName",
    "Split",
    "checked_choice",
    "checked_choices",
    "follows",
    "parse_choice",
    "parse_numbers",
    "settings_from",
    "split_outside",
]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Split = Annotated[
    int | None,
    typer.Option("--tp", min=1, help="Processes to split the model over, with a GPU each if there are any."),
]
DeviceName = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...; auto takes a GPU.")]
ModelName = Annotated[str | None, typer.Option("--model", help="smollm2, gemma3-270m, a model id, or a folder.")]


def parse_choice(text: str) -> MitigationChoice:
    """Read ``name`` or ``name:parameter=value:parameter=value``; values are JSON where they parse as JSON.

    A value may be a JSON list or text in double quotes, which may hold colons and commas. Files are read here.

    Raises:
        ConfigError: a parameter without a value, a bracket without its partner, or a file that cannot be read.
    """
    from rag_posfix.mitigations import MITIGATIONS
    from rag_posfix.pipeline.file_parameters import with_file_parameters

    return with_file_parameters(parse_method(text, "mitigation", "experts=5"), MITIGATIONS)


def checked_choice(text: str) -> MitigationChoice:
    """Read a mitigation and check it against the registry: a typing error is told before a model is loaded.

    Raises:
        ConfigError: an unknown mitigation or parameter, or a value outside of what is allowed.
    """
    from rag_posfix.mitigations import MITIGATIONS

    choice = parse_choice(text)
    MITIGATIONS.check(choice)
    return choice


def checked_choices(text: str) -> list[MitigationChoice]:
    """Read several mitigations, separated by commas, and check each.

    Raises:
        ConfigError: as ``checked_choice``, or one is named twice.
    """
    choices = [checked_choice(part) for part in split_outside(text, ",")]
    for index, choice in enumerate(choices):
        if choice in choices[:index]:
            raise ConfigError(
                f"--mitigation {text!r} names {choice.name!r} twice with the same parameters; once is all"
            )
    return choices


def parse_numbers(text: str, option: str) -> list[int]:
    """Read whole numbers, separated by commas.

    Raises:
        ConfigError: a part is no whole number.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} {text!r} must be numbers separated by commas, for example 0,4,9") from error


def settings_from(**changes: Any) -> Settings:
    """Return the settings of the environment with what the command line gave.

    Raises:
        ConfigError: a value is outside of what is allowed.
    """
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    given = {key: str(value) if isinstance(value, Path) else value for key, value in changes.items()}
    try:
        options: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        return Settings(**options)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"setting {where}: {first['msg']}, got {first.get('input')!r}") from error
    except SettingsError as error:
        raise ConfigError(f"an environment variable RAG_POSFIX_... cannot be read: {error}") from error


def follows(settings: Settings) -> bool:
    """Return whether torchrun started this process to hold a part of the model; it has done that part then.

    Raises:
        ConfigError: the model cannot be split so.
    """
    if settings.tp == 1:
        return False
    from rag_posfix.generation.tensor_parallel.launch import follow_torchrun
    from rag_posfix.pipeline.build import launch_environment

    return follow_torchrun(
        settings.model,
        tp=settings.tp,
        environment=launch_environment(),
        dtype=settings.dtype,
        device=settings.device,
        cache_dir=settings.cache_dir,
    )
