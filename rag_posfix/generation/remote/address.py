"""The address of a remote model: ``openai:NAME@URL``, or several servers of it: ``openai:NAME@URL,URL``."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from rag_posfix.errors import ConfigError
from rag_posfix.text import content_hash

PREFIX = "openai:"
EXAMPLE = "openai:qwen2.5-7b-instruct@http://127.0.0.1:8080/v1"
_ADDRESS = re.compile(r"openai:(?P<name>.+)@(?P<url>https?://.+)", re.DOTALL)
_LONGEST = 2048
REST_SECONDS = 10.0
"""How long a server that failed is asked only if every other one failed too."""


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """The name of a model on an OpenAI-compatible server, and the base URL of its API without a slash at the end.

    Several servers of the same model are base URLs separated by commas. The first one names the model in cache keys.
    """

    name: str
    url: str

    @property
    def urls(self) -> tuple[str, ...]:
        """The base URL of each server."""
        return tuple(self.url.split(","))


class Servers:
    """Equal servers, of which each key has an order of its own: rendezvous hashing, Thaler and Ravishankar (1998).

    Requests about one passage meet on one server, whose prefix cache then holds the passage. A server that is added
    takes its share of the keys; no key moves between the others. Used in one thread.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = tuple(urls)
        self._rests_until = dict.fromkeys(self.urls, 0.0)

    def choose(self, key: str, tried: Collection[str] = ()) -> str:
        """Return the first server in the order of ``key``; those that were tried or that rest come last."""
        if len(self.urls) == 1:
            return self.urls[0]
        now = time.monotonic()
        return min(
            self.urls, key=lambda url: (url in tried, self._rests_until[url] > now, content_hash("server", url, key))
        )

    def rest(self, url: str) -> None:
        """Note that a server failed."""
        self._rests_until[url] = time.monotonic() + REST_SECONDS


def is_remote(model: str) -> bool:
    """Return whether a model name means a model of a server."""
    return model.startswith(PREFIX)


def parse_remote(model: str) -> RemoteModel:
    """Read ``openai:NAME@URL`` or ``openai:NAME@URL,URL``.

    A URL is the base URL of the API, as OpenAI's clients take it. A URL without a path gets ``/v1``. The name may
    contain ``@``. Nothing is looked up.

    Raises:
        ConfigError: the text has another form, a URL holds a user, a password, a query or the path of a route, or two
            URLs are equal.
    """
    match = _ADDRESS.fullmatch(model) if len(model) <= _LONGEST else None
    if match is None or not match["name"].strip():
        raise ConfigError(f"model={_redact(model)} must be openai:NAME@URL, for example {EXAMPLE}")
    urls = [_base_url(model, text) for text in match["url"].split(",")]
    if len(set(urls)) < len(urls):
        raise ConfigError(f"model={_redact(model)}: each URL must be given once; remove the repeated one")
    return RemoteModel(match["name"].strip(), ",".join(urls))


def _base_url(model: str, text: str) -> str:
    try:
        url = urlsplit(text)
        url.port  # noqa: B018 - raises for a port that is no number
    except ValueError:  # its text quotes the URL, also where a password looks like a port
        raise ConfigError(
            f"model={_redact(model)}: the URL cannot be read: its host, or its port of 0 to 65535, is not valid; for "
            f"example {EXAMPLE}"
        ) from None
    if url.username is not None or url.password is not None:  # names of models are shown and logged
        raise ConfigError(
            "model=openai:...: the URL holds a user or a password; give the key in RAG_POSFIX_REMOTE_API_KEY"
        )
    path = url.path.rstrip("/")
    is_base = url.scheme in ("http", "https") and url.hostname and not url.query and not url.fragment
    if not is_base or re.search(r"[\s\x00-\x1f]", url.netloc + url.path):
        raise ConfigError(f"model={_redact(model)}: a URL is http(s)://HOST without a query; for example {EXAMPLE}")
    if path.endswith("/completions"):
        raise ConfigError(
            f"model={_redact(model)}: give the base URL, without the path of a route; for example {EXAMPLE}"
        )
    return urlunsplit((url.scheme, url.netloc, path or "/v1", "", ""))


def _redact(model: str) -> str:
    """Return a model name for an error message, shortened, without what may be a password or the key of a query.

    Where a wrong address has one of them is a guess, so all is left out behind the first place that it may begin at.
    """
    hidden = re.sub(r"(//|@)(?=.*[@?#]).*", r"\1...", model, flags=re.DOTALL)
    return repr(hidden if len(hidden) <= 200 else f"{hidden[:200]}...")
