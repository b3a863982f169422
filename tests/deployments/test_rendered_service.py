"""Environments as image and chart render them start the real service, up to /readyz."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import httpx2
import pytest

from deployments.ci.image_steps import DOCKERFILE, read_steps, stages_of
from rag_posfix.folders import default_cache_dir
from tests.support.helm_chart import one_of, values_of

READY_SECONDS = 200


def chart_environment():
    return one_of("ConfigMap", values_of("laptop"))["data"]


def image_environment():
    """The variables of the image's target and of the ``docker run`` line in its first comment."""
    text = DOCKERFILE.read_text("utf-8")
    steps = read_steps(text)
    chain = stages_of("cpu", steps)
    settings = " ".join(step.text for step in steps if step.stage in chain and step.instruction == "ENV")
    run = re.search(r"docker run --read-only.*?rag-posfix:\d", text, re.DOTALL)[0]
    return dict(re.findall(r"((?:RAG_POSFIX|HF)_\w+)=(\S+)", settings) + re.findall(r"--env (\w+)=(\S+)", run))


def start(environment, folder, **changes):
    """Start the service with its paths below a folder and a free port, as no container gives them."""
    paths = {"/cache": str(folder / "cache"), "/data": str(folder / "data"), "/tmp": str(folder)}
    variables = {key: value for key, value in os.environ.items() if not key.startswith("RAG_POSFIX")}
    variables |= {key: paths.get(value, value) for key, value in environment.items() if key != "HOME"} | changes
    variables["RAG_POSFIX_SERVICE_PORT"] = "0"
    if "RAG_POSFIX_SERVICE_METRICS_ADDRESS" in variables:
        variables["RAG_POSFIX_SERVICE_METRICS_ADDRESS"] = "127.0.0.1:0"
    command = [sys.executable, "-m", "rag_posfix.cli.main", "serve", "--log-format", "text"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, text=True)
    return process, folder / "log"


def wait_for(process, log, pattern):
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until:
        match = re.search(pattern, log.read_text())
        if match or process.poll() is not None:
            return match
        time.sleep(0.2)
    return None


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize("environment", [chart_environment, image_environment], ids=["chart", "image"])
def test_the_service_starts_without_a_key_where_that_is_said_and_warns(environment, tmp_path):
    process, log = start(environment(), tmp_path, RAG_POSFIX_CACHE_DIR=str(default_cache_dir()))
    try:
        assert wait_for(process, log, "ready: "), log.read_text()
        address = re.search(r"listening on http://0\.0\.0\.0:(\d+)", log.read_text())[1]
        assert httpx2.get(f"http://127.0.0.1:{address}/readyz").status_code == 200
        assert "no API key is needed" in log.read_text()
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0


def test_without_the_decision_the_service_does_not_start(tmp_path):
    environment = chart_environment() | {"RAG_POSFIX_SERVICE_ALLOW_ANONYMOUS": "false"}
    process, log = start(environment, tmp_path)
    assert process.wait(timeout=120) == 1
    assert "RAG_POSFIX_SERVICE_ALLOW_ANONYMOUS=true" in log.read_text()
