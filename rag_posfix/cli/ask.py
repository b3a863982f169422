"""``rag-posfix ask``: one question over an index."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rag_posfix.cli.options import AsJson, check_index, follows, with_settings
from rag_posfix.cli.output import emit_json, err, out, say, status
from rag_posfix.errors import ConfigError
from rag_posfix.settings import Settings
from rag_posfix.text import checked_question

if TYPE_CHECKING:
    from rag_posfix.contracts.answer import Answer
    from rag_posfix.pipeline.pipeline import Pipeline, Question

_SHOWN_SOURCES = 5
_SNIPPET_CHARACTERS = 120


@with_settings("mitigation", "reranker", "order", "k", "retriever", "max_tokens", "model", "adapter", "device", "tp")
def ask(
    index: Annotated[Path, typer.Option("--index", help="Search this index folder, written by rag-posfix index.")],
    settings: Settings,
    question: Annotated[str | None, typer.Argument(help="Ask this question; optional with --chat.")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer while it is generated.")] = False,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Use the answer cache.")] = True,
    chat: Annotated[bool, typer.Option("--chat", help="Read questions from the terminal, one per line.")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer a question from an index, with sources.

    With --chat the model is loaded once for all questions, until an empty line; each is answered by itself.
    """
    _check_usage(question, chat=chat, stream=stream, as_json=as_json)
    check_index(index)
    from rag_posfix.pipeline.build import build_pipeline, resolve_methods
    from rag_posfix.pipeline.pipeline import Question

    methods = resolve_methods(settings)
    if follows(settings):
        return
    with status("loading the embeddings and the tokenizer"):
        pipeline = build_pipeline(settings, index=index, deferred=True, methods=methods)
    with closing(pipeline):
        for text in _questions(question, chat):
            request = Question(text, use_cache=cache)
            if as_json:
                emit_json(pipeline.ask(request).to_dict())
            elif stream:
                _show_sources(_print_stream(pipeline, request), settings)
            else:
                answer = pipeline.ask(request)
                out().print(answer.text, markup=False, highlight=False)
                _show_sources(answer, settings)


def _check_usage(question: str | None, *, chat: bool, stream: bool, as_json: bool) -> None:
    """Raise for options that exclude each other, and for a question that is missing or empty."""
    if chat and as_json:
        raise ConfigError("--chat and --json cannot be combined; --json prints one object at the end")
    if question is None and not chat:
        raise typer.BadParameter("give a question, or --chat", param_hint="QUESTION")
    if stream and as_json:
        raise ConfigError("--stream and --json cannot be combined; --json prints one object at the end")
    if question is not None:
        checked_question(question)


def _questions(first: str | None, chat: bool) -> Iterator[str]:
    """Yield the question of the command line, and with ``chat`` the lines of stdin until an empty line or its end."""
    if first is not None:
        yield first
    while chat:
        if sys.stdin.isatty():
            err().print("question (an empty line ends): ", end="", highlight=False)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


def _print_stream(pipeline: Pipeline, question: Question) -> Answer | None:
    answer = None
    for chunk in pipeline.stream(question):
        typer.echo(chunk.text, nl=False)
        answer = chunk.answer or answer
    typer.echo()
    return answer


def _snippet(text: str) -> str:
    """Return the beginning of a text on one line."""
    words = " ".join(text[: 2 * _SNIPPET_CHARACTERS].split())
    return words if len(words) <= _SNIPPET_CHARACTERS else words[: _SNIPPET_CHARACTERS - 1].rstrip() + "…"


def _show_sources(answer: Answer | None, settings: Settings) -> None:
    from rag_posfix.retrieval.base import NOTHING_RELEVANT

    if answer is None:
        return
    # The threshold is one for the scores of the packaged embedding model.
    if (settings.embedding_model, settings.retriever, settings.reranker) == ("minilm", "dense", None):
        best = max((document.score or 0.0 for document in answer.documents), default=0.0)
        if best < NOTHING_RELEVANT:
            say(
                f"nothing relevant found: the best passage has score {best:.2f}, below {NOTHING_RELEVANT:.2f}; the "
                "answer may not be in the index"
            )
    if not answer.documents:
        return
    say(f"sources in the order of the prompt ({answer.mitigation}, order {answer.order}):")
    for document in answer.documents[:_SHOWN_SOURCES]:
        score = "no score" if document.score is None else f"score {document.score:.2f}"
        page = "" if document.page is None else f", page {document.page}"
        title = f" ({document.title})" if document.title else ""
        source = f"{document.source or 'no file'}{page}, {score}, attention {document.attention:.0%}"
        say(f"{document.position + 1}. {document.id}{title}: {source}", f"   {_snippet(document.text)}")
    n_hidden = len(answer.documents) - _SHOWN_SOURCES
    if n_hidden > 0:
        say(f"and {n_hidden} more; --json lists all")
    usage, seconds = answer.usage, sum(answer.timings.values())
    note = ", from the answer cache" if answer.cached else ""
    say(f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} completion tokens, {seconds:.1f} s{note}")
