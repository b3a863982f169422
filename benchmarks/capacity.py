"""How many replicas, how much Redis and how much network a rate of questions takes.

    python -m benchmarks.capacity [--part kv|rates|plan|check] [--out DIR]

``kv``: bytes of keys and values per token, computed from the configurations of models. ``rates``: tokens per second of
the packaged model on this machine, measured. ``plan``: replicas for 1, 100 and 1,000 questions/s on GPUs. This part is
arithmetic on published figures of the GPUs, with assumed efficiencies; nothing in it was measured. ``check``: the
queueing formula against the HTTP service on this machine, whose generator sleeps for times that are known.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.queueing import mean_wait
from rag_posfix.errors import ConfigError

__all__ = [
    "DEVICES",
    "MODELS",
    "Device",
    "ModelShape",
    "Plan",
    "Workload",
    "plan",
    "rate_of_replica",
    "shape_of_config",
]

PARTS = ("kv", "rates", "plan", "check")
RATES = (1, 100, 1000)


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides about memory and time.

    Attributes:
        layers: Decoder layers, L.
        kv_heads: Key/value heads, Hkv.
        head_dim: Channels of a head, D.
        parameters: Weights, in numbers.
        number_bytes: Bytes of a number, 2 for bfloat16.
    """

    layers: int
    kv_heads: int
    head_dim: int
    parameters: float
    number_bytes: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token: 2 L Hkv D bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.number_bytes

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights."""
        return self.parameters * self.number_bytes


MODELS: Mapping[str, ModelShape] = {
    "SmolLM2-135M": ModelShape(30, 3, 64, 0.135e9),
    "Qwen2.5-7B": ModelShape(28, 4, 128, 7.6e9),
    "Mistral-7B-v0.3": ModelShape(32, 8, 128, 7.2e9),
    "Llama-3.1-8B": ModelShape(32, 8, 128, 8.0e9),
    "Qwen3-8B": ModelShape(36, 8, 128, 8.2e9),
    "Gemma-2-9B": ModelShape(42, 8, 256, 9.2e9),
    "Phi-3-mini": ModelShape(32, 32, 96, 3.8e9),
    "Llama-3.1-70B": ModelShape(80, 8, 128, 70.6e9),
}
"""Shapes of published configurations. Every second layer of Gemma 2 keeps 4,096 tokens; passages are shorter."""


@dataclass(frozen=True)
class Device:
    """Published figures of a GPU: bytes of memory, bytes/s of memory bandwidth, dense bfloat16 operations/s."""

    memory: float
    bandwidth: float
    operations: float


DEVICES: Mapping[str, Device] = {
    "L4": Device(24e9, 300e9, 121e12),
    "A100": Device(80e9, 2039e9, 312e12),
    "H100": Device(80e9, 3350e9, 989e12),
}
"""L4 24 GB; A100 80 GB and H100 80 GB as SXM modules. Operations without sparsity."""


@dataclass(frozen=True)
class Workload:
    """One kind of question, and what is assumed of the service.

    Attributes:
        passages: Passages of a question.
        passage_tokens: Tokens of a passage.
        own_tokens: Tokens of the prompt's prefix, the question and the template.
        answer_tokens: Tokens of an answer.
        warm: Share of the passages whose keys and values are in the passage KV store.
        from_redis: Share of the warm passages that come from Redis and not from the replica's own memory.
        answered: Share of the questions that the answer cache answers.
        distinct: Passages that are kept in Redis.
        prefill_efficiency: Share of the published operations that prefill reaches; assumed.
        decode_efficiency: Share of the published bandwidth that decoding reaches; assumed.
        launch_seconds: Seconds of one layer of a decode step below which no GPU gets, because the engine launches
            kernels one by one; assumed.
        variation: Var(S) / E(S)^2 of the seconds of a question.
        most_slots: ``max_concurrent`` of a replica, if memory allows it.
        most_load: Largest share of the slots that are busy on average.
        most_wait: Largest mean seconds in the queue.
    """

    passages: int = 10
    passage_tokens: int = 150
    own_tokens: int = 100
    answer_tokens: int = 64
    warm: float = 0.8
    from_redis: float = 0.25
    answered: float = 0.2
    distinct: int = 10_000
    prefill_efficiency: float = 0.4
    decode_efficiency: float = 0.6
    launch_seconds: float = 4e-4
    variation: float = 0.5
    most_slots: int = 16
    most_load: float = 0.7
    most_wait: float = 0.5

    @property
    def context_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.passages * self.passage_tokens + self.own_tokens + self.answer_tokens

    @property
    def read_tokens(self) -> float:
        """Tokens that a question reads on average: its own, and those of cold passages."""
        return self.own_tokens + self.passages * self.passage_tokens * (1 - self.warm)


@dataclass(frozen=True)
class Plan:
    """What a rate of questions takes; a row of the table.

    Attributes:
        slots: Requests that a replica decodes at the same time.
        prefill_ms: Milliseconds in which a question is read.
        step_ms: Milliseconds of a decode step of all slots.
        seconds: Mean seconds of an answer without the queue, at this load.
        wait_ms: Mean milliseconds in the queue.
        replicas: Replicas, without a spare one.
        redis_gb: GB of the passages in Redis.
        network_gbit_s: Gbit/s that all replicas together read from Redis.
    """

    model: str
    device: str
    rate: float
    slots: int
    prefill_ms: float
    step_ms: float
    seconds: float
    wait_ms: float
    replicas: int
    redis_gb: float
    network_gbit_s: float


def shape_of_config(config: Mapping[str, Any], parameters: float, number_bytes: int = 2) -> ModelShape:
    """Return the shape that the ``config.json`` of a model has.

    Raises:
        ConfigError: the configuration lacks one of the fields.
    """
    text = config.get("text_config", config)
    try:
        heads = text["num_attention_heads"]
        head_dim = text.get("head_dim") or text["hidden_size"] // heads
        kv_heads = text.get("num_key_value_heads") or heads
        return ModelShape(text["num_hidden_layers"], kv_heads, head_dim, parameters, number_bytes)
    except KeyError as error:
        raise ConfigError(f"the configuration has no {error.args[0]!r}; give the config.json of a decoder") from error


def slots_of(model: ModelShape, device: Device, work: Workload) -> int:
    """Return how many requests fit beside the weights into nine tenths of the memory; 0 if the weights do not."""
    room = 0.9 * device.memory - model.weight_bytes
    return max(0, min(work.most_slots, int(room // (work.context_tokens * model.kv_bytes_per_token))))


def seconds_of_parts(model: ModelShape, device: Device, work: Workload, slots: int) -> tuple[float, float]:
    """Return the seconds of one prefill, and of one decode step of all slots.

    Prefill is bound by arithmetic: 2 operations per weight and token. A step is bound by the bandwidth: it reads the
    weights, and the keys and values of every slot. Small models are bound by the launches of their kernels.
    """
    prefill = work.read_tokens * 2 * model.parameters / (device.operations * work.prefill_efficiency)
    read = model.weight_bytes + slots * work.context_tokens * model.kv_bytes_per_token
    return prefill, max(model.layers * work.launch_seconds, read / (device.bandwidth * work.decode_efficiency))


def seconds_of_answer(rate: float, prefill: float, step: float, work: Workload) -> float:
    """Return the seconds for which a question holds its slot: S = P + D / (1 - rate P).

    Prefills of other questions interrupt decoding: of each second, rate * P are prefill.
    """
    busy = rate * prefill
    return math.inf if busy >= 1 else prefill + work.answer_tokens * step / (1 - busy)


def rate_of_replica(prefill: float, step: float, slots: int, work: Workload) -> float:
    """Return the most questions/s that a replica answers within ``most_load`` and ``most_wait``, by bisection."""

    def fits(rate: float) -> bool:
        seconds = seconds_of_answer(rate, prefill, step, work)
        load = rate * seconds / slots
        return load <= work.most_load and mean_wait(rate, seconds, slots, work.variation) <= work.most_wait

    low, high = 0.0, slots / (prefill + work.answer_tokens * step)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def plan(model: str, device: str, rate: float, work: Workload) -> Plan | None:
    """Return what ``rate`` questions/s take, or None if the weights do not fit one GPU."""
    shape, gpu = MODELS[model], DEVICES[device]
    slots = slots_of(shape, gpu, work)
    if not slots:
        return None
    prefill, step = seconds_of_parts(shape, gpu, work, slots)
    computed = rate * (1 - work.answered)
    replicas = math.ceil(computed / rate_of_replica(prefill, step, slots, work))
    seconds = seconds_of_answer(computed / replicas, prefill, step, work)
    wait = mean_wait(computed / replicas, seconds, slots, work.variation)
    passage_bytes = work.passage_tokens * shape.kv_bytes_per_token
    fetched = computed * work.passages * work.warm * work.from_redis * passage_bytes
    return Plan(
        model, device, rate, slots, round(1e3 * prefill, 1), round(1e3 * step, 2), round(seconds, 2),
        round(1e3 * wait, 1), replicas, round(work.distinct * passage_bytes / 1e9, 1), round(8 * fetched / 1e9, 2),
    )  # fmt: skip


def kv_table() -> dict[str, dict[str, float]]:
    """Return, by model, bytes per token and MB of a passage of 150 tokens."""
    return {
        name: {
            "bytes_per_token": shape.kv_bytes_per_token,
            "passage_mb": round(150 * shape.kv_bytes_per_token / 1e6, 2),
        }
        for name, shape in MODELS.items()
    }


def plans(work: Workload, models: Sequence[str] = ("SmolLM2-135M", "Qwen2.5-7B", "Llama-3.1-8B")) -> list[Plan]:
    """Return the rows of the table."""
    found = [plan(model, device, rate, work) for model in models for device in DEVICES for rate in RATES]
    return [row for row in found if row is not None]


def measured_rates(questions: int = 3) -> dict[str, Any]:
    """Measure tokens/s of the packaged model with method ``none`` and no caches: medians of ``questions`` prompts."""
    from contextlib import closing

    from rag_posfix.contracts.answer import Question
    from rag_posfix.pipeline.build import build_pipeline
    from rag_posfix.settings import CacheSettings, PassageStoreSettings, Settings

    settings = Settings(
        mitigation="none",
        max_tokens=16,
        cache=CacheSettings(enabled=False),
        passages=PassageStoreSettings(enabled=False),
    )
    prefill, decode = [], []
    with closing(build_pipeline(settings)) as pipeline:
        for number in range(questions + 1):
            sentence = f"the old bridge number {number} of the town was built of stone by the river, "
            texts = [f"passage {place}: {sentence * 2}" for place in range(10)]
            answer = pipeline.ask(Question(f"What is {number}?", documents=documents_of(texts)))
            if number:  # the first one warms up
                prefill.append(answer.usage.prompt_tokens / answer.timings["prefill"])
                decode.append((answer.usage.completion_tokens - 1) / answer.timings["decode"])
    return {
        "model": "smollm2",
        "prefill_tokens_per_s": round(statistics.median(prefill)),
        "decode_tokens_per_s": round(statistics.median(decode), 1),
    }


def documents_of(texts: Sequence[str]) -> list[Any]:
    """Return documents with falling scores, so that no embedding model is needed."""
    from langchain_core.documents import Document

    return [
        Document(page_content=text, id=f"d{i}", metadata={"relevance_score": 1 - i / 100})
        for i, text in enumerate(texts)
    ]


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="all without it; may be given again")
    parser.add_argument("--requests", type=int, default=600, help="of the check")
    parser.add_argument("--out", type=Path, default=None, help="folder for the record")
    return parser.parse_args(arguments)


def main() -> None:
    """Print the parts as JSON and write the record."""
    given = options()
    parts = given.part or PARTS
    work = Workload()
    before = os.getloadavg()
    summary: dict[str, Any] = {}
    if "kv" in parts:
        summary["kv"] = kv_table()
    if "rates" in parts:
        summary["rates"] = measured_rates()
    if "plan" in parts:
        summary["plan"] = [asdict(row) for row in plans(work)]
    if "check" in parts:
        from benchmarks.queue_check import check_queue  # the service

        summary["check"] = check_queue(given.requests)
    print(json.dumps(summary, indent=2))
    if given.out is not None:
        from rag_posfix.evaluation.record import environment, write_record

        load = {"before": before, "after": os.getloadavg()}
        head = {"kind": "capacity", **environment(), "load_average": load, "settings": asdict(work)}
        print(write_record(given.out, "capacity", {**head, "summary": summary}))


if __name__ == "__main__":
    main()
