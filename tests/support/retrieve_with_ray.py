"""A program of its own for the tests of Ray: the same first stages on a local cluster of two CPUs and in this process.

While the cluster is asked, embedding, counting and searching in this process raise. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from unittest.mock import patch

from langchain_core.documents import Document

from rag_posfix.contracts.method_spec import parse_method
from rag_posfix.errors import ConfigError, EvaluationError
from rag_posfix.evaluation import evaluate_reranking
from rag_posfix.evaluation.data.collection import Collection, Topic
from rag_posfix.evaluation.ranking.first_stage import open_first_stage, retrieve
from rag_posfix.evaluation.ranking.rankings import RankJournal
from rag_posfix.evaluation.ranking.ray_backend import ray_first_stage
from rag_posfix.evaluation.record import silent
from rag_posfix.settings import Settings
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.rerank_data import write_collection

WORDS = ["light", "keeper", "bridge", "river", "bread", "rye", "oven", "island", "ferry", "harbour", "lamp", "oar"]
DEPTH = 9


def text(number: int) -> str:
    """Return one of 144 texts of two words; a third of the documents have the text of another, so that scores tie."""
    return f"{WORDS[number % 12]} {WORDS[number // 12 % 12]}"


COLLECTION = Collection(
    {
        f"d{number}": Document(id=f"d{number}", page_content=text(number), metadata={"title": WORDS[number % 3]})
        for number in range(200)
    }
    | {"empty": Document(id="empty", page_content=" ")},
    "digest", {},
)  # fmt: skip
TOPICS = [Topic(f"q{number}", f"{text(number * 3)} {WORDS[number % 5]}", {"d1": 1}) for number in range(40)] + [
    Topic("none", "zzz", {"d1": 1})
]

IN_THIS_PROCESS = (
    "rag_posfix.retrieval.bm25.BM25Retriever._search",
    "rag_posfix.retrieval.dense.PassageRetriever._search",
    "rag_posfix.retrieval.hybrid.HybridRetriever._search",
    "rag_posfix.retrieval.index.bm25_index.BM25Index.build",
    "rag_posfix.retrieval.faiss_store.FaissVectorStore.embed_texts",
    "rag_posfix.retrieval.embeddings.SentenceEmbeddings._load",
    "tests.support.letter_embeddings.LetterEmbeddings.embed_query",
)


class Dying(LetterEmbeddings):
    """Ends its process at the first question that any process is asked."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self._marker = marker

    def embed_query(self, text):
        if text.startswith(TOPICS[20].question) and not self._marker.exists():
            self._marker.touch()
            os._exit(1)
        return super().embed_query(text)


def letters(settings):
    return LetterEmbeddings()


def dying(marker, settings):
    return Dying(marker)


def refused(settings):
    raise ConfigError("no such model")


@contextmanager
def nothing_is_done_here() -> Iterator[None]:
    with ExitStack() as patched:
        for name in IN_THIS_PROCESS:
            patched.enter_context(patch(name, side_effect=RuntimeError(f"{name} in the process of the command")))
        yield


def rankings(found) -> dict:
    """Return what was found, without how long it took."""
    return {name: {**asdict(one), "seconds": 0} for name, one in found.rankings.items()}


def here(first_stage: str, folder: Path | None = None, model: LetterEmbeddings | None = None):
    spec = parse_method(first_stage, "first stage", "k1=1.2")
    return open_first_stage(spec, COLLECTION, lambda: model or LetterEmbeddings(), folder)


def there(first_stage: str, workers: int, opener, folder: Path | None = None, progress=silent):
    spec = parse_method(first_stage, "first stage", "k1=1.2")
    return ray_first_stage(spec, COLLECTION, Settings(), workers, folder, progress, opener)


def compared(first_stage: str, workers: int, opener) -> dict:
    """Return what both places find."""
    local = here(first_stage)
    expected = rankings(retrieve(local, TOPICS, DEPTH, RankJournal()))
    with nothing_is_done_here(), there(first_stage, workers, opener) as stage:
        found = rankings(retrieve(stage, TOPICS, DEPTH, RankJournal()))
    return {"here": expected, "there": found, "identities": [local.identity, stage.identity]}


def kept(folder: Path) -> dict:
    """Return the same of vectors, and what the folder of a run spares a later one, in either place."""
    expected = rankings(retrieve(here("dense"), TOPICS, DEPTH, RankJournal()))
    journal, steps = folder / "journal.jsonl", []

    @contextmanager
    def progress(step):
        steps.append(step)
        yield lambda done, total: steps.append([done, total])

    with nothing_is_done_here(), there("dense", 2, letters, folder, progress) as stage:
        retrieve(stage, TOPICS[:30], DEPTH, RankJournal(journal))
        again = retrieve(stage, TOPICS, DEPTH, RankJournal(journal))
    model = LetterEmbeddings()
    local = retrieve(here("dense", folder, model), TOPICS, DEPTH, RankJournal(journal))
    return {
        "here": expected, "there": rankings(again), "reused": [len(again.reused), len(local.reused)],
        "embedded_again": len(model.texts), "steps": steps,
    }  # fmt: skip


def real(folder: Path) -> list[list[dict]]:
    """Return the rows of the whole experiment with the packaged embedding model: without Ray, and with it."""
    data = write_collection(folder / "beir")
    options = {"first_stage": "hybrid", "depth": 3, "settings": Settings()}
    expected = evaluate_reranking(data, [], **options)
    with nothing_is_done_here():
        found = evaluate_reranking(data, [], ray=True, ray_actors=1, **options)
    return [[{**row, "seconds": 0} for row in record.rows] for record in (expected, found)]


def failures() -> list[str]:
    """Return what is said of a model that cannot be loaded, and of words that cannot be counted."""
    said = []
    for first_stage, opener in (("dense", refused), ("bm25:k1=-1", letters)):
        try:
            with there(first_stage, 1, opener) as stage:
                retrieve(stage, TOPICS[:1], DEPTH, RankJournal())
        except EvaluationError as error:
            said.append(str(error))
    return said


def main(folder: str, journal: Path) -> None:
    import ray

    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20, _temp_dir=folder
    )
    marker = journal.with_name("died")
    found = {
        "bm25": compared("bm25:k1=1.2", 5, letters),  # more than there are CPUs
        "dense": kept(journal.parent),
        "hybrid": compared("hybrid:fusion=score:k1=0.5:candidates=20", 2, partial(dying, marker)),
        "died": marker.exists(),
        "real": real(journal.parent),
        "failures": failures(),
    }
    ray.shutdown()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
