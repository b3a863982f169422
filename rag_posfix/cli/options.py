"""Options that several commands share, and parsers of their values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from pydantic_settings import BaseSettings

from rag_posfix.contracts.method_spec import parse_method, split_outside
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import ConfigError
from rag_posfix.settings import ServiceSettings, Settings

if TYPE_CHECKING:
    from rag_posfix.evaluation.answers.experiment import Arrangement

S = TypeVar("S", Settings, ServiceSettings)


def setting_option(flag: str, help: str, *, of: type[BaseSettings] = Settings, **limits: Any) -> Any:
    """Return an option that overrides the setting of its name, whose default ``--help`` shows.

    Args:
        flag: ``--max-tokens`` for the setting ``max_tokens``.
        limits: Of ``typer.Option``.
    """
    default = of.model_fields[flag.removeprefix("--").replace("-", "_")].default
    return typer.Option(flag, help=help, show_default="none" if default is None else str(default), **limits)


BASIC_METHODS = "none,default"
"""What is compared where the command line does not say."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Split = Annotated[
    int | None,
    setting_option("--tp", "Number of processes for tensor parallelism, each with a GPU if there are GPUs.", min=1),
]
ModelName = Annotated[
    str | None,
    setting_option("--model", "Model: smollm2, gemma3-270m, a Hugging Face model id, a folder, or openai:NAME@URL."),
]

AdapterFolder = Annotated[
    Path | None, setting_option("--adapter", "Folder of a LoRA adapter of the model, as rag-posfix train writes it.")
]

DeviceName = Annotated[
    str | None,
    setting_option("--device", "auto, cpu, cuda, cuda:1, ...; auto uses a GPU if there is one."),
]

EmbeddingModel = Annotated[
    str | None, setting_option("--embedding-model", "Embedding model: minilm, a model id, or a folder.")
]

GoldPositions = Annotated[
    str | None,
    typer.Option(
        "--gold-positions",
        help="Positions of the gold passage, from 0, comma-separated; 0+9 places the two gold passages of HotpotQA.",
        show_default="first, middle and last of --documents",
    ),
]


def parse_choice(text: str) -> MitigationChoice:
    """Parse ``name`` or ``name:parameter=value:parameter=value``; a value that is valid JSON is parsed as JSON.

    A JSON list or a string in double quotes may contain colons and commas. A parameter that takes a file is replaced
    by the file's content.

    Raises:
        ConfigError: a parameter without a value, an unclosed bracket or quote, or a file that cannot be read.
    """
    from rag_posfix.mitigations import MITIGATIONS
    from rag_posfix.pipeline.file_parameters import with_file_parameters

    return with_file_parameters(parse_method(text, "mitigation", "experts=5"), MITIGATIONS)


def checked_choice(text: str) -> MitigationChoice:
    """Parse a mitigation and check it against the registry, so that errors are reported before a model is loaded.

    Raises:
        ConfigError: an unknown mitigation or parameter, or a value out of range.
    """
    from rag_posfix.mitigations import MITIGATIONS

    choice = parse_choice(text)
    MITIGATIONS.check(choice)
    return choice


def checked_choices(text: str) -> list[MitigationChoice]:
    """Parse several mitigations, separated by commas, and check each.

    Raises:
        ConfigError: as ``checked_choice``, or one occurs twice.
    """
    choices = [checked_choice(part) for part in split_outside(text, ",")]
    for index, choice in enumerate(choices):
        if choice in choices[:index]:
            raise ConfigError(
                f"--mitigation {text!r} has {choice.name!r} twice with the same parameters; remove one of them"
            )
    return choices


def checked_choices_and_arrangements(mitigation: str | None, arrangement: str | None) -> list[Arrangement]:
    """Read ``--mitigation`` and ``--arrangement``, each a list separated by commas, and check every part.

    Without ``--mitigation`` there are ``none`` and, without ``--arrangement`` too, ``context_experts``.

    Raises:
        ConfigError: an unknown name or parameter, a value outside of what is allowed, a file that cannot be read, or
            a part that is named twice.
    """
    from rag_posfix.evaluation.answers.experiment import Arrangement, check_arrangements, parse_arrangement
    from rag_posfix.mitigations import MITIGATIONS
    from rag_posfix.pipeline.file_parameters import order_with_values, with_file_parameters
    from rag_posfix.reranking import RERANKERS

    found = [Arrangement(one) for one in checked_choices(mitigation or ("none" if arrangement else BASIC_METHODS))]
    for part in split_outside(arrangement, ",") if arrangement else ():
        read = parse_arrangement(part)
        order = order_with_values(read.order)
        scorer = None if read.reranker is None else with_file_parameters(read.reranker, RERANKERS)
        found.append(Arrangement(with_file_parameters(read.mitigation, MITIGATIONS), order, scorer))
    check_arrangements(found)
    return found


