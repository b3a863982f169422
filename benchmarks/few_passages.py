"""What a judge and the few passages that it chooses cost, from question to first token, against a plain prompt.

    python -m benchmarks.few_passages [--documents 20] [--tokens 150] [--rounds 3] [--new-tokens 12] [--model smollm2]
        [--arrangement NAME ...] [--out DIR]

``rag-posfix bench`` times methods on a given prompt; an arrangement with a judge reads all passages before
there is one. Here each arrangement is a pipeline with a passage store of its own. In each round it is asked a question
with passages that it has not seen (cold), and another question with the same passages in another order (warm). Times
are divided by those of the stock model of transformers on a prompt of all passages, timed before and after each
arrangement. Ratios are medians of rounds. All retrieved passages are read, and so is the answer cache.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from langchain_core.documents import Document

from benchmarks.study import study_options, write_study
from benchmarks.tables import filled, table
from rag_posfix.contracts.answer import Question
from rag_posfix.demo_data import load_questions
from rag_posfix.evaluation.answers.experiment import Arrangement, parse_arrangement
from rag_posfix.evaluation.record import model_facts
from rag_posfix.evaluation.speed.bench import TimedRun, bench_layout, stock_run
from rag_posfix.generation.engine import Engine
from rag_posfix.pipeline.build import build_engine, build_pipeline
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.settings import CacheSettings, Settings

ARRANGEMENTS = (
    "none",
    "default",
    "sorted_inter_document",
    "yes_no:top_n=3/reverse/none",
    "yes_no:top_n=3/original/sorted_inter_document",
    "yes_no:top_n=3/original/inter_document",
)
Reading = dict[str, float]

COLUMNS = {
    "model, passages": "{size}", "arrangement": "`{name}`", "cold": "{cold:.2f}", "warm": "{warm:.2f}",
    "decode": "{decode:.2f}", "prompt tokens from the store, warm": "{cached:.0%}",
}  # fmt: skip


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = study_options("few_passages", __doc__)
    parser.add_argument("--documents", type=int, default=20, help="passages per question")
    parser.add_argument("--tokens", type=int, default=150, help="tokens per passage")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=12, help="of an answer at most")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--arrangement", action="append", help="repeatable")
    return parser.parse_args(arguments)


def passages_of_round(engine: Engine, documents: int, tokens: int, number: int) -> list[Document]:
    """Return passages of real words; those of each round begin with its number, so that none was read before."""
    layout = bench_layout(engine.encoder, documents, tokens)
    texts = [engine.encoder.decode(layout.token_ids[span.start : span.stop]) for span in layout.passages]
    return [
        Document(f"{number}. {text.strip()}", metadata={"relevance_score": 1 - place / len(texts)})
        for place, text in enumerate(texts)
    ]


def answer_time(pipeline: Pipeline, arrangement: Arrangement, text: str, documents: list[Document]) -> Reading:
    """Ask a question; return seconds to the first token, tokens per second after it, share of cached tokens."""
    question = Question(
        text, documents, mitigation=arrangement.mitigation, order=arrangement.order, reranker=arrangement.reranker,
        min_relevance="off", use_cache=False, allow_unsupported=True,
    )  # fmt: skip
    answer = pipeline.ask(question)
    times, usage = answer.timings, answer.usage
    rate = (usage.completion_tokens - 1) / times["decode"] if usage.completion_tokens > 1 else 0.0
    first = sum(seconds for phase, seconds in times.items() if phase != "decode")
    return {"first_s": first, "tokens_per_s": rate, "cached": usage.cached_tokens / usage.prompt_tokens}


def measure_round(
    pipelines: dict[str, Pipeline], stock: TimedRun, passages: list[Document], number: int, new_tokens: int
) -> dict[str, Reading]:
    """Return the ratios of each arrangement to the stock runs before and after it."""
    questions = [row.question for row in load_questions()]
    cold, warm = questions[2 * number % len(questions)], questions[(2 * number + 1) % len(questions)]
    shuffled = random.Random(number).sample(passages, len(passages))
    ratios, before = {}, stock(new_tokens)
    for name, pipeline in pipelines.items():
        arrangement = parse_arrangement(name)
        fresh = answer_time(pipeline, arrangement, cold, passages)
        again = answer_time(pipeline, arrangement, warm, shuffled)
        after = stock(new_tokens)
        first = fmean((before[0], after[0]))
        decode = fmean((new_tokens / before[1], new_tokens / after[1]))
        rates = [reading["tokens_per_s"] for reading in (fresh, again) if reading["tokens_per_s"]]
        ratios[name] = {
            "cold": fresh["first_s"] / first,
            "warm": again["first_s"] / first,
            "decode": fmean(rates) / decode if rates else 0.0,
            "cached": again["cached"],
            "stock_s": first,
        }
        before = after
    return ratios


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    chosen = options(arguments)
    names = list(dict.fromkeys(chosen.arrangement or ARRANGEMENTS))
    settings = Settings(
        model=chosen.model, max_tokens=chosen.new_tokens, cache=CacheSettings(enabled=False),
        reranker_deadline_seconds=600,
    )  # fmt: skip
    engine = build_engine(settings)
    stock = stock_run(engine, bench_layout(engine.encoder, chosen.documents, chosen.tokens))
    pipelines = {name: build_pipeline(settings, generator=engine) for name in names}
    rounds = []
    for number in range(chosen.rounds + 1):  # the first one sets up threads and kernels, and is left out
        passages = passages_of_round(engine, chosen.documents, chosen.tokens, number)
        rounds.append(measure_round(pipelines, stock, passages, number, chosen.new_tokens))
    for pipeline in pipelines.values():
        pipeline.close()
    summary = {
        name: {key: round(median(one[name][key] for one in rounds[1:]), 3) for key in rounds[0][name]}
        for name in names
    }
    facts = model_facts(engine)
    size = f"{facts['model']}, {chosen.documents} x {chosen.tokens}"
    table_rows = ({"size": size, "name": name, **ratios} for name, ratios in summary.items())
    tables = {"few-passages": filled(COLUMNS, table_rows)}
    print(table([{"kind": "few-passages", "tables": tables}]))
    write_study(chosen, "few-passages", summary, **facts, tables=tables)
    return summary


if __name__ == "__main__":
    main()
