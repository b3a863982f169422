"""A program of its own for the tests of Ray: the same answers on a local cluster of two CPUs and in this process.

Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import ConfigError, EvaluationError
from rag_posfix.evaluation.answers.answering import AnswerJournal
from rag_posfix.evaluation.answers.experiment import check_arrangements
from rag_posfix.evaluation.answers.positions import answer_at_positions
from rag_posfix.evaluation.answers.ray_backend import ray_answers
from rag_posfix.settings import Settings
from tests.support.tiny_evaluation import EXAMPLES, Alphabetical, tiny_engine

CHOICES = check_arrangements([MitigationChoice("none"), MitigationChoice("parallel_windows")])
QUESTIONS = [replace(EXAMPLES[n % 3], id=str(n), question=f"Why{n}") for n in range(11)]
ANSWER = partial(answer_at_positions, choices=CHOICES, gold_positions=(0, 2), n_documents=3, max_new_tokens=4)


def opened(arrangements, settings):
    return tiny_engine(), Alphabetical(), "alphabetical"


def refused(arrangements, settings):
    raise ConfigError("no such model")


def plain(rows) -> list[dict]:
    """Return rows without how long they took."""
    return [{**asdict(row), "seconds": 0} for row in rows]


def main(folder: str, journal: Path) -> None:
    import ray

    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20, _temp_dir=folder
    )
    progress: list[tuple[int, int]] = []
    here = ANSWER(tiny_engine(), QUESTIONS, reranker=Alphabetical(), rerankers={}, journal=AnswerJournal())
    with ray_answers(Settings(), CHOICES, 3, opener=opened) as there:  # one more than there is room for
        facts, relevance = there.facts()
        rows = there.rows(QUESTIONS, ANSWER, AnswerJournal(journal), lambda *done: progress.append(done))
        again = AnswerJournal(journal)
        repeated = there.rows(QUESTIONS[:9], ANSWER, again, lambda *_: None)
        kept = AnswerJournal(journal)
    failures = []
    with ray_answers(Settings(), CHOICES, 1, opener=refused) as there:
        try:
            there.facts()
        except EvaluationError as error:
            failures.append(str(error))
    ray.shutdown()
    found = {
        "here": plain(here), "there": plain(rows), "progress": progress, "relevance": relevance,
        "model": facts.get("model"), "mitigations": list(facts["mitigations"]), "failures": failures,
        "kept": len(kept.rows()), "answers": len({row.answer for row in rows}),
        "reused": [row.reused for row in repeated], "sources": len(again.sources),
    }  # fmt: skip
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
