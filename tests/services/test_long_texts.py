"""8 MB in a field: what they cost the service, a process of its own with the tokenizer of SmolLM2 and with MiniLM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.long_texts import BODIES, MAX_MEGABYTES, MAX_SECONDS, long_text, measure, service
from tests.support.serving import client_for

pytestmark = [pytest.mark.weights, pytest.mark.slow]

SECONDS = 2 * MAX_SECONDS
"""A fault costs many times the bound; processors differ by less than two."""

DOCUMENTS = "/v1/collections/notes/documents"

COSTLY = {
    # By text: where it cost most before texts were cut.
    "words": ("/v1/responses", "/v2/chat", "/v1/embeddings"),
    "lines": ("/v1/score", "/v1/messages/count_tokens"),
    "run": ("/v1/collections/notes/search", DOCUMENTS),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    with service(tmp_path_factory.mktemp("data")) as address:
        yield address


@pytest.mark.parametrize("name", COSTLY)
def test_8_mb_in_any_field_cost_100_mb_and_two_seconds_at_most(name: str, served: tuple[str, int]) -> None:
    text = long_text(name, 8_000_000)
    costs = [
        cost
        for path, body in BODIES
        if path in COSTLY[name]
        for cost in measure(*served, path, body, text)
        if cost.field.rpartition(".")[2] not in ("role", "model", "user", "id", "stop")
    ]
    assert len(costs) >= 4
    assert {cost.status for cost in costs} <= {200, 400, 422}
    assert [cost for cost in costs if cost.megabytes > MAX_MEGABYTES or cost.seconds > SECONDS] == []


@pytest.mark.parametrize("name", ["lines", "headings"])
def test_the_longest_document_costs_100_mb_and_two_seconds_at_most(name: str, served: tuple[str, int]) -> None:
    # These texts repeat: no more than a few passages differ, and embedding them takes no time.
    ((_, body),) = [entry for entry in BODIES if entry[0] == DOCUMENTS]
    text = long_text(name, 1_000_000)
    (cost,) = [cost for cost in measure(*served, DOCUMENTS, body, text) if cost.field == "documents.0.text"]
    assert cost.status == 200
    assert (cost.megabytes < MAX_MEGABYTES, cost.seconds <= SECONDS) == (True, True), cost


def test_every_route_that_reads_a_body_is_measured() -> None:
    measured = {path.replace("/notes/", "/{name}/") for path, _ in BODIES}
    paths = client_for().get("/openapi.json").json()["paths"]
    with_body = {path for path, methods in paths.items() if any("requestBody" in each for each in methods.values())}
    assert len(with_body) >= 20
    assert with_body - measured == set()
