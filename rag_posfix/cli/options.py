"""Options that several commands share, parsers of their values, and options made from settings and dataclasses.

What commands print: one JSON object on stdout, or tables and text; progress and logs on stderr.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import sys
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from pydantic_settings import BaseSettings
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from rag_posfix.checkpoints import WEIGHTS
from rag_posfix.contracts.method_spec import parse_method, split_outside
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.contracts.retrieval import combine_filters, read_filter
from rag_posfix.errors import ConfigError
from rag_posfix.parameters import Integer, parameters_of
from rag_posfix.process import check_device_is_here
from rag_posfix.settings import ServiceSettings, Settings, config_file, plugin_modules
from rag_posfix.text import visible

if TYPE_CHECKING:
    from rag_posfix.evaluation.answers.experiment import Arrangement
    from rag_posfix.generation.engine import Engine


_NO_TERMINAL = 80
_SECONDS_BETWEEN_LINES = 10.0
_WIDTH_OF_FILES = 160
"""Characters of a line in a file or pipe, where rich would assume 80: names of methods then fit into one line."""


class _SafeConsole(Console):
    """Shows control characters of printed text: passages, answers and names of files do not act on the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


class SafeFormatter(logging.Formatter):
    """Formats log lines with their control characters shown."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return visible(super().format(record))


def out() -> Console:
    """Return the console for results (stdout)."""
    console = _SafeConsole()
    assumed = not console.is_terminal and console.width == _NO_TERMINAL
    return _SafeConsole(width=_WIDTH_OF_FILES) if assumed else console


def err() -> Console:
    """Return the console for progress and messages (stderr)."""
    return _SafeConsole(stderr=True)


def emit_json(data: Mapping[str, Any]) -> None:
    """Write one JSON object and a newline to stdout. All text must be valid Unicode (see ``text.clean_text``)."""
    text = orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS).decode()
    sys.stdout.buffer.write(f"{visible(text)}\n".encode())
    sys.stdout.buffer.flush()


def emit(data: Mapping[str, Any], as_json: bool, show: Callable[[Any], None]) -> None:
    """Print the result of a command: as one JSON object, or with ``show`` as text."""
    if as_json:
        emit_json(data)
    else:
        show(data)


def say(*lines: str) -> None:
    """Print lines of text on stdout as they are: without markup, colors and line breaks."""
    for line in lines:
        out().print(line, highlight=False, markup=False, soft_wrap=True)


def say_files(data: Mapping[str, Any], *names: str) -> None:
    """Print a line for each file that a record names, such as ``record`` and ``svg``."""
    say(*(f"{name}: {data[name]}" for name in names if name in data))


def say_figure(data: Mapping[str, Any], caption: str) -> None:
    """Print what the figure of a record shows, if it was drawn."""
    if "svg" in data:
        say(f"figure: {caption}")


def table(*headings: str, **options: Any) -> Table:
    """Return a table whose cells are never cut: a word that is too long for its column continues on the next line."""
    return Table(*(Column(heading, overflow="fold") for heading in headings), **options)


class RateColumn(ProgressColumn):
    """Steps per second, or seconds per step if a step takes longer than one."""

    def render(self, task: Task) -> Text:
        """Return the text of the column; empty before the first step."""
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        return Text(f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each")


@contextmanager
def status(message: str) -> Iterator[None]:
    """Show ``message`` while the block runs: with a spinner on a terminal, else as a plain line."""
    console = err()
    if console.is_terminal:
        with console.status(message):
            yield
    else:
        console.print(message, highlight=False)
        yield


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function (done, total) that updates a progress bar; without a terminal nothing is shown."""
    with progress_bars(description) as (move,):
        yield move


