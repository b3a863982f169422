"""Segments of texts: of files, folders and indexes, and of the shipped corpus."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from langchain_core.documents import Document

from rag_posfix.demo_data import load_passages
from rag_posfix.retrieval.index.storage import read_entries
from rag_posfix.retrieval.ingest.ingest import PassageSize, read_documents, split_passages
from rag_posfix.training.data.pair import Segment

SHIPPED = "demo"
"""In place of a path: the corpus that the package brings along."""
_MANIFEST = "manifest.json"


def read_segments(source: str, words: int) -> list[Segment]:
    """Return the segments of ``demo``, of a file, of a folder of texts or of an index, in a fixed order.

    Args:
        source: The name of the shipped corpus, or a path.
        words: Maximum number of words of a segment; 100 words are about 128 tokens.
    """
    path = Path(source)
    if source == SHIPPED and not path.exists():
        return segments_of(load_passages(), words)
    if (path / _MANIFEST).is_file():
        return segments_of([entry.document for entry in read_entries(path).values()], words)
    return segments_of(read_documents([path], size=PassageSize(words, 10 * words)), words)


def segments_of(documents: Sequence[Document], words: int) -> list[Segment]:
    """Return the segments of documents, each with the title of its document."""
    size = PassageSize(words, 10 * words)
    return [
        Segment(str(document.metadata.get("title", "") or ""), document.page_content[span.start : span.end])
        for document in documents
        for span in split_passages(document.page_content, size)
    ]
