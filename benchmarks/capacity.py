"""Replicas, memory and network for a rate of questions, and the same formulas against the packaged engine.

    python -m benchmarks.capacity [--check QUESTIONS] [--out DIR]

The plan is arithmetic on published figures of GPUs with assumed efficiencies. ``--check`` measures the share of the
passages that comes from memory, and questions per second of processor time, with the packaged model on this machine.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from benchmarks.study import study_options, write_study

RATES = (1, 100, 1000)
INDEX_BYTES, SEARCH_SECONDS = 1786, 0.0012  # of a document, and processor time mapped: vector-search-1m.json
HTTP_SECONDS = 0.0031  # processor time of a cached answer: docs/operations.md
ANSWER_BYTES, ANSWER_SECONDS = 4096, 86_400  # an entry of the answer cache, assumed, and its default lifetime
_DISTINCT, _SKEW = 16, 0.8  # of the check


@dataclass(frozen=True)
class Decoder:
    """Layers, key/value heads, channels of a head, and weights of a decoder in numbers of 2 bytes."""

    layers: int
    kv_heads: int
    head_dim: int
    parameters: float

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


@dataclass(frozen=True)
class Device:
    """Published figures of a GPU: bytes of memory, bytes/s of bandwidth, dense bfloat16 operations/s."""

    memory: float
    bandwidth: float
    operations: float


DECODERS: Mapping[str, Decoder] = {
    "SmolLM2-135M": Decoder(30, 3, 64, 0.135e9),
    "Qwen2.5-7B": Decoder(28, 4, 128, 7.6e9),
    "Llama-3.1-8B": Decoder(32, 8, 128, 8.0e9),
}
DEVICES: Mapping[str, Device] = {
    "L4": Device(24e9, 300e9, 121e12),
    "A100": Device(80e9, 2039e9, 312e12),
    "H100": Device(80e9, 3350e9, 989e12),
}


@dataclass(frozen=True)
class Workload:
    """A kind of question, and what is assumed of the service; see docs/operations.md.

    Attributes:
        own_tokens: Tokens of the prompt outside passages.
        distinct: Passages that are asked for again and again, all of them in Redis.
        skew: s of Zipf's law: the passage of rank r is asked for in proportion to r**-s.
        stored: Share of the passages of questions that are among the ``distinct``.
        answered: Share of the questions that the answer cache answers.
        launch_seconds: Least seconds of one layer of a decode step.
        variation: Var(S) / E(S)^2 of the seconds of a question.
    """

    passages: int = 10
    passage_tokens: int = 150
    own_tokens: int = 100
    answer_tokens: int = 64
    distinct: int = 10_000
    skew: float = 0.8
    stored: float = 0.8
    answered: float = 0.2
    memory_share: float = 0.9
    prefill_efficiency: float = 0.4
    decode_efficiency: float = 0.6
    launch_seconds: float = 4e-4
    variation: float = 0.5
    max_slots: int = 16
    max_load: float = 0.7
    max_wait_seconds: float = 0.5


def lru_hit_share(distinct: int, fit: int, skew: float) -> float:
    """Return the share of look-ups that a least-recently-used memory of ``fit`` of ``distinct`` passages has.

    Source: Che, Tung and Wang (2002). A passage with the share p of the look-ups is in memory with probability
    1 - exp(-p T), and T is such that these probabilities sum to ``fit``.
    """
    if fit >= distinct:
        return 1.0
    # Ranks above 500 are grouped, 0.2 % of the rank at most: ten million passages take as long as ten thousand.
    ranks = np.unique(np.geomspace(1, distinct + 1, 5000).round())
    counts = np.diff(ranks)
    popularity = (ranks[:-1] + (counts - 1) / 2) ** -skew
    popularity /= (counts * popularity).sum()
    low, high = 0.0, 50 / float(popularity[-1])
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (counts * -np.expm1(-popularity * middle)).sum() < fit else (low, middle)
    return float((counts * popularity * -np.expm1(-popularity * high)).sum())


def memory_of(model: Decoder, device: Device, work: Workload) -> tuple[int, int]:
    """Return the requests that run at the same time, and the passages that fit next to them and the weights."""
    free = work.memory_share * device.memory - 2 * model.parameters
    context_tokens = work.passages * work.passage_tokens + work.own_tokens + work.answer_tokens
    request_bytes = context_tokens * model.kv_bytes_per_token
    slots = max(0, min(work.max_slots, int(free // request_bytes)))
    return slots, max(0, int((free - slots * request_bytes) // (work.passage_tokens * model.kv_bytes_per_token)))


def seconds_of_parts(model: Decoder, device: Device, work: Workload, slots: int) -> tuple[float, float]:
    """Return the seconds of one prefill, and of one decode step of all slots."""
    read_tokens = work.own_tokens + work.passages * work.passage_tokens * (1 - work.stored)
    context_tokens = work.passages * work.passage_tokens + work.own_tokens + work.answer_tokens
    read_bytes = 2 * model.parameters + slots * context_tokens * model.kv_bytes_per_token
    step = max(model.layers * work.launch_seconds, read_bytes / (device.bandwidth * work.decode_efficiency))
    return read_tokens * 2 * model.parameters / (device.operations * work.prefill_efficiency), step


def mean_wait(rate: float, mean: float, slots: int, variation: float) -> float:
    """Return the mean seconds in the queue M/G/c: Erlang's C, and Allen and Cunneen's factor for the variation."""
    load, loss = rate * mean, 1.0
    if load >= slots:
        return math.inf
    for number in range(1, slots + 1):
        loss = load * loss / (number + load * loss)
    waits = slots * loss / (slots - load * (1 - loss))
    return waits / (slots / mean - rate) * (1 + variation) / 2


def seconds_of_answer(rate: float, prefill: float, step: float, work: Workload) -> float:
    """Return the seconds for which a question holds its slot; prefills of other questions interrupt its decoding."""
    busy = rate * prefill
    return math.inf if busy >= 1 else prefill + work.answer_tokens * step / (1 - busy)


def rate_of_replica(prefill: float, step: float, slots: int, work: Workload) -> float:
    """Return the most computed questions/s of a replica within ``max_load`` and ``max_wait_seconds``."""
    low, high = 0.0, slots / (prefill + work.answer_tokens * step)
    for _ in range(60):
        rate = (low + high) / 2
        seconds = seconds_of_answer(rate, prefill, step, work)
        fits = rate * seconds <= work.max_load * slots
        fits = fits and mean_wait(rate, seconds, slots, work.variation) <= work.max_wait_seconds
        low, high = (rate, high) if fits else (low, rate)
    return low


def plan(model: Decoder, device: Device, work: Workload) -> dict[str, Any]:
    """Return what questions take on one kind of GPU: ``answer_s`` at 100/s, lists at each of ``RATES``."""
    slots, fit = memory_of(model, device, work)
    prefill, step = seconds_of_parts(model, device, work, slots)
    replica, passage_bytes = (
        rate_of_replica(prefill, step, slots, work),
        work.passage_tokens * model.kv_bytes_per_token,
    )
    on_gpu = work.stored * lru_hit_share(work.distinct, fit, work.skew)
    rates = [rate * (1 - work.answered) for rate in RATES]
    replicas = [math.ceil(rate / replica) for rate in rates]
    fetched_bytes = work.passages * (work.stored - on_gpu) * passage_bytes
    return {
        "slots": slots, "passages_on_gpu": fit, "share_on_gpu": on_gpu, "share_from_redis": work.stored - on_gpu,
        "prefill_ms": 1e3 * prefill, "step_ms": 1e3 * step, "rate_of_replica": replica, "replicas": replicas,
        "answer_s": seconds_of_answer(rates[1] / replicas[1], prefill, step, work),
        "redis_gb": work.distinct * passage_bytes / 1e9,
        "redis_gbit_s": [8e-9 * rate * fetched_bytes for rate in rates],
    }  # fmt: skip


def fleet(model: Decoder, device: Device, work: Workload, documents: int, rate: float, gpus: int) -> dict[str, float]:
    """Return what a fleet holds and takes if passages are kept on GPUs alone: one passage per document.

    ``routed``: requests with a passage go to the GPU that has it, so that GPUs keep different passages. ``alone``:
    each GPU keeps the same ones.
    """
    fit = memory_of(model, device, work)[1]
    result: dict[str, float] = {
        "index_gb": documents * INDEX_BYTES / 1e9,
        "search_cores": rate * SEARCH_SECONDS,
        "http_cores": rate * HTTP_SECONDS,
        "answers_gb": rate * (1 - work.answered) * ANSWER_SECONDS * ANSWER_BYTES / 1e9,
        "all_passages_tb": documents * work.passage_tokens * model.kv_bytes_per_token / 1e12,
    }
    for name, kept in (("routed", gpus * fit), ("alone", fit)):
        share = lru_hit_share(documents, kept, work.skew)
        row = plan(model, device, replace(work, stored=share))
        each = row["rate_of_replica"] / (1 - work.answered)
        result |= {
            f"{name}_passages": kept, f"{name}_share": share, f"{name}_rate_of_all": gpus * each,
            f"{name}_gpus": math.ceil(rate / each),
        }  # fmt: skip
    return result


def check(questions: int) -> dict[str, Any]:
    """Compare predictions with the packaged engine: 16 passages, memory for 4 and for 10, one question at a time.

    Rates come from runs without memory for passages. Of the other runs the plan knows the size of the memory alone.
    """
    drawn = _drawn(2 * questions)
    first, longer = _measured(0, drawn[:8], 1), _measured(0, drawn[:8], 5)
    alone, warm = _measured(1 << 30, [[0], [0]], 1), _measured(1 << 30, drawn[:8] * 2, 1)
    token_s = first["seconds"] / first["prompt_tokens"]
    step_s = (longer["seconds"] - first["seconds"]) / (longer["answer_tokens"] - first["answer_tokens"])
    # The beginning of the prompt is stored like a passage, and used by every question.
    passage_bytes = (warm["bytes"] - alone["bytes"]) / (warm["entries"] - alone["entries"])
    passage_tokens = (warm["cached_tokens"] / 8 - alone["cached_tokens"]) / 3
    first_bytes, first_tokens = alone["bytes"] - passage_bytes, alone["cached_tokens"] - passage_tokens
    rooms = {}
    for fit in (4, 10):
        row = _measured(int(first_bytes + (fit + 0.5) * passage_bytes), drawn, 5)
        share = lru_hit_share(_DISTINCT, fit, _SKEW)
        read_tokens = row["prompt_tokens"] - questions * (first_tokens + share * 4 * passage_tokens)
        seconds = read_tokens * token_s + (row["answer_tokens"] - questions) * step_s
        found = (row["cached_tokens"] / questions - first_tokens) / (4 * passage_tokens)
        rooms[str(fit)] = {
            "predicted_share": share, "measured_share": found,
            "predicted_rate": questions / seconds, "measured_rate": questions / row["seconds"],
        }  # fmt: skip
    return {"questions": questions, "token_ms": 1e3 * token_s, "step_ms": 1e3 * step_s, "rooms": rooms}


def _drawn(questions: int) -> list[list[int]]:
    """Return four different passages for each question, by Zipf's law."""
    chance, weights = random.Random(0), [(rank + 1) ** -_SKEW for rank in range(_DISTINCT)]
    drawn: list[list[int]] = []
    for _ in range(questions):
        chosen: dict[int, None] = {}
        while len(chosen) < 4:
            chosen[chance.choices(range(_DISTINCT), weights)[0]] = None
        drawn.append(list(chosen))
    return drawn


