"""API keys: who is let in, to what, how often, and what is kept of a key."""

from __future__ import annotations

import hashlib
import io
import json
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

import rag_posfix_api.server as server
from rag_posfix.cli.main import app
from rag_posfix.errors import ConfigError
from rag_posfix.settings import Settings
from rag_posfix_api.http.auth import Caller, Quotas, required_scope
from rag_posfix_api.http.errors import RequestError
from rag_posfix_api.keys.store import KeyStore, digest, split_key
from tests.support.clock import Clock
from tests.support.command_line import command_line
from tests.support.serving import BRIDGE, CHAT, GatedGenerator, chat, limits, make_pipeline, serving
from tests.support.tenants import Tenants, key_of, pipeline_with_embeddings
from tests.support.waiting import wait_until


def status_of(client: TestClient, **headers: str) -> int:
    return client.get("/v1/models", headers=headers).status_code


def test_a_key_is_its_id_and_256_random_bits(tmp_path: Path):
    key, whole = KeyStore(tmp_path).create("acme")
    identity, secret = split_key(whole)
    assert whole == f"rpk_{identity}_{secret}"
    assert identity == key.id
    assert len(secret) == 43  # 256 bits in base64


def test_the_digest_of_a_secret_is_blake2b_keyed_with_the_id():
    identity, secret = "0123456789abcdef", "a" * 43
    expected = hashlib.blake2b(b"a" * 43, digest_size=32, key=b"0123456789abcdef").hexdigest()
    assert digest(identity, secret) == f"blake2b${expected}"
    assert digest("0123456789abcdee", secret) != digest(identity, secret)
    assert digest(identity, "b" + secret[1:]) != digest(identity, secret)


@pytest.mark.parametrize(
    "key", ["", "rpk_", "rpk_0123456789abcdef_short", "sk-0123", "rpk_0123456789ABCDEF_" + "a" * 43]
)
def test_a_text_of_another_form_is_no_key(key: str):
    assert split_key(key) is None


def test_the_key_file_holds_no_secret_and_only_its_owner_reads_it(tmp_path: Path):
    store = KeyStore(tmp_path / "data")
    key, whole = store.create("acme", name="app", scopes=("write", "read"), requests_per_minute=5)
    file = tmp_path / "data" / "keys.json"
    assert split_key(whole)[1] not in file.read_text()
    assert {stat.S_IMODE(each.stat().st_mode) for each in file.parent.iterdir()} == {0o600}, "the lock's too"
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    again = KeyStore(tmp_path / "data").table().keys[key.id]
    assert again == key
    assert (again.scopes, again.requests_per_minute, again.max_concurrent) == (("read", "write"), 5, None)


def test_keys_of_a_tenant_share_a_random_salt_and_tenants_do_not(tmp_path: Path):
    store, other = KeyStore(tmp_path / "one"), KeyStore(tmp_path / "two")
    key, _ = store.create("acme")
    first = store.table().salts["acme"]
    store.create("acme")
    store.create("bolt")
    store.revoke(key.id)
    other.create("acme")
    salts = store.table().salts
    assert salts["acme"] == first
    assert set(salts) == {"acme", "bolt"}
    assert len({salts["acme"], salts["bolt"], other.table().salts["acme"]}) == 3


@pytest.mark.parametrize("tenant", ["../etc", "", "Acme", "a" * 65])
def test_a_tenant_is_a_short_name_in_lower_case(tenant: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^tenant"):
        KeyStore(tmp_path).create(tenant)
    assert not (tmp_path / "keys.json").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"scopes": ("root",)},
        {"scopes": ()},
        {"requests_per_minute": 0},
        {"max_concurrent": -1},
        {"name": "two\nlines"},
    ],
)
def test_what_a_key_cannot_be(fields: dict[str, Any], tmp_path: Path):
    with pytest.raises(ConfigError):
        KeyStore(tmp_path).create("acme", **fields)
    assert not (tmp_path / "keys.json").exists()


def test_keys_that_are_created_at_the_same_time_are_all_kept(tmp_path: Path):
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda number: KeyStore(tmp_path).create("acme", name=str(number)), range(8)))
    assert set(KeyStore(tmp_path).table().keys) == {key.id for key, _ in made}


