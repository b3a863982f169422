"""Every metric moves by a known amount when the thing happens that it counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.caching.answers.tiered import TieredAnswerCache
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.request import Chunk, GenerationRequest, MitigationChoice, Sampling
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.pipeline.pipeline import Defaults, Pipeline
from rag_posfix.settings import Settings
from rag_posfix_api.app import ROUTERS, create_app
from tests.support.clock import Clock
from tests.support.serving import (
    BRIDGE,
    CHAT,
    HARBOUR,
    DictCache,
    GatedGenerator,
    WordReranker,
    chat,
    limits,
    make_pipeline,
    post,
    running,
)
from tests.support.threads import in_threads
from tests.support.tiny import loaded_model
from tests.support.toy_encoder import ToyEncoder
from tests.support.waiting import wait_until


class Reading:
    """The metrics of an app, and how they change."""

    def __init__(self, app: Any) -> None:
        self._registry = app.state.service.metrics.registry
        self.before = self.now()

    def now(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        families = self._registry.collect()
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}

    def change(self, name: str, **labels: str) -> float:
        key = ("rag_posfix_" + name, tuple(sorted(labels.items())))
        return self.now()[key] - self.before.get(key, 0.0)


def client_for(pipeline: Pipeline, **fields: Any) -> tuple[TestClient, Reading]:
    app = create_app(Settings(), pipeline, limits(**fields))
    return TestClient(app), Reading(app)


class Clocked(FakeGenerator):
    """Says that it decoded for 1.4 s, and waited and reused as it is told."""

    def __init__(self, queue: float = 0.0, cached: int = 0) -> None:
        super().__init__(ToyEncoder())
        self.queue = queue
        self.cached = cached

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        for chunk in super().stream(request):
            if chunk.generation is None:
                yield chunk
                continue
            usage = replace(chunk.generation.usage, cached_tokens=self.cached)
            timings = {"queue": self.queue, "prefill": 0.5, "decode": 1.4}
            yield replace(chunk, generation=replace(chunk.generation, usage=usage, timings=timings))


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_counts_its_first_token_and_the_time_for_each_further_one(stream: bool):
    client, reading = client_for(make_pipeline(Clocked()))
    client.post(CHAT, json=chat(documents=[BRIDGE], stream=stream))
    assert reading.change("time_to_first_token_seconds_count") == 1
    assert reading.change("time_to_first_token_seconds_sum") > 0
    # Eight words in 1.4 s; the first comes with the prefill: 1.4 / 7.
    assert reading.change("time_per_output_token_seconds_count") == 1
    assert reading.change("time_per_output_token_seconds_sum") == pytest.approx(0.2)


def test_an_answer_of_one_token_has_a_first_token_only():
    client, reading = client_for(make_pipeline(Clocked()))
    client.post(CHAT, json=chat(documents=[BRIDGE], max_tokens=1))
    assert reading.change("time_to_first_token_seconds_count") == 1
    assert reading.change("time_per_output_token_seconds_count") == 0


def test_a_cached_answer_has_no_first_token_and_waits_for_nobody():
    client, reading = client_for(make_pipeline(Clocked(), cache=DictCache()))
    for _ in range(3):
        client.post(CHAT, json=chat(documents=[BRIDGE]))
    assert reading.change("time_to_first_token_seconds_count") == 1
    assert reading.change("queue_duration_seconds_count", work="answer") == 1
    assert reading.change("cache_requests_total", result="hit") == 2


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that requests wait for their permits by."""
    clock = Clock()
    monkeypatch.setattr("rag_posfix_api.runtime.admission.time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.mark.usefixtures("clock")
def test_the_time_in_the_queue_is_counted_with_the_queue_of_the_batch():
    client, reading = client_for(make_pipeline(Clocked(queue=3.0)))
    client.post(CHAT, json=chat(documents=[BRIDGE]))
    assert reading.change("queue_duration_seconds_count", work="answer") == 1
    assert reading.change("queue_duration_seconds_sum", work="answer") == 3.0
    assert reading.change("queue_duration_seconds_count", work="score") == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["ab", "cd", "ef"]}),
        ("/v1/evaluate/order", {"question": "Which bridge?", "documents": [BRIDGE, HARBOUR, "Fog."], "orders": 3}),
    ],
)
def test_a_request_of_several_answers_has_one_first_token_and_the_wait_of_each_answer(
    path: str, body: dict[str, Any], clock: Clock
):
    generator = GatedGenerator()
    with running(make_pipeline(generator), max_concurrent=1) as (url, server):
        reading = Reading(server.config.app)
        first = threading.Thread(target=post, args=(url,))
        first.start()
        assert generator.entered.wait(60)
        second = threading.Thread(target=httpx2.post, args=(url + path,), kwargs={"json": body, "timeout": 60})
        second.start()
        wait_until(lambda: reading.change("waiting_requests", work="answer") == 1)
        clock.advance(1)
        generator.gate.set()
        first.join(60)
        second.join(60)
    assert reading.change("time_to_first_token_seconds_count") == 2
    assert reading.change("queue_duration_seconds_count", work="answer") == 1 + 3
    assert reading.change("queue_duration_seconds_sum", work="answer") == 1, "one answer waited a second, two not"
    assert reading.change("stage_duration_seconds_sum", stage="queue") == 1


