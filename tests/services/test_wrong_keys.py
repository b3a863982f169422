"""Wrong secrets cost little, and keys of earlier releases get their digest at their first use."""

from __future__ import annotations

import asyncio
import base64
import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

import rag_posfix_api.http.auth as auth
from benchmarks.faults.service import Host
from benchmarks.service_load import wrong_keys
from rag_posfix.errors import ConfigError, OverloadedError
from rag_posfix_api.http.auth import KeyChecker, Rejections, source_of
from rag_posfix_api.keys.store import KeyStore, digest, matches_scrypt, split_key
from tests.support.clock import Clock
from tests.support.old_keys import hashes, make_old
from tests.support.tenants import Tenants, key_of
from tests.support.waiting import wait_until

WRONG = "A" * 43


def with_wrong_secret(key: str) -> bytes:
    return f"rpk_{split_key(key)[0]}_{WRONG}".encode()


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, gate: threading.Event | None = None) -> Iterator[list[str]]:
    """The secrets that were hashed with scrypt; each waits for the gate."""
    secrets: list[str] = []

    def hashed(secret: str, stored: str) -> bool:
        secrets.append(secret)
        assert gate is None or gate.wait(60)
        return matches_scrypt(secret, stored)

    with monkeypatch.context() as patched:
        patched.setattr(auth, "matches_scrypt", hashed)
        yield secrets


def test_a_scrypt_hash_matches_its_secret_alone():
    # RFC 7914, section 12: scrypt("pleaseletmein", "SodiumChloride", N=16384, r=8, p=1), the first 32 of 64 bytes.
    expected = bytes.fromhex("7023bdcb3afd7348461c06cd81fd38ebfda8fbba904f8e3ea9b543f6545da1f2")
    stored = "$".join(["scrypt$14$8$1", *(base64.b64encode(data).decode() for data in (b"SodiumChloride", expected))])
    assert matches_scrypt("pleaseletmein", stored)
    assert not matches_scrypt("pleaseletmeIn", stored)


@pytest.mark.parametrize(
    "stored",
    ["", "plain", "scrypt$14$8$1$x", "scrypt$99$8$1$AAAA$AAAA", "scrypt$14$8$1$?$?", "scrypt$a$8$1$AA==$AA==", "\xe9"],
)
async def test_a_damaged_hash_matches_nothing(stored: str, tmp_path: Path):
    assert not matches_scrypt(WRONG, stored)
    store = KeyStore(tmp_path)
    _, key = store.create("acme")
    file = tmp_path / "keys.json"
    file.write_text(file.read_text().replace(digest(*split_key(key)), stored))
    assert await KeyChecker(store).caller(key.encode()) is None


def test_a_key_that_is_revoked_while_it_is_hashed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tenants = Tenants(tmp_path)
    client = tenants.client("acme")
    make_old(tmp_path, key_of(client))

    def revoke_and_match(secret: str, stored: str) -> bool:
        KeyStore(tmp_path).revoke(tenants.made[key_of(client)])  # by another process, during the slow hash
        return matches_scrypt(secret, stored)

    monkeypatch.setattr(auth, "matches_scrypt", revoke_and_match)
    assert client.get("/v1/models").status_code == 401
    assert client.get("/v1/models").status_code == 401


def test_an_old_key_gets_its_digest_at_its_first_use_and_works_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tenants = Tenants(tmp_path)
    client, other = tenants.client("acme"), tenants.client("bolt")
    key = key_of(client)
    make_old(tmp_path, key, key_of(other))
    wrong = {"x-api-key": with_wrong_secret(key).decode()}
    with counted(monkeypatch) as secrets:
        assert tenants.stranger(**wrong).get("/v1/models").status_code == 401
        assert hashes(tmp_path)[split_key(key)[0]].startswith("scrypt$")
        for _ in range(3):
            assert client.get("/v1/models").status_code == 200
        assert secrets == [WRONG, split_key(key)[1]]
        assert hashes(tmp_path)[split_key(key)[0]] == digest(*split_key(key))
        assert hashes(tmp_path)[split_key(key_of(other))[0]].startswith("scrypt$")
        assert tenants.stranger(**wrong).get("/v1/models").status_code == 401
        assert len(secrets) == 2  # a digest costs no scrypt


async def test_a_key_file_that_cannot_be_written_costs_one_hash_and_not_one_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    store = KeyStore(tmp_path)
    _, key = store.create("acme")
    make_old(tmp_path, key)

    def fails(*_: object) -> None:
        raise ConfigError("the disk is read-only")

    monkeypatch.setattr(store, "renew", fails)
    checker = KeyChecker(store)
    with counted(monkeypatch) as secrets:
        for _ in range(3):
            assert (await checker.caller(key.encode())).tenant == "acme"
        assert await checker.caller(with_wrong_secret(key)) is None
    assert len(secrets) == 1
    assert caplog.text.count("stays in the key file: the disk is read-only") == 1


