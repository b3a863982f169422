"""Many requests: made from the OpenAPI document and then damaged, and how memory grows over ordinary ones."""

from __future__ import annotations

import json
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from benchmarks.faults.service import QUESTIONS, Connection, Host, body_of, correct_answer, text_of
from tests.support.serving import CHAT

OF_OTHER_PATHS = frozenset({"307", "404", "405"})
"""Statuses of paths and methods that the document does not have; 307 leads to the path without a slash at its end."""
STRINGS = (
    "", " ", "a", "When?", "x" * 5000, "\x00", "\ud800", "\U0001f600", "{", "null", "-1", "none", "default", "user",
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 10, 0.5, 1e308, -1e308, 2**63, 2**64, 10**400, 3.7)


@dataclass(frozen=True)
class Route:
    """One route of the document: where it is, its body, and the statuses that it is said to answer with."""

    method: str
    path: str
    schema: Mapping[str, Any] | None
    statuses: frozenset[str]


class Maker:
    """Makes values of schemas, which refer to ``components``; a share ``wrong`` of them does not follow its schema."""

    def __init__(self, chance: random.Random, components: Mapping[str, Any], wrong: float) -> None:
        self._chance = chance
        self._components = components
        self._wrong = wrong

    def value(self, schema: Mapping[str, Any], depth: int = 0) -> Any:
        """Return a value for ``schema``."""
        if self._chance.random() < self._wrong:
            return self._anything(depth)
        if "$ref" in schema:
            return self.value(self._components[schema["$ref"].rsplit("/", 1)[1]], depth)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return self.value(self._chance.choice(schema[name]), depth)
        if "allOf" in schema:
            return self.value(schema["allOf"][0], depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._chance.choice(schema["enum"])
        return self._of_type(schema, depth)

    def _of_type(self, schema: Mapping[str, Any], depth: int) -> Any:
        kind = schema.get("type")
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            count = self._chance.choice((0, 1, 1, 2, 3)) if depth < 6 else 0
            return [self.value(schema.get("items", {}), depth + 1) for _ in range(count)]
        if kind == "integer":
            return self._chance.choice((0, 1, 2, 5, 100, -1, 2**40))
        if kind == "number":
            return self._chance.choice((0, 0.5, 1.0, 2.5, -1))
        if kind == "boolean":
            return self._chance.random() < 0.5
        if kind == "null":
            return None
        return self._chance.choice(STRINGS) if kind == "string" else self._anything(depth)

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        needed = set(schema.get("required", ()))
        result = {}
        for name, field in schema.get("properties", {}).items():
            if name in needed or self._chance.random() < (0.3 if depth < 4 else 0.05):
                result[name] = self.value(field, depth + 1)
        if self._chance.random() < self._wrong:
            result[self._chance.choice(STRINGS)] = self._anything(depth)
        if result and self._chance.random() < self._wrong:
            result.pop(self._chance.choice(list(result)))
        return result

    def _anything(self, depth: int) -> Any:
        choices: tuple[Any, ...] = (None, True, self._chance.choice(STRINGS), self._chance.choice(NUMBERS))
        if depth < 6:
            choices += ([self._anything(depth + 1)], {self._chance.choice(STRINGS): self._anything(depth + 1)}, [], {})
        return self._chance.choice(choices)


def fuzz(url: str, count: int, seed: int = 0) -> dict[str, Any]:
    """Send ``count`` requests; return their statuses and those that no route documents.

    One request in 50 is an ordinary question; its answer is checked.
    """
    chance = random.Random(seed)
    document = httpx2.get(url + "/openapi.json", timeout=60).json()
    routes = list(_routes(document))
    connection = Connection(url)
    statuses: Counter[str] = Counter()
    undocumented: list[dict[str, Any]] = []
    wrong = 0
    for number in range(count):
        if number % 50 == 0:
            status, answer = connection.post(CHAT, body_of(number))
            wrong += status != 200 or text_of(answer) != correct_answer(number)
            statuses[str(status)] += 1
            continue
        route = chance.choice(routes)
        maker = Maker(chance, document["components"]["schemas"], wrong=chance.choice((0.0, 0.05, 0.2)))
        request, allowed = _request(chance, maker, route)
        try:
            result = str(connection.send(request)[0])
        except (OSError, ValueError) as error:
            result = type(error).__name__
        statuses[result] += 1
        if result not in allowed:
            undocumented.append({"route": route.path, "status": result, "request": repr(request[:600])})
    connection.close()
    return {
        "requests": count,
        "routes": len(routes),
        "statuses": dict(sorted(statuses.items())),
        "wrong": wrong,
        "undocumented": undocumented,
    }


def _routes(document: Mapping[str, Any]) -> Iterator[Route]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            yield Route(
                method.upper(), path, None if content is None else content["schema"], frozenset(operation["responses"])
            )


def _request(chance: random.Random, maker: Maker, route: Route) -> tuple[bytes, frozenset[str]]:
    """Return the bytes of a request and the statuses that it may be answered with."""
    method, path, allowed = route.method, route.path, route.statuses
    name = chance.choice(("default", "other", "a%2Fb", "%00", "x" * 300))
    path = "/".join(name if segment.startswith("{") else segment for segment in path.split("/"))
    if chance.random() < 0.02:
        method, allowed = chance.choice(("DELETE", "PUT", "PATCH", "OPTIONS")), allowed | OF_OTHER_PATHS
    if chance.random() < 0.02:
        path, allowed = path + chance.choice(("/", "x", "/../..", "?a=b", "%ff")), allowed | OF_OTHER_PATHS
    body = b"" if route.schema is None else json.dumps(maker.value(route.schema)).encode()
    if body and chance.random() < 0.2:
        body = _damage_body(chance, body)
    kind = chance.choice(("application/json",) * 9 + ("text/plain",))
    lines = (f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Type: {kind}", f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body, allowed


def _damage_body(chance: random.Random, body: bytes) -> bytes:
    offset, replacement = chance.randrange(len(body)), bytes([chance.randrange(256)])
    start, end = body[:offset], body[offset:]
    return chance.choice((start, start + replacement + end[1:], start + replacement + end, body * 2, b"[" * 200))


def growth(host: Host, requests: int, samples: int = 40) -> dict[str, Any]:
    """Return the memory of the service and its growth for each request after the first half, which warms it up.

    Answers are complete or streamed, with and without the answer cache; every tenth body is rejected.
    """
    url = host.serve(memory_entries=50)
    chance, connection = random.Random(0), Connection(url)
    curve: list[tuple[int, float]] = []
    wrong = 0
    for number in range(requests):
        if number % max(1, requests // samples) == 0:
            curve.append((number, host.rss_bytes() / 2**20))
        question = chance.randrange(QUESTIONS)
        if number % 10 == 9:
            status, _ = connection.post(CHAT, chance.choice((b"{", b'{"messages":[]}', b"[1]")))
            wrong += status not in (400, 422)
            continue
        fields = {"stream": chance.random() < 0.3, "cache": chance.random() < 0.7}
        status, answer = connection.post(CHAT, body_of(question, **fields))
        wrong += status != 200 or text_of(answer) != correct_answer(question)
    connection.close()
    late = curve[len(curve) // 2 :]
    slope = statistics.linear_regression([number for number, _ in late], [mib for _, mib in late]).slope
    return {
        "requests": requests,
        "wrong": wrong,
        "mib": [round(mib, 1) for _, mib in curve],
        "grown_mib": round(late[-1][1] - late[0][1], 2),
        "bytes_per_request": round(slope * 2**20, 1),
    }