def test_a_reranking_request_waits_in_a_queue_of_its_own():
    client, reading = client_for(make_pipeline(reranker=WordReranker()))
    client.post("/v1/rerank", json={"query": "bridge", "documents": [BRIDGE, HARBOUR]})
    assert reading.change("queue_duration_seconds_count", work="score") == 1
    assert reading.change("queue_duration_seconds_count", work="answer") == 0


def test_a_request_that_waits_is_seen_and_its_wait_is_counted_when_it_is_refused():
    generator = GatedGenerator()
    with running(make_pipeline(generator), max_concurrent=1, queue_timeout_seconds=0.3) as (url, server):
        reading = Reading(server.config.app)
        first = threading.Thread(target=post, args=(url,))
        first.start()
        assert generator.entered.wait(60)
        second = threading.Thread(target=post, args=(url,), kwargs={"documents": [HARBOUR]})
        second.start()
        wait_until(lambda: reading.change("waiting_requests", work="answer") == 1)
        assert reading.change("running_answers") == 1
        assert reading.change("in_flight_requests") == 2
        second.join(60)
        generator.gate.set()
        first.join(60)
        assert reading.change("requests_total", dialect="openai", code="overloaded") == 1
        assert reading.change("queue_duration_seconds_count", work="answer") == 2
        assert reading.change("queue_duration_seconds_sum", work="answer") >= 0.3
        assert reading.change("waiting_requests", work="answer") == 0
        # The refused request got no text.
        assert reading.change("time_to_first_token_seconds_count") == 1


MESSAGES = {"model": "fake", "max_tokens": 9, "messages": [{"role": "user", "content": "Which bridge?"}]}


def test_requests_are_counted_by_the_format_of_the_response_and_its_outcome():
    client, reading = client_for(make_pipeline(reranker=WordReranker()), api_key="key", max_body_bytes=5000)
    key = {"authorization": "Bearer key"}
    rerank = {"query": "bridge", "documents": [BRIDGE]}
    for path, body in (
        (CHAT, chat(documents=[BRIDGE])),
        (CHAT, chat(order="unheard of")),
        ("/v1/messages", MESSAGES),
        ("/v1/messages", {}),
        ("/v1/rerank", rerank),
        ("/v2/rerank", {**rerank, "query": " "}),
        ("/rerank", {"query": "bridge", "texts": [BRIDGE, "x" * 6000]}),
        ("/score", {"text_1": "bridge", "text_2": [BRIDGE]}),
        ("/v1/responses", {"input": "Which bridge?"}),
        ("/nothing", {}),
    ):
        client.post(path, json=body, headers=key)
    client.post("/v1/messages", json=MESSAGES)
    client.get("/livez")
    expected = {
        ("openai", "ok"): 1,
        ("openai", "unknown_name"): 1,
        ("anthropic", "ok"): 1,
        ("anthropic", "invalid_request"): 1,
        ("anthropic", "invalid_api_key"): 1,
        ("jina", "ok"): 1,
        ("cohere", "invalid_value"): 1,
        ("tei", "body_too_large"): 1,
        ("vllm", "ok"): 1,
        ("responses", "ok"): 1,
        ("none", "not_found"): 1,
        ("none", "ok"): 1,
    }
    found = {
        (labels["dialect"], labels["code"]): value
        for (name, pairs), value in reading.now().items()
        if name == "rag_posfix_requests_total" and (labels := dict(pairs))
    }
    assert found == expected


def test_a_stream_that_fails_is_counted_as_its_error_although_its_status_is_200():
    class Failing(FakeGenerator):
        def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
            yield Chunk("The ")
            raise ZeroDivisionError

    client, reading = client_for(make_pipeline(Failing(ToyEncoder())))
    assert client.post(CHAT, json=chat(documents=[BRIDGE], stream=True)).status_code == 200
    assert reading.change("requests_total", dialect="openai", code="internal_error") == 1
    assert reading.change("request_duration_seconds_count", route=CHAT, status="200") == 1


def test_tokens_of_the_model_are_read_reused_or_generated_and_cached_answers_have_none():
    client, reading = client_for(make_pipeline(Clocked(cached=30), cache=DictCache()))
    body = client.post(CHAT, json=chat(documents=[BRIDGE])).json()
    client.post(CHAT, json=chat(documents=[BRIDGE]))
    prompt = body["usage"]["prompt_tokens"]
    assert reading.change("model_tokens_total", kind="read") == prompt - 30
    assert reading.change("model_tokens_total", kind="reused") == 30
    assert reading.change("model_tokens_total", kind="generated") == 8
    assert reading.change("tokens_total", kind="prompt") == 2 * prompt
    assert reading.change("tokens_total", kind="completion") == 16