async def test_an_old_key_that_is_revoked_while_it_is_checked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, gate = KeyStore(tmp_path), threading.Event()
    made, key = store.create("acme")
    make_old(tmp_path, key)
    with counted(monkeypatch, gate) as secrets:
        asked = asyncio.create_task(KeyChecker(store).caller(key.encode()))
        await asyncio.to_thread(wait_until, lambda: secrets)
        store.revoke(made.id)
        gate.set()
        assert await asked is None
    assert store.table().keys[made.id].revoked_at is not None


async def test_wrong_secrets_of_an_old_key_do_not_keep_other_old_keys_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, gate = KeyStore(tmp_path), threading.Event()
    keys = [store.create("acme")[1] for _ in range(3)]
    make_old(tmp_path, *keys)
    checker = KeyChecker(store)
    with counted(monkeypatch, gate) as secrets:
        wrong = [asyncio.create_task(checker.caller(with_wrong_secret(keys[0]))) for _ in range(257)]
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(OverloadedError, match="256 secrets for the key"):
            await checker.caller(with_wrong_secret(keys[0]))
        valid = [asyncio.create_task(checker.caller(key.encode())) for key in keys[1:]]
        await anyio.wait_all_tasks_blocked()
        gate.set()
        callers = await asyncio.gather(*valid)
        assert [caller.key_id for caller in callers] == [split_key(key)[0] for key in keys[1:]]
        assert secrets[:3] == [WRONG, *(split_key(key)[1] for key in keys[1:])]
        for task in wrong:
            task.cancel()
        await asyncio.gather(*wrong, return_exceptions=True)


def test_refusals_are_a_fiftieth_of_a_second_apart_and_wait_five_seconds_at_most():
    clock = Clock()
    rejections = Rejections(clock)
    assert rejections.pause("a") == 0
    assert rejections.pause("a") == pytest.approx(0.02)
    assert rejections.pause("a") == pytest.approx(0.04)
    clock.now += 0.05
    assert rejections.pause("a") == pytest.approx(0.01)
    assert max(rejections.pause("a") for _ in range(400)) == 5
    assert rejections.pause("b") == 0, "another source does not wait"
    for number in range(5000):
        rejections.pause(f"source {number}")
    assert rejections.pause("a") == 0, "the oldest of many sources is forgotten"
    clock.now += 60
    assert rejections.pause("b") == 0


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("testclient", "testclient"),
    ],
)
def test_a_source_is_an_address_or_a_network_that_one_customer_has(host: str, source: str):
    assert source_of({"type": "http", "client": (host, 1234)}) == source
    assert source_of({"type": "http"}) == source_of({"type": "http", "client": None}) == ""


async def test_wrong_secrets_from_one_source_do_not_keep_the_same_key_from_another_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, gate = KeyStore(tmp_path), threading.Event()
    _, key = store.create("acme")
    make_old(tmp_path, key)
    checker = KeyChecker(store)
    with counted(monkeypatch, gate) as secrets:
        wrong = [asyncio.create_task(checker.caller(with_wrong_secret(key), "203.0.113.9")) for _ in range(257)]
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(OverloadedError):
            await checker.caller(key.encode(), "203.0.113.9")
        valid = asyncio.create_task(checker.caller(key.encode(), "192.0.2.7"))
        await anyio.wait_all_tasks_blocked()
        gate.set()
        caller = await valid
        assert caller is not None
        assert caller.tenant == "acme"
        assert secrets == [WRONG, split_key(key)[1]]
        assert await asyncio.gather(*wrong) == [None] * 257
        assert len(secrets) == 2, "the digest is there: no further scrypt"


@pytest.fixture(scope="module")
def attack() -> Iterator[tuple[Host, Executor]]:
    """A process for services and one that floods them."""
    with Host() as host, ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as flooding:
        yield host, flooding


@pytest.mark.slow
@pytest.mark.parametrize("old", [False, True], ids=["digests", "scrypt hashes"])
def test_no_valid_key_is_refused_under_wrong_secrets_on_200_connections(
    old: bool, tmp_path: Path, attack: tuple[Host, Executor]
):
    """What it costs others, the benchmark measures: ``python -m benchmarks.service_load keys``."""
    store, (host, flooding) = KeyStore(tmp_path), attack
    attacked, *valid = [store.create(f"tenant{number}")[1] for number in range(16)]
    if old:
        make_old(tmp_path, attacked, *valid)
    url = host.serve(limits={"data_dir": str(tmp_path)})
    # A scrypt hash takes 16 MiB and a core: its first use waits for what was presented for the same key.
    measured = wrong_keys(url, [attacked] if old else [attacked, *valid], valid, 0.2, flooding)
    assert (measured["connections"], measured["valid"], measured["refused"]) == (200, 15, 0)
    assert measured["wrong_per_s"] <= 60  # each is told a fiftieth of a second after the one before
