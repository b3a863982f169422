"""Ranking on a local Ray cluster of two CPUs, in a process of its own."""

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
from rag_posfix.settings import Settings, environment_with

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pytest.importorskip("ray", reason="the extra ray is not installed")
    folder = tempfile.mkdtemp(prefix="ray-")  # short: the cluster's sockets lie in it
    journal = tmp_path_factory.mktemp("ray") / "journal.jsonl"
    environment = environment_with(PYTHONPATH=str(ROOT), RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.rank_with_ray", folder, str(journal)],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_rankings_on_the_cluster_are_those_made_here(found):
    assert found["there"] == found["here"]
    assert list(found["there"]) == [*(f"q{n}" for n in range(10)), "empty"]
    assert found["there"]["empty"]["ids"] == []
    assert all(seconds > 0 for seconds in found["seconds"][:-1])


def test_what_the_cluster_ranked_is_in_the_journal(found):
    assert found["reused"] == 11


def test_a_cluster_that_was_connected_before_stays_connected(found):
    assert found["stayed"]


def test_a_failure_in_an_actor_is_the_same_line_as_here(found):
    ranking, loading = found["failures"]
    assert ranking.startswith("by_length failed on query 'q0' (ConfigError: nothing is ranked here)")
    assert loading == "no such model"


def test_without_the_extra_the_message_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"ray is not installed.*rag-posfix\[ray\]"), ray_rankers(Settings(), 1):
        pass
