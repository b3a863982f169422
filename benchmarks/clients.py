"""Real clients over the routes that they speak, whole and streamed: ``python -m benchmarks.clients [--out DIR]``.

The service runs with a generator without weights, whose right answer is known. A cell is ``works`` where the client
returned the expected content, the text of the error where it did not, and empty where the format has no such form.
``make docs`` fills a page with the table of the record.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import httpx2
from pydantic import SecretStr

from benchmarks.tables import table
from rag_posfix.evaluation.record import environment, write_record
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.order_biased import OrderBiasedGenerator
from tests.support.page_bodies import LIBRECHAT, OPEN_WEBUI
from tests.support.serving import (
    ANSWER,
    BRIDGE,
    CHAT,
    HARBOUR,
    QUESTION,
    ListRetriever,
    WordReranker,
    make_pipeline,
    serving,
)

__all__ = ["Cell", "cells", "main", "measure", "outcome", "service"]

KEY = "key"
PACKAGES = ("openai", "langchain-openai", "anthropic", "cohere", "ollama", "httpx2")
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
DOCUMENTS = [BRIDGE, HARBOUR]

Try = Callable[[], str]
"""Asks, and returns text in which the expected content must be."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A client on a route.

    Attributes:
        client: Its name.
        route: Method, unless it is POST, and path.
        whole: Asks for a whole response.
        streamed: Asks for a stream, or None where the format has none.
        expected: What the response must contain.
    """

    client: str
    route: str
    whole: Try | None
    streamed: Try | None = None
    expected: str = ANSWER


def cells(url: str) -> Iterator[Cell]:
    """Yield the cells of all clients; packages are imported when their client is reached."""
    for clients in (_openai, _langchain, _anthropic, _cohere, _ollama, _pages, _bodies, _own):
        with ExitStack() as opened:
            yield from clients(url, opened)


def measure(url: str) -> list[dict[str, str]]:
    """Return a row for each cell: client, route, and what became of each form."""
    return [
        {
            "client": cell.client,
            "route": cell.route,
            "whole": outcome(cell.whole, cell.expected),
            "streamed": outcome(cell.streamed, cell.expected),
        }
        for cell in cells(url)
    ]


def outcome(attempt: Try | None, expected: str) -> str:
    """Return ``works``, or what was wrong; nothing without an attempt."""
    if attempt is None:
        return ""
    try:
        found = attempt()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "works" if expected in found else f"other content: {found[:100]!r}"


def _openai(url: str, opened: ExitStack) -> Iterator[Cell]:
    import openai

    client = opened.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=20))
    chat: Any = {"model": "default", "messages": MESSAGES}
    plain: Any = {"model": "default", "prompt": "The bridge"}
    asked: Any = {"model": "default", "input": QUESTION}

    def streamed_chat() -> str:
        return "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(**chat, stream=True))

    def streamed_plain() -> str:
        return "text:" + "".join(c.choices[0].text for c in client.completions.create(**plain, stream=True))

    def streamed_response() -> str:
        events = client.responses.create(**asked, stream=True)
        return "".join(e.delta for e in events if e.type == "response.output_text.delta")

    yield Cell(
        "openai", CHAT, lambda: str(client.chat.completions.create(**chat).choices[0].message.content), streamed_chat
    )
    yield Cell(
        "openai",
        "/v1/completions",
        lambda: f"text:{client.completions.create(**plain).choices[0].text}",
        streamed_plain,
        "text:",
    )
    yield Cell("openai", "/v1/responses", lambda: client.responses.create(**asked).output_text, streamed_response)
    yield Cell(
        "openai",
        "/v1/embeddings",
        lambda: f"{len(client.embeddings.create(model='default', input='a').data[0].embedding)} numbers",
        expected="26 numbers",
    )
    yield Cell("openai", "GET /v1/models", lambda: client.models.list().data[0].id, expected="fake")


def _langchain(url: str, opened: ExitStack) -> Iterator[Cell]:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    shared: Any = {"base_url": f"{url}/v1", "api_key": SecretStr(KEY), "max_retries": 0}
    model = ChatOpenAI(model="default", extra_body={"documents": DOCUMENTS}, **shared)
    vectors = OpenAIEmbeddings(model="default", check_embedding_ctx_length=False, **shared)
    yield Cell(
        "langchain-openai",
        CHAT,
        lambda: str(model.invoke(QUESTION).content),
        lambda: "".join(str(piece.content) for piece in model.stream(QUESTION)),
    )
    yield Cell(
        "langchain-openai",
        "/v1/embeddings",
        lambda: f"{len(vectors.embed_query('a'))} numbers",
        expected="26 numbers",
    )


def _anthropic(url: str, opened: ExitStack) -> Iterator[Cell]:
    import anthropic

    client = opened.enter_context(anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=20))
    asked: Any = {"model": "default", "max_tokens": 50, "messages": MESSAGES}

    def streamed() -> str:
        with client.messages.stream(**asked) as stream:
            return "".join(stream.text_stream)

    yield Cell(
        "anthropic",
        "/v1/messages",
        lambda: "".join(block.text for block in client.messages.create(**asked).content if block.type == "text"),
        streamed,
    )


def _cohere(url: str, opened: ExitStack) -> Iterator[Cell]:
    import cohere

    http = opened.enter_context(httpx.Client())
    second = cohere.ClientV2(api_key=KEY, base_url=url, httpx_client=http)
    first = cohere.Client(api_key=KEY, base_url=url, httpx_client=http)
    asked: Any = {"model": "default", "messages": MESSAGES, "documents": DOCUMENTS}
    ranked: Any = {"model": "default", "query": QUESTION, "documents": DOCUMENTS}

    def whole() -> str:
        return "".join(getattr(part, "text", "") for part in second.chat(**asked).message.content or [])

    def streamed() -> str:
        events: Any = second.chat_stream(**asked)
        return "".join(event.delta.message.content.text for event in events if event.type == "content-delta")

    yield Cell("cohere", "/v2/chat", whole, streamed)
    yield Cell("cohere", "/v2/rerank", lambda: f"first {second.rerank(**ranked).results[0].index}", expected="first 0")
    yield Cell("cohere", "/v1/rerank", lambda: f"first {first.rerank(**ranked).results[0].index}", expected="first 0")


def _ollama(url: str, opened: ExitStack) -> Iterator[Cell]:
    import ollama

    client = opened.enter_context(ollama.Client(host=url, timeout=20, headers={"authorization": f"Bearer {KEY}"}))

    def streamed() -> str:
        return "".join(part.message.content or "" for part in client.chat("default", MESSAGES, stream=True))

    yield Cell("ollama", "/api/chat", lambda: str(client.chat("default", MESSAGES).message.content), streamed)
    yield Cell("ollama", "GET /api/tags", lambda: str(client.list().models[0].model), expected="fake")


def _pages(url: str, opened: ExitStack) -> Iterator[Cell]:
    ask = _asker(url, opened)
    for name, body in (("body of Open WebUI", OPEN_WEBUI), ("body of LibreChat", LIBRECHAT)):
        whole = {field: value for field, value in body.items() if field != "stream_options"} | {"stream": False}
        yield Cell(name, CHAT, _content(ask, CHAT, whole), _events(ask, CHAT, body))


def _bodies(url: str, opened: ExitStack) -> Iterator[Cell]:
    ask = _asker(url, opened)
    scores = {
        "body of TEI": ("/rerank", {"query": QUESTION, "texts": DOCUMENTS}, '"index":0'),
        "body of vLLM": ("/rerank", {"query": QUESTION, "documents": DOCUMENTS}, '"index":0'),
        "body of Jina": ("/v1/rerank", {"query": QUESTION, "documents": DOCUMENTS, "top_n": 1}, '"index":0'),
    }
    for name, (path, body, expected) in scores.items():
        yield Cell(name, path, _text(ask, path, body), expected=expected)
    for path in ("/score", "/v1/score"):
        body = {"text_1": QUESTION, "text_2": DOCUMENTS}
        yield Cell("body of vLLM", path, _text(ask, path, body), expected='"score":')


def _own(url: str, opened: ExitStack) -> Iterator[Cell]:
    ask = _asker(url, opened)
    notes, evaluated = "/v1/collections/notes", {"question": QUESTION, "documents": DOCUMENTS}
    posts: list[tuple[str, Any, str]] = [
        ("/v1/collections", {"name": "notes"}, '"notes"'),
        (f"{notes}/documents", {"documents": [{"id": "b", "text": BRIDGE}]}, '"added":1'),
        (f"{notes}/search", {"query": QUESTION}, '"id":"b"'),
        ("/v1/evaluate/order", evaluated, '"flip_rate"'),
        ("/v1/posfix/attention", {"query": QUESTION, "documents": DOCUMENTS}, '"attention"'),
        ("/admin/keys", {"tenant": "acme"}, '"key":"rpk_'),
    ]
    for path, body, expected in posts:
        yield Cell("httpx2", path, _text(ask, path, body), expected=expected)
    read = {
        "/info": '"methods"',
        notes: '"documents":1',
        "/admin/keys": '"acme"',
        "/metrics": "rag_posfix_",
        "/docs": "<",
    }
    for path, expected in read.items():
        yield Cell("httpx2", f"GET {path}", _text(ask, path, None), expected=expected)


Ask = Callable[[str, Any], httpx2.Response]


def _asker(url: str, opened: ExitStack) -> Ask:
    client = opened.enter_context(httpx2.Client(base_url=url, headers={"x-api-key": KEY}, timeout=20))

    def ask(path: str, body: Any) -> httpx2.Response:
        response = client.get(path) if body is None else client.post(path, json=body)
        if response.status_code >= 400:
            raise RuntimeError(f"{response.status_code} {response.text}")
        return response

    return ask


def _text(ask: Ask, path: str, body: Any) -> Try:
    return lambda: ask(path, body).text


def _content(ask: Ask, path: str, body: Any) -> Try:
    return lambda: str(ask(path, body).json()["choices"][0]["message"]["content"])


def _events(ask: Ask, path: str, body: Any) -> Try:
    def read() -> str:
        lines = [line[6:] for line in ask(path, body).text.splitlines() if line.startswith("data: {")]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    return read


@contextmanager
def service() -> Iterator[str]:
    """Run the service in this process; yield its address."""
    pipeline = make_pipeline(
        OrderBiasedGenerator(), retriever=ListRetriever(BRIDGE), reranker=WordReranker(), embeddings=LetterEmbeddings()
    )
    with TemporaryDirectory() as folder, serving(pipeline, data_dir=Path(folder), api_key=SecretStr(KEY)) as url:
        yield url


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and write the record; the status is 1 if a cell does not work."""
    parser = argparse.ArgumentParser(prog="benchmarks.clients", description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=None, help="folder for the record")
    given = parser.parse_args(arguments)
    with service() as url:
        rows = measure(url)
    packages = {name: version(name) for name in PACKAGES}
    head = {"kind": "clients", **environment(), "summary": {"clients": packages, "cells": rows}}
    print(table([head]))
    if given.out is not None:
        print(write_record(given.out, "clients", head))
    return int(any(row[form] not in ("", "works") for row in rows for form in ("whole", "streamed")))


if __name__ == "__main__":
    sys.exit(main())