@contextmanager
def progress_with_text() -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function (done, total, text) that shows a bar with the text; without a terminal a line now and then.

    A text that ends with a line break is printed in any case, and stays.
    """
    console, shown_at = err(), float("-inf")
    columns = (
        SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def move(done: int, total: int, text: str) -> None:
            nonlocal shown_at
            stays = text.endswith("\n")
            progress.update(task, completed=done, total=total, description=text.rstrip())
            due = done == total or time.monotonic() - shown_at >= _SECONDS_BETWEEN_LINES
            if stays or (due and not console.is_terminal):
                line = text.rstrip() if stays else f"{done} of {total}: {text}"
                console.print(line, highlight=False, markup=False, soft_wrap=True)
                shown_at = time.monotonic()

        yield move


@contextmanager
def experiment_step(name: str) -> Iterator[Callable[[int, int], None]]:
    """Show a step of an experiment: a bar on a terminal, else its name as a plain line."""
    console = err()
    if not console.is_terminal:
        console.print(name, highlight=False, markup=False, soft_wrap=True)
    with progress_bar(name) as move:
        yield move


@contextmanager
def progress_bars(*descriptions: str) -> Iterator[list[Callable[[int, int], None]]]:
    """Yield a function (done, total) for each bar. Only the first bar is visible before its first update.

    Without a terminal nothing is shown.
    """
    console = err()
    columns = (
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        RateColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def bar(number: int, description: str) -> Callable[[int, int], None]:
            task = progress.add_task(description, total=None, visible=number == 0)
            return lambda done, total: progress.update(task, completed=done, total=total, visible=True)

        yield [bar(number, description) for number, description in enumerate(descriptions)]


Command = Callable[..., None]

BASIC_METHODS = "none,default"
"""What is compared if the command line names no method."""

_SETTING_HELP: Mapping[str, tuple[type[Any], str]] = {
    "mitigation": (str, "Correct with this method: name or name:parameter=value."),
    "reranker": (str, "Choose the k passages with it: name or name:parameter=value."),
    "order": (str, "Order the passages by it: name or name:parameter=value."),
    "k": (int, "Put this number of passages into the prompt."),
    "retriever": (str, "Retrieve with auto, dense, bm25, hybrid or KIND:key=value."),
    "max_tokens": (int, "Stop the answer after this number of tokens."),
    "allow_ungrounded": (bool, "Answer from the model's memory if nothing is found."),
    "allow_unsupported": (bool, "Answer even if no passage supports it, with a warning."),
    "min_relevance": (str, "Drop off-topic passages: auto, off, or a minimum similarity."),
    "query": (str, "How to search for a follow-up: last, history or rewrite."),
    "writer": (str, "Model that rewrites follow-ups and writes test questions."),
    "profile": (Path, "Use what rag-posfix measure chose: its profile.json."),
    "template": (str, "Write prompts by a shipped name, a TOML or Jinja2 file."),
    "index": (Path, "Serve this index folder, written by rag-posfix index."),
    "embedding_model": (str, "Embed with minilm, multilingual, a model id or a folder."),
    "model": (str, "Use a packaged model, id, folder, GGUF or openai:NAME@URL."),
    "adapter": (Path, "Merge this folder of a LoRA adapter into the model."),
    "device": (str, "Run on cpu, cuda, cuda:1, ...; auto prefers a GPU."),
    "tp": (int, "Split the model over this number of processes or GPUs."),
}
"""Type and help of the options that override a setting of their name."""


def setting_option(flag: str, help: str, *, of: type[BaseSettings] = Settings, **limits: Any) -> Any:
    """Return an option that overrides the setting of its name, whose default ``--help`` shows."""
    default = of.model_fields[flag.removeprefix("--").replace("-", "_")].default
    return typer.Option(flag, help=help, show_default="none" if default is None else str(default), **limits)


def _use_config(context: typer.Context, path: Path | None) -> Path | None:
    """Read settings from the file until the command is done."""
    if path is not None and not context.resilient_parsing:
        context.with_resource(config_file(path))
    return path


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        callback=_use_config,
        is_eager=True,
        help="Read settings from this TOML file.",
        show_default="RAG_POSFIX_CONFIG, or rag-posfix.toml",
    ),
]


def _use_plugins(context: typer.Context, names: list[str] | None) -> list[str] | None:
    """Import plug-ins before other options are checked, until the command is done."""
    if not context.resilient_parsing:
        context.with_resource(plugin_modules(names or ()))
    return names


Plugin = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        callback=_use_plugins,
        is_eager=True,
        help="Import methods of this module or .py file.",
        show_default="RAG_POSFIX_PLUGINS",
    ),
]


def out_option(help: str, **options: Any) -> Any:
    """Return the option ``--out``, a folder that is checked before anything is computed for it."""
    return typer.Option("--out", callback=checked_output, help=help, **options)


Filter = Annotated[
    list[str] | None,
    typer.Option("--filter", help="Retrieve only matching passages: FIELD=VALUE or JSON.", show_default="none"),
]
Index = Annotated[
    Path | None,
    typer.Option(
        "--index",
        help="Search this index folder, written by rag-posfix index.",
        show_default="none; needed without a store as --retriever",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Data = Annotated[Path, typer.Option("--data", help="Read questions from this file; .gz or plain.")]
GoldPositions = Annotated[
    str | None,
    typer.Option(
        "--gold-positions",
        help="Put the gold passage there: 0,4,9; or two of them: 0+9.",
        show_default="first, middle and last of --documents",
    ),
]
Documents = Annotated[int, typer.Option("--documents", min=1, help="Use this number of passages per question.")]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, help="Use at most this many questions.", show_default="all")
]
Skip = Annotated[int, typer.Option("--skip", min=0, help="Leave out this many questions at the start.")]
Joined = Annotated[
    int | None,
    typer.Option("--joined", min=2, help="Join this number of passages to a long one.", show_default="none"),
]
Hostile = Annotated[
    str | None,
    typer.Option("--hostile", show_default="none", help="Plant echo, poison, injection, faq, conflict or majority."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Recompute results that are in the journal.")]
UseRay = Annotated[bool, typer.Option("--ray", help="Run on the Ray cluster at RAY_ADDRESS, or a local one.")]
RayActors = Annotated[int, typer.Option("--ray-actors", min=1, help="Start this many processes per stage on Ray.")]


def with_settings(*names: str) -> Callable[[Command], Command]:
    """Return a decorator for a command whose parameter ``settings`` holds the settings, overridden by options.

    Args:
        names: Settings that have an option, in the order of the help.
    """
    options = []
    for name in names:
        kind, text = _SETTING_HELP[name]
        limits: dict[str, Any] = {"min": 1} if kind is int else {}
        option = setting_option(f"--{name.replace('_', '-')}", text, **limits)
        options.append(_keyword(name, Annotated[kind | None, option], None))
    shared = [_keyword("config", Config, None), _keyword("plugin", Plugin, None)]
    return _replace_parameter("settings", [*options, *shared], settings_from)


def with_options_of(cls: type[Any], name: str, flags: Mapping[str, str] | None = None) -> Callable[[Command], Command]:
    """Return a decorator for a command whose parameter ``name`` is made from an option per field of ``cls``.

    Names, types, ranges and defaults are written once, in ``cls``, a dataclass that checks its values itself. The help
    of an option is the field's description in the docstring of ``cls``; ``flags`` are the options with another name.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    docstring = re.split(r"\n(?:Args|Attributes):\n", inspect.getdoc(cls) or "")[-1]
    matches = re.finditer(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", docstring, re.MULTILINE)
    texts = {match.group(1): " ".join(match.group(2).replace("``", "").split()) for match in matches}
    options = []
    for field, parameter in parameters_of(cls).items():
        hint = hints[field]
        kind = hint.__origin__ if typing.get_origin(hint) is Annotated else hint
        ranges = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Integer)]
        limits: dict[str, Any] = {"min": ranges[0].low} if ranges else {}
        default: Any = "chosen by the command" if parameter.default is None else True
        text = texts[field]
        if typing.get_origin(kind) is typing.Literal:
            kind, text = str, f"{text} One of: {', '.join(typing.get_args(kind))}."
        flag = (flags or {}).get(field, f"--{field.replace('_', '-')}")
        option: Any = typer.Option(flag, help=text, show_default=default, **limits)
        options.append(_keyword(field, Annotated[kind, option], parameter.default))
    return _replace_parameter(
        name, options, lambda **values: cls(**{key: value for key, value in values.items() if value is not None})
    )


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _replace_parameter(
    name: str, options: Sequence[inspect.Parameter], make: Callable[..., Any]
) -> Callable[[Command], Command]:
    """Return a decorator that replaces a parameter of a command by ``options``; ``make`` makes its value of them."""

    def decorate(function: Command) -> Command:
        def command(**values: Any) -> None:
            value = make(**{option.name: values.pop(option.name) for option in options})
            function(**values, **{name: value})

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            if parameter.name == name:
                parameters += options
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        return command

    return decorate


