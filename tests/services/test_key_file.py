"""The key file: while it cannot be read, while there is none, and when revoked keys leave it."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from rag_posfix_api.keys.store import KeyStore
from rag_posfix_api.server import listen
from tests.support.command_line import command_line
from tests.support.serving import limits
from tests.support.tenants import Tenants, key_of


def status_of(client: TestClient) -> int:
    return client.get("/v1/models").status_code


def in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def failing_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Reading the key file fails with EMFILE meanwhile; each attempt is in the list."""
    read_text, attempts = Path.read_text, list[bool]()

    def fail(path: Path, *args: Any, **options: Any) -> str:
        if path != folder / "keys.json":
            return read_text(path, *args, **options)
        attempts.append(True)
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", fail)
        yield attempts


def test_a_key_file_that_could_not_be_read_once_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    tenants = Tenants(tmp_path, api_key="operator")
    client, operator = tenants.client("acme"), tenants.stranger(**{"x-api-key": "operator"})
    with failing_reads(tmp_path, monkeypatch) as attempts:
        for _ in range(3):
            response = client.get("/v1/models")
            assert (response.status_code, response.json()["error"]["code"]) == (503, "keys_unavailable")
            assert response.headers["retry-after"]
            assert status_of(tenants.stranger()) == 401
        assert len(attempts) >= 3
        assert status_of(operator) == 200
        assert "key file" in client.get("/readyz").json()["detail"]
        assert str(tmp_path) not in client.get("/readyz").text
    assert status_of(client) == 200
    assert "detail" not in client.get("/readyz").json()
    assert caplog.text.count("cannot be read: Too many open files") == 1


def test_a_key_file_that_could_not_be_looked_for_once_closes_no_service_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stranger = Tenants(tmp_path).stranger()
    with monkeypatch.context() as patched:
        stat = Path.stat

        def fail(path: Path, **options: Any) -> Any:
            if path.name == "keys.json":
                raise OSError(errno.EIO, "Input/output error")
            return stat(path, **options)

        patched.setattr(Path, "stat", fail)
        with failing_reads(tmp_path, monkeypatch):
            assert status_of(stranger) == 401
    assert status_of(stranger) == 200


def test_keys_are_not_listed_as_none_while_their_file_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
):
    tenants = Tenants(tmp_path, api_key="operator")
    tenants.client("acme")
    with failing_reads(tmp_path, monkeypatch):
        assert tenants.stranger(**{"x-api-key": "operator"}).get("/admin/keys").status_code == 500
        assert command_line(capsysbinary)("keys", "list", "--data-dir", tmp_path)[0] == 1


def test_a_changed_key_file_is_read_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tenants = Tenants(tmp_path)
    client = tenants.client("acme")
    assert status_of(client) == 200
    tenants.client("other")
    read_text, loops = Path.read_text, list[bool]()

    def record(path: Path, *args: Any, **options: Any) -> str:
        if path.name == "keys.json":
            loops.append(in_event_loop())
        return read_text(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", record)
    assert status_of(client) == 200
    assert loops == [False]


def test_pruned_keys_are_gone_and_the_others_and_the_salts_stay(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
):
    tenants = Tenants(tmp_path)
    client, old = tenants.client("acme"), tenants.client("acme")
    assert tenants.keys.prune() == 0
    before = tenants.keys.table()
    tenants.keys.revoke(tenants.made[key_of(old)])
    removed = command_line(capsysbinary)("keys", "prune", "--data-dir", tmp_path, "--json")[1]
    assert json.loads(removed) == {"removed": 1}
    after = tenants.keys.table()
    assert (list(after.keys), after.salts) == ([tenants.made[key_of(client)]], before.salts)
    assert (status_of(client), status_of(old)) == (200, 401)


def test_a_service_whose_last_key_was_pruned_stays_closed_after_a_restart(tmp_path: Path):
    keys = KeyStore(tmp_path)
    key, _ = keys.create("acme")
    keys.revoke(key.id)
    keys.prune()
    assert KeyStore(tmp_path).has_keys
    assert status_of(Tenants(tmp_path).stranger()) == 401


@pytest.mark.parametrize(
    "headers", [{"x-forwarded-for": "203.0.113.7"}, {"forwarded": "for=203.0.113.7"}, {"via": "1.1 proxy"}]
)
def test_without_a_key_the_requests_of_a_proxy_are_refused_unless_everyone_may_come(headers: dict, tmp_path: Path):
    proxied = Tenants(tmp_path).stranger(**headers)
    assert proxied.get("/readyz").status_code == 200
    response = proxied.get("/v1/models")
    assert response.status_code == 401
    assert "proxy" in response.json()["error"]["message"]
    assert status_of(Tenants(tmp_path, allow_anonymous=True).stranger(**headers)) == 200
    tenants = Tenants(tmp_path)
    client = tenants.client("acme")
    assert client.get("/v1/models", headers=headers).status_code == 200


def test_a_service_that_requires_a_key_is_closed_while_there_is_none(tmp_path: Path):
    tenants = Tenants(tmp_path, require_key=True, allow_anonymous=True)
    assert status_of(tenants.stranger()) == 401
    assert status_of(tenants.client("acme")) == 200
    with listen(limits(host="0.0.0.0", require_key=True, data_dir=tmp_path / "empty")) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