def _measured(memory_bytes: int, drawn: Sequence[Sequence[int]], answer_tokens: int) -> dict[str, float]:
    """Ask one question after another; return sums over the second half of them, in seconds of processor time."""
    from langchain_core.documents import Document

    from rag_posfix.caching.kv.store import PassageStore
    from rag_posfix.contracts.answer import Question
    from rag_posfix.pipeline.build import build_pipeline
    from rag_posfix.settings import CacheSettings, PassageStoreSettings, Settings

    settings = Settings(
        mitigation="parallel_encoding", max_tokens=answer_tokens, cache=CacheSettings(enabled=False),
        passages=PassageStoreSettings(enabled=memory_bytes > 0, memory_bytes=max(memory_bytes, 4096), disk_bytes=0),
    )  # fmt: skip
    sums = dict.fromkeys(("seconds", "prompt_tokens", "cached_tokens", "answer_tokens"), 0.0)
    with closing(build_pipeline(settings)) as pipeline:
        for number, ranks in enumerate(drawn):
            texts = [f"Bridge {rank + 10} of the town was built of stone. " * 5 for rank in ranks]
            documents = [Document(page_content=text, metadata={"relevance_score": 0.5}) for text in texts]
            started = time.process_time()
            answer = pipeline.ask(Question(f"What was built in {number + 100}?", documents=documents))
            seconds, usage = time.process_time() - started, answer.usage
            if number >= len(drawn) // 2:
                values = (seconds, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
                sums = {name: sums[name] + value for name, value in zip(sums, values, strict=True)}
        if isinstance(pipeline.passages, PassageStore):
            tier = pipeline.passages.stats()["tiers"][0]
            sums |= {"bytes": tier["bytes"], "entries": tier["entries"]}
    return sums


def summary(questions: int) -> dict[str, Any]:
    """Return the plan of each decoder and GPU, the fleet of docs/operations.md, and with ``questions`` the check."""
    work, result = Workload(), {}
    result["plan"] = {
        f"{name}, {gpu}": plan(model, device, work)
        for name, model in DECODERS.items()
        for gpu, device in DEVICES.items()
    }
    llama, h100 = DECODERS["Llama-3.1-8B"], DEVICES["H100"]
    result["fleet"] = {
        f"{share:.0%} answered": fleet(llama, h100, replace(work, answered=share), 10_000_000, 1000, 50)
        for share in (0.2, 0.6)
    }
    return result | ({"check": check(questions)} if questions else {})


def tables(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of docs/operations.md: replicas for each decoder and GPU, and what 50 GPUs do."""
    from benchmarks.tables import filled

    columns = {
        "model, GPU": "{name}", "passages on the GPU": "{passages_on_gpu:,}", "found there": "{share_on_gpu:.0%}",
        "from Redis": "{share_from_redis:.0%}", "prefill": "{prefill_ms:.1f} ms", "step": "{step_ms:.1f} ms",
        "answer at 100/s": "{answer_s:.1f} s", "replicas at 1, 100, 1,000/s": "{all_replicas}",
        "from Redis, Gbit/s": "{gbit_s}",
    }  # fmt: skip
    plans = (
        {
            "name": name, **row, "all_replicas": ", ".join(map(str, row["replicas"])),
            "gbit_s": ", ".join(f"{float(f'{rate:.2g}'):g}" for rate in row["redis_gbit_s"]),
        }
        for name, row in result["plan"].items()
    )  # fmt: skip
    fleet_columns = {
        "answer cache": "{name}", "requests": "{title}", "different passages on GPUs": "{passages:,}",
        "found there": "{share:.0%}", "50 GPUs": "{rate_of_all:,.0f}/s", "GPUs for 1,000/s": "{gpus}",
    }  # fmt: skip
    fleets = (
        {"name": name, "title": title}
        | {key.removeprefix(f"{way}_"): value for key, value in row.items() if key.startswith(f"{way}_")}
        for name, row in result["fleet"].items()
        for way, title in (("routed", "routed by passage"), ("alone", "spread at random"))
    )
    return {"capacity-plan": filled(columns, plans), "capacity-fleet": filled(fleet_columns, fleets)}


def main() -> None:
    parser = study_options("capacity", __doc__)
    parser.add_argument("--check", type=int, default=0, metavar="QUESTIONS", help="measure with the packaged model")
    chosen = parser.parse_args()
    result = summary(chosen.check)
    print(json.dumps(result, indent=2))
    write_study(chosen, "capacity", result, tables=tables(result), settings=asdict(Workload()))


if __name__ == "__main__":
    main()
