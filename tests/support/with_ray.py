"""A program for the tests of Ray and Ray Serve: one local cluster of two CPUs finds what this process finds.

Ray opens sockets and leaves files open at exit, which the test run itself forbids. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from langchain_core.documents import Document

from rag_posfix.contracts.method_spec import parse_method
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import ConfigError, EvaluationError
from rag_posfix.evaluation import evaluate_reranking
from rag_posfix.evaluation.answers.experiment import AnswerJournal, check_arrangements
from rag_posfix.evaluation.answers.positions import answer_at_positions
from rag_posfix.evaluation.answers.ray_backend import ray_answers
from rag_posfix.evaluation.data.collection import Collection, Topic
from rag_posfix.evaluation.ranking.first_stage import open_first_stage, retrieve
from rag_posfix.evaluation.ranking.rankings import QueryCandidates, RankJournal, RerankerChoice, local_ranker, rerank
from rag_posfix.evaluation.ranking.ray_backend import ray_first_stage, ray_rankers
from rag_posfix.evaluation.record import silent
from rag_posfix.settings import Settings
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.redis_server import free_port
from tests.support.rerank_data import CORPUS, open_by_length, open_failing, write_collection
from tests.support.serve_with_ray import serve_results
from tests.support.tiny_evaluation import EXAMPLES, Alphabetical, tiny_engine


def rankings(result) -> dict[str, Any]:
    """Return what was ranked, without how long it took."""
    return {name: {**asdict(ranking), "seconds": 0} for name, ranking in result.rankings.items()}


def errors_of(*calls: Callable[[], object]) -> list[str]:
    messages = []
    for call in calls:
        try:
            call()
        except EvaluationError as error:
            messages.append(str(error))
    return messages


# Rerankers.

DOCUMENTS = [
    Document(id=row["_id"], page_content=row["text"], metadata={"title": "é", "relevance_score": 0.5})
    for row in CORPUS[:4]
]
QUERIES = [
    *(QueryCandidates(f"q{n}", f"question {n}", tuple(DOCUMENTS[n % 4 :])) for n in range(10)),
    QueryCandidates("empty", "why", ()),
]


def ranked(journal: Path) -> dict[str, Any]:
    import ray

    choice = RerankerChoice("by_length")
    here = rerank(local_ranker(open_by_length(choice, Settings())), QUERIES, RankJournal())
    with ray_rankers(Settings(), 2, open_by_length) as ranker_of:
        there = rerank(ranker_of(choice), QUERIES, RankJournal(journal))
        again = rerank(ranker_of(choice), QUERIES, RankJournal(journal))

    def fail():
        with ray_rankers(Settings(), 1, open_failing) as ranker_of:
            rerank(ranker_of(choice), QUERIES[:1], RankJournal())

    return {
        "here": rankings(here), "there": rankings(there), "reused": len(again.reused), "stayed": ray.is_initialized(),
        "failures": errors_of(fail),
        "seconds": [ranking.seconds for ranking in there.rankings.values()],
    }  # fmt: skip


# Answers.

CHOICES = check_arrangements([MitigationChoice("none"), MitigationChoice("parallel_windows")])
QUESTIONS = [replace(EXAMPLES[n % 3], id=str(n), question=f"Why{n}") for n in range(11)]
ANSWER = partial(answer_at_positions, choices=CHOICES, gold_positions=(0, 2), n_documents=3, max_new_tokens=4)


def open_answerer(arrangements, settings):
    return tiny_engine(), Alphabetical(), "alphabetical"


def fail_to_open(*_: object):
    raise ConfigError("no such model")


def answered(journal: Path) -> dict[str, Any]:
    progress: list[tuple[int, int]] = []
    here = ANSWER(tiny_engine(), QUESTIONS, reranker=Alphabetical(), rerankers={}, journal=AnswerJournal())
    with ray_answers(Settings(), CHOICES, 3, opener=open_answerer) as there:  # one more than there is room for
        facts, relevance = there.facts()
        rows = there.rows(QUESTIONS, ANSWER, AnswerJournal(journal), lambda *done: progress.append(done))
        again = AnswerJournal(journal)
        repeated = there.rows(QUESTIONS[:9], ANSWER, again, lambda *_: None)
        kept = AnswerJournal(journal)

    def fail():
        with ray_answers(Settings(), CHOICES, 1, opener=fail_to_open) as there:
            there.facts()

    return {
        "here": [{**asdict(row), "seconds": 0} for row in here],
        "there": [{**asdict(row), "seconds": 0} for row in rows],
        "progress": progress, "relevance": relevance, "mitigations": list(facts["mitigations"]),
        "failures": errors_of(fail), "kept": len(kept.rows()), "answers": len({row.answer for row in rows}),
        "reused": [row.reused for row in repeated], "sources": len(again.sources),
    }  # fmt: skip


# First stages. While the cluster is asked, embedding, counting and searching in this process raise.

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
    "rag_posfix.retrieval.base.PassageRetriever._search",
    "rag_posfix.retrieval.hybrid.HybridRetriever._search",
    "rag_posfix.retrieval.index.file_formats.BM25Index.build",
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


@contextmanager
def nothing_is_done_here() -> Iterator[None]:
    with ExitStack() as patched:
        for name in IN_THIS_PROCESS:
            patched.enter_context(patch(name, side_effect=RuntimeError(f"{name} in the process of the command")))
        yield


def local_stage(first_stage: str, folder: Path | None = None, model: LetterEmbeddings | None = None):
    spec = parse_method(first_stage, "first stage", "k1=1.2")
    return open_first_stage(spec, COLLECTION, lambda: model or LetterEmbeddings(), folder)


def cluster_stage(first_stage: str, workers: int, opener, folder: Path | None = None, progress=silent):
    spec = parse_method(first_stage, "first stage", "k1=1.2")
    return ray_first_stage(spec, COLLECTION, Settings(), workers, folder, progress, opener)


def compared(first_stage: str, workers: int, opener) -> dict[str, Any]:
    """Return what both places find."""
    local = local_stage(first_stage)
    expected = rankings(retrieve(local, TOPICS, DEPTH, RankJournal()))
    with nothing_is_done_here(), cluster_stage(first_stage, workers, opener) as stage:
        result = rankings(retrieve(stage, TOPICS, DEPTH, RankJournal()))
    return {"here": expected, "there": result, "identities": [local.identity, stage.identity]}


def compared_dense(folder: Path) -> dict[str, Any]:
    """Return the same of vectors, and what the folder of a run spares a later one, in either place."""
    expected = rankings(retrieve(local_stage("dense"), TOPICS, DEPTH, RankJournal()))
    journal, steps = folder / "journal.jsonl", []

    @contextmanager
    def progress(step):
        steps.append(step)
        yield lambda done, total: steps.append([done, total])

    with nothing_is_done_here(), cluster_stage("dense", 2, letters, folder, progress) as stage:
        retrieve(stage, TOPICS[:30], DEPTH, RankJournal(journal))
        again = retrieve(stage, TOPICS, DEPTH, RankJournal(journal))
    model = LetterEmbeddings()
    local = retrieve(local_stage("dense", folder, model), TOPICS, DEPTH, RankJournal(journal))
    return {
        "here": expected, "there": rankings(again), "reused": [len(again.reused), len(local.reused)],
        "embedded_again": len(model.texts), "steps": steps,
    }  # fmt: skip


def real_experiment(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the rows of the whole experiment with the packaged embedding model: without Ray, and with it."""
    data = write_collection(folder / "beir")
    options = {"first_stage": "hybrid", "depth": 3, "settings": Settings()}
    expected = evaluate_reranking(data, [], **options)
    with nothing_is_done_here():
        result = evaluate_reranking(data, [], ray=True, ray_actors=1, **options)
    return [[{**row, "seconds": 0} for row in record.rows] for record in (expected, result)]


def retrieved(folder: Path) -> dict[str, Any]:
    def fail():
        with cluster_stage("bm25:k1=-1", 1, letters) as stage:
            retrieve(stage, TOPICS[:1], DEPTH, RankJournal())

    marker = folder / "died"
    return {
        "bm25": compared("bm25:k1=1.2", 3, letters),  # more than there are CPUs
        "dense": compared_dense(folder),
        "hybrid": compared("hybrid:fusion=score:k1=0.5:candidates=20", 2, partial(dying, marker)),
        "died": marker.exists(),
        "real": real_experiment(folder),
        "failures": errors_of(fail),
    }


def main(cluster_folder: str, folder: Path) -> None:
    import ray

    context = ray.init(
        num_cpus=2, include_dashboard=True, dashboard_port=int(free_port()), log_to_driver=False,
        object_store_memory=100 * 2**20, _temp_dir=cluster_folder,
    )  # fmt: skip
    (folder / "retrieved").mkdir()
    result = {
        "ranked": ranked(folder / "ranked.jsonl"),
        "answered": answered(folder / "answered.jsonl"),
        "retrieved": retrieved(folder / "retrieved"),
        "served": serve_results(folder / "served", context.dashboard_url),
    }
    ray.shutdown()
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
