"""Rankings, answers and first stages on one local Ray cluster of two CPUs, in a process of its own."""

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
from rag_posfix.evaluation.ranking.ray_backend import ray_rankers
from rag_posfix.process import environment_with
from rag_posfix.settings import Settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """What the program of tests/support prints."""
    pytest.importorskip("ray", reason="the extra ray is not installed")
    folder = tempfile.mkdtemp(prefix="ray-")  # short: the cluster's sockets lie in it
    environment = environment_with(
        PYTHONPATH=str(ROOT), RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32),
        RAY_worker_niceness="0",  # not behind everything else on a busy machine
    )  # fmt: skip
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.with_ray", folder, str(tmp_path_factory.mktemp("ray"))],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540, check=False,
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
def retrieved(results):
    return results["retrieved"]


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
    ranking, loading = ranked["failures"]
    assert ranking.startswith("by_length failed on query 'q0' (ConfigError: nothing is ranked here)")
    assert loading == "no such model"


@pytest.mark.parametrize("first_stage", ["bm25", "dense", "hybrid"])
def test_the_first_stage_on_the_cluster_finds_what_it_finds_here(retrieved, first_stage):
    found = retrieved[first_stage]
    assert found["there"] == found["here"]
    assert list(found["there"]) == [*(f"q{n}" for n in range(40)), "none"]
    scores = found["there"]["q0"]["scores"]
    assert len(scores) == 9
    assert len(set(scores)) < 9, "without ties their order is not compared"
    assert found["there"]["none"]["ids"] == found["here"]["none"]["ids"]


@pytest.mark.parametrize("first_stage", ["bm25", "hybrid"])
def test_the_first_stage_has_one_identity_in_both_places(retrieved, first_stage):
    here, there = retrieved[first_stage]["identities"]
    assert here == there


def test_a_searching_process_that_dies_is_started_again_with_its_questions(retrieved):
    assert retrieved["died"]


def test_vectors_and_rankings_of_the_cluster_are_kept_where_the_command_runs(retrieved):
    dense = retrieved["dense"]
    assert dense["steps"][0] == "embedding"
    assert dense["steps"][-1] == [200, 200]
    assert dense["steps"].count("embedding") == 1
    assert dense["reused"] == [30, 41]
    assert dense["embedded_again"] == 0


def test_the_experiment_with_real_weights_finds_the_same(retrieved):
    here, there = retrieved["real"]
    assert there == here
    assert [row["documents"][0] for row in there] == ["d1", "d3", "d2"]


def test_a_failure_of_the_first_stage_on_the_cluster_is_one_line(retrieved):
    assert retrieved["failures"] == ["no such model", "BM25: k1=-1 must be a number >= 0; 0.9 is usual for passages"]


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
