"""Conversations, measured: ``python -m benchmarks.conversation [PART ...] [--model M] [--mitigation NAME] --out DIR``.

Parts: ``ranks`` (rank of the gold passage of a follow-up by query), ``answers`` (accuracy by query, and with passages
before and after the history) and ``cache`` (cached tokens, bytes and first tokens by turn and user). Each writes a
record and prints its table; without a part all are measured. The conversations are ``benchmarks/conversations.jsonl``,
the passages those of the demo. Earlier turns have their accepted answers, so all conditions read the same history.
An interrupted part ``answers`` continues.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.keep_record import RESULTS
from benchmarks.tables import filled, table
from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.generator import ChatMessage, Generator
from rag_posfix.contracts.request import Sampling
from rag_posfix.contracts.retrieval import Retriever, SearchQuery, retrieve_query
from rag_posfix.demo_data import load_passages
from rag_posfix.evaluation.record import environment, file_digest, model_facts, save_record
from rag_posfix.evaluation.statistics import best_subspan_em, difference_interval, first_line, mcnemar_p
from rag_posfix.generation.batching.scheduler import unbatched
from rag_posfix.pipeline.build import build_embeddings, build_engine, build_pipeline
from rag_posfix.pipeline.pipeline import Pipeline, Question
from rag_posfix.pipeline.query import DECAY, QueryChoice, search_query
from rag_posfix.retrieval.base import PassageRetriever
from rag_posfix.retrieval.bm25 import BM25Retriever
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.hybrid import HybridRetriever
from rag_posfix.settings import Settings

CONVERSATIONS = Path(__file__).with_name("conversations.jsonl")
PARTS = ("ranks", "answers", "cache")
WEIGHTS = tuple(round(0.1 * step, 1) for step in range(11))
"""Weights of the message before the question that are compared; 0 is ``last``."""
K = 5
MAX_TOKENS = 16
SYSTEMS = ("", "The user is Ann. Be brief.", "You help the archive of Port Lannick. The user is Bo, who is nine.")
CONDITIONS: Mapping[str, tuple[QueryChoice, bool]] = {
    "history": ("history", False),
    "history, history first": ("history", True),
    "last": ("last", False),
    "rewrite": ("rewrite", False),
}
"""Query, and whether the history is before the passages, by name."""


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A question after others; ``history`` has the accepted answers of the turns before it."""

    id: str
    question: str
    answers: tuple[str, ...]
    gold: str
    history: tuple[ChatMessage, ...]

    @property
    def half(self) -> int:
        """0 or 1 by the number of the conversation within its kind, so that both halves have all kinds."""
        return int(self.id.partition("/")[0].rpartition("-")[2]) % 2


def load_follow_ups(path: Path = CONVERSATIONS) -> list[FollowUp]:
    """Return every turn but the first of each conversation."""
    follow_ups = []
    for line in path.read_text("utf-8").splitlines():
        row, history = json.loads(line), list[ChatMessage]()
        for number, turn in enumerate(row["turns"]):
            if history:
                follow_ups.append(
                    FollowUp(
                        f"{row['id']}/{number}", turn["question"], tuple(turn["answers"]), turn["gold"], tuple(history)
                    )
                )
            history += [
                {"role": "user", "content": turn["question"]},
                {"role": "assistant", "content": turn["answers"][0]},
            ]
    return follow_ups


def build_retrievers(settings: Settings) -> dict[str, Retriever]:
    """Return retrievers of the passages of the demo by name."""
    passages = load_passages()
    store = FaissVectorStore(build_embeddings(settings))
    store.add_documents(passages)
    dense, words = PassageRetriever(store=store, k=K), BM25Retriever.from_documents(passages)
    return {"dense": dense, "bm25": words, "hybrid": HybridRetriever(retrievers=[dense, words])}


def reciprocal_rank(retriever: Retriever, query: SearchQuery, gold: str) -> float:
    """Return 1 / rank of the gold passage, 0 if it is not found."""
    ids = [document.id for document in retrieve_query(retriever, query, len(load_passages()), None)]
    return 1 / (ids.index(gold) + 1) if gold in ids else 0.0


def weighted_query(follow_up: FollowUp, weight: float, writer: Generator) -> SearchQuery:
    """Return the query of the history with another weight of a message relative to the next one."""
    query = search_query("history", follow_up.question, follow_up.history, writer)
    if weight == 0:
        return SearchQuery(follow_up.question)
    return replace(query, weighted=tuple((text, weight**age) for age, (text, _) in enumerate(query.weighted)))


