"""What commands print: one JSON object on stdout, or tables and text; progress and logs on stderr."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import orjson
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

from rag_posfix.text import visible

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