def test_the_commands_create_list_and_revoke(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]):
    call, folder = command_line(capsysbinary), ("--data-dir", tmp_path)
    made = json.loads(call("keys", "create", "acme", "--name", "app", "--scopes", "read", *folder, "--json")[1])
    assert (made["tenant"], made["scopes"], made["revoked_at"]) == ("acme", ["read"], None)
    listed = json.loads(call("keys", "list", *folder, "--json")[1])["keys"]
    assert listed == [{name: value for name, value in made.items() if name != "key"}]
    shown = call("keys", "list", *folder)[1]
    assert made["id"] in shown
    assert made["key"] not in shown
    plain = call("keys", "create", "acme", *folder)[1]
    assert split_key(plain.strip()) is not None  # nothing but the key, for scripts
    revoked = json.loads(call("keys", "revoke", made["id"], *folder, "--json")[1])
    assert revoked["revoked_at"] >= made["created_at"]
    code, _, told = call("keys", "revoke", "0" * 16, *folder)
    assert code == 1
    assert "there is no key with the id '0000000000000000'" in told


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a file on a full disk")
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_key_that_could_not_be_printed_is_revoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options):
    with io.TextIOWrapper(open("/dev/full", "wb", buffering=0), write_through=True) as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(ConfigError, match=r"could not be printed \(No space left on device\) and is revoked"):
            app(["keys", "create", "acme", "--data-dir", str(tmp_path), *options], standalone_mode=False)
        monkeypatch.undo()
    (key,) = KeyStore(tmp_path).table().keys.values()
    assert key.revoked_at is not None


def test_a_key_is_sent_as_bearer_or_as_x_api_key_and_a_wrong_one_is_refused(tmp_path: Path):
    tenants = Tenants(tmp_path)
    client = tenants.client("acme")
    key, stranger = key_of(client), tenants.stranger()
    assert status_of(client) == 200
    for headers in ({"x-api-key": key}, {"authorization": f"bearer  {key}"}):
        assert status_of(stranger, **headers) == 200
    altered = key[:-1] + ("A" if key[-1] != "A" else "B")
    for headers in (
        {},
        {"x-api-key": altered},
        {"authorization": f"Basic {key}"},
        {"authorization": f"Bearer {key}x"},
    ):
        response = stranger.get("/v1/models", headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"


def test_two_keys_in_one_request_are_refused(tmp_path: Path):
    """A proxy in front may have looked at the other one."""
    tenants = Tenants(tmp_path)
    key, other = key_of(tenants.client("acme")), key_of(tenants.client("bolt"))
    for name, form in (("authorization", "Bearer {}"), ("x-api-key", "{}")):
        twice = [(name, form.format(key)), (name, form.format(other))]
        assert tenants.stranger().get("/v1/models", headers=twice).status_code == 401


def test_a_revoked_key_is_refused_at_its_next_request_and_the_door_stays_closed(tmp_path: Path):
    tenants = Tenants(tmp_path)
    client = tenants.client("acme")
    assert status_of(client) == 200
    KeyStore(tmp_path).revoke(tenants.made[key_of(client)])  # another process does it so
    assert status_of(client) == 401
    assert status_of(tenants.stranger()) == 401


def test_a_key_file_that_cannot_be_read_lets_nobody_in(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tenants = Tenants(tmp_path)
    client = tenants.client("acme")
    assert status_of(client) == 200
    for content in (
        "{",
        json.dumps({"format": "other", "version": 1}),
        "[]",
        '{"format": "rag-posfix-keys", "version": 1}',
    ):
        (tmp_path / "keys.json").write_text(content)
        assert status_of(client) == 503
        assert status_of(tenants.stranger()) == 401
    with pytest.raises(ConfigError, match="damaged or of another release"):
        tenants.keys.create("acme")
    (tmp_path / "keys.json").unlink()
    assert status_of(tenants.stranger()) == 401
    assert "damaged" in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("POST", CHAT, "read"),
        ("GET", "/v1/collections", "read"),
        ("POST", "/v1/collections", "write"),
        ("GET", "/v1/collections/a", "read"),
        ("DELETE", "/v1/collections/a", "write"),
        ("POST", "/v1/collections/a/search", "read"),
        ("DELETE", "/v1/collections/a/search", "write"),
        ("POST", "/v1/collections/a/documents", "write"),
        ("DELETE", "/v1/collections/a/documents/search", "write"),
        ("DELETE", "/v1/collections/a/documents/x/search", "write"),
        ("POST", "/v1/collections/a/documents/search", "write"),
        ("POST", "/v1/collections/a/precompute", "write"),
        ("GET", "/admin/keys", "admin"),
        ("DELETE", "/admin/keys/1", "admin"),
    ],
)
def test_the_scope_of_a_request(method: str, path: str, scope: str):
    assert required_scope(method, path) == scope