def filter_of(texts: Sequence[str] | None) -> Mapping[str, Any] | None:
    """Return the filter of all ``--filter`` options together; None without one."""
    return combine_filters(*(read_filter(text) for text in texts or ()))


def unknown_filter_fields(index: Path | None, metadata_filter: Mapping[str, Any] | None) -> list[str]:
    """Return a line if no passage of the index has a field of the filter; it names the fields that there are."""
    if index is None or metadata_filter is None:
        return []
    from rag_posfix.retrieval.index.storage import read_entries, unknown_fields

    unknown, known = unknown_fields(read_entries(index, mmap=True).values(), metadata_filter)
    if not unknown:
        return []
    noun, names = ("field" if len(unknown) == 1 else "fields"), ", ".join(map(repr, unknown))
    return [f"no passage has the {noun} {names}; fields: {', '.join(known) or 'none'}"]


def open_engine(settings: Settings, passage_bytes: int = 0) -> Engine:
    """Load the model of the settings into this process, with a status line; ``passage_bytes`` as ``build_engine``."""
    with status("loading the model"):
        from rag_posfix.pipeline.build import build_engine

        return build_engine(settings, passage_bytes)


def checked_choice(text: str) -> MitigationChoice:
    """Parse ``name`` or ``name:parameter=value``, and check it, so that errors come before a model is loaded.

    A value that is valid JSON is parsed as JSON; a list or a string in double quotes may contain colons and commas. A
    parameter that takes a file is replaced by the file's content.
    """
    return _checked([text])[0]


