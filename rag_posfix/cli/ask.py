"""``rag-posfix ask``: one question over an index."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rag_posfix.cli.options import (
    AdapterFolder,
    AsJson,
    DeviceName,
    ModelName,
    Split,
    check_arrangement,
    check_index,
    checked_choice,
    follows,
    setting_option,
    settings_from,
)
from rag_posfix.cli.output import emit_json, err, out, status
from rag_posfix.errors import ConfigError
from rag_posfix.text import checked_question

if TYPE_CHECKING:
    from rag_posfix.contracts.answer import Answer
    from rag_posfix.pipeline.pipeline import Pipeline, Question
    from rag_posfix.settings import Settings

_SHOWN_SOURCES = 5
_SNIPPET_CHARACTERS = 120


Method = Annotated[
    str | None,
    setting_option("--mitigation", "Method: name, or name:parameter=value; see `rag-posfix methods`."),
]
RerankerName = Annotated[
    str | None,
    setting_option("--reranker", "Reranker that chooses the k passages: name, or name:parameter=value."),
]
OrderName = Annotated[
    str | None, setting_option("--order", "Order of the passages in the prompt: name, or name:parameter=value.")
]
Number = Annotated[int | None, setting_option("--k", "Number of passages in the prompt.", min=1)]
FirstStage = Annotated[
    str | None, setting_option("--retriever", "dense (by embeddings), bm25 (by words), or hybrid (both).")
]
MaxTokens = Annotated[int | None, setting_option("--max-tokens", "Maximum number of tokens of the answer.", min=1)]
Chat = Annotated[
    bool, typer.Option("--chat", help="Read questions from the terminal, one per line, until an empty line.")
]


def ask(
    index: Annotated[Path, typer.Option("--index", help="Index folder, written by `rag-posfix index`.")],
    question: Annotated[str | None, typer.Argument(help="The question; not needed with --chat.")] = None,
    mitigation: Method = None,
    reranker: RerankerName = None,
    order: OrderName = None,
    k: Number = None,
    retriever: FirstStage = None,
    max_tokens: MaxTokens = None,
    model: ModelName = None,
    adapter: AdapterFolder = None,
    device: DeviceName = None,
    tp: Split = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer while it is generated.")] = False,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Use the answer cache.")] = True,
    chat: Chat = False,
    as_json: AsJson = False,
) -> None:
    """Answer a question from an index, and print the answer and its sources.

    With --chat the model is loaded once for all questions; each is answered by itself.
    """
    _check_usage(question, chat=chat, stream=stream, as_json=as_json)
    choice = checked_choice(mitigation) if mitigation else None
    settings = settings_from(
        model=model, adapter=adapter, device=device, max_tokens=max_tokens, order=order, k=k, tp=tp, reranker=reranker,
        retriever=retriever, mitigation=choice and choice.name,
    )  # fmt: skip
    check_index(index)
    check_arrangement(settings)
    if follows(settings):
        return
    with status("loading the embeddings and the tokenizer"):
        from rag_posfix.pipeline.build import build_pipeline
        from rag_posfix.pipeline.pipeline import Question

        pipeline = build_pipeline(settings, index=index, deferred=True)
    with closing(pipeline):
        for text in _questions(question, chat):
            asked = Question(text, mitigation=choice, use_cache=cache)
            if as_json:
                emit_json(pipeline.ask(asked).to_dict())
            elif stream:
                _show_sources(_print_stream(pipeline, asked), settings)
            else:
                answer = pipeline.ask(asked)
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
    """Yield the question of the command line, and with ``chat`` those of stdin until an empty line or its end."""
    if first is not None:
        yield first
    while chat:
        if sys.stdin.isatty():
            err().print("question (an empty line ends): ", end="", highlight=False)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


def _print_stream(pipeline: Pipeline, asked: Question) -> Answer | None:
    answer = None
    for chunk in pipeline.stream(asked):
        typer.echo(chunk.text, nl=False)
        answer = chunk.answer or answer
    typer.echo()
    return answer


def _snippet(text: str) -> str:
    """Return the beginning of a text on one line."""
    words = " ".join(text[: 2 * _SNIPPET_CHARACTERS].split())
    return words if len(words) <= _SNIPPET_CHARACTERS else words[: _SNIPPET_CHARACTERS - 1].rstrip() + "…"


def _warn_of_no_source(answer: Answer, settings: Settings) -> None:
    """Say that nothing relevant was found, where scores are those of the packaged embedding model."""
    from rag_posfix.retrieval.base import NOTHING_RELEVANT

    if (settings.embedding_model, settings.retriever, settings.reranker) != ("minilm", "dense", None):
        return
    best = max((document.score or 0.0 for document in answer.documents), default=0.0)
    if best < NOTHING_RELEVANT:
        out().print(
            f"nothing relevant found: the best passage has score {best:.2f}, below {NOTHING_RELEVANT:.2f}; the answer "
            "may not be in the index",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip


def _show_sources(answer: Answer | None, settings: Settings) -> None:
    if answer is None:
        return
    _warn_of_no_source(answer, settings)
    if not answer.documents:
        return
    lines = [f"sources in the order of the prompt ({answer.mitigation}, order {answer.order}):"]
    for document in answer.documents[:_SHOWN_SOURCES]:
        score = "no score" if document.score is None else f"score {document.score:.2f}"
        page = "" if document.page is None else f", page {document.page}"
        place = document.source or "no file"
        title = f" ({document.title})" if document.title else ""
        shares = f"{score}, attention {document.attention:.0%}"
        lines.append(f"{document.position + 1}. {document.id}{title}: {place}{page}, {shares}")
        lines.append(f"   {_snippet(document.text)}")
    more = len(answer.documents) - _SHOWN_SOURCES
    if more > 0:
        lines.append(f"and {more} more; --json lists all")
    for line in lines:
        out().print(line, highlight=False, markup=False, soft_wrap=True)
    usage = answer.usage
    seconds = sum(answer.timings.values())
    note = ", from the answer cache" if answer.cached else ""
    out().print(
        f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} completion tokens, {seconds:.1f} s{note}",
        highlight=False,
    )