def check_index(folder: Path) -> None:
    """Check that a folder holds an index whose files are there, without reading them.

    Raises:
        RetrievalError: it holds none, or one of another program or version, or one that is damaged.
    """
    from rag_posfix.retrieval.index.storage import check_sizes

    check_sizes(folder)


def check_arrangement(settings: Settings) -> None:
    """Check reranker, order and method of the settings, so that errors are reported before a model is loaded.

    Raises:
        ConfigError: an unknown name or parameter, or a value out of range.
        UnsupportedModelError: the model is on a server, and the method needs the weights in this process.
    """
    from rag_posfix.assembly.orders import create_order
    from rag_posfix.generation.remote.address import is_remote, parse_remote
    from rag_posfix.pipeline.file_parameters import order_with_values
    from rag_posfix.reranking.build import parse_reranker

    create_order(order_with_values(settings.order))
    if settings.reranker is not None:
        parse_reranker(settings.reranker)
    choice = checked_choice(settings.mitigation)
    if is_remote(settings.model):
        from rag_posfix.generation.remote.generator import check_remote_mitigation

        check_remote_mitigation(parse_remote(settings.model).name, choice)


def checked_output(folder: Path | None) -> Path | None:
    """Check that results can be written to a folder, before anything is computed for it.

    Raises:
        ConfigError: it, or the nearest parent that exists, is a file or cannot be written.
    """
    if folder is None:
        return None
    found = folder
    while not found.exists() and found != found.parent:
        found = found.parent
    if not found.is_dir():
        raise ConfigError(f"--out {str(folder)!r}: {str(found)!r} is a file; give a folder")
    if not os.access(found, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {str(folder)!r}: {str(found)!r} cannot be written; give another folder")
    return folder


def spread_positions(documents: int) -> list[int]:
    """Return the first, a middle and the last place of so many passages: the default gold positions."""
    return sorted({0, (documents - 1) // 2, documents - 1})


def gold_positions_of(text: str | None, documents: int) -> list[int | tuple[int, ...]]:
    """Parse ``--gold-positions``; without it, the first, a middle and the last place of the prompt.

    Raises:
        ConfigError: as ``parse_gold_positions``.
    """
    return parse_gold_positions(text) if text is not None else [*spread_positions(documents)]


def parse_gold_positions(text: str) -> list[int | tuple[int, ...]]:
    """Parse positions, separated by commas; ``0+9`` places two gold passages.

    Raises:
        ConfigError: a part is neither a number nor numbers joined by a plus.
    """
    try:
        parts = [tuple(int(one) for one in part.split("+")) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"--gold-positions {text!r} must be numbers separated by commas, for example 0,4,9, or 0+1,0+9 for "
            "questions with two gold passages"
        ) from error
    return [part[0] if len(part) == 1 else part for part in parts]


def settings_from(**changes: Any) -> Settings:
    """Return the settings of the environment, overridden by the options of the command line that are not None.

    Raises:
        ConfigError: a value is out of range.
    """
    return _read_settings(Settings, changes)


def service_settings_from(**changes: Any) -> ServiceSettings:
    """Do what ``settings_from`` does for the settings of the service.

    Raises:
        ConfigError: a value is out of range.
    """
    return _read_settings(ServiceSettings, changes)


def _read_settings(kind: type[S], changes: Mapping[str, Any]) -> S:
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    given = {key: str(value) if isinstance(value, Path) else value for key, value in changes.items()}
    try:
        options: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        return kind(**options)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"setting {where}: {first['msg']}, got {first.get('input')!r}") from error
    except SettingsError as error:
        raise ConfigError(f"an environment variable RAG_POSFIX_... cannot be read: {error}") from error


def follows(settings: Settings) -> bool:
    """Run this process as a follower rank if torchrun started it as one.

    Returns:
        True if the process was a follower and is done; False if it is the first rank or the only process.

    Raises:
        ConfigError: the model cannot be split over this number of processes.
    """
    if settings.tp == 1 or settings.adapter is not None:  # an adapter is refused where the model is loaded
        return False
    from rag_posfix.generation.tensor_parallel.launch import run_torchrun_worker
    from rag_posfix.pipeline.build import launch_environment

    return run_torchrun_worker(
        settings.model,
        tp=settings.tp,
        environment=launch_environment(),
        dtype=settings.dtype,
        device=settings.device,
        cache_dir=settings.cache_dir,
    )
