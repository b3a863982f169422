"""A Redis Cluster of three masters that loses one, and managed deployments with TLS and passwords: real servers."""

from contextlib import ExitStack, closing, contextmanager

import pytest
from redis.crc import key_slot

from rag_posfix.caching.answers.tiered import BlobCodec, TieredAnswerCache
from rag_posfix.caching.kv.store import KVCodec
from rag_posfix.caching.redis import RedisTier
from tests.support.certificates import make_certificate
from tests.support.passages import SHAPE, entry, get_blob, same, set_blob
from tests.support.redis_server import RedisServer, form_cluster, node_id, skip_without_tls
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

ENTRIES = 300
KEYS = [f"key{number}" for number in range(ENTRIES)]


@contextmanager
def cluster_of_three(**options):
    # A cluster without its replicas: full coverage would stop the living masters too, once one is known to be dead.
    directives = {"cluster-enabled": "yes", "cluster-require-full-coverage": "no"}
    with ExitStack() as stack:
        nodes = [stack.enter_context(RedisServer(**{**directives, **options})) for _ in range(3)]
        form_cluster(nodes)
        yield nodes


def url_of(nodes, scheme="redis-cluster", login=""):
    return f"{scheme}://{login}" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)


def slot_of(name):
    return key_slot(name.encode())


