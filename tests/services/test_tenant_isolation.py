"""An adversary with a key sees nothing of another tenant: not by names, salts, headers, caches or numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.caching.answers.tiered import TieredAnswerCache
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.request import Generation, GenerationRequest, tenant_tags
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.pipeline.pipeline import Pipeline
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.serving import BRIDGE, CHAT, HARBOUR, chat, make_pipeline
from tests.support.tenants import Tenants, key_of
from tests.support.toy_encoder import ToyEncoder
from tests.support.waiting import wait_until

SECRET = "The code of the vault of Ostrava is 4711."
ASK = "What is the code of the vault of Ostrava?"
NAME = "projekt-ostrava"


class CountingGenerator(FakeGenerator):
    """Keeps the salt of each answer that it computes."""

    def __init__(self) -> None:
        super().__init__(ToyEncoder())
        self.salts: list[str] = []

    def generate(self, request: GenerationRequest) -> Generation:
        self.salts.append(request.salt)
        return super().generate(request)


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    cache = TieredAnswerCache([MemoryTier(max_entries=100)])
    pipeline = make_pipeline(CountingGenerator(), embeddings=LetterEmbeddings(), cache=cache)
    return Tenants(tmp_path / "served-here", pipeline)


@pytest.fixture
def victim(tenants: Tenants) -> TestClient:
    """A tenant that has a collection with a secret, asked about it, and has the answer in the cache."""
    client = tenants.client("victim", name="victims-key")
    assert client.post("/v1/collections", json={"name": NAME}).status_code == 201
    body = {"documents": [{"id": "vault-42", "text": SECRET, "title": "Vault"}]}
    assert client.post(f"/v1/collections/{NAME}/documents", json=body).status_code == 200
    for cached in (False, True):
        answer = client.post(CHAT, json=chat(ASK, posfix={"collection": NAME})).json()
        assert "4711" in answer["choices"][0]["message"]["content"]
        assert answer["cached"] is cached
    return client


@pytest.fixture
def adversary(tenants: Tenants, victim: TestClient) -> TestClient:
    return tenants.client("mallory")


def says_nothing(text: str, tenants: Tenants) -> None:
    for told in ("4711", "vault-42", "victim", str(tenants.keys.folder), "served-here"):
        assert told not in text, told
    for key, identity in tenants.made.items():
        assert key not in text
        assert identity not in text
    for salt in tenants.keys.table().salts.values():
        assert salt not in text


def without_ids(response: Any) -> tuple[int, str]:
    """Status and body of a response, and its headers but for those that are different each time."""
    headers = {name: value for name, value in response.headers.items() if name not in ("x-request-id", "date")}
    return response.status_code, response.text + json.dumps(headers)


def requests_about(name: str) -> list[tuple[str, str, Any]]:
    collection = f"/v1/collections/{name}"
    return [
        ("GET", collection, None),
        ("DELETE", collection, None),
        ("POST", f"{collection}/documents", {"documents": [{"text": "x"}]}),
        ("DELETE", f"{collection}/documents/vault-42", None),
        ("POST", f"{collection}/search", {"query": ASK}),
        ("POST", f"{collection}/precompute", {}),
        ("GET", f"{collection}/precompute", None),
        ("DELETE", f"{collection}/precompute", None),
        ("POST", CHAT, chat(ASK, posfix={"collection": name})),
        ("POST", CHAT, chat(ASK, posfix={"collection": name}, stream=True)),
    ]


def test_a_guessed_name_is_answered_like_one_that_nobody_has(
    tenants: Tenants, adversary: TestClient, victim: TestClient
):
    absent = "projekt-ostrawa"
    for (method, path, body), (_, other_path, other_body) in zip(
        requests_about(NAME), requests_about(absent), strict=True
    ):
        guessed = adversary.request(method, path, json=body)
        missing = adversary.request(method, other_path, json=other_body)
        status, text = without_ids(guessed)
        assert (status, text.replace(NAME, absent)) == without_ids(missing)
        assert status in (400, 404)
        says_nothing(text, tenants)
    assert victim.get(f"/v1/collections/{NAME}").json()["documents"] == 1


def test_paths_lead_out_of_no_tenant(tenants: Tenants, adversary: TestClient, victim: TestClient):
    for name in (f"..%2Fvictim%2F{NAME}", f"%2e%2e/victim/{NAME}", f"..%5Cvictim%5C{NAME}", "..", f"victim%2F{NAME}"):
        for method in ("GET", "DELETE"):
            response = adversary.request(method, f"/v1/collections/{name}")
            assert response.status_code in (404, 405, 422)
            says_nothing(response.text.replace("victim", "", 4), tenants)
    for name in (f"../victim/{NAME}", f"/{NAME}", f"victim/{NAME}", f"..\\victim\\{NAME}"):
        response = adversary.post(CHAT, json=chat(ASK, posfix={"collection": name}))
        assert response.status_code == 400
        assert "4711" not in response.text
        assert adversary.post("/v1/collections", json={"name": name}).status_code == 422
    assert victim.get(f"/v1/collections/{NAME}").status_code == 200


def test_lists_and_pages_of_the_service_name_nobody(tenants: Tenants, adversary: TestClient, victim: TestClient):
    for path in ("/v1/collections", "/info", "/v1/models", "/openapi.json", "/readyz", "/v1/nothing"):
        response = adversary.get(path)
        says_nothing(response.text + json.dumps(dict(response.headers)), tenants)
        assert NAME not in response.text
    assert adversary.get("/v1/collections").json()["data"] == []
    assert adversary.get("/admin/keys").status_code == 403


FORGED = [
    {"x-tenant": "victim"},
    {"x-posfix-tenant": "victim", "tenant": "victim"},
    {"x-forwarded-user": "victim", "openai-organization": "victim", "openai-project": "victim"},
    {"cookie": "tenant=victim; salt=victim"},
    {"x-original-url": f"/v1/collections/{NAME}"},
]
SALTED = [
    {"tenant": "victim"},
    {"salt": "victim", "cache_salt": "victim", "user": "victim"},
    {"metadata": {"tenant": "victim"}},
    {"prompt_cache_key": "victim", "safety_identifier": "victim"},
]


def test_headers_and_fields_choose_no_tenant(tenants: Tenants, adversary: TestClient):
    """The answer to the victim's question and document is computed again, whatever the request claims."""
    salt = tenants.keys.table().salts["victim"]
    claims = [(headers, {}) for headers in FORGED] + [({}, fields) for fields in SALTED]
    claims += [({"x-salt": f"victim:{salt}"}, {"salt": f"victim:{salt}", "tenant": f"victim:{salt}"})]
    document = {"id": "vault-42", "text": SECRET, "title": "Vault", "score": 1.0}
    generator = tenants.pipeline.generator
    assert isinstance(generator, CountingGenerator)
    before = set(generator.salts)
    for number, (headers, fields) in enumerate(claims):
        body = chat(ASK, documents=[document | {"score": 1.0 - number / 100}], **fields)
        response = adversary.post(CHAT, json=body, headers=headers)
        assert response.status_code == 200, response.text
        assert response.json()["cached"] is False
        assert adversary.get("/v1/collections", headers=headers).json()["data"] == []
    new = set(generator.salts) - before
    assert len(new) == 1
    assert "mallory" in new.pop()
    refused = adversary.post(CHAT, json=chat(ASK, posfix={"tenant": "victim"}))
    assert refused.status_code == 422


