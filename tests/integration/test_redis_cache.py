"""The Redis tier against a real redis-server."""

from contextlib import closing

import orjson
import pytest
import redis

from rag_posfix.caching.answers.tiered import Blob, BlobCodec, TieredAnswerCache
from rag_posfix.caching.redis import RedisTier
from rag_posfix.caching.tier import MemoryTier
from tests.integration.tls_proxy import TlsProxy
from tests.support.certificates import make_certificate
from tests.support.clock import Clock
from tests.support.passages import get_blob, set_blob
from tests.support.redis_server import RedisServer, free_port
from tests.support.serving import make_pipeline, post, serving
from tests.support.waiting import wait_until


@pytest.fixture
def cache(redis_server: RedisServer):
    # Generous: what these tests look at is not time, and the machine may be busy.
    with closing(RedisTier(redis_server.url, BlobCodec(), timeout_seconds=60)) as cache:
        yield cache


@pytest.mark.parametrize("value", [b"", b"answer", bytes(range(256)) * 1000])
def test_a_value_comes_back_as_it_went_in(cache, value):
    set_blob(cache, "key", value, 60)
    assert get_blob(cache, "key") == value
    assert (cache.stats().hits, cache.stats().misses, cache.stats().errors) == (1, 0, 0)


def test_keys_have_the_documented_prefix_and_a_time_to_live(cache, redis_server):
    set_blob(cache, "key", b"answer", 60, ["tag"])
    assert b"rag_posfix:answer:key" in redis_server.command("KEYS", "*")
    assert 0 < int(redis_server.command("TTL", "rag_posfix:answer:key")[1:]) <= 60
    assert int(redis_server.command("TTL", "rag_posfix:tag:tag")[1:]) >= 60


def test_an_entry_expires(cache):
    set_blob(cache, "key", b"answer", 0.05)
    wait_until(lambda: get_blob(cache, "key") is None)
    assert cache.stats().errors == 0


@pytest.mark.parametrize("damage", ["", "nonsense", "RPX1", "RPX1" + "x" * 40])
def test_a_damaged_entry_is_a_miss_and_counted(cache, redis_server, damage):
    set_blob(cache, "key", b"answer", 60)
    redis_server.command("SET", "rag_posfix:answer:key", damage)
    assert get_blob(cache, "key") is None
    assert cache.stats().corrupt == 1
    set_blob(cache, "key", b"fresh", 60)
    assert get_blob(cache, "key") == b"fresh"


def test_the_value_of_another_key_is_a_miss(cache, redis_server):
    set_blob(cache, "key", b"answer", 60)
    redis_server.command("RENAME", "rag_posfix:answer:key", "rag_posfix:answer:other")
    assert get_blob(cache, "other") is None


def test_entries_are_dropped_by_tag(cache):
    set_blob(cache, "one", b"1", 60, ["a", "b"])
    set_blob(cache, "two", b"2", 60, ["b"])
    set_blob(cache, "three", b"3", 60, ["c"])
    assert cache.delete_tags(["b", "unknown"]) == 2
    assert [get_blob(cache, key) for key in ("one", "two", "three")] == [None, None, b"3"]


def test_an_entry_that_is_added_while_its_tag_is_deleted_keeps_the_tag(cache, redis_server, monkeypatch):
    read, added = redis.client.Pipeline.execute, []

    def read_and_add(pipeline, **options):
        keys = read(pipeline, **options)
        if not added:
            added.append("new")
            set_blob(other, "new", b"2", 60, ["tag"])
        return keys

    set_blob(cache, "old", b"1", 60, ["tag"])
    with closing(RedisTier(redis_server.url, BlobCodec(), timeout_seconds=2)) as other:
        with monkeypatch.context() as patched:
            patched.setattr(redis.client.Pipeline, "execute", read_and_add)
            assert cache.delete_tags(["tag"]) == 1
        assert get_blob(cache, "new") == b"2"
        assert cache.delete_tags(["tag"]) == 1
        assert get_blob(cache, "new") is None


@pytest.mark.parametrize("lifetimes", [(1000, 10), (10, 1000)])
def test_a_tag_outlives_its_longest_entry(cache, redis_server, lifetimes):
    for number, lifetime in enumerate(lifetimes):
        set_blob(cache, f"key{number}", b"x", lifetime, ["tag"])
    assert int(redis_server.command("TTL", "rag_posfix:tag:tag")[1:]) > 1000


def test_a_tag_forgets_expired_entries(redis_server):
    clock = Clock()
    with closing(RedisTier(redis_server.url, BlobCodec(), timeout_seconds=60, clock=clock)) as cache:
        for number in range(20):
            cache.put_many({f"key{number}": Blob(b"x", ("tag",), clock.now + 100)})
        clock.advance(1000)
        cache.put_many({"last": Blob(b"x", ("tag",), clock.now + 100)})
        assert redis_server.command("ZCARD", "rag_posfix:tag:tag") == b":1\r\n"


