"""The address of a remote model: ``openai:NAME@URL``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit, urlunsplit

from rag_posfix.errors import ConfigError

PREFIX = "openai:"
EXAMPLE = "openai:qwen2.5-7b-instruct@http://127.0.0.1:8080/v1"
_ADDRESS = re.compile(r"openai:(?P<name>.+)@(?P<url>https?://.+)", re.DOTALL)
_LONGEST = 2048


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """The name of a model on an OpenAI-compatible server, and the base URL of its API without a slash at the end."""

    name: str
    url: str


def is_remote(model: str) -> bool:
    """Return whether a model name means a model of a server."""
    return model.startswith(PREFIX)


def parse_remote(model: str) -> RemoteModel:
    """Read ``openai:NAME@URL``.

    The URL is the base URL of the API, as OpenAI's clients take it. A URL without a path gets ``/v1``. The name may
    contain ``@``. Nothing is looked up.

    Raises:
        ConfigError: the text has another form, or the URL holds a user, a password, a query or the path of a route.
    """
    match = _ADDRESS.fullmatch(model) if len(model) <= _LONGEST else None
    if match is None or not match["name"].strip():
        raise ConfigError(f"model={_redact(model)} must be openai:NAME@URL, for example {EXAMPLE}")
    try:
        url = urlsplit(match["url"])
        url.port  # noqa: B018 - raises for a port that is no number
    except ValueError as error:
        raise ConfigError(
            f"model={_redact(model)}: the URL cannot be read ({error}); for example {EXAMPLE}"
        ) from error
    if url.username is not None or url.password is not None:  # names of models are shown and logged
        raise ConfigError(
            "model=openai:...: the URL holds a user or a password; give the key in RAG_POSFIX_REMOTE_API_KEY"
        )
    return RemoteModel(match["name"].strip(), _base_url(model, url))


def _base_url(model: str, url: SplitResult) -> str:
    path = url.path.rstrip("/")
    if not url.hostname or url.query or url.fragment or re.search(r"[\s\x00-\x1f]", url.netloc + url.path):
        raise ConfigError(f"model={_redact(model)}: the URL needs a host and takes no query; for example {EXAMPLE}")
    if path.endswith("/completions"):
        raise ConfigError(
            f"model={_redact(model)}: give the base URL, without the path of a route; for example {EXAMPLE}"
        )
    return urlunsplit((url.scheme, url.netloc, path or "/v1", "", ""))


def _redact(model: str) -> str:
    """Return a model name for an error message, shortened, without what may be a password."""
    hidden = re.sub(r"//[^/@]*@", "//...@", model)
    return repr(hidden if len(hidden) <= 200 else f"{hidden[:200]}...")
