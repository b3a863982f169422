"""POST /v1/evaluate/order: orders, answers and flip rate; GET /info."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.contracts.request import Generation, GenerationRequest
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix_api.dialects.measurements import orders_of, summarize
from tests.support.serving import DictCache, make_pipeline
from tests.support.tenants import Tenants
from tests.support.toy_encoder import ToyEncoder

PATH = "/v1/evaluate/order"


class FirstPassage(FakeGenerator):
    """Answers with the first passage of the prompt, whatever is asked; ``parallel_windows`` with the shortest."""

    def generate(self, request: GenerationRequest) -> Generation:
        from dataclasses import replace

        layout = request.layout
        texts = [self.encoder.decode(layout.tokens(span)) for span in layout.texts]
        text = min(texts, key=len) if request.mitigation.name == "parallel_windows" else texts[0]
        return replace(super().generate(request), text=text)


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    generator = FirstPassage(ToyEncoder(), order_invariant=False)
    return Tenants(tmp_path, make_pipeline(generator, cache=DictCache())).stranger()


def evaluate(client: TestClient, **fields: Any) -> dict[str, Any]:
    response = client.post(PATH, json={"question": "which?", "documents": ["aa bb", "cc", "dd ee ff"], **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_the_first_orders_are_the_original_and_the_reverse_one():
    assert orders_of(3, 2, 0) == [("original", (0, 1, 2)), ("reverse", (2, 1, 0))]


@given(st.integers(2, 6), st.integers(2, 24), st.integers(0, 100))
def test_orders_are_different_permutations_and_as_many_as_there_are(count: int, wanted: int, seed: int):
    orders = [order for _, order in orders_of(count, wanted, seed)]
    possible = {2: 2, 3: 6, 4: 24}.get(count, 120)
    assert len(orders) == len(set(orders)) == min(wanted, possible)
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert [order for _, order in orders_of(count, wanted, seed)] == orders


def test_the_flip_rate_is_the_share_of_the_other_orders_whose_answer_is_another():
    flip_rate, texts, indices = summarize(["a", "b", "a ", "c", "b", "\na"])
    assert flip_rate == 3 / 5
    assert texts == ["a", "b", "c"]
    assert indices == [0, 1, 0, 2, 1, 0]


def test_answers_of_a_model_that_reads_the_first_passage_flip(client: TestClient):
    """Of the 6 orders of 3 passages, each passage is first in 2: 4 of the 5 others differ from the original."""
    result = evaluate(client, orders=6)
    assert result["flip_rate"] == 4 / 5
    assert {(one["text"], one["orders"]) for one in result["answers"]} == {("aa bb", 2), ("cc", 2), ("dd ee ff", 2)}
    assert [one["order"] for one in result["orders"]] == ["original", "reverse", *["random"] * 4]
    for one in result["orders"]:
        first = ["aa bb", "cc", "dd ee ff"][one["documents"][0]]
        assert result["answers"][one["answer"]]["text"] == first
        assert one["changed"] is (first != "aa bb")
    two = evaluate(client, orders=2)["usage"]
    assert result["usage"] == {name: 3 * count for name, count in two.items()}, "the sum over the orders"
    assert min(two["prompt_tokens"], two["completion_tokens"]) > 0


def test_answers_of_a_method_that_does_not_look_at_the_order_do_not(client: TestClient):
    result = evaluate(client, orders=6, mitigation={"name": "parallel_windows"})
    assert (result["mitigation"], result["flip_rate"]) == ("parallel_windows", 0.0)
    assert result["answers"] == [{"text": "cc", "orders": 6}]


def test_the_seed_chooses_the_orders(client: TestClient):
    documents = [f"document {number}" for number in range(8)]
    orders = [evaluate(client, documents=documents, orders=4, seed=seed)["orders"] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"documents": ["one"]}, 422),
        ({"orders": 25}, 422),
        ({"question": " "}, 400),
        ({"tenant": "another"}, 422),
    ],
)
def test_what_cannot_be_evaluated(fields: dict[str, Any], status: int, client: TestClient):
    response = client.post(PATH, json={"question": "which?", "documents": ["a", "b"], **fields})
    assert response.status_code == status, response.text


def test_info_tells_what_is_served_and_no_path(tmp_path: Path):
    tenants = Tenants(tmp_path / "data-folder", api_key="the-single-key")
    assert tenants.stranger().get("/info").status_code == 401
    response = tenants.stranger(authorization="Bearer the-single-key").get("/info")
    info = response.json()
    assert info["model"] == {
        "id": "fake", "fingerprint": "fake-1", "context_window": 8192, "embeddings": True, "index": False,
    }  # fmt: skip
    assert info["methods"]["mitigations"] == list(MITIGATIONS.names())
    assert {"relevance", "original"} <= set(info["methods"]["orders"])
    assert info["limits"]["max_documents"] == 1000
    assert info["versions"]["python"].count(".") == 2
    for told in ("data-folder", "the-single-key", str(Path.home()), "/"):
        assert told not in response.text
