"""A program of its own for the tests of Ray: a local cluster of two CPUs, the same rankings there and here, failures.

Ray opens sockets and leaves files open at exit, which the test run itself forbids. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.ranking.rankings import QueryCandidates, RankJournal, RerankerChoice, local_ranker, rerank
from rag_posfix.evaluation.ranking.ray_backend import ray_rankers
from rag_posfix.settings import Settings
from tests.support.rerank_data import CORPUS as ROWS
from tests.support.rerank_data import open_by_length, open_failing, open_nothing

CHOICE = RerankerChoice("by_length")


def queries() -> list[QueryCandidates]:
    """Eleven queries with different candidates, one without any."""
    from langchain_core.documents import Document

    documents = [
        Document(id=row["_id"], page_content=row["text"], metadata={"title": "é", "relevance_score": 0.5})
        for row in ROWS[:4]
    ]
    return [QueryCandidates(f"q{n}", f"question {n}", tuple(documents[n % 4 :])) for n in range(10)] + [
        QueryCandidates("empty", "why", ())
    ]


def rankings(found) -> dict:
    """Return what was ranked, without how long it took."""
    return {name: {**asdict(one), "seconds": 0} for name, one in found.rankings.items()}


def main(folder: str, journal: str) -> None:
    import ray

    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20, _temp_dir=folder
    )
    here = rerank(local_ranker(open_by_length(CHOICE, Settings())), queries(), RankJournal())
    with ray_rankers(Settings(), 2, open_by_length) as ranker_of:
        there = rerank(ranker_of(CHOICE), queries(), RankJournal(journal))
        again = rerank(ranker_of(CHOICE), queries(), RankJournal(journal))
        stayed = ray.is_initialized()
    failures = []
    for opener in (open_failing, open_nothing):
        with ray_rankers(Settings(), 1, opener) as ranker_of:
            try:
                rerank(ranker_of(CHOICE), queries()[:1], RankJournal())
            except EvaluationError as error:
                failures.append(str(error))
    ray.shutdown()
    found = {
        "here": rankings(here), "there": rankings(there), "reused": len(again.reused), "stayed": stayed,
        "failures": failures, "seconds": [one.seconds for one in there.rankings.values()],
    }  # fmt: skip
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    from pathlib import Path

    main(sys.argv[1], Path(sys.argv[2]))
