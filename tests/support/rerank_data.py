"""A collection in BEIR's form, small enough to rank in milliseconds, and rerankers without weights."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import Field

from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.ranking.rankings import OpenedReranker

CORPUS = [
    {"_id": "d1", "title": "Lighthouse", "text": "The Maravel lighthouse was designed by Ilse Korvanth."},
    {"_id": "d2", "title": "", "text": "The Ostrel bridge crosses the river Venn."},
    {"_id": "d3", "text": "Rye bread from Tull is baked for nine hours."},
    {"_id": "d4", "text": "A lighthouse keeper bakes bread near the bridge."},
    {"_id": "d5", "text": ""},
]
QUERIES = [
    {"_id": "1", "text": "who designed the lighthouse"},
    {"_id": "2", "text": "how long is bread baked"},
    {"_id": "3", "text": "what does the bridge cross"},
]
QRELS = [("1", "d1", 2), ("1", "d4", 1), ("2", "d3", 1), ("3", "d2", 1)]


def write_collection(folder: Path, corpus=None, queries=None, qrels=None, *, compressed=False) -> Path:
    """Write a BEIR folder and return its path."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in (corpus or CORPUS)).encode()
    name = "corpus.jsonl.gz" if compressed else "corpus.jsonl"
    (folder / name).write_bytes(gzip.compress(lines) if compressed else lines)
    (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (queries or QUERIES)))
    rows = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, row)) for row in (qrels or QRELS))]
    (folder / "qrels" / "test.tsv").write_text("\n".join(rows) + "\n")
    return folder


class ByLength(BaseDocumentCompressor):
    """Scores short documents high, whatever is asked. Keeps what it was asked, and is interrupted where told so."""

    asked: list[str] = Field(default_factory=list)
    fail_on: str = ""

    def compress_documents(self, documents, query, callbacks=None):
        if query == self.fail_on:
            raise KeyboardInterrupt
        self.asked.append(query)
        scored = [
            Document(id=d.id, page_content=d.page_content, metadata={"relevance_score": 1 / len(d.page_content)})
            for d in documents
        ]
        return sorted(scored, key=lambda d: -d.metadata["relevance_score"])


def open_by_length(choice, settings) -> OpenedReranker:
    """Return ``ByLength``, as an actor makes it."""
    return OpenedReranker(choice.label, "by length", ByLength())


class Failing(BaseDocumentCompressor):
    """Fails on every query."""

    def compress_documents(self, documents, query, callbacks=None):
        raise ConfigError("nothing is ranked here")


def open_failing(choice, settings) -> OpenedReranker:
    """Return ``Failing``, as an actor makes it."""
    return OpenedReranker(choice.label, "failing", Failing())