def test_clear_leaves_the_keys_of_others(cache, redis_server):
    for number in range(1200):
        set_blob(cache, f"key{number}", b"x", 60, ["tag"])
    redis_server.command("SET", "somebody:else", "1")
    assert cache.clear() == 1200
    assert redis_server.command("KEYS", "*") == b"*1\r\n$13\r\nsomebody:else\r\n"


def test_a_password_opens_and_is_never_shown(caplog):
    with RedisServer(password="hush-hush") as server:
        with closing(RedisTier(server.url, BlobCodec(), timeout_seconds=60)) as cache:
            set_blob(cache, "key", b"answer", 60)
            assert get_blob(cache, "key") == b"answer"
            server.kill()
            get_blob(cache, "key")
        # The attributes as well: tools that report errors show them.
        assert "hush" not in repr(cache) + repr(vars(cache)) + caplog.text
        assert "is failing" in caplog.text


@pytest.mark.parametrize("trusted", [True, False])
def test_a_cluster_behind_tls_is_used_if_its_certificate_is_trusted(tmp_path, trusted):
    certificate, key = make_certificate(tmp_path)
    other, _ = make_certificate(tmp_path, "other")
    port = free_port()
    directives = {"cluster-enabled": "yes", "cluster-announce-port": str(port)}
    with (
        RedisServer(password="hush-hush", **directives) as server,
        TlsProxy(port, server.port, certificate, key) as proxy,
    ):
        server.command("CLUSTER", "ADDSLOTS", *(str(slot) for slot in range(16384)))
        wait_until(lambda: b"cluster_state:ok" in server.command("CLUSTER", "INFO"))
        trust = certificate if trusted else other
        url = f"rediss-cluster://:hush-hush@localhost:{port}?ssl_ca_certs={trust}&ssl_check_hostname=false"
        with closing(RedisTier(url, BlobCodec(), timeout_seconds=60)) as cache:
            set_blob(cache, "key", b"answer", 60, ["tag"])
            assert get_blob(cache, "key") == (b"answer" if trusted else None)
        assert (b"answer" in server.command("KEYS", "*")) is trusted
        assert (proxy.handshakes > 0) is trusted


def test_sentinel_names_the_master(redis_server):
    with RedisServer(sentinel_of=redis_server.port) as sentinel:
        url = f"redis-sentinel://127.0.0.1:{sentinel.port}/mymaster/0"
        with closing(RedisTier(url, BlobCodec(), timeout_seconds=60)) as cache:
            set_blob(cache, "key", b"answer", 60, ["tag"])
            assert get_blob(cache, "key") == b"answer"
            assert b"rag_posfix:answer:key" in redis_server.command("KEYS", "*")


def test_a_hit_in_redis_is_promoted_and_dropped_with_its_document(cache):
    memory = MemoryTier()
    TieredAnswerCache([cache]).put("key", {"text": "Paris"}, ["doc"])
    tiers = TieredAnswerCache([memory, cache])
    assert tiers.get("key") == {"text": "Paris"}
    assert memory.stats().entries == 1
    assert tiers.drop_documents(["doc"]) == 1
    assert memory.stats().entries == 0
    assert tiers.get("key") is None


def test_the_options_of_a_url_cannot_undo_ours(redis_server):
    url = f"{redis_server.url}?socket_timeout=60&decode_responses=true&retry_on_timeout=true&protocol=3"
    with closing(RedisTier(url, BlobCodec(), timeout_seconds=60)) as cache:
        set_blob(cache, "key", b"\xff", 60)
        assert get_blob(cache, "key") == b"\xff"


@pytest.mark.slow
def test_a_forged_entry_that_opens_is_a_miss_and_no_error(redis_server):
    """The seal and the envelope are right, only the answer's numbers are not."""
    tier = RedisTier(redis_server.url, BlobCodec(), timeout_seconds=60)
    with closing(TieredAnswerCache([tier])) as cache, serving(make_pipeline(cache=cache)) as url:
        answer = post(url, temperature=0).json()["choices"][0]["message"]["content"]
        names = redis_server.command("KEYS", "rag_posfix:answer:*").decode().split()
        (key,) = [name.removeprefix("rag_posfix:answer:") for name in names if name.startswith("rag_posfix:answer:")]
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
            for number in (-1, True, 2.5, "3", None):
                envelope = orjson.loads(get_blob(tier, key))
                envelope["value"][name] = number
                set_blob(tier, key, orjson.dumps(envelope), 60)
                response = post(url, temperature=0)
                assert response.status_code == 200, (name, number, response.text)
                assert response.json()["choices"][0]["message"]["content"] == answer
