"""The arithmetic of benchmarks/capacity.py: values worked by hand, exact queues, and a simulation."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from benchmarks.capacity import (
    DEVICES,
    MODELS,
    Device,
    ModelShape,
    Workload,
    kv_table,
    plan,
    plans,
    rate_of_replica,
    seconds_of_answer,
    seconds_of_parts,
    shape_of_config,
    slots_of,
)
from benchmarks.queue_check import check_queue
from benchmarks.queueing import erlang_c, mean_wait, simulated_wait
from rag_posfix.caching.kv.entry import EntryShape
from rag_posfix.errors import ConfigError


@pytest.mark.parametrize(("slots", "load", "waits"), [(1, 0.7, 0.7), (2, 1.0, 1 / 3), (3, 2.0, 4 / 9), (4, 4.0, 1.0)])
def test_the_probability_of_waiting_is_that_of_erlang(slots, load, waits):
    """2 servers, load 1: B(1) = 1/2, B(2) = 1/5, C = 2/5 / (2 - 4/5) = 1/3. 3, load 2: B(3) = 4/19, C = 4/9."""
    assert erlang_c(slots, load) == pytest.approx(waits)


def test_one_slot_is_exact():
    # Pollaczek and Khinchine: load 0.5, mean 1 s: W = 0.5 / (1 - 0.5) (1 + variation) / 2.
    assert mean_wait(0.5, 1.0, 1, variation=1.0) == pytest.approx(1.0)
    assert mean_wait(0.5, 1.0, 1, variation=0.0) == pytest.approx(0.5)
    assert mean_wait(1.0, 1.0, 1) == math.inf


@pytest.mark.parametrize(("variation", "slots", "load"), [(1.0, 4, 0.7), (0.0, 4, 0.7), (0.0, 8, 0.9), (1.0, 1, 0.5)])
def test_the_formula_agrees_with_a_simulation(variation, slots, load):
    draw = random.Random(5)
    seconds = [draw.expovariate(1.0) if variation else 1.0 for _ in range(60_000)]
    simulated = simulated_wait(load * slots, seconds, slots)
    # The time in the system is what an operator sees; the wait alone of equal times is overestimated by up to 15 %.
    assert 1 + mean_wait(load * slots, 1.0, slots, variation) == pytest.approx(1 + simulated, rel=0.05)


@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_a_token_are_those_of_the_store(name):
    shape = MODELS[name]
    entry = EntryShape(shape.layers, shape.kv_heads, shape.head_dim, torch.bfloat16, n_tokens=150)
    assert entry.n_bytes == 150 * kv_table()[name]["bytes_per_token"]


def test_the_shape_is_read_from_a_configuration():
    smollm2 = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    assert shape_of_config(smollm2, 0.135e9) == MODELS["SmolLM2-135M"]
    gemma = {"num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256}
    assert shape_of_config({"text_config": gemma}, 9.2e9) == MODELS["Gemma-2-9B"]
    with pytest.raises(ConfigError, match="has no 'num_attention_heads'"):
        shape_of_config({"hidden_size": 5}, 1e9)


MODEL = ModelShape(layers=10, kv_heads=5, head_dim=100, parameters=1e9)  # 20 kB a token
DEVICE = Device(memory=10e9, bandwidth=1e12, operations=100e12)
WORK = Workload(
    passages=8, passage_tokens=100, own_tokens=100, answer_tokens=100, warm=0.5, prefill_efficiency=0.5,
    decode_efficiency=0.5, launch_seconds=0.0, most_slots=100,
)  # fmt: skip


def test_parts_are_worked_by_hand():
    # A question reads 100 + 800 / 2 = 500 tokens, 2 x 1e9 operations each, at 50e12 operations/s: 20 ms.
    # A step of 10 slots reads 2e9 bytes of weights and 10 x 1000 tokens x 20 kB, at 0.5e12 bytes/s: 4.4 ms.
    assert seconds_of_parts(MODEL, DEVICE, WORK, 10) == pytest.approx((0.02, 0.0044))
    launched = replace(WORK, launch_seconds=1e-3)
    assert seconds_of_parts(MODEL, DEVICE, launched, 10)[1] == pytest.approx(0.01)
    # 0.9 x 10e9 - 2e9 bytes, 20 MB a request.
    assert slots_of(MODEL, DEVICE, replace(WORK, most_slots=1000)) == 350
    # At 10 questions/s a fifth of the time is prefill: 0.02 + 100 x 4.4 ms / 0.8.
    assert seconds_of_answer(10, 0.02, 0.0044, WORK) == pytest.approx(0.57)
    assert seconds_of_answer(50, 0.02, 0.0044, WORK) == math.inf


def test_a_replica_takes_the_most_that_load_and_wait_allow():
    rate = rate_of_replica(0.02, 0.0044, 10, WORK)
    seconds = seconds_of_answer(rate, 0.02, 0.0044, WORK)
    load, wait = rate * seconds / 10, mean_wait(rate, seconds, 10, WORK.variation)
    assert load == pytest.approx(WORK.most_load) or wait == pytest.approx(WORK.most_wait)
    assert max(load / WORK.most_load, wait / WORK.most_wait) <= 1 + 1e-9


def test_replicas_grow_with_the_rate_and_shrink_with_warm_passages():
    work = Workload()
    found = [plan("Llama-3.1-8B", "A100", rate, work).replicas for rate in (1, 100, 1000)]
    assert found == sorted(found)
    cold = plan("Llama-3.1-8B", "A100", 1000, replace(work, warm=0.0))
    assert cold.replicas > found[-1]


def test_redis_and_network_follow_the_bytes_of_a_passage():
    row = plan("Llama-3.1-8B", "H100", 100, Workload())
    passage = 150 * 131072
    assert row.redis_gb == pytest.approx(10_000 * passage / 1e9, abs=0.1)
    assert row.network_gbit_s == pytest.approx(100 * 0.8 * 10 * 0.8 * 0.25 * passage * 8 / 1e9, abs=0.01)


def test_a_model_that_does_not_fit_has_no_plan():
    assert plan("Llama-3.1-70B", "H100", 1, Workload()) is None
    assert {row.device for row in plans(Workload())} == set(DEVICES)


def test_the_check_measures_the_service():
    """A few short requests: that the check works. Its claim is measured by `python -m benchmarks.capacity`."""
    found = check_queue(requests=12, slots=2, mean=0.05, load=0.5)
    for name in ("equal", "exponential"):
        assert found[name]["measured_response_s"] >= found[name]["mean_service_s"] * 0.9
        assert found[name]["predicted_response_s"] >= found[name]["mean_service_s"]
