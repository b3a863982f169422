"""Makes the generator of ``openai:NAME@URL``."""

from __future__ import annotations

from collections.abc import Callable

from rag_posfix.errors import ConfigError
from rag_posfix.generation.remote.address import parse_remote
from rag_posfix.generation.remote.connection import Connection, ServerLimits
from rag_posfix.generation.remote.generator import DEFAULT_CONTEXT_WINDOW, RemoteGenerator, TokenLimitField


def open_remote(
    model: str,
    *,
    api_key: str | None = None,
    context_window: int = DEFAULT_CONTEXT_WINDOW,
    limits: ServerLimits | None = None,
    token_limit_field: TokenLimitField = "max_tokens",
    check_cancelled: Callable[[], None] = lambda: None,
) -> RemoteGenerator:
    """Return a generator that asks an OpenAI-compatible server. Nothing is sent before the first answer.

    Args:
        model: ``openai:NAME@URL``.
        api_key: Sent as ``Authorization: Bearer`` to that server alone; None sends none.
        context_window: Token limit of prompt and answer together, on the server.
        token_limit_field: The field of the request that bounds the answer.
        check_cancelled: Called while an answer is awaited; what it raises ends the request.

    Raises:
        ConfigError: the model has another form, the key cannot be sent, or httpx2 is not installed.
    """
    address = parse_remote(model)
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip()):
        raise ConfigError("RAG_POSFIX_REMOTE_API_KEY must be printable ASCII without line breaks; check how it is set")
    connection = Connection(address.url, api_key, limits, check_cancelled)
    return RemoteGenerator(address, connection, context_window=context_window, token_limit_field=token_limit_field)
