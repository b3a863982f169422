"""A program for the tests of Ray and Ray Serve: one local cluster of two CPUs finds what this process finds.

Ray opens sockets and leaves files open at exit, which the test run itself forbids. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import ConfigError, EvaluationError
from rag_posfix.evaluation import evaluate_positions, evaluate_reranking
from rag_posfix.evaluation.answers.experiment import AnswerJournal, check_arrangements
from rag_posfix.evaluation.answers.positions import answer_at_positions, answer_on_ray
from rag_posfix.evaluation.ranking.rankings import QueryCandidates, RankJournal, RerankerChoice, local_ranker, rerank
from rag_posfix.evaluation.ranking.reranking import ray_rankers
from rag_posfix.settings import Settings
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
ASKED = {"gold_positions": (0, 2), "n_documents": 3, "max_new_tokens": 4}


def open_answerer(arrangements, settings):
    return tiny_engine(), Alphabetical(), "alphabetical"


def fail_to_open(*_: object):
    raise ConfigError("no such model")


class Dying(Alphabetical):
    """Ends its process at the first question that any process is asked."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self._marker = marker

    def compress_documents(self, documents, query, callbacks=None):
        if query == QUESTIONS[9].question and not self._marker.exists():
            self._marker.touch()
            os._exit(1)
        return super().compress_documents(documents, query, callbacks)


def open_dying(marker, arrangements, settings):
    return tiny_engine(), Dying(marker), "alphabetical"


def answered(journal: Path) -> dict[str, Any]:
    progress: list[tuple[int, int]] = []
    marker = journal.with_suffix(".died")
    there = partial(answer_on_ray, arrangements=CHOICES, asked=ASKED, settings=Settings())
    here = answer_at_positions(tiny_engine(), QUESTIONS, CHOICES, reranker=Alphabetical(), **ASKED)
    rows, facts, relevance = there(
        QUESTIONS, journal=AnswerJournal(journal), actors=3,  # one more than there is room for
        progress=lambda *done: progress.append(done), opener=partial(open_dying, marker),
    )  # fmt: skip
    again = AnswerJournal(journal)
    repeated, _, _ = there(QUESTIONS[:9], journal=again, actors=1, opener=open_answerer)
    kept = AnswerJournal(journal)

    def fail():
        there(QUESTIONS[:1], journal=AnswerJournal(), actors=1, opener=fail_to_open)

    return {
        "here": [{**asdict(row), "seconds": 0} for row in here],
        "there": [{**asdict(row), "seconds": 0} for row in rows],
        "progress": progress, "relevance": relevance, "mitigations": list(facts["mitigations"]),
        "failures": errors_of(fail), "kept": len(kept.rows()), "answers": len({row.answer for row in rows}),
        "reused": [row.reused for row in repeated], "sources": len(again.sources),
        "died": marker.exists(),
    }  # fmt: skip


# The commands' own entry points, with the packaged models.


def real(folder: Path) -> dict[str, Any]:
    """Return the rows of both experiments without Ray, and with it."""
    settings = Settings(model="smollm2")
    rerank_options = {"rerankers": [RerankerChoice("embedding")], "depth": 3, "settings": settings}
    answer_options = {"gold_positions": (0, 2), "documents": 3, "max_tokens": 3, "settings": settings}
    places: list[dict[str, Any]] = [{}, {"ray": True, "ray_actors": 1}]
    data = write_collection(folder)
    return {
        "reranked": [without_time(evaluate_reranking(data, **rerank_options, **place)) for place in places],
        "answered": [
            without_time(evaluate_positions(EXAMPLES[:1], [MitigationChoice("none")], **answer_options, **place))
            for place in places
        ],
    }


def without_time(record) -> list[dict[str, Any]]:
    return [{**row, "seconds": 0} for row in record.rows]


def main(cluster_folder: str, folder: Path) -> None:
    import ray

    context = ray.init(
        num_cpus=2, include_dashboard=True, dashboard_port=int(free_port()), log_to_driver=False,
        object_store_memory=100 * 2**20, _temp_dir=cluster_folder,
    )  # fmt: skip
    result = {
        "ranked": ranked(folder / "ranked.jsonl"),
        "answered": answered(folder / "answered.jsonl"),
        "real": real(folder / "beir"),
        "served": serve_results(folder / "served", context.dashboard_url),
    }
    ray.shutdown()
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