def test_a_second_key_does_not_borrow_the_first(tenants: Tenants, adversary: TestClient, victim: TestClient):
    own, other = key_of(adversary), key_of(victim)
    identity, secret = other.split("_")[1], own.split("_", 2)[2]
    mixed = f"rpk_{identity}_{secret}"  # the id of the victim's key with a secret that is right for another
    attempts = [
        [("authorization", f"Bearer {mixed}")],
        [("authorization", f"Bearer {own}"), ("authorization", f"Bearer {mixed}")],
        [("authorization", f"Bearer {own}, Bearer {mixed}")],
        [("authorization", f"Bearer {own} {mixed}")],
        [("x-api-key", mixed)],
        [("authorization", "Bearer victim")],
        [("authorization", f"Bearer rpk_{identity}_")],
    ]
    answers = {without_ids(tenants.stranger().get("/v1/collections", headers=headers)) for headers in attempts}
    assert len(answers) == 1  # no word tells an id that exists from one that does not
    assert answers.pop()[0] == 401
    both = tenants.stranger().get("/v1/collections", headers={"authorization": f"Bearer {own}", "x-api-key": mixed})
    assert both.json()["data"] == []


def test_the_cache_of_answers_tells_nothing(tenants: Tenants, adversary: TestClient, victim: TestClient):
    """The same question over the same document is computed: not by ``cached``, ``cached_tokens`` or time."""
    document = {"id": "vault-42", "text": SECRET, "title": "Vault", "score": 1.0}
    secret = chat(ASK, documents=[document])
    for cached in (False, True):
        assert victim.post(CHAT, json=secret).json()["cached"] is cached

    computed = tenants.pipeline.generator.salts
    before = len(computed)
    answer = adversary.post(CHAT, json=secret).json()
    assert len(computed) == before + 1
    assert answer["cached"] is False
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert "cache" in answer["timings"]
    assert victim.post(CHAT, json=secret).json()["cached"] is True
    assert len(computed) == before + 1


def test_a_tenant_that_is_created_again_reads_nothing_of_the_one_of_its_name_before(tmp_path: Path):
    generator = CountingGenerator()
    tenants = Tenants(tmp_path, make_pipeline(generator, cache=TieredAnswerCache([MemoryTier(max_entries=100)])))
    for _ in range(2):
        client = tenants.client("victim")
        for cached in (False, True):
            assert client.post(CHAT, json=chat(ASK, documents=[SECRET])).json()["cached"] is cached
        (tmp_path / "keys.json").unlink()
    before, after = generator.salts
    assert before != after, "keys and values of passages are kept apart by it"


