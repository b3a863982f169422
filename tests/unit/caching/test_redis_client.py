from __future__ import annotations

import logging
from contextlib import closing, suppress

import pytest

from rag_posfix.caching.redis_client import RedisConnection, redis_target
from rag_posfix.errors import CacheError
from tests.support.faulty_server import faulty_server


@pytest.mark.parametrize(
    "url",
    [
        "http://:hush@host",
        "redis://",
        "redis://:hush@host:port",
        "redis://:hush@host/database",
        "redis://:hush@host?colour=hush",
        "redis-cluster://:hush@host:1/3",
        "redis-sentinel://:hush@host:1",
        "redis-cluster://:hush@host:1?ssl_ca_certs=hush.pem",
        "rediss-cluster://:hush@host:1?socket_timeout=60",
        "rediss-cluster://:hush@host:1?ssl_check_hostname=hush",
        "rediss-sentinel://:hush@host:1/service?hush",
        "",
    ],
)
def test_an_invalid_url_is_refused_without_its_password(url):
    with pytest.raises(CacheError, match=r"is not valid; allowed: redis://") as caught:
        redis_target(url, 1)
    assert "hush" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("url", "label"),
    [
        ("redis://user:hush@host:7000/3", "redis://host:7000/3"),
        ("rediss://:hush@host", "rediss://host:6379/0"),
        ("unix://:hush@/run/redis.sock", "unix:///run/redis.sock"),
        ("redis-cluster://user:hush@one:1,two:2", "redis-cluster://one:1,two:2"),
        ("redis-sentinel://:hush@one:1,two/service/3", "redis-sentinel://one:1,two/service/3"),
        ("rediss-cluster://user:hush@one:1?ssl_ca_certs=ca.pem", "rediss-cluster://one:1"),
        ("rediss-sentinel://one:1/service?sentinel_password=hush", "rediss-sentinel://one:1/service"),
    ],
)
def test_the_label_is_the_address_without_the_password(url, label):
    target = redis_target(url, 1)
    assert target.label == label
    assert "hush" not in repr(target)


def test_sentinels_have_a_login_of_their_own_and_the_tls_of_the_master():
    url = (
        "rediss-sentinel://user:hush@host:1/main?ssl_ca_certs=ca.pem&ssl_check_hostname=false&sentinel_password=quiet"
    )
    client = redis_target(url, 2).connect()
    pool = client.connection_pool
    sentinel = pool.sentinel_manager.sentinels[0].connection_pool.connection_kwargs
    assert (pool.connection_kwargs["password"], sentinel["password"]) == ("hush", "quiet")
    for options in (pool.connection_kwargs, sentinel):
        assert (options["ssl_ca_certs"], options["ssl_check_hostname"]) == ("ca.pem", False)
    assert pool.connection_class.__name__ == "SentinelManagedSSLConnection"
    client.close()


def test_the_options_of_a_url_cannot_undo_the_timeouts_and_the_single_attempt():
    url = "redis://host?socket_timeout=60&socket_connect_timeout=60&retry_on_timeout=true&health_check_interval=1"
    client = redis_target(url, 2).connect()  # makes the client; it connects when it is first used
    options = client.connection_pool.connection_kwargs
    assert (options["socket_timeout"], options["socket_connect_timeout"]) == (2, 2)
    assert options["retry"].get_retries() == 0
    assert not {"retry_on_timeout", "health_check_interval"} & set(options)
    client.close()


# A Redis whose name leads to another server than before, and a node of a cluster that is taken for the whole.


SECONDS = 30.0


def connection_to(url):
    return closing(RedisConnection("answers", redis_target(url, SECONDS), "probe", SECONDS))


def replies_by_connection(*replies):
    """Serve with the first reply on the first connection, the second on the next, and the last one from then on."""
    remaining = list(replies)

    def serve(connection, over):
        reply = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        while not over.is_set():
            with suppress(TimeoutError):
                if not connection.recv(65536):
                    return
                connection.sendall(reply)

    return serve


def write(connection):
    return connection.call("writing", lambda client: client.set("key", "value"), None, SECONDS)


def test_after_a_write_to_a_former_master_the_next_one_reaches_the_server_that_has_the_name_now():
    for rejection in (
        b"-READONLY You can't write against a read only replica.\r\n",
        b"-ERR Error running script (call to f_1): @user_script:1: -READONLY You can't write here.\r\n",
    ):
        with (
            faulty_server(replies_by_connection(rejection, b"+OK\r\n")) as url,
            connection_to(url) as connection,
        ):
            assert write(connection) is None
            assert write(connection) is True


def test_a_write_that_is_rejected_for_another_reason_keeps_its_connection():
    replies = replies_by_connection(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", b"+OK\r\n")
    with faulty_server(replies) as url, connection_to(url) as connection:
        assert write(connection) is None
        assert write(connection) is None


def test_a_node_of_a_cluster_at_a_redis_address_is_reported_once_with_the_address_to_use(caplog):
    moved = replies_by_connection(b"-MOVED 866 127.0.0.1:7001\r\n")
    with (
        caplog.at_level(logging.WARNING, "rag_posfix.caching.redis_client"),
        faulty_server(moved) as url,
        connection_to(url) as connection,
    ):
        assert write(connection) is None
        assert connection.start("reading", lambda client: client.get("key"), "missing")() == "missing"
    advice = [line for line in caplog.messages if "redis-cluster://" in line]
    assert len(advice) == 1
    assert url.removeprefix("redis://") in advice[0]
