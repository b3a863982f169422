"""``rag-posfix index``: files to an index on disk."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from rag_posfix.cli.options import AsJson, settings_from
from rag_posfix.cli.output import emit_json, out, progress_bar, status

__all__ = ["index"]


def index(
    paths: Annotated[list[Path], typer.Argument(help="Files (.txt, .md, .jsonl) or folders.")],
    output: Annotated[Path, typer.Option("--out", help="Folder for the index; replaced whole if it is one already.")],
    embedding_model: Annotated[
        str | None, typer.Option("--embedding-model", help="minilm, a model id, or a folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Split files into passages, embed them, and write an index."""
    settings = settings_from(embedding_model=embedding_model)
    started = time.perf_counter()
    with status("loading the embeddings"):
        from rag_posfix.retrieval.embeddings import SentenceEmbeddings
        from rag_posfix.retrieval.indexing import build_index

        embeddings = SentenceEmbeddings(settings.embedding_model)
    with progress_bar("embedding") as progress:
        manifest = build_index([Path(p) for p in paths], output, embeddings, progress=progress)
    seconds = time.perf_counter() - started
    if as_json:
        emit_json(
            {
                "index": str(output),
                "passages": manifest.count,
                "dimension": manifest.dimension,
                "embedding": manifest.embedding,
                "seconds": seconds,
            }
        )
    else:
        out().print(f"indexed {manifest.count} passages in {seconds:.1f} s: {output}", highlight=False)
