"""The address of a remote model."""

from __future__ import annotations

import pytest

from rag_posfix.errors import (
    ConfigError,
)
from rag_posfix.generation.remote.connection import RemoteModel, is_remote, parse_remote


@pytest.mark.parametrize(
    ("text", "name", "url"),
    [
        ("openai:qwen@http://127.0.0.1:8080/v1", "qwen", "http://127.0.0.1:8080/v1"),
        ("openai:qwen@http://127.0.0.1:8080/v1/", "qwen", "http://127.0.0.1:8080/v1"),
        ("openai:qwen@http://127.0.0.1:8080", "qwen", "http://127.0.0.1:8080/v1"),
        ("openai:a/b:c@https://host/api/openai/v1", "a/b:c", "https://host/api/openai/v1"),
        ("openai:@cf/meta/llama-3@https://host/v1", "@cf/meta/llama-3", "https://host/v1"),
        ("openai:m@http://[::1]:1/v1", "m", "http://[::1]:1/v1"),
    ],
)
def test_name_and_base_url_are_read(text: str, name: str, url: str):
    assert parse_remote(text) == RemoteModel(name, url)


@pytest.mark.parametrize(
    "text",
    [
        "openai:qwen",
        "openai:qwen@127.0.0.1:8080/v1",
        "openai: @http://host/v1",
        "openai:m@ftp://host/v1",
        "openai:m@http://",
        "openai:m@http://host:port/v1",
        "openai:m@http://host/v1?key=1",
        "openai:m@http://host/v1/chat/completions",
        "openai:m@http://" + "h" * 3000,
    ],
)
def test_what_is_no_address_is_refused_with_an_example(text: str):
    with pytest.raises(ConfigError, match=r"for example openai:\S+@http"):
        parse_remote(text)


def test_a_password_in_the_url_is_refused_and_not_repeated():
    with pytest.raises(ConfigError, match="RAG_POSFIX_REMOTE_API_KEY") as refused:
        parse_remote("openai:m@https://me:hunter2@host/v1")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "address",
    [
        "m@http://user:SECRET/SECRET@host/v1",
        "m@http://user:SECRET#SECRET@host/v1",
        "m@http://user:SECRET?SECRET@host/v1",
        "m@http://user:SECRET/x@SECRET@host/v1",
        "m@http://host/v1?api_key=SECRET",
        "m@http://host/v1?api_key=a@SECRET",
        "m@https://host/v1/chat/completions?key=SECRET",
        "m@http://host/v1#SECRET",
        "m@http://host:99999/v1?key=SECRET",
        "m@http://[SECRET:x@host/v1",
        "m@http://a/v1,http://a/v1?key=SECRET",
        "m@user:SECRET@host/v1",
        "m@host/v1?key=SECRET",
        "http://user:SECRET@host/v1",
        "http://host/v1?key=SECRET",
    ],
)
def test_no_secret_of_a_wrong_address_is_shown(address: str):
    with pytest.raises(ConfigError, match=r"must be openai|the URL|a URL|the base URL") as refused:
        parse_remote(f"openai:{address}")
    assert "SECRET" not in str(refused.value)
    assert refused.value.__cause__ is None, "the text of urllib quotes the URL, and logs show causes"


def test_what_is_wrong_with_an_address_without_secrets_is_shown():
    with pytest.raises(ConfigError, match=r"openai:m@http://host:99999/v1': .* port of 0 to 65535"):
        parse_remote("openai:m@http://host:99999/v1")


def test_only_the_prefix_makes_a_model_remote():
    assert is_remote("openai:m@http://host")
    assert not is_remote("openai/m")
    assert not is_remote("smollm2")
