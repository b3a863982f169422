"""Answers of replicas that are lost: repeated where that cannot be seen, an error where it can. No Ray."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.contracts.answer import Question
from rag_posfix.contracts.request import Chunk, GenerationRequest, Sampling
from rag_posfix.errors import ConfigError, GenerationError, PromptTooLongError, UpstreamError
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix_api.ray_serve.routing import (
    GeneratorReplica,
    ReplicaLost,
    ReplicaModel,
    Replicas,
    ReplicatedGenerator,
    RoutedRequest,
    Sketches,
    marked_passages,
)
from tests.support.serving import BRIDGE, HARBOUR, QUESTION, make_pipeline
from tests.support.tiny_evaluation import tiny_engine
from tests.support.toy_encoder import ToyEncoder
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


def asked(**sampling) -> GenerationRequest:
    """A request about two passages, as the pipeline makes it."""
    documents = [Document(page_content=text, metadata={"relevance_score": 0.5}) for text in (BRIDGE, HARBOUR)]
    layout = Assembler(ToyEncoder(), 8192).assemble(QUESTION, documents).layout
    return GenerationRequest(layout, sampling=Sampling(**sampling))


class Failing:
    """Replicas that are lost after so many chunks, one number for each attempt, and then one that is not."""

    def __init__(self, *lost_after: int, texts: list[list[str]] | None = None) -> None:
        self.lost_after = list(lost_after)
        self.asked: list[GenerationRequest] = []
        self.texts = texts or []

    def ask(self, request: RoutedRequest) -> Iterator[Chunk]:
        attempt = len(self.asked)
        self.asked.append(request.request)
        chunks = list(FakeGenerator(ToyEncoder()).stream(request.request))
        if attempt < len(self.texts):
            chunks = [Chunk(piece) for piece in self.texts[attempt]]
        for number, chunk in enumerate(chunks):
            if attempt < len(self.lost_after) and number == self.lost_after[attempt]:
                raise ReplicaLost("gone")
            yield chunk


def replicated(replicas: Replicas, **options) -> ReplicatedGenerator:
    return ReplicatedGenerator(FakeGenerator(ToyEncoder()), replicas, **options)


@pytest.mark.parametrize("lost_after", [(), (0,), (1,), (4, 2), (2, 4, 0)])
def test_the_answer_is_that_of_one_generator_whenever_replicas_are_lost(lost_after):
    request = asked(top_logprobs=1)
    replicas = Failing(*lost_after)
    chunks = list(replicated(replicas).stream(request))
    (*_, last) = FakeGenerator(ToyEncoder()).stream(request)
    assert "".join(chunk.text for chunk in chunks) == last.generation.text
    assert tuple(one for chunk in chunks for one in chunk.log_probs) == last.generation.log_probs
    assert [chunk.generation for chunk in chunks if chunk.generation] == [last.generation]
    assert len(replicas.asked) == len(lost_after) + 1


def test_a_second_answer_may_come_in_other_pieces():
    replicas = Failing(2, 3, texts=[["The bri", "dge ", "of"], ["The ", "bridge of ", "Arvo", " was"]])
    text = "".join(chunk.text for chunk in replicated(replicas).stream(asked()))
    assert text == "The bridge of Arvo was built in 1911"


@pytest.mark.parametrize(
    ("lost_after", "text"),
    [(2, ["A tower ", "of", "..."]), (3, ["The bridge of Arvo was built ", "in 1911", " by Wick", "."])],
)
def test_an_answer_that_began_and_goes_on_otherwise_or_ends_earlier_is_an_error(lost_after, text):
    with pytest.raises(UpstreamError, match="another replica's answer differs"):
        list(replicated(Failing(lost_after, texts=[text])).stream(asked()))


def test_attempts_are_bounded():
    replicas = Failing(0, 0, 0)
    with pytest.raises(UpstreamError, match="3 replicas were lost"):
        list(replicated(replicas, attempts=3).stream(asked()))
    assert len(replicas.asked) == 3
    with pytest.raises(ConfigError, match="attempts=0"):
        replicated(replicas, attempts=0)


def test_what_samples_without_a_seed_gets_one_for_all_attempts():
    replicas = Failing(1)
    list(replicated(replicas, new_seed=lambda: 7).stream(asked(temperature=1.0)))
    assert [one.sampling.seed for one in replicas.asked] == [7, 7]
    replicas = Failing()
    list(replicated(replicas, new_seed=lambda: 7).stream(asked()))
    assert replicas.asked[0].sampling.seed is None  # greedy


def test_a_reader_that_goes_away_ends_the_work_of_the_replica():
    ended = []

    class Watched(Failing):
        def ask(self, request):
            try:
                yield from super().ask(request)
            finally:
                ended.append(len(self.asked))

    chunks = replicated(Watched()).stream(asked())
    next(chunks)
    assert ended == []
    chunks.close()
    assert ended == [1]


def test_other_errors_are_not_repeated():
    class Refusing(Failing):
        def ask(self, request):
            self.asked.append(request.request)
            raise PromptTooLongError("too long")

    replicas = Refusing()
    with pytest.raises(PromptTooLongError):
        list(replicated(replicas).stream(asked()))
    assert len(replicas.asked) == 1


def test_an_error_of_a_replica_keeps_its_message():
    """Ray raises an instance of both its own error, whose text is the replica's traceback, and the error's class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray's own settings
        exceptions = pytest.importorskip("ray.exceptions", reason="the extra ray is not installed")
        from rag_posfix_api.ray_serve.cluster import ServeReplicas
    raised = exceptions.RayTaskError(
        "stream", "Traceback of the replica", PromptTooLongError("too long")
    ).as_instanceof_cause()
    assert isinstance(raised, PromptTooLongError)

    class Handle:
        def options(self, **_: object) -> Handle:
            return self

        def remote(self, _: object) -> Iterator[Chunk]:
            raise raised
            yield

    with pytest.raises(PromptTooLongError) as told:
        list(replicated(ServeReplicas(Handle())).stream(asked()))
    assert str(told.value) == "too long"


