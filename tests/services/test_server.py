from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import rag_posfix_api.server as server
from rag_posfix.errors import ConfigError
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.settings import Settings
from rag_posfix_api.openapi import main
from rag_posfix_api.server import bind
from tests.support.serving import limits, make_pipeline
from tests.support.subprocesses import run_python
from tests.support.toy_encoder import ToyEncoder
from tests.support.warm_python import WarmPython

ROOT = Path(__file__).parents[2]

PROGRAM = """
from rag_posfix.settings import Settings
from rag_posfix_api.server import run
from tests.support.serving import make_pipeline
run(Settings(), "127.0.0.1", 0, pipeline=make_pipeline())
"""


def test_a_busy_port_is_told_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "create_app", lambda *arguments: pytest.fail("loaded"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as refused:
            server.run(Settings(), "127.0.0.1", port, service=limits())
    assert str(refused.value) == f"port {port} on 127.0.0.1 is in use; choose another with --port"


def test_an_address_that_is_not_ours_is_told():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0 cannot be listened on"):
        bind("192.0.2.1", 0)
    with pytest.raises(ConfigError, match=r"host 'no host' cannot be resolved"):
        bind("no host", 0)


@pytest.mark.slow
def test_the_service_is_imported_without_torch():
    """An ingress of Ray Serve never needs it, and wrong settings are told before that import."""
    assert run_python("import sys, rag_posfix_api.server; print('torch' in sys.modules)") == "False"


@pytest.mark.slow
def test_the_server_runs_on_the_port_given_and_stops_on_a_signal():
    """In a process of its own: signals, stderr and exit code are those of a user's terminal."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAG_POSFIX_SERVICE_SHUTDOWN_TIMEOUT_SECONDS": "3"},
    )
    try:
        assert process.stderr is not None
        line = json.loads(process.stderr.readline())
        assert line["message"].startswith("listening on http://127.0.0.1:")
        port = int(line["message"].rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            assert connection.recv(20).startswith(b"HTTP/1.1 200")
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
            assert connection.recv(20).startswith(b"HTTP/1.1 403")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert out == ""
    assert process.returncode == 0
    messages = [json.loads(rest)["message"] for rest in err.splitlines()]
    assert [message for message in messages if message != "request"] == [f"ready: http://127.0.0.1:{port}/", "stopped"]


@pytest.mark.slow
def test_a_service_whose_embeddings_cannot_be_loaded_ends_with_1(tmp_path: Path, python: WarmPython):
    """Until a supervisor sees the end of the process, it would go on as not ready."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'services'}",
        "RAG_POSFIX_EMBEDDING_MODEL": str(tmp_path / "missing"),
        "RAG_POSFIX_MODEL": "openai:none@http://127.0.0.1:9/v1",  # no weights are loaded first
        "RAG_POSFIX_MITIGATION": "none",
    }
    command, log = ("-m", "rag_posfix.cli.main", "serve", "--port", "0"), tmp_path / "log"
    assert python.start(ROOT, *command, output=log, environment=environment).wait(120) == 1
    assert log.read_text().splitlines()[-1].startswith(f"error: embedding model '{tmp_path / 'missing'}' could not")


def test_a_server_whose_split_model_lost_a_process_ends_and_says_why():
    """It would answer 503 to everything until somebody looks."""

    class Split(FakeGenerator):
        failure: str | None = None

    generator = Split(ToyEncoder())
    running = server.make_server(Settings(), limits(), make_pipeline(generator), on_ready=lambda: kill(generator))

    def kill(generator: Split) -> None:
        generator.failure = "the process of rank 1 of 2 ended"

    with bind("127.0.0.1", 0) as listener:
        running.run(sockets=[listener])
    assert "cannot answer any more: the process of rank 1 of 2 ended" in str(running.failure)


def test_the_openapi_document_is_current_and_tells_every_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Run ``python -m rag_posfix_api.openapi docs/openapi.json`` after changing a route."""
    assert main([str(tmp_path / "openapi.json")]) == 0
    written = (tmp_path / "openapi.json").read_text(encoding="utf-8")
    assert (ROOT / "docs" / "openapi.json").read_text(encoding="utf-8") == written
    paths = json.loads(written)["paths"]
    responses = paths["/v1/chat/completions"]["post"]["responses"]
    assert set(responses) == {"200", "400", "401", "403", "404", "413", "422", "429", "500", "502", "503", "504"}
    assert "HTTPValidationError" not in written
    assert {"/v1/rerank", "/v1/models", "/livez", "/readyz", "/health", "/healthz", "/metrics"} <= set(paths)
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
def test_a_hangup_before_the_server_runs_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch):
    def listen_and_be_signalled(*arguments):
        signal.raise_signal(signal.SIGHUP)  # the process ends here if nobody handles it
        raise ConfigError("reached")

    monkeypatch.setattr(server, "listen", listen_and_be_signalled)
    before = signal.signal(signal.SIGHUP, lambda *_: pytest.fail("it was not replaced"))
    try:
        with pytest.raises(ConfigError, match="reached"):
            server.run(Settings(), service=limits())
    finally:
        signal.signal(signal.SIGHUP, before)