def measure_ranks(settings: Settings) -> tuple[dict[str, Any], list[dict[str, Any]], Generator]:
    """Return summary and rows of the ranks of gold passages by query and retriever, and the writer."""
    follow_ups, retrievers, writer = load_follow_ups(), build_retrievers(settings), build_engine(settings)
    rows = []
    for follow_up in follow_ups:
        history = search_query("history", follow_up.question, follow_up.history, writer)
        queries = {
            "last": SearchQuery(follow_up.question),
            "joined": SearchQuery(history.text),
            "history": history,
            "rewrite": search_query("rewrite", follow_up.question, follow_up.history, writer),
            **{f"weight {weight}": weighted_query(follow_up, weight, writer) for weight in WEIGHTS},
        }
        rows += [
            {
                "id": follow_up.id, "half": follow_up.half, "retriever": name, "query": kind,
                "reciprocal_rank": reciprocal_rank(retriever, query, follow_up.gold),
                **({"text": query.text, "written": not query.weighted} if kind == "rewrite" else {}),
            }
            for name, retriever in retrievers.items()
            for kind, query in queries.items()
        ]  # fmt: skip
    return summarize_ranks(rows), rows, writer


def summarize_ranks(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return mean reciprocal ranks and hit@5 by query and retriever, and the weight that each half chooses."""
    kinds = ("last", "joined", "history", "rewrite")
    retrievers = list(dict.fromkeys(row["retriever"] for row in rows))

    def scores(kind: str, retriever: str | None = None, half: int | None = None) -> list[float]:
        return [
            row["reciprocal_rank"]
            for row in rows
            if row["query"] == kind and retriever in (None, row["retriever"]) and half in (None, row["half"])
        ]

    held_out = {}
    for half in (0, 1):
        weight = max(WEIGHTS, key=lambda weight: (round(fmean(scores(f"weight {weight}", None, half)), 6), weight))
        held_out[str(half)] = {
            "weight": weight,
            **{
                retriever: {
                    "chosen": fmean(scores(f"weight {weight}", retriever, 1 - half)),
                    **{kind: fmean(scores(kind, retriever, 1 - half)) for kind in kinds},
                }
                for retriever in retrievers
            },
        }
    written = [row["written"] for row in rows if row["query"] == "rewrite" and row["retriever"] == retrievers[0]]
    return {
        "n": len(written),
        "queries": {
            kind: {
                retriever: {
                    "reciprocal_rank": fmean(scores(kind, retriever)),
                    "hit@5": fmean(score >= 1 / K for score in scores(kind, retriever)),
                }
                for retriever in retrievers
            }
            for kind in kinds
        },
        "weights": {str(weight): {r: fmean(scores(f"weight {weight}", r)) for r in retrievers} for weight in WEIGHTS},
        "chosen_on_half": held_out,
        "default_weight": DECAY,
        "rewritten": fmean(written),
    }


def earlier_rows(journal: Path) -> list[dict[str, Any]]:
    """Return the rows of an interrupted run; a last line that was written in part is cut off the file."""
    if not journal.exists():
        return []
    written = journal.read_bytes()
    complete = written[: written.rfind(b"\n") + 1]
    os.truncate(journal, len(complete))
    return [json.loads(line) for line in complete.splitlines()]


def measure_answers(
    settings: Settings, mitigation: str, conditions: Sequence[str], journal: Path, limit: int | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]], Generator]:
    """Return summary and rows of the answers to follow-ups under each condition, and the reader."""
    retriever = build_retrievers(settings)["dense"]
    passages_first = build_pipeline(settings, retriever=retriever)
    pipelines = {
        False: passages_first,
        True: passages_first.with_template(replace(PromptTemplate(), history_first=True)),
    }
    rows = [row for row in earlier_rows(journal) if row["condition"] in conditions]
    done = {(row["id"], row["condition"]) for row in rows}
    follow_ups = load_follow_ups()[:limit]
    for follow_up in follow_ups:
        for condition in conditions:
            if (follow_up.id, condition) in done:
                continue
            query, history_first = CONDITIONS[condition]
            answer = pipelines[history_first].ask(
                Question(
                    follow_up.question, history=follow_up.history, query=query, k=K, mitigation=mitigation,
                    sampling=Sampling(max_tokens=MAX_TOKENS), use_cache=False, allow_unsupported=True,
                )
            )  # fmt: skip
            text = answer.text.strip()  # base models begin with empty lines
            rows.append(
                {
                    "id": follow_up.id, "condition": condition, "answer": answer.text, "query": answer.query,
                    "accuracy": best_subspan_em(first_line(text), follow_up.answers),
                    "has_gold": follow_up.gold in [document.id for document in answer.documents],
                    "cached_tokens": answer.usage.cached_tokens, "prompt_tokens": answer.usage.prompt_tokens,
                    "seconds": sum(answer.timings.values()),
                }
            )  # fmt: skip
            with journal.open("a", encoding="utf-8") as file:
                print(json.dumps(rows[-1]), file=file)
    generator = passages_first.generator
    passages_first.close()
    kept = {follow_up.id for follow_up in follow_ups}
    rows = [row for row in rows if row["id"] in kept]
    return summarize_answers(rows, mitigation), rows, generator


def summarize_answers(rows: Sequence[Mapping[str, Any]], mitigation: str) -> dict[str, Any]:
    """Return accuracy by condition, and the difference of each to passages first with the query ``history``."""
    by_condition: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_condition.setdefault(row["condition"], []).append(row)
    base = [row["accuracy"] for row in by_condition["history"]]
    summary = {}
    for condition, measured in by_condition.items():
        accuracy = [row["accuracy"] for row in measured]
        differences = [b - a for a, b in zip(accuracy, base, strict=True)]
        summary[condition] = {
            "accuracy": fmean(accuracy),
            "has_gold": fmean(row["has_gold"] for row in measured),
            "cached_share": sum(row["cached_tokens"] for row in measured)
            / sum(row["prompt_tokens"] for row in measured),
            "seconds": median(row["seconds"] for row in measured),
            "default_minus_this": fmean(differences),
            "ci95": list(difference_interval(differences)),
            "mcnemar_p": mcnemar_p(base, accuracy),
        }
    return {"n": len(base), "mitigation": mitigation, "conditions": summary}


@dataclass(frozen=True, slots=True)
class Turn:
    """What reading one prompt cost; bytes are those of the store after it."""

    cached_share: float
    cached_tokens: int
    prompt_tokens: int
    store_bytes: int
    first_token_seconds: float


def read_turn(pipeline: Pipeline, store: PassageStore, question: Question) -> tuple[Turn, str]:
    """Ask a question; return its costs, and the answer. The share is of the tokens of passages and constant prefix."""
    constant = sum(part.tokens for part in pipeline.preview(question).segments if part.kind == "passage")
    started, first = time.perf_counter(), None
    for chunk in pipeline.stream(question):
        first = first or time.perf_counter() - started
        answer = chunk.answer
    if answer is None or first is None:
        raise ValueError("a stream ended without an answer")
    usage, size = answer.usage, store.stats()["tiers"][0]["bytes"]
    return (
        Turn(min(1.0, usage.cached_tokens / constant), usage.cached_tokens, usage.prompt_tokens, size, first),
        answer.text,
    )


def measure_cache(
    settings: Settings, mitigation: str, repeats: int = 1
) -> tuple[dict[str, Any], list[dict[str, Any]], Generator]:
    """Return summary and rows of six turns over the same passages, for each layout and user, and the reader."""
    engine = build_engine(settings)
    documents = load_passages()[:K]
    questions = [row.question for row in load_follow_ups()[:6]]
    rows = []
    for layout, history_first in (("passages first", False), ("history first", True)):
        store = PassageStore([MemoryTier(2**31)])
        pipeline = build_pipeline(settings, generator=engine.with_passages(store))
        pipeline = pipeline.with_template(replace(PromptTemplate(), history_first=history_first))

        def question(text: str, history: Iterable[ChatMessage]) -> Question:
            return Question(
                text, documents, history=list(history), order="original", mitigation=mitigation, use_cache=False,
                sampling=Sampling(max_tokens=MAX_TOKENS), allow_unsupported=True,
            )  # fmt: skip

        for user, system in enumerate(SYSTEMS[: 1 if history_first else None]):
            history: list[ChatMessage] = [{"role": "system", "content": system}] if system else []
            for number, text in enumerate(questions if user == 0 else questions[:2]):
                turn, answer = read_turn(pipeline, store, question(text, history))
                warm = {
                    name: median(
                        read_turn(pipeline, store, question(text, messages))[0].first_token_seconds
                        for _ in range(repeats)
                    )
                    for name, messages in (("again_seconds", history), ("single_question_seconds", ()))
                    if user == 0 and not history_first
                }
                rows.append(
                    {
                        "layout": layout, "user": user, "turn": number + 1, "cached_share": turn.cached_share,
                        "cached_tokens": turn.cached_tokens, "prompt_tokens": turn.prompt_tokens,
                        "store_bytes": turn.store_bytes, "first_token_seconds": turn.first_token_seconds,
                        **warm,
                    }
                )  # fmt: skip
                history += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    return {"mitigation": mitigation, "passages": K, "turns": rows}, rows, engine


def table_of(part: str, summary: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the table of a part: ranks by query, answers by condition, or the cache by turn."""
    if part == "ranks":
        retrievers = summary["queries"]["last"]
        columns = {"query": "`{query}`"} | {
            f"{name}: reciprocal rank, hit@5": f"{{{name}[reciprocal_rank]:~.3f}}, {{{name}[hit@5]:~.2f}}"
            for name in retrievers
        }
        return filled(columns, ({"query": query, **ranks} for query, ranks in summary["queries"].items()))
    if part == "answers":
        columns = {
            "reader": "{model}", "method": "`{mitigation}`", "condition": "`{condition}`",
            "accuracy": "{accuracy:~.2f}",
            "gold among the passages": "{has_gold:.0%}", "cached tokens": "{cached_share:.0%}",
            "default - this, p": "{default_minus_this:+.2f} [{ci95[0]:+.2f}, {ci95[1]:+.2f}], {mcnemar_p:.2f}",
        }  # fmt: skip
        common = {"model": model, "mitigation": summary["mitigation"]}
        return filled(columns, ({**common, "condition": name, **row} for name, row in summary["conditions"].items()))
    columns = {
        "method": "`{mitigation}`", "layout": "{layout}", "user": "{user}", "turn": "{turn}",
        "prompt tokens": "{prompt_tokens}", "cached": "{cached_tokens}", "store, bytes": "{store_bytes:,}",
        "first token, s": "{first_token_seconds:~.2f}",
    }  # fmt: skip
    return filled(columns, ({"mitigation": summary["mitigation"], **turn} for turn in summary["turns"]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.conversation", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--mitigation", default="default")
    parser.add_argument("--conditions", default=";".join(CONDITIONS), help="of answers, separated by semicolons")
    parser.add_argument("--limit", type=int, help="follow-ups that are answered; all by default")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    conditions = chosen.conditions.split(";")
    if not {"history"} <= set(conditions) <= CONDITIONS.keys():
        parser.error(f"--conditions={chosen.conditions!r} must have 'history' and may have {', '.join(CONDITIONS)}")
    for part in chosen.parts or PARTS:
        if part not in PARTS:
            parser.error(f"{part!r} is no part; there are: {', '.join(PARTS)}")
        settings = Settings(model=chosen.model, device="cpu")
        name = f"conversation-{part}-{chosen.model}" + ("" if part == "ranks" else f"-{chosen.mitigation}")
        journal = chosen.out / f"{name}.partial.jsonl"
        if part == "ranks":
            summary, rows, generator = measure_ranks(settings)
        elif part == "answers":
            summary, rows, generator = measure_answers(settings, chosen.mitigation, conditions, journal, chosen.limit)
        else:
            summary, rows, generator = measure_cache(settings, chosen.mitigation)
        head = {
            "kind": f"conversation-{part}", **environment(), **model_facts(unbatched(generator)),
            "data": {"name": CONVERSATIONS.name, "sha256": file_digest(CONVERSATIONS)},
            "settings": {"k": K, "max_tokens": MAX_TOKENS, "model": chosen.model, "mitigation": chosen.mitigation},
            "summary": summary,
        }  # fmt: skip
        head["tables"] = {f"conversation-{part}": table_of(part, summary, chosen.model)}
        save_record(chosen.out / f"{name}.json", head, rows)
        journal.unlink(missing_ok=True)
        print(name, table([head]), sep="\n\n")


if __name__ == "__main__":
    main()
