"""The test run's own guard: loopback and Unix sockets work, also under asyncio; nothing else is reached."""

import asyncio
import os
import socket

import pytest
from pytest_socket import SocketConnectBlockedError

# Reserved for documentation (RFC 5737): nothing answers there, should the guard be missing.
ELSEWHERE = "192.0.2.1"
# The guard warns before it raises, and warnings are errors here.
BLOCKED = (SocketConnectBlockedError, UserWarning)


def test_a_connection_to_another_machine_is_refused():
    with socket.socket() as client:
        client.settimeout(60)
        with pytest.raises(BLOCKED, match=ELSEWHERE):
            client.connect((ELSEWHERE, 80))


async def test_a_connection_to_another_machine_is_refused_under_asyncio():
    with pytest.raises(BLOCKED, match=ELSEWHERE):
        await asyncio.wait_for(asyncio.open_connection(ELSEWHERE, 80), 60)


async def test_a_server_on_loopback_is_reached_under_asyncio():
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert await reader.read() == b"hello"
        writer.close()
        await writer.wait_closed()


def test_unix_sockets_work():
    left, right = socket.socketpair()
    with left, right:
        left.sendall(b"hello")
        assert right.recv(5) == b"hello"


def test_model_libraries_were_told_to_stay_offline():
    assert os.environ["HF_HUB_OFFLINE"] == os.environ["TRANSFORMERS_OFFLINE"] == "1"
    from huggingface_hub import constants

    assert constants.HF_HUB_OFFLINE is True
