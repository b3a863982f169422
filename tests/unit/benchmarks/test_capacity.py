"""The capacity plan: numbers worked by hand, and the hit share against a simulated memory."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from dataclasses import replace

import pytest

from benchmarks.capacity import (
    DECODERS,
    DEVICES,
    Decoder,
    Device,
    Workload,
    fleet,
    lru_hit_share,
    mean_wait,
    memory_of,
    plan,
    rate_of_replica,
    seconds_of_answer,
    seconds_of_parts,
)

MODEL = Decoder(layers=10, kv_heads=5, head_dim=100, parameters=1e9)  # 2 x 10 x 5 x 100 x 2 bytes = 20 kB a token
DEVICE = Device(memory=10e9, bandwidth=1e12, operations=100e12)
WORK = Workload(
    passages=8, passage_tokens=100, own_tokens=100, answer_tokens=100, distinct=1000, skew=0.0, stored=0.5,
    prefill_efficiency=0.5, decode_efficiency=0.5, launch_seconds=0.0, max_slots=100,
)  # fmt: skip


def test_passages_get_the_memory_that_weights_and_running_requests_leave():
    # 0.9 x 10 GB - 2 GB of weights = 7 GB. 100 requests of 1,000 tokens: 2 GB. The other 5 GB hold passages of 2 MB.
    assert memory_of(MODEL, DEVICE, WORK) == (100, 2500)
    # Without a limit of 100 requests, 7 GB are 350 requests of 20 MB, and no passage.
    assert memory_of(MODEL, DEVICE, replace(WORK, max_slots=1000)) == (350, 0)
    assert memory_of(MODEL, replace(DEVICE, memory=2e9), WORK) == (0, 0)


def test_an_8b_model_on_an_a100_has_memory_for_2670_passages():
    # 72 GB - 16 GB - 16 requests x 1,664 tokens x 131,072 bytes (3.49 GB) = 52.51 GB; a passage is 19.66 MB.
    assert memory_of(DECODERS["Llama-3.1-8B"], DEVICES["A100"], Workload()) == (16, 2670)


def test_the_hit_share_of_equally_frequent_passages_is_their_share():
    assert lru_hit_share(10, 4, 0.0) == pytest.approx(0.4)
    assert lru_hit_share(10, 10, 0.8) == lru_hit_share(10, 11, 0.8) == 1.0
    assert lru_hit_share(10, 0, 0.8) == pytest.approx(0.0, abs=1e-9)


def test_the_hit_share_of_two_passages_follows_from_the_golden_ratio():
    # s = 1: shares 2/3 and 1/3. With x = exp(-T/3), (1 - x^2) + (1 - x) = 1, so x = (sqrt 5 - 1)/2 and x^2 = 1 - x.
    x = (math.sqrt(5) - 1) / 2
    assert lru_hit_share(2, 1, 1.0) == pytest.approx(2 / 3 * x + 1 / 3 * (1 - x), rel=1e-6)


@pytest.mark.parametrize(
    ("distinct", "fit", "skew"), [(16, 4, 0.8), (16, 10, 0.8), (2000, 300, 0.8), (2000, 300, 1.1)]
)
def test_the_hit_share_agrees_with_a_simulated_memory(distinct: int, fit: int, skew: float):
    chance, memory, hits, n = random.Random(3), OrderedDict[int, None](), 0, 60_000
    weights = [rank**-skew for rank in range(1, distinct + 1)]
    for number, rank in enumerate(chance.choices(range(distinct), weights, k=n)):
        hits += rank in memory and number >= n // 2
        memory[rank] = None
        memory.move_to_end(rank)
        if len(memory) > fit:
            memory.popitem(last=False)
    assert lru_hit_share(distinct, fit, skew) == pytest.approx(hits / (n / 2), abs=0.02)


def test_parts_of_an_answer():
    # A question reads 100 + 800 / 2 = 500 tokens, 2 x 1e9 operations each, at 50e12 operations/s: 20 ms. A step reads
    # 2 GB of weights and, for 10 requests of 1,000 tokens, 0.2 GB at 0.5e12 bytes/s: 4.4 ms.
    assert seconds_of_parts(MODEL, DEVICE, WORK, 10) == pytest.approx((0.02, 0.0044))
    assert seconds_of_parts(MODEL, DEVICE, replace(WORK, launch_seconds=1e-3), 10)[1] == pytest.approx(0.01)
    # 25 questions/s: half of each second is prefill, so 100 steps take twice as long.
    assert seconds_of_answer(25, 0.02, 0.0044, WORK) == pytest.approx(0.02 + 0.88)
    assert seconds_of_answer(50, 0.02, 0.0044, WORK) == math.inf


def test_the_wait_in_the_queue():
    # One place, half busy, 1 s: W = 0.5 / (1 - 0.5) x (1 + v) / 2. Two places, load 1: C = 1/3 and W = C / (2 - 1).
    assert mean_wait(0.5, 1.0, 1, 1.0) == pytest.approx(1.0)
    assert mean_wait(0.5, 1.0, 1, 0.0) == pytest.approx(0.5)
    assert mean_wait(1.0, 1.0, 2, 1.0) == pytest.approx(1 / 3)
    assert mean_wait(2.0, 1.0, 2, 1.0) == math.inf


def test_a_replica_takes_the_rate_at_which_70_percent_of_its_places_are_busy():
    # Without prefill and with many places only the load counts: 100 steps of 10 ms are 1 s, and 0.7 x 100 are 70/s.
    assert rate_of_replica(0.0, 0.01, 100, WORK) == pytest.approx(70)


def test_the_plan_splits_stored_passages_between_gpu_and_redis():
    # 250 of 1,000 passages fit, equally frequent, and half of all passages are among the 1,000: 12.5 % and 37.5 %.
    device = replace(DEVICE, memory=5e9)  # 4.5 - 2 - 2 GB: 0.5 GB for passages of 2 MB
    row = plan(MODEL, device, replace(WORK, answered=0.5))
    assert (row["passages_on_gpu"], row["redis_gb"]) == (250, 2.0)
    assert (row["share_on_gpu"], row["share_from_redis"]) == (pytest.approx(0.125), pytest.approx(0.375))
    # 1,000 questions/s, half of them computed, 8 passages, 37.5 % of these from Redis, 2 MB each: 3 GB/s = 24 Gbit/s.
    assert row["redis_gbit_s"] == [pytest.approx(0.024), pytest.approx(2.4), pytest.approx(24)]


def test_routed_gpus_keep_different_passages():
    # 4 GPUs of 2,500 passages: 10,000 of 100,000 documents, equally frequent, against 2,500.
    result = fleet(MODEL, DEVICE, WORK, documents=100_000, rate=100, gpus=4)
    assert (result["routed_passages"], result["alone_passages"]) == (10_000, 2500)
    assert (result["routed_share"], result["alone_share"]) == (pytest.approx(0.1), pytest.approx(0.025))
    assert result["index_gb"] == pytest.approx(0.1786)  # 100,000 x 1,786 bytes
    assert (result["search_cores"], result["http_cores"]) == (pytest.approx(0.12), pytest.approx(0.31))
    assert result["answers_gb"] == pytest.approx(28.31, abs=0.01)  # 100/s x 0.8 x 86,400 s x 4,096 bytes
    assert result["all_passages_tb"] == pytest.approx(0.2)  # 100,000 x 2 MB
    row = plan(MODEL, DEVICE, replace(WORK, stored=result["routed_share"]))
    assert result["routed_rate_of_all"] == pytest.approx(4 * row["rate_of_replica"] / 0.8)
    assert result["routed_gpus"] == math.ceil(100 * 0.8 / row["rate_of_replica"]) <= result["alone_gpus"]
