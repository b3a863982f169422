"""``rag-posfix prompt``: what the model will read for a question."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rag_posfix.cli.options import AsJson, check_index, with_settings
from rag_posfix.cli.output import emit, out, say, status
from rag_posfix.settings import Settings
from rag_posfix.text import checked_question

if TYPE_CHECKING:
    from rag_posfix.pipeline.preview import PromptPreview


@with_settings(
    "mitigation",
    "reranker",
    "order",
    "k",
    "retriever",
    "floor",
    "max_tokens",
    "template",
    "model",
    "adapter",
    "device",
)
def prompt(
    question: Annotated[str, typer.Argument(help="Show the prompt of this question.")],
    index: Annotated[Path, typer.Option("--index", help="Search this index folder, written by rag-posfix index.")],
    settings: Settings,
    as_json: AsJson = False,
) -> None:
    """Print the prompt of a question, without answering it.

    Prints the prompt on stdout; on stderr the tokens of each segment, and those that the passage KV store has on disk
    or in Redis. The weights are loaded only if there is such a store.
    """
    checked_question(question)
    check_index(index)
    from rag_posfix.pipeline.build import build_pipeline, resolve_methods
    from rag_posfix.pipeline.pipeline import Question

    methods = resolve_methods(settings)
    deferred = not settings.passages.is_persistent(settings.cache_dir)
    with status("loading the embeddings and the tokenizer" if deferred else "loading the model"):
        pipeline = build_pipeline(settings, index=index, deferred=deferred, methods=methods)
    with closing(pipeline):
        preview = pipeline.preview(Question(question))
    emit(preview.to_dict(), as_json, lambda _: _show(preview))


def _show(preview: PromptPreview) -> None:
    out().print(preview.text, markup=False, highlight=False, soft_wrap=True)
    for segment in preview.segments:
        name = f"passage {segment.id}" if segment.id is not None else segment.kind
        say(f"{name}: {segment.tokens} tokens{', cached' if segment.cached else ''}")
    for identity, reason in preview.dropped:
        say(f"left out: {identity} ({reason})")
    note = "; the answer is in the answer cache" if preview.answer_cached else ""
    say(
        f"{preview.tokens} prompt tokens, {preview.cached_tokens} of them cached ({preview.mitigation}, order "
        f"{preview.order}){note}"
    )
