"""A Redis whose name leads to another server than before, and a node of a cluster that is taken for the whole."""

from __future__ import annotations

import logging
from contextlib import closing, suppress

from rag_posfix.caching.redis_client import RedisConnection, redis_target
from tests.support.faulty_server import faulty_server

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
