"""The service on a local Ray cluster with two replicas: answers, routing, and a replica that is killed."""

from __future__ import annotations

import json
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rag_posfix.process import environment_with

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found():
    pytest.importorskip("ray.serve", reason="the extra ray is not installed")
    folder = tempfile.mkdtemp(prefix="ray-")  # short: the cluster's sockets lie in it
    environment = environment_with(
        PYTHONPATH=f"{ROOT}:{ROOT / 'services'}",
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(32),
        RAY_worker_niceness="0",  # not behind everything else on a busy machine
    )  # fmt: skip
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.serve_with_ray", folder],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_answers_are_those_of_the_plain_service(found):
    on_ray, plain = found["equal"]
    assert on_ray == plain
    assert "21 kilometres" in json.dumps(on_ray[0])
    assert found["refused"] == 422


def test_shuffled_repeats_go_to_the_replica_that_holds_the_passages(found):
    for processes in found["overlap"].values():
        assert len(set(processes)) == 1
    assert len({process for processes in found["overlap"].values() for process in processes}) == 2


def test_no_request_fails_when_a_replica_is_killed_under_load(found):
    killed = found["killed"]
    assert killed["failed"] == []
    assert killed["different"] == []
    assert killed["repeated"] >= 1


def test_the_prefix_tree_of_ray_matches_nothing_of_reordered_passages():
    """The class by which Ray's ``PrefixCacheAffinityRouter`` compares prompts."""
    pytest.importorskip("ray.serve", reason="the extra ray is not installed")
    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

    from rag_posfix.contracts.request import GenerationRequest
    from rag_posfix_api.ray_serve.routing import RoutedRequest
    from tests.support.tiny import toy_layout

    layout = toy_layout(lengths=(40, 50, 60, 70))
    request = RoutedRequest.of(GenerationRequest(layout))
    tree = PrefixTree()
    tree.add_tenants(["replica"], 0.0)
    tree.insert(request.prompt, "replica", 1.0)
    assert tree.prefix_match(request.prompt)[0] == request.prompt
    for seed in range(6):
        order = random.Random(seed).sample((1, 2, 3), 3)
        shuffled = RoutedRequest.of(GenerationRequest(layout.select((*order, 0))))
        matched, _ = tree.prefix_match(shuffled.prompt)
        assert len(matched) <= layout.prefix.stop + 1  # a first token may agree by chance
        assert shuffled.passages == request.passages