def _checked(texts: Sequence[str]) -> list[MitigationChoice]:
    from rag_posfix.mitigations import MITIGATIONS
    from rag_posfix.pipeline.file_parameters import with_file_parameters

    choices = [with_file_parameters(parse_method(text, "mitigation", "experts=5"), MITIGATIONS) for text in texts]
    for choice in choices:
        MITIGATIONS.check(choice)
    return choices


def checked_choices(text: str) -> list[MitigationChoice]:
    """Parse several mitigations, separated by commas, and check each; none may occur twice."""
    choices = _checked(split_outside(text, ","))
    for index, choice in enumerate(choices):
        if choice in choices[:index]:
            raise ConfigError(
                f"--mitigation {text!r} has {choice.name!r} twice with the same parameters; remove one of them"
            )
    return choices


def checked_choices_and_arrangements(mitigation: str | None, arrangement: str | None) -> list[Arrangement]:
    """Read ``--mitigation`` and ``--arrangement``, each a list separated by commas, and check every part.

    Without ``--mitigation`` there is the baseline and, without ``--arrangement`` too, the default method.
    """
    choices = checked_choices(mitigation or ("none" if arrangement else BASIC_METHODS))
    from rag_posfix.evaluation.answers.experiment import Arrangement, check_arrangements, parse_arrangement
    from rag_posfix.mitigations import MITIGATIONS
    from rag_posfix.pipeline.file_parameters import order_with_values, with_file_parameters
    from rag_posfix.reranking import RERANKERS

    arrangements = [Arrangement(choice) for choice in choices]
    for text in split_outside(arrangement, ",") if arrangement else ():
        parsed = parse_arrangement(text)
        order = order_with_values(parsed.order)
        scorer = None if parsed.reranker is None else with_file_parameters(parsed.reranker, RERANKERS)
        arrangements.append(Arrangement(with_file_parameters(parsed.mitigation, MITIGATIONS), order, scorer))
    check_arrangements(arrangements)
    return arrangements


def check_index(folder: Path) -> None:
    """Check that a folder holds an index whose files are there, without reading them."""
    from rag_posfix.retrieval.index.storage import check_sizes

    check_sizes(folder)