def test_a_key_may_do_what_its_scopes_say_and_nothing_else(tmp_path: Path):
    tenants = Tenants(tmp_path)
    reader, writer = tenants.client("acme", scopes=("read",)), tenants.client("acme", scopes=("write",))
    admin = tenants.client("acme", scopes=("admin",))
    asked = {
        "read": lambda client: client.get("/v1/collections"),
        "write": lambda client: client.post("/v1/collections", json={"name": "c"}),
        "admin": lambda client: client.get("/admin/keys"),
    }
    for scope, client in (("read", reader), ("write", writer), ("admin", admin)):
        for needed, ask in asked.items():
            response = ask(client)
            assert (response.status_code < 300) == (scope == needed), (scope, needed)
            if scope != needed:
                assert response.status_code == 403
                assert response.json()["error"]["code"] == "insufficient_scope"


def test_the_body_of_a_request_that_is_not_allowed_is_not_read(tmp_path: Path):
    reader = Tenants(tmp_path).client("acme", scopes=("read",))
    assert reader.post("/v1/collections", content=b"no JSON").status_code == 403


def test_keys_are_made_listed_and_revoked_over_http(tmp_path: Path):
    tenants = Tenants(tmp_path)
    admin = tenants.client("ops", scopes=("admin",))
    made = admin.post("/admin/keys", json={"tenant": "acme", "name": "app", "scopes": ["read"], "max_concurrent": 3})
    assert made.status_code == 201
    client = tenants.stranger(authorization=f"Bearer {made.json()['key']}")
    assert status_of(client) == 200
    listed = admin.get("/admin/keys")
    assert [(key["tenant"], key["name"], key["max_concurrent"]) for key in listed.json()["keys"]] == [
        ("ops", "", None),
        ("acme", "app", 3),
    ]
    assert "blake2b" not in listed.text
    assert made.json()["key"] not in listed.text
    revoked = admin.delete(f"/admin/keys/{made.json()['id']}")
    assert revoked.json()["revoked_at"] is not None
    assert status_of(client) == 401
    missing = admin.delete("/admin/keys/0000000000000000")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    for body in ({"tenant": "../x"}, {"tenant": "a", "scopes": []}, {"tenant": "a", "salt": "b"}, {}):
        assert admin.post("/admin/keys", json=body).status_code == 422
    assert admin.post("/admin/keys", json={"tenant": "a", "scopes": ["root"]}).status_code == 422


def test_without_any_key_nobody_makes_one_over_http(tmp_path: Path):
    stranger = Tenants(tmp_path).stranger()
    refused = stranger.post("/admin/keys", json={"tenant": "mine", "scopes": ["admin"]})
    assert refused.status_code == 403
    assert not (tmp_path / "keys.json").exists()


def test_the_single_key_of_the_settings_works_beside_the_others_and_may_do_all(tmp_path: Path):
    tenants = Tenants(tmp_path, api_key="operator")
    client, operator = tenants.client("acme"), tenants.stranger(authorization="Bearer operator")
    for one in (client, operator):
        assert status_of(one) == 200
    assert operator.get("/admin/keys").status_code == 200
    assert operator.post("/v1/collections", json={"name": "mine"}).status_code == 201
    assert client.get("/v1/collections").json()["data"] == []
    assert status_of(tenants.stranger(authorization="Bearer wrong")) == 401


