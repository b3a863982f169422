"""What order-free answers cost on a server with a prefix cache, against the plain prompt in a shuffled order.

    python -m benchmarks.engines --model openai:NAME@URL [--documents 14] [--tokens 150] [--questions 40]
        [--concurrent 8] [--best 5] [--ordered 0] [--orders 6] [--new-tokens 8] [--out DIR]

New questions over the same documents, each with the documents in another order: the workload on which caches of
passages were reported to decay. ``plain`` reads all documents in that order; ``judged`` is ``yes_no:top_n=BEST`` with
``reverse``. Both run in one process against one server, in turns of ten questions, so that other load meets both; the
documents are other ones for each, and for each run. First tokens are the client's, judging included; the first ten
questions are cold. ``--ordered`` asks so many questions in ``--orders`` different orders and counts those with more
than one answer; the control is one order, asked as often. Each of the two is the traffic of the other.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from benchmarks.study import study_options, write_study
from rag_posfix.contracts.generator import sum_usage
from rag_posfix.contracts.request import Sampling, Usage
from rag_posfix.demo_data import load_passages
from rag_posfix.pipeline.build import build_pipeline
from rag_posfix.pipeline.pipeline import Pipeline, Question
from rag_posfix.settings import CacheSettings, RemoteSettings, Settings

BLOCK = 10
"""Questions of a turn."""
SUBJECTS = ("bridge", "harbour", "mill", "ferry", "tower", "school", "market", "garden", "library", "railway")
VERBS = ("built", "closed", "named", "painted", "sold", "moved", "measured", "opened", "repaired", "counted")


@dataclass(frozen=True, slots=True)
class Asked:
    """One answered question: seconds to its first piece, and its tokens."""

    first_token: float
    usage: Usage
    text: str
    failed_to_judge: bool


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = study_options("engines", __doc__)
    parser.add_argument("--model", required=True, help="openai:NAME@URL")
    parser.add_argument("--documents", type=int, default=14)
    parser.add_argument("--tokens", type=int, default=150, help="about so many tokens per document")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--concurrent", type=int, default=8)
    parser.add_argument("--best", type=int, default=5)
    parser.add_argument("--ordered", type=int, default=0, help="so many questions are asked in several orders")
    parser.add_argument("--orders", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--window", type=int, default=8192)
    return parser.parse_args(arguments)


def documents_of(count: int, tokens: int, name: str) -> list[Document]:
    """Return documents of the demo corpus, joined to about ``tokens`` tokens (3/4 of a word each) and marked."""
    words = " ".join(passage.page_content for passage in load_passages()).split()
    length = max(tokens * 3 // 4, 1)
    return [
        Document(
            f"Note {name}-{number}. "
            + " ".join((words * (1 + count * length // len(words)))[number * length :][:length]),
            id=f"{name}-{number}",
        )
        for number in range(count)
    ]


def question_text(number: int) -> str:
    """Return a question that differs for each number."""
    subject, verb = SUBJECTS[number % len(SUBJECTS)], VERBS[number // len(SUBJECTS) % len(VERBS)]
    return f"Which {subject} was {verb} in the year {1850 + number}?"


def ask(pipeline: Pipeline, documents: Sequence[Document], number: int, new_tokens: int) -> Asked:
    sampling = Sampling(max_tokens=new_tokens)
    started, first = time.perf_counter(), 0.0
    for chunk in pipeline.stream(Question(question_text(number), documents=list(documents), sampling=sampling)):
        first = first or time.perf_counter() - started
        last = chunk
    if last.answer is None:
        raise RuntimeError("the stream ended without an answer")
    answer = last.answer
    return Asked(first, answer.usage, answer.text, bool(answer.warnings))


def summary_of(asked: Sequence[Asked], block_seconds: Sequence[float]) -> dict[str, Any]:
    usage = sum_usage([each.usage for each in asked])
    warm = asked[BLOCK:] or asked
    return {
        "first_token_cold_s": round(statistics.median(each.first_token for each in asked[:BLOCK]), 4),
        "first_token_warm_s": round(statistics.median(each.first_token for each in warm), 4),
        "questions_per_s_by_ten": [round(BLOCK / seconds, 3) for seconds in block_seconds],
        "prompt_tokens": usage.prompt_tokens,
        "cached_share": round(usage.cached_tokens / max(usage.prompt_tokens, 1), 3),
        "not_judged": sum(each.failed_to_judge for each in asked),
    }


def orders_of(documents: Sequence[Document], count: int) -> list[list[Document]]:
    """Return ``count`` different orders of the documents, or all where there are fewer."""
    if math.factorial(len(documents)) <= count:
        return [list(each) for each in itertools.permutations(documents)]
    random_, orders = random.Random(0), dict[tuple[str | None, ...], list[Document]]()
    while len(orders) < count:
        order = random_.sample(documents, len(documents))
        orders[tuple(each.id for each in order)] = order
    return list(orders.values())


def changed_answers(
    pipeline: Pipeline, documents: Sequence[Document], chosen: argparse.Namespace, threads: ThreadPoolExecutor
) -> dict[str, int]:
    """Return how many questions have more than one answer over several orders, and over one order repeated.

    The answers of both are written at the same time, as many as are asked for concurrently.
    """
    orders = orders_of(documents, chosen.orders)
    asked = [
        (number, kind, orders[index if kind == "orders" else 0])
        for number in range(chosen.ordered)
        for index in range(len(orders))
        for kind in ("orders", "same_order")
    ]
    answers = threads.map(lambda each: ask(pipeline, each[2], each[0], chosen.new_tokens).text, asked)
    texts: dict[tuple[int, str], set[str]] = {}
    for (number, kind, _), text in zip(asked, answers, strict=True):
        texts.setdefault((number, kind), set()).add(text)
    kinds = ("orders", "same_order")
    return {kind: sum(len(texts[number, kind]) > 1 for number in range(chosen.ordered)) for kind in kinds}


def settings_of(chosen: argparse.Namespace, folder: str, judged: bool) -> Settings:
    return Settings(
        model=chosen.model, mitigation="none", max_tokens=chosen.new_tokens, cache_dir=Path(folder),
        cache=CacheSettings(enabled=False), remote=RemoteSettings(context_window=chosen.window, timeout_seconds=600),
        reranker_deadline_seconds=600, reranker=f"yes_no:top_n={chosen.best}" if judged else None,
        order="reverse" if judged else "original",
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    chosen = options(arguments)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(chosen.concurrent) as threads:
        ways: dict[str, tuple[Pipeline, list[Document]]] = {}
        for name in ("plain", "judged"):
            documents = documents_of(chosen.documents, chosen.tokens, f"{name}-{os.getpid()}")
            if name == "plain":  # scored, so that no embedding model runs
                documents = [
                    Document(each.page_content, id=each.id, metadata={"relevance_score": 0.5}) for each in documents
                ]
            ways[name] = build_pipeline(settings_of(chosen, folder, name == "judged")), documents
        asked: dict[str, list[Asked]] = {name: [] for name in ways}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for pipeline, documents in ways.values():  # a server's first requests pay for its start
            ask(pipeline, [documents[0].model_copy(update={"page_content": "Warm up."})], 0, chosen.new_tokens)
        for start in range(0, chosen.questions, BLOCK):
            for name, (pipeline, documents) in ways.items():
                started = time.perf_counter()
                numbers = range(start, start + BLOCK)
                asked[name] += threads.map(
                    lambda n, p=pipeline, d=documents: ask(
                        p, random.Random(n).sample(d, len(d)), n, chosen.new_tokens
                    ),
                    numbers,
                )
                seconds[name].append(time.perf_counter() - started)
        summary: dict[str, Any] = {name: summary_of(asked[name], seconds[name]) for name in ways}
        if chosen.ordered:
            summary |= {"changed": {name: changed_answers(*way, chosen, threads) for name, way in ways.items()}}
        for pipeline, _ in ways.values():
            pipeline.close()
    plain, judged = summary["plain"], summary["judged"]
    summary["ratios"] = {
        "first_token_cold": round(plain["first_token_cold_s"] / judged["first_token_cold_s"], 2),
        "first_token_warm": round(plain["first_token_warm_s"] / judged["first_token_warm_s"], 2),
        "questions_per_s": round(
            sum(seconds["plain"][1:] or seconds["plain"]) / sum(seconds["judged"][1:] or seconds["judged"]), 2
        ),
    }
    print(json.dumps(summary))
    write_study(chosen, "engines", summary)
    return summary


if __name__ == "__main__":
    main()
