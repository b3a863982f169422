"""Several answers at a time: the service around an engine whose answers are decoded together."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest
import torch
from fastapi.testclient import TestClient
from langchain_core.documents import Document

import rag_posfix.generation.batching.scheduler as worker_module
from rag_posfix.assembly.assembler import Assembler
from rag_posfix.contracts.request import Chunk, GenerationRequest, Sampling
from rag_posfix.errors import GenerationCancelled
from rag_posfix.generation.batching.scheduler import BatchingGenerator
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.pipeline.pipeline import Defaults, Pipeline
from rag_posfix.settings import Settings
from rag_posfix_api.app import create_app
from rag_posfix_api.runtime.admission import TICKET, Admission, AdmittedGenerator, Ticket
from tests.support.serving import (
    BRIDGE,
    CHAT,
    HARBOUR,
    WordReranker,
    chat,
    client_for,
    gauge,
    in_flight,
    leaving,
    limits,
    make_pipeline,
    noticed_leaving,
    post,
    serving,
)
from tests.support.stepped import RecordingEngine, answer, ask
from tests.support.tiny import loaded_model
from tests.support.toy_encoder import ToyEncoder
from tests.support.waiting import wait_until

METHODS = ["none", "context_experts", "parallel_windows", "inter_document", "multi_base", "passage_answers"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread_per_operation() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    """A random model that reads and writes bytes, and never ends of itself."""
    encoder: Any = ToyEncoder()
    encoder.eos_ids = frozenset()
    loaded = loaded_model(vocab_size=ToyEncoder.vocab_size, max_position_embeddings=4096)
    engine = Engine(loaded, encoder, "fake", "print")
    return Pipeline(engine, Assembler(encoder, 4096), defaults=Defaults(sampling=Sampling(max_tokens=24)))


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many answers took part in each step."""
    counts: list[int] = []
    step = worker_module.decode_step
    monkeypatch.setattr(worker_module, "decode_step", lambda running: (counts.append(len(running)), step(running))[1])
    return counts


def threads() -> set[threading.Thread]:
    """The threads that generate; one of a test before may still end."""
    return {thread for thread in threading.enumerate() if thread.name == "rag-posfix-generation"}


def streamed(client: openai.OpenAI, number: int) -> tuple[str, str | None]:
    """The text and the finish reason of one streamed answer."""
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": f"What happened in {1900 + number}?"}],
            stream=True,
            temperature=number % 2,
            seed=number,
            max_tokens=12 + number,
            extra_body={
                "documents": [BRIDGE, HARBOUR][: 1 + number % 2],
                "mitigation": METHODS[number % len(METHODS)],
            },
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return text, chunks[-1].choices[0].finish_reason


def hold_prompts(monkeypatch: pytest.MonkeyPatch, pipeline: Pipeline) -> threading.Event:
    """Let the engine read no prompt before the event is set that is returned."""
    begin, engine = threading.Event(), pipeline.generator
    assert isinstance(engine, Engine)
    open_session = engine.open

    def held(*request: Any) -> Any:
        assert begin.wait(60)
        return open_session(*request)

    monkeypatch.setattr(engine, "open", held)
    return begin


@pytest.mark.slow
def test_eight_streams_at_a_time_say_what_they_say_one_by_one(
    pipeline: Pipeline, together: list[int], monkeypatch: pytest.MonkeyPatch
):
    with serving(pipeline, max_concurrent=1) as url, openai.OpenAI(base_url=url + "/v1", api_key="-") as client:
        alone = [streamed(client, number) for number in range(8)]
    assert together == []
    with serving(pipeline) as url, openai.OpenAI(base_url=url + "/v1", api_key="-") as client:
        begin = hold_prompts(monkeypatch, pipeline)
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(lambda number: streamed(client, number), range(8))
            wait_until(lambda: in_flight(url) == 8)
            begin.set()
            assert list(answers) == alone
        wait_until(lambda: gauge(url, "rag_posfix_running_answers") == 0)
    assert max(together) > 1
    assert len({text for text, _ in alone}) == 8


@pytest.mark.parametrize("stream", [False, True])
def test_when_a_client_goes_away_its_answer_leaves_and_the_others_stay(
    pipeline: Pipeline, together: list[int], stream: bool, monkeypatch: pytest.MonkeyPatch
):
    begin, noticed = hold_prompts(monkeypatch, pipeline), noticed_leaving(monkeypatch)
    both, step = threading.Event(), worker_module.decode_step

    def step_of_both(running: Any) -> Any:
        if len(running) == 2:
            both.set()
            assert noticed.wait(60)
        return step(running)

    monkeypatch.setattr(worker_module, "decode_step", step_of_both)
    body = chat(documents=[BRIDGE], stream=stream, max_tokens=3000, mitigation="none")
    with serving(pipeline) as url, ThreadPoolExecutor(1) as pool:
        with leaving(url, **body):
            stays = pool.submit(post, url, max_tokens=100)
            wait_until(lambda: in_flight(url) == 2)
            begin.set()
            assert both.wait(60)
        assert stays.result().status_code == 200
        wait_until(lambda: in_flight(url) == 0)
        assert together.count(2) == 1, "the step that was under way"


