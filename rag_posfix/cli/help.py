"""Help that is readable at 80 columns: options in groups with their text below them, examples last, nothing cut."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

WIDTH = 80

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Data": (
        "data", "corpus", "queries", "qrels", "index", "documents", "gold_positions", "limit", "skip", "split",
        "texts", "pairs", "templates", "data_dir", "decontaminate", "decontaminate_limit",
        "own_distractors", "hostile", "joined", "questions", "passages", "filters",
    ),
    "Method": (
        "mitigation", "arrangement", "reranker", "order", "k", "retriever", "first_stage", "template", "precompute",
        "min_relevance", "allow_ungrounded", "allow_unsupported", "encoding", "query", "profile",
    ),
    "Model": ("model", "writer", "judge", "adapter", "embedding_model", "device", "dtype", "tp", "max_tokens"),
    "Service": ("host", "port", "served_model_name", "tls_cert", "tls_key", "open_page"),
    "Output": ("out", "output", "as_json", "stream", "log_format", "fresh"),
    "Running": (
        "config", "plugin", "use_ray", "ray", "actors", "ray_actors", "seed", "seeds", "cache", "reuse", "rebuild",
        "strict",
    ),
}  # fmt: skip
"""Options by group; all others are in the first group, ``Options``."""

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "rag-posfix": ("rag-posfix demo", "rag-posfix index FILES --out my.index"),
    "demo": ("rag-posfix demo", "rag-posfix demo --mitigation inter_document"),
    "index": ("rag-posfix index FILES --out my.index", "rag-posfix index FILES --out my.index --precompute default"),
    "ask": ('rag-posfix ask "Who built it?" --index my.index', "rag-posfix ask --chat --index my.index --k 5"),
    "prompt": ('rag-posfix prompt "Who built it?" --index my.index',),
    "methods": ("rag-posfix methods", "rag-posfix methods context_experts"),
    "verify": ("rag-posfix verify --model MODEL",),
    "serve": ("rag-posfix serve --index my.index --open", "rag-posfix serve --model MODEL --port 9000"),
    "mcp": ("rag-posfix mcp --index my.index",),
    "measure": (
        "rag-posfix measure --index my.index --questions log.txt --out report",
        "rag-posfix measure --data q.jsonl --passages p.jsonl --minutes 30 --out report",
    ),
    "report": ("rag-posfix report results/record.json --out report.html",),
    "data check": ("rag-posfix data check questions.jsonl --passages passages.jsonl",),
    "bench": ("rag-posfix bench --documents 10 --tokens 150",),
    "positions": ("rag-posfix eval positions --data questions.jsonl --out results",),
    "permutations": ("rag-posfix eval permutations --data questions.jsonl --out results",),
    "rerank": ("rag-posfix eval rerank --corpus c.gz --queries q.gz --qrels q.tsv --out out",),
    "rerank-positions": ("rag-posfix eval rerank-positions --data q.jsonl --reranker embedding --out out",),
    "slot-attention": ("rag-posfix probe slot-attention --data questions.jsonl --out results",),
    "all": ("rag-posfix probe all --out results",),
    "run": ("rag-posfix lab run counting --encoding rope --out results",),
    "train data": ("rag-posfix train data --out pairs",),
    "in2": ("rag-posfix train in2 --data pairs --out adapter",),
    "fetch": ("rag-posfix models fetch",),
    "clear": ("rag-posfix cache clear",),
    "create": ("rag-posfix keys create my-team --scopes read",),
}
"""Command lines by name of the command, with that of its group where groups share the name."""


class _ReadableHelp:
    """Writes the help of a command or a group; mixed into typer's classes."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        command: Any = self
        formatter.write("".join(f"{line}\n" for line in _help_lines(command, ctx)))


class ReadableCommand(_ReadableHelp, TyperCommand):
    """A command with readable help."""


class ReadableGroup(_ReadableHelp, TyperGroup):
    """A group of commands with readable help."""


def make_readable(app: typer.Typer) -> None:
    """Give an application, its groups and all their commands readable help."""
    app.rich_markup_mode = None
    if not isinstance(app.info.cls, type):  # else the group has a class of its own, a ``ReadableGroup``
        app.info.cls = ReadableGroup
    for command in app.registered_commands:
        command.cls = ReadableCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            make_readable(group.typer_instance)


def _help_lines(command: Any, ctx: Any) -> Iterator[str]:
    usage = " ".join(command.collect_usage_pieces(ctx))
    yield from textwrap.wrap(f"Usage: {ctx.command_path} {usage}", WIDTH, subsequent_indent="    ", **_WHOLE_WORDS)
    for paragraph in (command.help or "").split("\n\n"):
        yield ""
        yield from textwrap.wrap(" ".join(paragraph.split()), WIDTH, **_WHOLE_WORDS)
    for heading, parameters in _grouped(command.get_params(ctx)).items():
        yield from ("", f"{heading}:")
        for parameter in parameters:
            yield from _parameter_lines(parameter, ctx)
    names = command.list_commands(ctx) if isinstance(command, TyperGroup) else []
    if names:
        yield from ("", "Commands:")
    for name in names:
        text = (command.get_command(ctx, name).help or "").split("\n\n")[0]
        yield f"  {name}"
        yield from _indented(" ".join(text.split()))
    group = ctx.parent.info_name if ctx.parent else ""
    name = command.name if ctx.parent else "rag-posfix"
    examples = EXAMPLES.get(f"{group} {name}") or EXAMPLES.get(name or "", ())
    if examples:
        yield from ("", "Examples:", *(f"  {example}" for example in examples))


def _grouped(parameters: Sequence[Any]) -> dict[str, list[Any]]:
    """Return parameters by heading: arguments, options without a group, and the groups in their order."""
    group_of = {name: heading for heading, names in GROUPS.items() for name in names}
    headings: dict[str, list[Any]] = {heading: [] for heading in ("Arguments", "Options", *GROUPS)}
    for parameter in parameters:
        if not getattr(parameter, "hidden", False):
            is_argument = parameter.param_type_name == "argument"
            headings["Arguments" if is_argument else group_of.get(parameter.name, "Options")].append(parameter)
    return {heading: members for heading, members in headings.items() if members}


def _parameter_lines(parameter: Any, ctx: Any) -> Iterator[str]:
    """Yield names and kind of value of a parameter, and below them its text and its default."""
    names, text = parameter.get_help_record(ctx) or (parameter.name, "")
    names = re.sub(r"list\[(\w+)\]", lambda match: match[1].lower(), names.replace(" range>", ">"))
    yield from textwrap.wrap(names, WIDTH, initial_indent="  ", subsequent_indent="      ", **_WHOLE_WORDS)
    text = re.sub(r"\[default: \((.*?)\)([;\]])", r"[default: \1\2", text.replace("\\[", "["))
    description, bracket, value = text.rpartition("  [")
    one_line = _indented(text)
    yield from one_line if len(one_line) == 1 or not bracket else [*_indented(description), *_indented(f"[{value}")]


def _indented(text: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()), WIDTH, initial_indent="      ", subsequent_indent="      ", **_WHOLE_WORDS
    )


_WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
