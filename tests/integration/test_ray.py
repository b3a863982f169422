"""Rankings, answers and the service on one local Ray cluster of two CPUs, in a process of its own."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.ranking.reranking import ray_rankers
from rag_posfix.process import environment_with
from rag_posfix.settings import Settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """What the program of tests/support prints."""
    pytest.importorskip("ray.serve", reason="the extra ray is not installed")
    folder = tempfile.mkdtemp(prefix="ray-")  # short: the cluster's sockets lie in it
    environment = environment_with(
        PYTHONPATH=f"{ROOT}:{ROOT / 'services'}", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32),
        RAY_worker_niceness="0", RAY_raylet_start_wait_time_s="120",  # on a busy machine
        OMP_NUM_THREADS="1",  # as Ray sets it for its actors: sums agree to the last bit
    )  # fmt: skip
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.with_ray", folder, str(tmp_path_factory.mktemp("ray"))],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1100, check=False,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def ranked(results):
    return results["ranked"]


@pytest.fixture
def answered(results):
    return results["answered"]


@pytest.fixture
def served(results):
    return results["served"]


def test_rankings_on_the_cluster_are_those_made_here(ranked):
    assert ranked["there"] == ranked["here"]
    assert list(ranked["there"]) == [*(f"q{n}" for n in range(10)), "empty"]
    assert ranked["there"]["empty"]["ids"] == []
    assert all(seconds > 0 for seconds in ranked["seconds"][:-1])


def test_what_the_cluster_ranked_is_in_the_journal(ranked):
    assert ranked["reused"] == 11


def test_a_cluster_that_was_connected_before_stays_connected(ranked):
    assert ranked["stayed"]


def test_a_failure_in_an_actor_is_the_same_line_as_here(ranked):
    (ranking,) = ranked["failures"]
    assert ranking.startswith("by_length failed on query 'q0' (ConfigError: nothing is ranked here)")


def test_an_actor_that_dies_is_started_again_with_its_questions(answered):
    assert answered["died"]


@pytest.mark.parametrize("experiment", ["reranked", "answered"])
def test_an_experiment_with_packaged_models_has_the_same_rows_on_the_cluster(results, experiment):
    here, there = results["real"][experiment]
    assert there == here
    assert len(here) >= 4


def test_without_the_extra_the_message_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"ray is not installed.*\.\[eval,ray\]"), ray_rankers(Settings(), 1):
        pass


def test_answers_on_the_cluster_are_those_made_here(answered):
    assert answered["there"] == answered["here"]
    assert len(answered["there"]) == 11 * (2 + 2 * 2)
    assert answered["answers"] > 1
    assert answered["relevance"] == "alphabetical"
    assert answered["mitigations"] == ["none", "parallel_windows"]


def test_the_journal_of_answers_stays_with_who_asks(answered):
    assert answered["progress"] == [[1, 2], [2, 2]]  # blocks of eight questions
    assert all(answered["reused"])
    assert answered["sources"] == 1
    assert answered["kept"] >= 11 * 4


def test_an_actor_that_cannot_load_its_model_says_so(answered):
    assert answered["failures"] == ["no such model"]


def test_answers_on_ray_need_settings_and_a_model_of_their_own():
    from rag_posfix.contracts.request import MitigationChoice
    from rag_posfix.evaluation import evaluate_positions
    from tests.support.tiny_evaluation import EXAMPLES, tiny_engine

    none = [MitigationChoice("none")]
    with pytest.raises(ConfigError, match="give settings instead of engine"):
        evaluate_positions(EXAMPLES, none, gold_positions=(0,), documents=3, ray=True, engine=tiny_engine())
    remote = Settings(model="openai:a@http://127.0.0.1:1/v1")
    with pytest.raises(ConfigError, match="leave --ray out"):
        evaluate_positions(EXAMPLES, none, gold_positions=(0,), documents=3, ray=True, settings=remote)


def test_answers_are_those_of_the_plain_service(served):
    on_ray, plain = served["equal"]
    assert on_ray == plain
    assert "21 kilometres" in json.dumps(on_ray[0])
    assert served["refused"] == 422


def test_shuffled_repeats_go_to_the_replica_that_holds_the_passages(served):
    for processes in served["overlap"].values():
        assert len(set(processes)) == 1
    assert len({process for processes in served["overlap"].values() for process in processes}) == 2


def test_no_request_fails_when_a_replica_is_killed_under_load(served):
    killed = served["killed"]
    assert killed["failed"] == []
    assert killed["different"] == []
    assert killed["repeated"] >= 1


def test_replicas_export_their_queue_batches_and_passages_to_the_metrics_of_the_node(served):
    assert served["gauges"]["in_flight_requests"] == 0
    assert {"waiting_requests", "decode_steps", "decoded_answers"} <= set(served["gauges"])


def test_the_documented_deploy_line_works_on_a_cluster_with_a_token_and_without_it_is_refused(served):
    deployed = served["deployed"]
    assert deployed["refused"] != 0
    assert deployed["returncode"] == 0, deployed["output"]
    assert deployed["codes"] == [401, 200]