def test_shutting_down_ends_the_thread_and_an_app_may_be_started_again(pipeline: Pipeline):
    before = threads()
    app = create_app(Settings(), pipeline, limits())
    for _ in range(2):
        with TestClient(app) as client:
            assert threads() <= before
            assert client.post(CHAT, json=chat(documents=[BRIDGE])).status_code == 200
            assert len(threads() - before) == 1
        assert threads() <= before


def test_one_at_a_time_needs_no_thread(pipeline: Pipeline):
    before = threads()
    with client_for(pipeline, max_concurrent=1) as client:
        assert client.post(CHAT, json=chat(documents=[BRIDGE])).status_code == 200
        assert threads() <= before


def test_a_pipeline_that_brings_its_own_batching_is_served_as_it_is(pipeline: Pipeline, together: list[int]):
    generator = BatchingGenerator(pipeline.generator)  # type: ignore[arg-type]
    own = Pipeline(generator, pipeline.assembler, defaults=pipeline.defaults)
    with client_for(own) as client:
        assert client.post(CHAT, json=chat(documents=[BRIDGE])).status_code == 200
    assert generator.generate(ask("none", 2)).usage.completion_tokens == 2  # it was not closed by the service
    generator.close()
    assert together


class GatedReranker(WordReranker):
    def __init__(self) -> None:
        self.gate = threading.Event()
        self.running = self.most_running = 0

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> Sequence[Document]:
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        assert self.gate.wait(60)
        self.running -= 1
        return super().compress_documents(documents, query)


def test_scores_are_computed_for_one_request_at_a_time():
    reranker = GatedReranker()
    body = {"query": "bridge", "documents": [BRIDGE]}
    with serving(make_pipeline(reranker=reranker)) as url, ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(httpx2.post, url + "/v1/rerank", json=body, timeout=60) for _ in range(3)]
        wait_until(lambda: in_flight(url) == 3 and reranker.running)
        reranker.gate.set()
        assert [answer.result().status_code for answer in answers] == [200] * 3
        assert reranker.most_running == 1


class TestPermits:
    @pytest.fixture
    def engine(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingEngine]:
        engine = RecordingEngine(by_turns=True).install(monkeypatch)
        yield engine
        engine.run_free()

    @pytest.fixture
    def admission(self) -> Admission:
        return Admission(1, 10, 600.0)

    @pytest.fixture
    def admitted(self, engine: RecordingEngine, admission: Admission) -> Iterator[AdmittedGenerator]:
        generator = BatchingGenerator(engine, 1)
        yield AdmittedGenerator(generator, admission)
        engine.run_free()
        generator.close()

    def with_ticket(self, ticket: Ticket, function: Any) -> Any:
        token = TICKET.set(ticket)
        try:
            return function()
        finally:
            TICKET.reset(token)

    def test_a_reader_that_takes_its_time_holds_no_permit(
        self, engine: RecordingEngine, admitted: AdmittedGenerator, admission: Admission
    ):
        engine.run_free()
        slow = admitted.stream(ask("a", 9))
        first = self.with_ticket(Ticket(600, time.monotonic()), lambda: next(slow))
        wait_until(lambda: admission.working == 0)
        second = self.with_ticket(Ticket(600, time.monotonic()), lambda: admitted.generate(ask("b")))
        assert second.text == answer()
        chunks = [first, *slow]
        assert "".join(chunk.text for chunk in chunks) == answer(9)

    def test_the_time_in_both_queues_is_told_as_one(self):
        class Waits(FakeGenerator):
            def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
                for chunk in super().stream(request):
                    if chunk.generation is not None:
                        generation = replace(chunk.generation, timings={"queue": 5.0, "decode": 1.0})
                        yield Chunk("", generation)

        class Full(Admission):
            def acquire(self, ticket: Ticket, tokens: int = 1) -> None:
                super().acquire(ticket, tokens)
                ticket.queued_seconds = 100.0

        admitted = AdmittedGenerator(Waits(ToyEncoder()), Full(1, 10, 10.0))
        timings = self.with_ticket(Ticket(600, time.monotonic()), lambda: admitted.generate(ask("none"))).timings
        assert set(timings) == {"queue", "decode"}
        assert timings["queue"] == 105.0

    def test_a_ticket_that_is_cancelled_ends_the_wait_for_a_piece_that_is_not_there_yet(
        self, engine: RecordingEngine, admitted: AdmittedGenerator, admission: Admission
    ):
        ticket = Ticket(600, time.monotonic())
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(self.with_ticket, ticket, lambda: admitted.generate(ask("a", 50)))
            engine.turns(2)
            admission.cancel(ticket)
            engine.let(1)
            assert isinstance(waiting.exception(timeout=60), GenerationCancelled)
        wait_until(lambda: engine.events == ["open a", "step a", "step a"])
        engine.run_free()
        wait_until(lambda: admission.working == 0)
        assert len(engine.events) == 3
