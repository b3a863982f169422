"""Whether the answer to a question depends on how many others are answered at the same time, over HTTP.

    python -m benchmarks.equal_under_load --out DIR [--dtype bfloat16] [--batch-invariant auto|on|blocks|off]
        [--questions 100] [--methods A,B] [--together 1,3,8,16] [--passages 4] [--new-tokens 16]

Every question of the demo corpus, with passages drawn around the gold one, is asked alone and then by several
connections at a time. Each connection asks its next question when it has an answer, so requests join and leave.
Answers and log-probabilities are compared exactly, and each load is timed. The passages of order-invariant methods are
shuffled meanwhile.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import httpx2

from benchmarks.study import study_options, write_study
from benchmarks.tables import filled
from rag_posfix.demo_data import load_passages, load_questions
from rag_posfix.generation.batching.scheduler import unbatched
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.pipeline.build import build_pipeline
from rag_posfix.settings import CacheSettings, Settings
from tests.support.serving import CHAT, serving

METHODS = "none,sorted_inter_document,parallel_encoding,default"

COLUMNS = {
    "dtype": "{settings[dtype]}", "batch-invariant": "`{settings[batch_invariant]}`", "method": "`{method}`",
    "connections": "{together}", "different answers": "{different_answers} of {questions}",
    "different log-probabilities": "{different_scores} of {questions}",
    "questions per second": "{rate:.2f}",
}  # fmt: skip


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = study_options("equal_under_load", __doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--batch-invariant", default="auto", choices=("auto", "on", "blocks", "off"))
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--together", default="1,3,8,16", help="how many connections ask, one load after another")
    parser.add_argument("--passages", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=16)
    return parser.parse_args(arguments)


def demo_bodies(count: int, passages: int) -> list[dict[str, Any]]:
    """Return request bodies: question i of the demo corpus, with other distractors in each round over the corpus."""
    corpus = {passage.id: passage for passage in load_passages()}
    questions, bodies = load_questions(), []
    for number in range(count):
        question, draw = questions[number % len(questions)], random.Random(number)
        ids = [question.gold, *draw.sample(question.distractors, passages - 1)]
        draw.shuffle(ids)
        documents = [{"id": name, "text": corpus[str(name)].page_content} for name in ids]
        bodies.append({"messages": [{"role": "user", "content": question.question}], "documents": documents})
    return bodies


def ask(client: httpx2.Client, body: dict[str, Any]) -> tuple[str, tuple[float, ...]]:
    """Return an answer and the log-probabilities of its tokens."""
    choice = client.post(CHAT, json=body).raise_for_status().json()["choices"][0]
    return choice["message"]["content"], tuple(token["logprob"] for token in choice["logprobs"]["content"])


def compare_loads(
    url: str, bodies: Sequence[dict[str, Any]], methods: Sequence[str], together: Sequence[int], new_tokens: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each method and load: how many answers and log-probabilities are not those of one at a time."""
    # Connections that wait longer than the service keeps them would be closed while they are used again.
    limits = httpx2.Limits(max_keepalive_connections=32, keepalive_expiry=2.0)
    with httpx2.Client(base_url=url, timeout=600, limits=limits) as client:
        for method in methods:
            fields = {"model": "default", "max_tokens": new_tokens, "temperature": 0, "logprobs": True}
            requests = [{**body, **fields, "posfix": {"mitigation": method}} for body in bodies]
            alone = [ask(client, body) for body in requests]
            for count in together:
                if count > 1 and MITIGATIONS.get(method).order_invariant:
                    requests = [_shuffle_passages(body, f"{count} {number}") for number, body in enumerate(requests)]
                begun = time.perf_counter()
                with ThreadPoolExecutor(count) as pool:
                    answers = list(pool.map(lambda body: ask(client, body), requests))
                seconds = time.perf_counter() - begun
                pairs = list(zip(answers, alone, strict=True))
                yield {
                    "method": method,
                    "together": count,
                    "questions": len(requests),
                    "seconds": seconds,
                    "different_answers": sum(answer[0] != expected[0] for answer, expected in pairs),
                    "different_scores": sum(answer[1] != expected[1] for answer, expected in pairs),
                }


def _shuffle_passages(body: dict[str, Any], seed: str) -> dict[str, Any]:
    documents = list(body["documents"])
    random.Random(seed).shuffle(documents)
    return {**body, "documents": documents}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    chosen = options(arguments)
    settings = Settings(
        model=chosen.model,
        dtype=chosen.dtype,
        batch_invariant=chosen.batch_invariant,
        cache=CacheSettings(enabled=False),
    )
    pipeline = build_pipeline(settings)
    engine: Any = unbatched(pipeline.generator)
    methods, together = chosen.methods.split(","), [int(count) for count in chosen.together.split(",")]
    rows = []
    with serving(pipeline, max_queue=max(together)) as url:
        bodies = demo_bodies(chosen.questions, chosen.passages)
        for row in compare_loads(url, bodies, methods, together, chosen.new_tokens):
            rows.append(row)
            print(json.dumps(row))
    pipeline.close()
    summary = {"pass_rows": asdict(engine.loaded.pass_rows), "rows": rows}
    cells = ({**row, "settings": vars(chosen), "rate": row["questions"] / row["seconds"]} for row in rows)
    write_study(chosen, "equal-under-load", summary, tables={"equal-under-load": filled(COLUMNS, cells)})
    return summary


if __name__ == "__main__":
    main()