def shard_of(name, prefix="rag_posfix:answer:"):
    """Which of the three masters has a key."""
    return next(number for number in range(3) if slot_of(prefix + name) < 16384 * (number + 1) // 3)


def hits(tier):
    return set(tier.get_many(dict.fromkeys(KEYS)))


@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_a_lost_shard_rests_alone_and_the_living_ones_serve_and_take_entries(fault, caplog):
    with cluster_of_three() as nodes, closing(RedisTier(url_of(nodes), BlobCodec(), timeout_seconds=1)) as tier:
        for key in KEYS:
            set_blob(tier, key, b"answer", 600, [f"a-{key}", f"b-{key}"])
        assert hits(tier) == set(KEYS)
        getattr(nodes[1], fault)()
        living = {key for key in KEYS if shard_of(key) != 1}
        assert 100 < len(living) < 280
        hits(tier)  # notices
        before = tier.stats()
        for _ in range(20):
            assert hits(tier) == living
        after = tier.stats()
        assert after.hits - before.hits == 20 * len(living)
        assert after.skipped - before.skipped == 20, "the lost shard must not be waited for again"
        assert not after.available
        for number in range(30):
            set_blob(tier, f"new{number}", b"later", 600, [f"{letter}{number}" for letter in "cdefgh"])
            assert get_blob(tier, f"new{number}") == (None if shard_of(f"new{number}") == 1 else b"later")
        failing = [record.getMessage() for record in caplog.records if "is failing" in record.getMessage()]
        assert failing
        assert all(f"127.0.0.1:{nodes[1].port} " in line for line in failing)
        if fault == "kill":
            nodes[1].start()
        else:
            nodes[1].resume()
        wait_until(lambda: hits(tier) >= living and tier.stats().available)
        lost = next(key for key in KEYS if shard_of(key) == 1)
        set_blob(tier, lost, b"again", 600)
        assert get_blob(tier, lost) == b"again"


def test_answers_are_served_and_deleted_for_good_while_a_shard_is_lost():
    deleted = shard_of("rag_posfix:answer-deleted", prefix="")
    with cluster_of_three() as nodes:
        tier = RedisTier(url_of(nodes), BlobCodec(), timeout_seconds=1)
        with closing(TieredAnswerCache([tier])) as answers:
            for key in KEYS:
                assert answers.get(key) is None
                answers.put(key, {"text": key}, [f"document-{key}"])
            lost = (deleted + 1) % 3
            nodes[lost].kill()
            living = [key for key in KEYS if shard_of(key) != lost]
            answers.get(KEYS[0])
            wait_until(lambda: [key for key in KEYS if answers.get(key)] == living)
            gone = living[:50]
            answers.drop_documents([f"document-{key}" for key in gone])
            assert answers.flush_deletions(60)
            assert [key for key in KEYS if answers.get(key)] == living[50:]


def test_passages_of_the_living_shards_are_read_in_one_search():
    # The keys' list, which counts what is stored, is on the third master.
    prefix, codec = KVCodec.redis_prefix, KVCodec()
    index = shard_of(codec.redis_index, prefix="")
    with cluster_of_three() as nodes, closing(RedisTier(url_of(nodes), codec, timeout_seconds=60)) as tier:
        entries = {f"passage{number}": entry(number) for number in range(40)}
        tier.put_many(entries)
        assert tier.stats().entries == 40
        lost = (index + 1) % 3
        nodes[lost].kill()
        wanted = dict.fromkeys(entries, SHAPE)
        tier.get_many(wanted)
        found = tier.get_many(wanted)
        assert set(found) == {key for key in entries if shard_of(key, prefix) != lost}
        assert all(same(found[key], entries[key]) for key in found)


def test_a_key_that_moved_to_another_master_is_found_there():
    with cluster_of_three() as nodes, closing(RedisTier(url_of(nodes), BlobCodec(), timeout_seconds=60)) as tier:
        key = next(key for key in KEYS if shard_of(key) == 0)
        assert get_blob(tier, key) is None
        for node in (nodes[1], nodes[0], nodes[2]):
            moved = node.command(
                "CLUSTER", "SETSLOT", str(slot_of("rag_posfix:answer:" + key)), "NODE", node_id(nodes[1])
            )
            assert moved.startswith(b"+OK")
        set_blob(tier, key, b"answer", 60)  # is told where the key is
        set_blob(tier, key, b"answer", 60)
        assert get_blob(tier, key) == b"answer"
        assert b"rag_posfix:answer:" + key.encode() in nodes[1].command("KEYS", "*")
        assert tier.stats().available


@pytest.fixture
def tls(tmp_path):
    skip_without_tls()
    return make_certificate(tmp_path)


LOGIN = {"user": "service on >hush-hush ~rag_posfix:* +@all"}


def assert_used(url, servers, caplog):
    """An entry goes to one of the servers and comes back; without the password it does not, and nothing shows it."""
    with closing(RedisTier(url, BlobCodec(), timeout_seconds=60)) as tier:
        for key in KEYS[:20]:
            set_blob(tier, key, b"answer", 60, ["tag"])
            assert get_blob(tier, key) == b"answer"
        stored = b"".join(server.command("KEYS", "*") for server in servers)
        assert all(b"rag_posfix:answer:" + key.encode() in stored for key in KEYS[:20])
        assert tier.delete_tags(["tag"]) == 20
        shown = repr(tier) + repr(vars(tier))
    with closing(RedisTier(url.replace("hush-hush", "hush-wrong"), BlobCodec(), timeout_seconds=60)) as tier:
        assert get_blob(tier, KEYS[0]) is None
        assert tier.stats().errors > 0
        shown += repr(vars(tier))
    assert "is failing" in caplog.text
    assert "hush" not in caplog.text + shown


def test_a_server_with_tls_a_user_and_a_password(tls, caplog):
    with RedisServer(password="admin", tls=tls, **LOGIN) as server:
        url = f"rediss://service:hush-hush@127.0.0.1:{server.port}/0?ssl_ca_certs={tls[0]}"
        assert_used(url, [server], caplog)


def test_a_cluster_with_tls_a_user_and_a_password(tls, caplog):
    with cluster_of_three(password="admin", tls=tls, **LOGIN, **{"tls-cluster": "yes"}) as nodes:
        url = url_of(nodes, "rediss-cluster", "service:hush-hush@") + f"?ssl_ca_certs={tls[0]}"
        assert_used(url, nodes, caplog)


def test_a_sentinel_with_tls_and_a_password_of_its_own(tls, caplog):
    with (
        RedisServer(password="admin", tls=tls, **LOGIN) as master,
        RedisServer(password="hush-quiet", sentinel_of=master.port, master_password="admin", tls=tls) as sentinel,
    ):
        options = f"?ssl_ca_certs={tls[0]}&sentinel_password=hush-quiet"
        url = f"rediss-sentinel://service:hush-hush@127.0.0.1:{sentinel.port}/mymaster/0{options}"
        wait_until(lambda: b"flags" in sentinel.command("SENTINEL", "MASTER", "mymaster"))
        assert_used(url, [master], caplog)
        with closing(RedisTier(url.replace("hush-quiet", "hush-wrong"), BlobCodec(), timeout_seconds=60)) as tier:
            assert get_blob(tier, KEYS[0]) is None
            assert tier.stats().errors > 0


@pytest.mark.parametrize("trust", ["", "another"])
def test_a_server_whose_certificate_is_not_trusted_is_not_used(tls, tmp_path, trust):
    with RedisServer(password="hush-hush", tls=tls) as server:
        option = f"?ssl_ca_certs={make_certificate(tmp_path, trust)[0]}" if trust else ""
        url = f"rediss://:hush-hush@127.0.0.1:{server.port}/0{option}"
        with closing(RedisTier(url, BlobCodec(), timeout_seconds=60)) as tier:
            set_blob(tier, "key", b"answer", 60)
            assert get_blob(tier, "key") is None
        assert b"answer" not in server.command("KEYS", "*")
