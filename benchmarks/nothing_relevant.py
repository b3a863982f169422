"""How high the best score of an index is for questions that it can answer, and for questions that it cannot.

python -m benchmarks.nothing_relevant XQUAD_FILE OUT_FOLDER

A question can be answered if its paragraph is in the index, and cannot if all paragraphs of its article are left out.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rag_posfix.evaluation.record import environment, file_digest, write_record
from rag_posfix.retrieval.embeddings import SentenceEmbeddings

THRESHOLDS = (0.2, 0.25, 0.3, 0.35, 0.4)


def measure(data: Path) -> dict[str, Any]:
    """Return for each threshold the share of both kinds of questions whose best score is below it."""
    articles = json.loads(gzip.decompress(data.read_bytes()))["data"]
    paragraphs = [(a, p["context"]) for a, article in enumerate(articles) for p in article["paragraphs"]]
    questions = [
        (a, q["question"]) for a, article in enumerate(articles) for p in article["paragraphs"] for q in p["qas"]
    ]
    embeddings = SentenceEmbeddings("minilm")
    passages = np.array(embeddings.embed_documents([text for _, text in paragraphs]))
    scores = np.array([embeddings.embed_query(text) for _, text in questions]) @ passages.T
    same = np.array([a for a, _ in questions])[:, None] == np.array([a for a, _ in paragraphs])[None]
    found = {"answerable": scores.max(axis=1), "not answerable": np.where(same, -1.0, scores).max(axis=1)}
    below = {str(t): {kind: float((best < t).mean()) for kind, best in found.items()} for t in THRESHOLDS}
    return {"below": below, "n": len(questions)}


if __name__ == "__main__":
    source = Path(sys.argv[1])
    head = {
        "kind": "nothing-relevant", **environment(), "embedding_model": "minilm",
        "data": {"name": source.name, "sha256": file_digest(source)}, "summary": measure(source),
    }  # fmt: skip
    print(write_record(Path(sys.argv[2]), "nothing-relevant", head))
