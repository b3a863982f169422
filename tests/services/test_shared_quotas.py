"""Quotas that all processes of a service share, in a real Redis; two real processes; Redis away."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx2
import pytest
from fastapi.testclient import TestClient

from rag_posfix.caching.redis_client import RedisServers
from rag_posfix.settings import CacheSettings, Settings
from rag_posfix_api.app import create_app
from rag_posfix_api.http.auth import Caller, SharedQuotas
from rag_posfix_api.http.errors import RequestError
from rag_posfix_api.keys.store import KeyStore
from tests.support.clock import Clock
from tests.support.redis_server import RedisServer, form_cluster, free_port
from tests.support.serving import limits, make_pipeline
from tests.support.subprocesses import wait_until_ready
from tests.support.waiting import wait_until
from tests.support.warm_python import WarmPython

ROOT = Path(__file__).resolve().parents[2]
LEASE_SECONDS = 3600.0  # no test lasts as long
REDIS_SECONDS = 60.0  # a busy machine must not make Redis look dead


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@contextmanager
def processes(
    url: str, count: int = 2, without_redis: str = "local", clock: Callable[[], float] | None = None
) -> Iterator[list[SharedQuotas]]:
    """The quotas of so many processes, whose time stands still without a clock."""
    clock = clock or Clock()
    with ExitStack() as stack:
        quotas = [SharedQuotas(url, without_redis, LEASE_SECONDS, REDIS_SECONDS, clock) for _ in range(count)]
        for each in quotas:
            stack.enter_context(closing(each))
        yield quotas


async def taken(quotas, caller: Caller, attempts: int) -> list:
    """Take turns; return what releases those that were let in."""
    releases = []
    for number in range(attempts):
        try:
            releases.append(await quotas[number % len(quotas)].take(caller))
        except RequestError as error:
            if error.code != "rate_limit_exceeded":
                raise
    return releases


async def test_processes_together_give_a_key_its_rate_once(redis_server):
    with processes(redis_server.url, 3) as quotas:
        caller = Caller("acme", key_id="k", requests_per_minute=60)
        assert len(await taken(quotas, caller, 90)) == 60
        with pytest.raises(RequestError, match="60 requests a minute; try again in 1 seconds"):
            await quotas[0].take(caller)
        assert len(await taken(quotas, Caller("acme", key_id="another", requests_per_minute=5), 10)) == 5


async def test_a_rate_fills_again_as_a_bucket(redis_server):
    clock = Clock()
    with processes(redis_server.url, 1, clock=clock) as quotas:
        caller = Caller("acme", key_id="k", requests_per_minute=120)
        assert len(await taken(quotas, caller, 130)) == 120
        clock.advance(2.25)  # one every half second
        assert len(await taken(quotas, caller, 20)) == 4
        clock.advance(0.25)  # with the quarter that was left over
        assert len(await taken(quotas, caller, 20)) == 1
        clock.advance(3600)
        assert len(await taken(quotas, caller, 130)) == 120, "a bucket is full after a minute"


async def test_without_a_clock_the_time_of_redis_counts(redis_server):
    def redis_time() -> int:
        return int(redis_server.command("TIME").split(b"\r\n")[2])

    with closing(SharedQuotas(redis_server.url, "reject", LEASE_SECONDS, REDIS_SECONDS)) as quotas:
        before = redis_time()
        await quotas.take(Caller("acme", key_id="k", requests_per_minute=6))
        # The theoretical arrival time of the next one is 60 / 6 s later; this time of Redis is cut to seconds.
        assert before <= arrival_time(redis_server, "k") - 10 <= redis_time() + 1


def arrival_time(server: RedisServer, key_id: str) -> float:
    return float(server.command("ZSCORE", f"rag_posfix:quota:{key_id}", "rate").split(b"\r\n")[1])


async def test_processes_together_run_so_many_requests_of_a_key(redis_server):
    with processes(redis_server.url) as (one, other):
        caller = Caller("acme", key_id="k", max_concurrent=2)
        releases = [await one.take(caller), await other.take(caller)]
        for quotas in (one, other):
            with pytest.raises(RequestError, match="2 requests of this key are running and 2 are allowed"):
                await quotas.take(caller)
        await releases[0]()
        await other.take(caller)
        with pytest.raises(RequestError, match="are running"):
            await one.take(caller)


async def test_requests_of_a_process_that_died_are_given_up_after_the_lease(redis_server):
    clock = Clock()
    with processes(redis_server.url, clock=clock) as (dead, living):
        caller = Caller("acme", key_id="k", max_concurrent=1)
        await dead.take(caller)
        clock.advance(LEASE_SECONDS - 1)
        with pytest.raises(RequestError, match="are running"):
            await living.take(caller)
        clock.advance(1)
        await living.take(caller)


async def test_requests_that_end_while_redis_is_away_are_not_counted_after_it():
    caller = Caller("acme", key_id="k", max_concurrent=1)
    with RedisServer(appendonly="yes") as server, processes(server.url) as (quotas, other):
        release = await quotas.take(caller)
        server.kill()  # not paused: a paused one would still read the end of the request
        await release()
        server.start()
        with pytest.raises(RequestError, match="are running"):
            await other.take(caller)  # Redis has stored that the request runs
        async with asyncio.timeout(60):  # counted here until the breaker closes, and never refused
            while server.command("ZCARD", "rag_posfix:quota:k") != b":0\r\n":
                await (await quotas.take(caller))()
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("fault", ["kill", "pause"])
async def test_without_redis_each_process_counts_for_itself_or_rejects_as_chosen(redis_server, fault):
    caller, free = Caller("acme", key_id="k", requests_per_minute=3), Caller("acme", key_id="free")
    getattr(redis_server, fault)()
    with (
        closing(SharedQuotas(redis_server.url, "local", LEASE_SECONDS, clock=Clock())) as local,
        closing(SharedQuotas(redis_server.url, "reject", LEASE_SECONDS)) as strict,
    ):
        assert len(await taken([local], caller, 10)) == 3
        with pytest.raises(RequestError, match="cannot be checked now"):
            await strict.take(caller)
        await (await strict.take(free))()  # without limits there is nothing to check


@pytest.mark.slow
async def test_keys_on_living_masters_of_a_cluster_keep_one_count():
    with ExitStack() as stack:
        options = {"cluster-enabled": "yes", "cluster-require-full-coverage": "no"}
        nodes = [stack.enter_context(RedisServer(**options)) for _ in range(3)]
        form_cluster(nodes)
        url = "redis-cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        (quotas,) = stack.enter_context(processes(url, 1, "reject"))
        callers = [Caller("acme", key_id=f"key{number}", requests_per_minute=10) for number in range(30)]
        for caller in callers:
            await quotas.take(caller)
        nodes[0].kill()
        for _ in range(3):
            outcomes = [await outcome(quotas, caller) for caller in callers]
        living = nodes[1].command("KEYS", "*") + nodes[2].command("KEYS", "*")
        assert outcomes == [caller.key_id.encode() + b"\r" in living for caller in callers]
        assert 0 < sum(outcomes) < 30


async def outcome(quotas, caller) -> bool:
    try:
        await quotas.take(caller)
    except RequestError as error:
        if error.code != "quotas_unavailable":
            raise
        return False
    return True


def test_the_script_takes_one_round_trip_and_leaves_nothing_without_a_time_to_live(redis_server):
    with processes(redis_server.url, 1) as (quotas,):
        asyncio.run(quotas.take(Caller("acme", key_id="k", requests_per_minute=3, max_concurrent=3)))
    assert redis_server.command("KEYS", "*") == b"*1\r\n$18\r\nrag_posfix:quota:k\r\n"
    assert 0 < int(redis_server.command("PTTL", "rag_posfix:quota:k")[1:]) <= LEASE_SECONDS * 1000
    with closing(RedisServers("test", redis_server.url, "probe", REDIS_SECONDS)) as servers:
        calls = servers.call("reading", "probe", lambda client: client.info("commandstats"))
    assert calls["cmdstat_eval"]["calls"] == 1


def test_requests_of_keys_with_limits_get_503_without_redis_if_that_is_chosen(tmp_path):
    store = KeyStore(tmp_path)
    _, limited = store.create("acme", requests_per_minute=100)
    _, free = store.create("acme")
    settings = Settings(cache=CacheSettings(redis_url=f"redis://127.0.0.1:{free_port()}"))
    chosen = limits(data_dir=tmp_path, quotas_without_redis="reject")
    with TestClient(create_app(settings, make_pipeline(), chosen)) as client:
        for _ in range(3):
            refused = client.get("/v1/models", headers={"x-api-key": limited})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "quotas_unavailable")
        assert client.get("/v1/models", headers={"x-api-key": free}).status_code == 200


@contextmanager
def service(python: WarmPython, folder: Path, redis_url: str) -> Iterator[str]:
    """A process ``rag-posfix serve`` with a model on a server that nobody asks; yields the address."""
    port = free_port()
    environment = {
        **os.environ,
        "RAG_POSFIX_MODEL": "openai:none@http://127.0.0.1:9/v1",
        "RAG_POSFIX_MITIGATION": "none",
        "RAG_POSFIX_CACHE_REDIS_URL": redis_url,
        "RAG_POSFIX_SERVICE_DATA_DIR": str(folder),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'services'}",
    }
    command = ("-m", "rag_posfix.cli.main", "serve", "--port", port)
    process = python.start(ROOT, *command, output=folder / f"{port}.log", environment=environment)
    try:
        wait_until_ready(process, str(port), 300)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.timeout(600)  # two services start; minutes on a busy machine
def test_two_services_share_keys_and_quotas_and_answer_on_without_redis(redis_server, tmp_path, python):
    store, rate = KeyStore(tmp_path), 12
    _, operator = store.create("ops", scopes=("admin",))
    with (
        service(python, tmp_path, redis_server.url) as first,
        service(python, tmp_path, redis_server.url) as second,
        ThreadPoolExecutor(4) as pool,
        httpx2.Client(timeout=60) as client,
    ):
        body = {"tenant": "acme", "requests_per_minute": rate}
        made = client.post(first + "/admin/keys", json=body, headers={"x-api-key": operator}).json()

        def status(url: str, key: str = made["key"]) -> int:
            return client.get(url + "/v1/models", headers={"x-api-key": key}).status_code

        def is_refused(url: str) -> bool:
            return any(status(url) == 429 for _ in range(10 * rate))

        # Redis may be late the first time that a process asks; another key then has its count.
        _, warm = store.create("warm", requests_per_minute=1_000_000)
        wait_until(lambda: {status(url, warm) for url in (first, second)} == {200})
        wait_until(lambda: redis_server.command("KEYS", "rag_posfix:quota:*").startswith(b"*1"))
        assert status(first) == 200
        earlier = arrival_time(redis_server, made["id"])
        counts = Counter(pool.map(status, [first, second] * rate))  # both know the new key
        # However long it took, each that was let in moved the one theoretical arrival time by 60 / rate seconds.
        assert rate - 1 <= counts[200] <= (arrival_time(redis_server, made["id"]) - earlier) * rate / 60 + 0.001
        assert {url for url in (first, second) if is_refused(url)} == {first, second}

        _, single = store.create("single", max_concurrent=1)
        assert {status(url, single) for url in [first, second] * 10} == {200}, "a request ends before the next begins"

        redis_server.kill()
        after = Counter(pool.map(status, [first, second] * rate))
        assert after == {200: 2 * rate}, "each counts for itself"
        assert {url for url in (first, second) if is_refused(url)} == {first, second}

        client.delete(f"{first}/admin/keys/{made['id']}", headers={"x-api-key": operator})
        assert [status(url) for url in (first, second)] == [401] * 2
    logs = "".join(file.read_text() for file in tmp_path.glob("*.log"))
    assert "quotas: " in logs
    assert '"status": 500' not in logs