def test_a_pipeline_answers_with_replicas_as_with_a_generator():
    with_replicas = make_pipeline(replicated(Failing(1)))
    question = Question(QUESTION, documents=[Document(page_content=BRIDGE, metadata={"relevance_score": 1.0})])
    assert with_replicas.ask(question).text == make_pipeline().ask(question).text


async def replied(replica: GeneratorReplica, request: GenerationRequest) -> list[Chunk]:
    return [chunk async for chunk in replica.stream(RoutedRequest.of(request))]


async def test_a_replica_answers_and_says_what_it_read():
    replica = GeneratorReplica(lambda: ReplicaModel(FakeGenerator(ToyEncoder())), 2)
    chunks = await replied(replica, asked())
    assert chunks == list(FakeGenerator(ToyEncoder()).stream(asked()))
    stats = await replica.record_routing_stats()
    marks = list(marked_passages(asked()))
    assert Sketches(30.0).held({"replica": stats}, marks, stats["made_at"]).tolist() == [[True] * len(marks)]
    counts = {"in_flight_requests": 0, "waiting_requests": 0, "decode_steps": 0, "decoded_answers": 0}
    assert await replica.counts() == counts
    await replica.check_health()


async def test_the_sketch_of_a_replica_with_a_store_leaves_out_what_the_store_dropped():
    kept, _ = asked().layout.keys
    store = SimpleNamespace(memory_tags=lambda: frozenset({kept}), stats=lambda: {"hits": 1, "tiers": []})
    reports = []
    replica = GeneratorReplica(lambda: ReplicaModel(FakeGenerator(ToyEncoder()), store), 2, report=reports.append)
    await replied(replica, asked())
    stats, marks = await replica.record_routing_stats(), list(marked_passages(asked()))
    assert Sketches(30.0).held({"replica": stats}, marks, stats["made_at"]).tolist() == [[True, False]]
    assert reports == [await replica.counts()]
    assert reports[0]["passages_hits"] == 1
    assert "passages_tiers" not in reports[0]


async def test_a_replica_counts_its_open_requests_and_the_steps_of_its_batches():
    replica = GeneratorReplica(lambda: ReplicaModel(tiny_engine(4096)), 2)
    answer = replica.stream(RoutedRequest.of(asked(max_tokens=6)))
    await anext(answer)
    assert (await replica.counts())["in_flight_requests"] == 1
    await answer.aclose()
    await asyncio.gather(*(replied(replica, asked(max_tokens=6)) for _ in range(2)))
    counts = await replica.counts()
    assert counts["in_flight_requests"] == counts["waiting_requests"] == 0
    assert counts["decode_steps"] < counts["decoded_answers"] <= 2 * counts["decode_steps"]


async def test_a_cancelled_request_ends_the_work_at_its_next_step():
    entered, closed = threading.Event(), threading.Event()

    class Endless(FakeGenerator):
        def stream(self, request):
            try:
                while True:
                    entered.set()
                    yield Chunk("word ")
            finally:
                closed.set()

    replica = GeneratorReplica(lambda: ReplicaModel(Endless(ToyEncoder())), 2)
    task = asyncio.create_task(replied(replica, asked()))
    await asyncio.to_thread(entered.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_until, closed.is_set)


async def test_a_replica_whose_model_died_is_unhealthy():
    generator = FakeGenerator(ToyEncoder())
    generator.failure = "rank 1 exited"
    replica = GeneratorReplica(lambda: ReplicaModel(generator), 1)
    with pytest.raises(GenerationError, match="rank 1 exited"):
        await replica.check_health()