def test_documents_of_one_id_are_dropped_for_their_own_tenant_alone(
    tenants: Tenants, adversary: TestClient, victim: TestClient
):
    """Who adds and deletes documents of guessed ids does not empty the caches of others."""
    assert adversary.post("/v1/collections", json={"name": NAME}).status_code == 201
    body = {"documents": [{"id": "vault-42", "text": SECRET, "title": "Vault"}]}
    for _ in range(2):
        assert adversary.post(f"/v1/collections/{NAME}/documents", json=body).status_code == 200
        assert adversary.delete(f"/v1/collections/{NAME}/documents/vault-42").status_code == 200
    assert adversary.delete(f"/v1/collections/{NAME}").status_code == 200
    assert victim.post(CHAT, json=chat(ASK, posfix={"collection": NAME})).json()["cached"] is True
    assert victim.get(f"/v1/collections/{NAME}").json()["documents"] == 1


def test_the_errors_of_a_tenant_name_no_path_and_no_other_tenant(
    tenants: Tenants, adversary: TestClient, victim: TestClient
):
    (folder,) = tenants.keys.folder.glob(f"collections/victim/{NAME}")
    next(folder.glob("*.sqlite")).write_text("damaged")
    broken = victim.get(f"/v1/collections/{NAME}")
    assert broken.status_code == 500
    says_nothing(broken.text, tenants)
    for body in (b"{", b"\x00", json.dumps(chat("x" * 100_000)).encode(), b"[" * 10_000):
        response = adversary.post(CHAT, content=body, headers={"content-type": "application/json"})
        says_nothing(response.text, tenants)


def test_keys_and_values_are_tagged_for_their_tenant():
    assert tenant_tags("", ["a"]) == ()
    assert tenant_tags("one", ["a", "b"]) != tenant_tags("two", ["a", "b"])
    assert not {"a", "b"} & set(tenant_tags("one", ["a", "b"]))
    assert tenant_tags("('x', 'a')", ["b"]) != tenant_tags("x", ["('a', 'b')"])


@pytest.mark.weights
@pytest.mark.slow
def test_the_keys_and_values_of_passages_tell_nothing(engine: Any, tmp_path: Path):
    """``cached_tokens`` of a real model: the victim's passages are warm for the victim alone, precomputed or asked."""
    store = PassageStore([MemoryTier(1 << 28)])
    with_store = engine.with_passages(store)
    pipeline = Pipeline(
        with_store,
        Assembler(with_store.encoder, with_store.context_window),
        embeddings=LetterEmbeddings(),
        passages=store,
    )
    tenants = Tenants(tmp_path, pipeline)
    victim, adversary = tenants.client("victim"), tenants.client("mallory")
    ask = {"posfix": {"collection": NAME, "mitigation": "parallel_windows"}, "max_tokens": 2, "model": "default"}
    for client in (victim, adversary):
        client.post("/v1/collections", json={"name": NAME})
        body = {"documents": [{"id": "vault-42", "text": SECRET}, {"id": "h", "text": HARBOUR}]}
        client.post(f"/v1/collections/{NAME}/documents", json=body)

    def cached(client: TestClient, question: str) -> int:
        answer = client.post(CHAT, json=chat(question, **ask))
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    job = f"/v1/collections/{NAME}/precompute"
    assert victim.post(job, json={"mitigation": "parallel_windows"}).status_code == 202
    wait_until(lambda: victim.get(job).json()["status"] == "done")
    done = victim.get(job).json()
    assert (done["done"], done["documents"]) == (2, 2)
    context = done["tokens"]  # the text before the passages, and both passages
    assert adversary.get(job).json()["status"] == "none"  # its own collection of this name
    assert cached(victim, ASK) == context
    assert cached(adversary, ASK) == 0
    assert cached(adversary, "And where is it?") == context  # its own by now
    victim.delete(f"/v1/collections/{NAME}/documents/vault-42")
    assert cached(adversary, "And who has it?") == context  # the victim's deletion is not seen
    assert adversary.delete(f"/v1/collections/{NAME}").status_code == 200
    assert cached(victim, "Why did it freeze?") > 10


def test_metrics_have_labels_of_closed_lists_only(tenants: Tenants, adversary: TestClient, victim: TestClient):
    adversary.get("/v1/collections/a-name-of-mine")
    adversary.post(CHAT, json=chat(BRIDGE, documents=[BRIDGE]))
    refused = adversary.get("/metrics")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")
    says_nothing(refused.text, tenants)
    text = tenants.client("ops", scopes=("metrics",)).get("/metrics").text
    assert 'route="/v1/collections/{name}"' in text
    assert set(re.findall(r'tenant="([^"]*)"', text)) <= {"", "mallory", "victim", "ops"}
    for told in ("a-name-of-mine", NAME):
        assert told not in text