def check_searchable(index: Path | None, settings: Settings) -> None:
    """Check that there is an index, as ``check_index``, or that a vector store of another program is searched."""
    if index is not None:
        check_index(index)
        return
    from rag_posfix.retrieval.external_stores import is_external

    if not is_external(settings.retriever):
        raise typer.BadParameter(
            "give the folder of an index, or a vector store as --retriever KIND:key=value,...", param_hint="--index"
        )


def check_answer_fits(settings: Settings) -> None:
    """Check that the longest answer leaves room for a prompt, before the model is loaded.

    The context window is known of packaged models and of folders with a ``config.json``.
    """
    weights = WEIGHTS.get(settings.model)
    config = Path(settings.model, "config.json")
    window = weights.context_window if weights else None
    if config.is_file():
        try:
            window = json.loads(config.read_text("utf-8")).get("max_position_embeddings")
        except (OSError, ValueError, AttributeError):
            return  # loading the model says what is wrong
    if isinstance(window, int) and settings.max_tokens >= window:
        raise ConfigError(
            f"--max-tokens {settings.max_tokens} leaves no room for a prompt: the context window of "
            f"{settings.model!r} has {window} tokens; use fewer"
        )


def checked_output(folder: Path | None) -> Path | None:
    """Check that results can be written to a folder: that the nearest existing parent is a writable folder."""
    if folder is None:
        return None
    parent = folder
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        raise ConfigError(f"--out {str(folder)!r}: {str(parent)!r} is a file; give a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {str(folder)!r}: {str(parent)!r} cannot be written; give another folder")
    return folder


def gold_positions_of(text: str | None, documents: int) -> list[int | tuple[int, ...]]:
    """Parse ``--gold-positions``; without it, the first, a middle and the last position of the prompt."""
    return sorted({0, (documents - 1) // 2, documents - 1}) if text is None else parse_gold_positions(text)


def parse_gold_positions(text: str) -> list[int | tuple[int, ...]]:
    """Parse positions, separated by commas; ``0+9`` is the positions of two gold passages."""
    try:
        positions = [tuple(int(number) for number in group.split("+")) for group in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"--gold-positions {text!r} must be numbers separated by commas, for example 0,4,9, or 0+1,0+9 for "
            "questions with two gold passages"
        ) from error
    return [position[0] if len(position) == 1 else position for position in positions]


def settings_from(config: Path | None = None, plugin: Sequence[str] | None = None, **changes: Any) -> Settings:
    """Return the settings of environment and configuration file, overridden by the options that are not None.

    Args:
        config: The file, which its option has made known already.
        plugin: Plug-ins, which their option has imported already.
        changes: The options by the names of their settings.

    Raises:
        ConfigError: a value is not allowed, or this machine lacks the device.
    """
    settings = Settings(**_as_text(changes))
    check_device_is_here(settings.device)
    _check_files(settings)
    return settings


def _check_files(settings: Settings) -> None:
    """Check the files that settings name, before a model is loaded."""
    if settings.profile is not None and not settings.profile.is_file():
        raise ConfigError(
            f"profile={str(settings.profile)!r} is not a file; give the profile.json that rag-posfix measure wrote"
        )
    if settings.adapter is not None:
        from rag_posfix.generation.model.checkpoint import check_adapter

        check_adapter(settings.adapter)
    if "template" in settings.model_fields_set:
        from rag_posfix.assembly.templates import read_template

        read_template(settings.template)


def service_settings_from(**changes: Any) -> ServiceSettings:
    """Return the settings of the service, overridden by the options of the command line that are not None."""
    return ServiceSettings(**_as_text(changes))


def _as_text(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not None, paths as text: it reads the same in an error."""
    return {
        key: str(value) if isinstance(value, Path) else value for key, value in changes.items() if value is not None
    }


def follows(settings: Settings) -> bool:
    """Run this process as a follower rank if torchrun started it as one; return whether it was one, and is done."""
    if settings.tp == 1 or settings.adapter is not None:  # loading the model rejects the adapter
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