def test_a_path_prefix_changes_no_scope(tmp_path: Path):
    """A proxy of Ray, or an application in which this one is mounted, leaves the prefix in the path."""
    tenants = Tenants(tmp_path)
    whole = tenants.keys.create("acme", scopes=("read",))[1]
    prefixed = TestClient(tenants.app, root_path="/rag")
    headers = {"authorization": f"Bearer {whole}"}
    assert prefixed.get("/rag/v1/models", headers=headers).status_code == 200
    refused = prefixed.post("/rag/admin/keys", json={"tenant": "a", "scopes": ["admin"]}, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")
    assert prefixed.get("/rag/metrics", headers=headers).status_code == 403
    assert prefixed.get("/rag/livez").status_code == 200
    assert prefixed.post("/rag/v1/messages", headers=headers, json={}).json()["type"] == "error"  # Anthropic's form


async def test_requests_per_minute_are_a_bucket_that_fills_again():
    clock = Clock()
    quotas, caller = Quotas(clock), Caller("acme", key_id="k", requests_per_minute=3)

    async def ask(caller: Caller = caller) -> None:
        await (await quotas.take(caller))()

    for _ in range(3):
        await ask()
    with pytest.raises(RequestError, match="3 requests a minute; try again in 20 seconds") as refused:
        await ask()
    assert refused.value.retry_seconds == 20
    await ask(Caller("acme", key_id="another", requests_per_minute=3))
    clock.now += 19
    with pytest.raises(RequestError, match="requests a minute"):
        await ask()
    clock.now += 1
    await ask()
    clock.now += 3600
    for _ in range(3):  # not more than a minute's worth gathers
        await ask()
    with pytest.raises(RequestError, match="requests a minute"):
        await ask()


def test_a_key_that_asks_too_often_is_told_when_to_come_back_in_the_dialect_of_the_path(tmp_path: Path):
    tenants = Tenants(tmp_path)
    client, other = tenants.client("acme", requests_per_minute=2), tenants.client("acme")
    for _ in range(2):
        assert status_of(client) == 200
    refused = client.get("/v1/models")
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    anthropic = client.post("/v1/messages", json={})
    assert (anthropic.status_code, anthropic.json()["type"]) == (429, "error")
    assert anthropic.json()["error"]["type"] == "rate_limit_error"
    assert status_of(other) == 200
    assert client.get("/livez").status_code == 200  # nobody's


def test_a_key_runs_so_many_requests_at_once(tmp_path: Path):
    store, generator = KeyStore(tmp_path), GatedGenerator()
    _, whole = store.create("acme", max_concurrent=1)
    _, other = store.create("acme")

    def ask(url: str, key: str, stream: bool = False):
        import httpx2

        body = chat(documents=[BRIDGE], stream=stream)
        return httpx2.post(url + CHAT, json=body, headers={"x-api-key": key}, timeout=60)

    with serving(make_pipeline(generator), data_dir=tmp_path) as url, ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, url, whole, True)
        wait_until(generator.entered.is_set)
        refused = ask(url, whole)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        second = pool.submit(ask, url, other)
        generator.gate.set()
        assert (first.result().status_code, second.result().status_code) == (200, 200)
        wait_until(lambda: ask(url, whole).status_code == 200)


def test_the_log_line_of_a_request_has_the_id_of_its_key_and_not_the_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    client = Tenants(tmp_path).client("acme")
    with caplog.at_level("INFO", "rag_posfix_api.access"):
        assert status_of(client) == 200
    (record,) = [record for record in caplog.records if record.name == "rag_posfix_api.access"]
    assert record.fields["key"] == split_key(key_of(client))[0]
    assert split_key(key_of(client))[1] not in str(vars(record))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_a_key_the_service_listens_on_loopback_only(host: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no API key; create one with: rag-posfix keys create") as refused:
        server.run(Settings(), host, service=limits(data_dir=tmp_path), pipeline=pipeline_with_embeddings())
    assert "listen on 127.0.0.1" in str(refused.value)


@pytest.mark.parametrize("single", [True, False])
def test_with_a_key_the_service_listens_anywhere(single: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Started(Exception):
        pass

    def start(*args: object, hosts: object = None, **options: object) -> None:
        assert hosts is None  # any name in Host, with a key
        raise Started

    monkeypatch.setattr(server, "make_server", start)
    monkeypatch.setattr(server, "configure_logging", lambda form: None)
    if not single:
        KeyStore(tmp_path).create("acme")
    fields = {"api_key": "key"} if single else {}
    with pytest.raises(Started):
        server.run(Settings(), "0.0.0.0", service=limits(data_dir=tmp_path, **fields))


@pytest.mark.slow
def test_a_file_of_keys_that_cannot_be_written_is_no_fault_of_the_caller(tmp_path: Path):
    tenants = Tenants(tmp_path)
    admin = tenants.client("ops", scopes=("admin",))
    (tmp_path / "keys.lock").unlink(missing_ok=True)
    (tmp_path / "keys.lock").mkdir()
    for response in (
        admin.post("/admin/keys", json={"tenant": "acme"}),
        admin.delete(f"/admin/keys/{next(iter(tenants.made.values()))}"),
    ):
        assert (response.status_code, response.json()["error"]["code"]) == (500, "not_stored")
        assert str(tmp_path) not in response.text
