"""TLS by flags: a real handshake with a certificate of the test, and files that cannot be used."""

from __future__ import annotations

import json
import ssl
from pathlib import Path

import httpx2
import pytest

import rag_posfix_api.server as server
from rag_posfix.errors import ConfigError
from rag_posfix.settings import Settings
from rag_posfix_api.server import check_tls
from tests.support.certificates import make_certificate
from tests.support.command_line import command_line
from tests.support.serving import limits, make_pipeline
from tests.support.waiting import wait_until
from tests.support.warm_python import WarmPython

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
import rag_posfix_api.server as server
from rag_posfix.cli.main import main
from tests.support.serving import make_pipeline
run = server.run
server.run = lambda settings, **given: run(settings, pipeline=make_pipeline(), **given)
sys.exit(main())
"""


@pytest.mark.slow
def test_the_flags_serve_over_tls(tmp_path: Path, python: WarmPython):
    cert, key = make_certificate(tmp_path)
    flags = ["serve", "--port", "0", "--tls-cert", str(cert), "--tls-key", str(key)]
    log = tmp_path / "log"
    process = python.start(ROOT, "-c", PROGRAM, *flags, output=log)
    try:
        wait_until(lambda: "\n" in log.read_text(), 60)
        message = json.loads(log.read_text().splitlines()[0])["message"]
        assert message.startswith("listening on https://127.0.0.1:")
        url = message.removeprefix("listening on ")
        trusting = ssl.create_default_context(cafile=str(cert))
        assert httpx2.get(url + "/readyz", verify=trusting, timeout=60).status_code == 200
        with pytest.raises(httpx2.TransportError):  # nobody vouches for this certificate
            httpx2.get(url + "/readyz", timeout=60)
        with pytest.raises(httpx2.TransportError):
            httpx2.get(url.replace("https", "http") + "/readyz", timeout=60)
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()


def test_files_that_cannot_be_used_are_told_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cert, key = make_certificate(tmp_path)
    _, other = make_certificate(tmp_path, "other")
    _, locked = make_certificate(tmp_path, "locked", passphrase="secret")
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    monkeypatch.setattr(server, "create_app", lambda *arguments: pytest.fail("loaded"))
    for files, told in (
        ((cert, None), "--tls-cert is given and --tls-key is not"),
        ((None, key), "--tls-key is given and --tls-cert is not"),
        ((tmp_path / "none.pem", key), "none.pem cannot be read: No such file or directory"),
        ((cert, tmp_path), "cannot be read: Is a directory"),
        ((text, key), "cannot be used"),
        ((cert, other), "a certificate and its own key"),
        ((cert, locked), "the key without a passphrase"),
    ):
        with pytest.raises(ConfigError, match=r"TLS needs both|cannot be") as refused:
            server.run(Settings(), service=limits(tls_cert=files[0], tls_key=files[1]), pipeline=make_pipeline())
        assert told in str(refused.value)
    check_tls(cert, key)
    check_tls(None, None)


def test_the_command_line_tells_it(capsysbinary: pytest.CaptureFixture[bytes]):
    code, _, told = command_line(capsysbinary)("serve", "--tls-cert", "a.pem")
    assert code == 1
    assert "TLS needs both files" in told
