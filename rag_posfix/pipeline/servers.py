"""Connections to servers, from settings: the remote generator, and the servers of rerankers."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from rag_posfix.caching.answers.tiered import TieredAnswerCache
from rag_posfix.cancellation import check_cancelled, remaining_seconds
from rag_posfix.errors import ConfigError
from rag_posfix.generation.remote.address import is_remote, parse_remote
from rag_posfix.generation.remote.connection import Connection, ServerLimits
from rag_posfix.generation.remote.generator import RemoteGenerator, open_remote
from rag_posfix.settings import RemoteSettings, Settings


def open_remote_generator(settings: Settings, cache: TieredAnswerCache | None = None) -> RemoteGenerator:
    """Return the generator of a remote ``settings.model``; ``cache`` keeps its judgements of passages.

    Raises:
        ConfigError: a setting splits or changes weights, which are on the server.
    """
    if settings.adapter is not None:
        raise ConfigError(f"an adapter changes weights in this process, and model={settings.model!r} is on a server")
    for name, is_set in (("tp", settings.tp != 1), ("device_map", settings.device_map is not None)):
        if is_set:
            raise ConfigError(f"{name} splits weights in this process, and model={settings.model!r} is on a server")
    return open_remote(
        settings.model,
        api_key=_key_of(settings),
        context_window=settings.remote.context_window,
        limits=_limits(settings),
        token_limit_field=settings.remote.max_tokens_field,
        check_cancelled=check_cancelled,
        remaining_seconds=remaining_seconds,
        judgements=cache,
    )


def remote_settings_of(settings: Settings, model: str) -> RemoteSettings:
    """Return ``settings.remote`` for another model: without the key if the served model is on another server."""
    if not is_remote(settings.model) or _servers(model) <= _servers(settings.model):
        return settings.remote
    return settings.remote.model_copy(update={"api_key": None})


def _servers(model: str) -> set[tuple[str, ...]]:
    """Return scheme and host of each server of a model; none of a model in this process."""
    return {urlsplit(url)[:2] for url in parse_remote(model).urls} if is_remote(model) else set()


def _key_of(settings: Settings) -> str | None:
    return None if settings.remote.api_key is None else settings.remote.api_key.get_secret_value()


def _limits(settings: Settings) -> ServerLimits:
    remote = settings.remote
    return ServerLimits(remote.connect_timeout_seconds, remote.timeout_seconds, remote.retries, remote.concurrency)


def connect_with(settings: Settings) -> Callable[[str], Connection]:
    """Return a function that connects to the server of a reranker; only the remote model's own server gets its key."""

    def connect(url: str) -> Connection:
        own = urlsplit(url)[:2] in _servers(settings.model)
        return Connection(
            url, _key_of(settings) if own else None, _limits(settings), check_cancelled, remaining_seconds
        )

    return connect