def test_answers_with_a_fault_of_form_are_counted_and_named():
    client, reading = client_for(make_pipeline())
    document = {"id": "d", "text": "The answer is:"}  # the generator answers with a sentence of it
    body = client.post(CHAT, json=chat(documents=[document])).json()
    assert (body["well_formed"], body["form_fault"]) == (False, "fragment")
    assert reading.change("malformed_answers_total", fault="fragment") == 1


def test_the_answer_cache_counts_each_tier():
    small = MemoryTier(max_entries=1)
    client, reading = client_for(make_pipeline(cache=TieredAnswerCache([small])))
    for document in (BRIDGE, BRIDGE, HARBOUR):
        client.post(CHAT, json=chat(documents=[document]))
    tier = {"cache": "answers", "tier": "memory"}
    assert reading.change("cache_tier_lookups_total", result="hit", **tier) == 1
    assert reading.change("cache_tier_lookups_total", result="skipped", **tier) == 0
    assert reading.change("cache_tier_entries", **tier) == 1
    assert reading.change("cache_tier_evictions_total", **tier) == 1
    assert reading.change("cache_tier_damaged_entries_total", **tier) == 0
    assert reading.change("cache_tier_bytes", **tier) == small.stats().bytes
    assert reading.now()["rag_posfix_cache_tier_available", tuple(sorted(tier.items()))] == 1


@pytest.fixture(scope="module")
def engine() -> Engine:
    """A random model that reads and writes bytes, and never ends of itself."""
    encoder: Any = ToyEncoder()
    encoder.eos_ids = frozenset()
    return Engine(loaded_model(vocab_size=ToyEncoder.vocab_size, max_position_embeddings=4096), encoder, "fake", "x")


def test_the_passage_store_counts_passages_and_bytes(engine: Engine):
    store = PassageStore([MemoryTier(10**8)])
    method = Defaults(mitigation=MitigationChoice("context_experts"), sampling=Sampling(max_tokens=4))
    pipeline = Pipeline(engine.with_passages(store), Assembler(engine.encoder, 4096), passages=store, defaults=method)
    client, reading = client_for(pipeline)
    usages = [
        client.post(CHAT, json=chat(question, documents=[BRIDGE, HARBOUR])).json()["usage"]
        for question in ("Which bridge?", "Which harbour?")
    ]
    stats = store.stats()
    assert stats["hits"] >= 2, "both passages, and perhaps what stands before them"
    assert stats["misses"] == stats["hits"]
    assert reading.change("passage_lookups_total", result="hit") == stats["hits"]
    assert reading.change("passage_lookups_total", result="miss") == stats["misses"]
    assert reading.change("passage_hit_bytes_total") == stats["hit_bytes"] > 0
    assert reading.change("passage_dropped_writes_total") == 0
    assert reading.change("passage_pending_writes") == 0
    tier = {"cache": "passages", "tier": "memory"}
    assert reading.change("cache_tier_lookups_total", result="hit", **tier) == stats["hits"]
    assert reading.change("cache_tier_bytes", **tier) == stats["tiers"][0]["bytes"] >= stats["hit_bytes"]
    assert reading.change("cache_tier_entries", **tier) == stats["misses"]
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] == 0
    assert cached[1] > len(BRIDGE + HARBOUR), "both passages and what stands before them, a token for each character"
    assert reading.change("model_tokens_total", kind="reused") == cached[1]
    assert reading.change("model_tokens_total", kind="read") == prompts - cached[1]
    assert reading.change("model_tokens_total", kind="generated") == 2 * 4


def test_the_size_of_the_batch_is_counted_at_each_step(engine: Engine):
    tokens = 12
    pipeline = Pipeline(
        engine, Assembler(engine.encoder, 4096), defaults=Defaults(sampling=Sampling(max_tokens=tokens))
    )
    with running(pipeline, max_concurrent=2) as (url, server):
        reading = Reading(server.config.app)
        post(url)
        # The prefill writes the first token; each further one is a step of a batch of one.
        assert reading.change("decode_batch_size_count") == tokens - 1
        assert reading.change("decode_batch_size_sum") == tokens - 1
        in_threads(lambda number: post(url, documents=[BRIDGE + str(number)]), range(2))
        # However the two overlap, every further token of each was in one step.
        assert reading.change("decode_batch_size_sum") == 3 * (tokens - 1)
        assert reading.change("decode_batch_size_count") <= 3 * (tokens - 1)


def test_names_follow_the_conventions_of_prometheus():
    app = create_app(Settings(), make_pipeline(cache=TieredAnswerCache([MemoryTier(max_entries=1)])), limits())
    families = [f for f in app.state.service.metrics.registry.collect() if not f.name.startswith("process_")]
    for family in families:
        assert family.name.startswith("rag_posfix"), family.name
        assert family.documentation.endswith("."), family.name
        assert not family.name.endswith(("_ms", "_milliseconds", "_kb", "_mb", "_total")), family.name
        if family.type == "histogram" and family.name != "rag_posfix_decode_batch_size":
            assert family.name.endswith("_seconds"), "a histogram names its base unit"


def test_every_route_of_a_dialect_has_its_label():
    # A router inside of a router would hide its routes from the labels.
    assert all(isinstance(route, APIRoute) for routers in ROUTERS.values() for one in routers for route in one.routes)
