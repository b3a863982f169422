"""``rag-posfix ask``: one question over an index."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rag_posfix.cli.options import (
    AsJson,
    DeviceName,
    ModelName,
    Split,
    check_arrangement,
    check_index,
    checked_choice,
    follows,
    settings_from,
)
from rag_posfix.cli.output import emit_json, out, status
from rag_posfix.errors import ConfigError
from rag_posfix.text import checked_question

if TYPE_CHECKING:
    from rag_posfix.contracts.answer import Answer
    from rag_posfix.pipeline.pipeline import Pipeline, Question

__all__ = ["ask"]


def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    index: Annotated[Path, typer.Option("--index", help="Index folder, written by `rag-posfix index`.")],
    mitigation: Annotated[
        str | None,
        typer.Option("--mitigation", help="Method: name, or name:parameter=value; see `rag-posfix methods`."),
    ] = None,
    reranker: Annotated[
        str | None,
        typer.Option("--reranker", help="Reranker that chooses the k passages: name, or name:parameter=value."),
    ] = None,
    order: Annotated[
        str | None, typer.Option("--order", help="Order of the passages in the prompt: name, or name:parameter=value.")
    ] = None,
    k: Annotated[int | None, typer.Option("--k", min=1, help="Number of passages in the prompt.")] = None,
    retriever: Annotated[
        str | None, typer.Option("--retriever", help="dense (by embeddings), bm25 (by words), or hybrid (both).")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Maximum number of tokens of the answer.")
    ] = None,
    model: ModelName = None,
    device: DeviceName = None,
    tp: Split = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer while it is generated.")] = False,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Use the answer cache.")] = True,
    as_json: AsJson = False,
) -> None:
    """Answer a question from an index, and print the answer and its sources."""
    if stream and as_json:
        raise ConfigError("--stream and --json cannot be combined; --json prints one object at the end")
    settings = settings_from(
        model=model, device=device, max_tokens=max_tokens, order=order, k=k, tp=tp, reranker=reranker,
        retriever=retriever,
    )  # fmt: skip
    checked_question(question)
    check_index(index)
    check_arrangement(settings)
    choice = checked_choice(mitigation) if mitigation else None
    if follows(settings):
        return
    with status("loading the embeddings and the tokenizer"):
        from rag_posfix.pipeline.build import build_pipeline
        from rag_posfix.pipeline.pipeline import Question

        pipeline = build_pipeline(settings, index=index, deferred=True)
    asked = Question(question, mitigation=choice, use_cache=cache)
    with closing(pipeline):
        if as_json:
            emit_json(pipeline.ask(asked).to_dict())
        elif stream:
            _show_sources(_print_stream(pipeline, asked))
        else:
            answer = pipeline.ask(asked)
            out().print(answer.text, markup=False, highlight=False)
            _show_sources(answer)


def _print_stream(pipeline: Pipeline, asked: Question) -> Answer | None:
    answer = None
    for chunk in pipeline.stream(asked):
        typer.echo(chunk.text, nl=False)
        answer = chunk.answer or answer
    typer.echo()
    return answer


def _show_sources(answer: Answer | None) -> None:
    if answer is None or not answer.documents:
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table("passage", "relevance", "attention", title=f"{answer.mitigation}, order {answer.order}")
    for document in sorted(answer.documents, key=lambda d: -d.attention)[:5]:
        score = "-" if document.score is None else f"{document.score:.2f}"
        name = document.title or document.source
        shown = f"{document.id} ({name})" if name else document.id
        table.add_row(escape(shown), score, f"{document.attention:.0%}")
    out().print(table)
    usage = answer.usage
    seconds = sum(answer.timings.values())
    note = ", from the answer cache" if answer.cached else ""
    out().print(
        f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} completion tokens, {seconds:.1f} s{note}",
        highlight=False,
    )
