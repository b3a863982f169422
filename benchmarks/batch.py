"""How much sooner many questions are answered together (``Pipeline.batch``) than one after another.

    python -m benchmarks.batch --out DIR [--questions 64] [--methods none,default] [--passages 4] [--new-tokens 64]
        [--shared] [--dtype auto] [--model smollm2]

Questions of the demo corpus, each with passages drawn around its gold passage; with ``--shared`` all have the passages
of the first. Both ways run on the same weights in one process, each with a passage store of its own that is empty at
the start. Answers are compared exactly. ``prefill_share`` is the part of the time one by one that reads prompts: it is
computed per token, so sharing steps cannot shorten it; ``bound`` is the ratio if decoding took no time at all.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.study import study_options, write_study
from rag_posfix.contracts.answer import Answer
from rag_posfix.contracts.generator import Generator
from rag_posfix.demo_data import load_passages, load_questions
from rag_posfix.pipeline.build import build_engine, build_pipeline
from rag_posfix.pipeline.pipeline import Pipeline, Question
from rag_posfix.settings import CacheSettings, Settings


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = study_options("batch", __doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--methods", default="none,default")
    parser.add_argument("--passages", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--shared", action="store_true", help="ask all questions about the same passages")
    return parser.parse_args(arguments)


def demo_questions(count: int, passages: int, shared: bool) -> list[Question]:
    """Return ``count`` different questions: other distractors in each round over the demo corpus."""
    corpus = {passage.id: passage for passage in load_passages()}
    rows, questions = load_questions(), []
    for number in range(count):
        row = rows[number % len(rows)]
        source, draw = (rows[0], random.Random(0)) if shared else (row, random.Random(number))
        ids = [source.gold, *draw.sample(source.distractors, passages - 1)]
        text = row.question if number < len(rows) else f"{row.question} ({number // len(rows) + 1})"
        documents = [
            corpus[name].model_copy(update={"metadata": {**corpus[name].metadata, "relevance_score": 1 - place / 10}})
            for place, name in enumerate(ids)
        ]  # with scores, as retrieved passages have: no reranker runs
        questions.append(Question(text, documents))
    return questions


def timed(run: Callable[[], list[Answer]]) -> tuple[list[Answer], float, float]:
    """Return the answers, and the seconds on the clock and of the processor, which other programs change less."""
    started, worked = time.perf_counter(), time.process_time()
    answers = run()
    return answers, time.perf_counter() - started, time.process_time() - worked


def measure(engine: Generator, settings: Settings, questions: Sequence[Question], warm: Question) -> dict[str, Any]:
    """Return times, their ratio, and how many answers differ, for one method."""

    def fresh() -> Pipeline:
        pipeline = build_pipeline(settings, generator=engine)
        pipeline.ask(warm)
        return pipeline

    alone, together = fresh(), fresh()
    single, seconds, work = timed(lambda: [alone.ask(question) for question in questions])
    batch, batch_seconds, batch_work = timed(lambda: together.batch(questions))
    alone.close()
    together.close()
    prefill = sum(answer.timings["prefill"] for answer in single)
    return {
        "method": settings.mitigation,
        "one_by_one_s": round(seconds, 2),
        "batch_s": round(batch_seconds, 2),
        "ratio": round(seconds / batch_seconds, 2),
        "processor_ratio": round(work / batch_work, 2),
        "prefill_share": round(prefill / seconds, 3),
        "bound": round(seconds / prefill, 2),
        "different_answers": sum(a.text != b.text for a, b in zip(single, batch, strict=True)),
        "prompt_tokens": sum(answer.usage.prompt_tokens for answer in single),
        "cached_tokens": sum(answer.usage.cached_tokens for answer in single),
        "completion_tokens": sum(answer.usage.completion_tokens for answer in single),
    }


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    chosen = options(arguments)
    base = Settings(
        model=chosen.model, dtype=chosen.dtype, max_tokens=chosen.new_tokens, cache=CacheSettings(enabled=False)
    )
    engine = build_engine(base)
    questions = demo_questions(chosen.questions + 1, chosen.passages, chosen.shared)
    rows = []
    for method in chosen.methods.split(","):
        settings = base.model_copy(update={"mitigation": method})
        rows.append(measure(engine, settings, questions[:-1], questions[-1]))
        print(json.dumps(rows[-1]), flush=True)
    write_study(chosen, "batch", {"rows": rows})
    return rows


if __name__ == "__main__":
    main()
