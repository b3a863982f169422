from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from langchain_core.documents import Document
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.contracts.answer import Question
from rag_posfix.contracts.request import Chunk, Generation, GenerationRequest, Sampling, Usage
from rag_posfix.errors import ConfigError, GenerationCancelled, RerankingError
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.pipeline.pipeline import Defaults, Pipeline
from rag_posfix.telemetry.build import OFF, question_tracer
from tests.support.recorded_telemetry import RecordedTelemetry
from tests.support.serving import DictCache, ListRetriever, WordReranker
from tests.support.toy_encoder import ToyEncoder

ROME = "Rome lies on the Tiber."
PARIS = "Paris lies on the Seine."
ASKED = "Which river does Rome have?"
SECOND = 1_000_000_000


class Timed(FakeGenerator):
    """Says that it waited 1 s, read for 2 s and wrote for 3 s."""

    def generate(self, request: GenerationRequest) -> Generation:
        timings = {"queue": 1.0, "prefill": 2.0, "decode": 3.0}
        return replace(super().generate(request), timings=timings, usage=Usage(50, 5, 20))


class FailsAfter(FakeGenerator):
    """Fails after a number of pieces."""

    def __init__(self, pieces: int, error: Exception) -> None:
        super().__init__(ToyEncoder())
        self.pieces = pieces
        self.error = error

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        for number, chunk in enumerate(super().stream(request)):
            if number == self.pieces:
                raise self.error
            yield chunk


def make(recorded: RecordedTelemetry, generator: FakeGenerator | None = None, **parts: Any) -> Pipeline:
    generator = generator or FakeGenerator(ToyEncoder())
    return Pipeline(generator, Assembler(ToyEncoder(), 8192), tracer=recorded.telemetry.question_tracer(), **parts)


def retrieving(recorded: RecordedTelemetry, **parts: Any) -> Pipeline:
    parts = {"defaults": Defaults(second_step=False), **parts}
    return make(recorded, retriever=ListRetriever(ROME, PARIS), reranker=WordReranker(), candidates=2, **parts)


def given(*texts: str) -> list[Document]:
    return [Document(page_content=text, id=f"id-{i}") for i, text in enumerate(texts)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_question_has_a_span_and_each_stage_one_below_it(stream: bool):
    recorded = RecordedTelemetry()
    pipeline = retrieving(recorded)
    if stream:
        assert list(pipeline.stream(ASKED))
    else:
        pipeline.ask(ASKED)
    stages = {"retrieve": {}, "rerank": {}, "assemble": {}, "prefill": {}, "decode": {}}
    assert recorded.tree() == {"chat fake": stages}
    assert list(recorded.tree()["chat fake"]) == list(stages), "in this order"
    assert recorded.span("chat fake").kind is SpanKind.INTERNAL


def test_the_attributes_are_those_of_the_conventions_for_generative_ai():
    recorded = RecordedTelemetry()
    sampling = Sampling(max_tokens=9, temperature=0.5, top_p=0.9, top_k=7, seed=3)
    pipeline = retrieving(recorded, generator=Timed(ToyEncoder()))
    pipeline.ask(Question(ASKED, sampling=sampling, order="reverse"))
    assert recorded.attributes("chat fake") == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "rag_posfix",
        "gen_ai.request.model": "fake",
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 3,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 50,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 20,
        "rag_posfix.mitigation": "context_experts",
        "rag_posfix.order": "reverse",
        "rag_posfix.cache": "off",
        "rag_posfix.documents": 2,
        "rag_posfix.documents.dropped": 0,
    }
    assert recorded.attributes("retrieve") == {
        "gen_ai.operation.name": "retrieval",
        "gen_ai.provider.name": "rag_posfix",
        "rag_posfix.documents": 2,
    }
    assert recorded.attributes("rerank")["gen_ai.operation.name"] == "rerank"
    assert recorded.attributes("assemble") == {"rag_posfix.documents": 2}
    assert recorded.attributes("prefill") == {
        "gen_ai.usage.input_tokens": 50,
        "gen_ai.usage.cache_read.input_tokens": 20,
        "rag_posfix.queue.seconds": 1.0,
    }
    assert recorded.attributes("decode") == {"gen_ai.usage.output_tokens": 5}


def test_prefill_and_decode_have_the_times_that_the_generator_measured():
    recorded = RecordedTelemetry()
    make(recorded, Timed(ToyEncoder())).ask(Question(ASKED, given(ROME)))
    assembled, prefill, decode = map(recorded.span, ("assemble", "prefill", "decode"))
    assert prefill.end_time - prefill.start_time == 2 * SECOND
    assert decode.start_time == prefill.end_time
    assert decode.end_time - decode.start_time == 3 * SECOND
    # One second in the queue comes before; the rest is what Python takes.
    assert SECOND <= prefill.start_time - assembled.end_time < 2 * SECOND


def test_no_text_is_recorded_unless_it_is_asked_for():
    secret = "xyzzy"
    question = Question(
        f"Which river does {secret} have?",
        [Document(page_content=f"{secret} lies on the Tiber.", id=f"{secret}-id", metadata={"source": secret})],
        history=[{"role": "user", "content": secret}, {"role": "assistant", "content": secret}],
        sampling=Sampling(stop=(f"{secret}!",)),
        tenant=secret,
    )
    recorded = RecordedTelemetry()
    answer = make(recorded, reranker=WordReranker()).ask(question)
    assert secret in answer.text
    assert len(recorded.spans) == 5
    assert secret not in recorded.text()


def test_content_is_recorded_under_the_names_of_the_conventions_when_it_is_asked_for():
    recorded = RecordedTelemetry(content=True)
    pipeline = retrieving(recorded)
    history = [{"role": "user", "content": "Hello \ud800"}, {"role": "assistant", "content": "Hi"}]
    answer = pipeline.ask(Question(ASKED, history=history))
    asked = json.loads(recorded.attributes("chat fake")["gen_ai.input.messages"])
    assert [message["role"] for message in asked] == ["user", "assistant", "user"]
    assert asked[2] == {"role": "user", "parts": [{"type": "text", "content": ASKED}]}
    (told,) = json.loads(recorded.attributes("chat fake")["gen_ai.output.messages"])
    assert told == {
        "role": "assistant",
        "parts": [{"type": "text", "content": answer.text}],
        "finish_reason": "stop",
    }
    for name in ("retrieve", "rerank"):
        assert recorded.attributes(name)["gen_ai.retrieval.query.text"].endswith(f"\n{ASKED}")
        found = json.loads(recorded.attributes(name)["gen_ai.retrieval.documents"])
        assert {document["id"] for document in found} == {"r0", "r1"}
        assert all(isinstance(document["score"], float) for document in found)
    recorded.text().encode()  # what UTF-8 cannot hold would cost the whole batch


def test_a_cached_answer_has_no_prefill_and_says_that_it_is_cached():
    recorded = RecordedTelemetry()
    pipeline = make(recorded, cache=DictCache())
    for _ in range(2):
        pipeline.ask(Question(ASKED, given(ROME)))
    list(pipeline.stream(Question(ASKED, given(ROME))))
    asked = [span for span in recorded.spans if span.name == "chat fake"]
    assert [span.attributes["rag_posfix.cache"] for span in asked] == ["miss", "hit", "hit"]
    assert [span.name for span in recorded.spans].count("prefill") == 1


def test_a_stream_tells_its_time_to_the_first_piece():
    recorded = RecordedTelemetry()
    list(make(recorded).stream(Question(ASKED, given(ROME))))
    assert 0 < recorded.attributes("chat fake")["gen_ai.response.time_to_first_chunk"] < 10
    assert recorded.attributes("chat fake")["gen_ai.request.stream"] is True


def test_wrong_input_fails_the_span_with_the_type_of_the_error_alone():
    recorded = RecordedTelemetry()
    with pytest.raises(ConfigError):
        make(recorded).ask(Question(ASKED, given(ROME), index="xyzzy"))
    span = recorded.span("chat fake")
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "UnknownNameError"
    assert "xyzzy" not in recorded.text()
    assert not span.events, "an exception event would carry the text of the error"


def test_a_stage_that_fails_fails_its_span_and_that_of_the_question():
    class Broken:
        def compress_documents(self, documents: Any, query: str, callbacks: Any = None) -> Any:
            raise RerankingError(f"no luck with {query}")

    recorded = RecordedTelemetry()
    with pytest.raises(RerankingError):
        make(recorded, reranker=Broken()).ask(Question(ASKED, given(ROME)))
    assert recorded.tree() == {"chat fake": {"rerank": {}}}
    for name in ("rerank", "chat fake"):
        assert recorded.attributes(name)["error.type"] == "RerankingError"
    assert "no luck" not in recorded.text()


@pytest.mark.parametrize(
    ("pieces", "expected"), [(0, {"prefill": True}), (2, {"prefill": False, "decode": True})], ids=["read", "written"]
)
def test_a_generator_that_fails_leaves_the_spans_of_what_it_did(pieces: int, expected: dict[str, bool]):
    recorded = RecordedTelemetry()
    with pytest.raises(ZeroDivisionError):
        list(make(recorded, FailsAfter(pieces, ZeroDivisionError())).stream(Question(ASKED, given(ROME))))
    found = {
        span.name: span.status.status_code is StatusCode.ERROR
        for span in recorded.spans
        if span.name in ("prefill", "decode")
    }
    assert found == expected
    assert recorded.span("chat fake").status.status_code is StatusCode.ERROR


def test_a_stream_that_is_closed_is_no_error():
    recorded = RecordedTelemetry()
    chunks = make(recorded).stream(Question(ASKED, given(ROME)))
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    for name in ("decode", "chat fake"):
        assert recorded.attributes(name)["rag_posfix.closed_early"] is True
        assert recorded.span(name).status.status_code is StatusCode.UNSET


def test_a_client_that_left_is_no_error_of_the_service():
    recorded = RecordedTelemetry()
    with pytest.raises(GenerationCancelled):
        list(make(recorded, FailsAfter(1, GenerationCancelled("gone"))).stream(Question(ASKED, given(ROME))))
    assert recorded.span("chat fake").status.status_code is StatusCode.UNSET
    assert recorded.attributes("chat fake")["error.type"] == "GenerationCancelled"


def test_spans_join_the_trace_of_the_caller_and_calls_within_a_stage_join_it():
    recorded = RecordedTelemetry()
    tracer = recorded.tracer_provider.get_tracer("caller")

    class Remote(ListRetriever):
        def retrieve(self, question: str, k: int) -> list[Document]:
            with tracer.start_as_current_span("GET /search"):
                return super().retrieve(question, k)

    with tracer.start_as_current_span("job"):
        make(recorded, retriever=Remote(ROME)).ask(ASKED)
        assert trace.get_current_span().get_span_context() is not None
    assert recorded.tree() == {
        "job": {"chat fake": {"retrieve": {"GET /search": {}}, "assemble": {}, "prefill": {}, "decode": {}}}
    }


def test_a_stream_that_is_read_in_another_context_leaves_the_current_span_alone():
    recorded = RecordedTelemetry()
    tracer = recorded.tracer_provider.get_tracer("caller")
    with tracer.start_as_current_span("asking"):
        chunks = make(recorded).stream(Question(ASKED, given(ROME)))
    with tracer.start_as_current_span("reading") as reading:
        next(chunks)
        assert trace.get_current_span() is reading
        list(chunks)
        assert trace.get_current_span() is reading
    assert list(recorded.tree()) == ["asking", "reading"]
    assert list(recorded.tree()["asking"]) == ["chat fake"]


def test_the_watcher_of_the_caller_still_sees_every_stage():
    from rag_posfix.pipeline.tracing import NoopTracer

    class Watcher(NoopTracer):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def stage(self, name: str, question: str, documents: Any = ()) -> Any:
            self.seen.append(name)
            return self

        def on_delta(self, text: str) -> None:
            self.seen.append(text)

    watcher = Watcher()
    recorded = RecordedTelemetry()
    list(retrieving(recorded).stream(ASKED, watcher=watcher))
    assert watcher.seen[:3] == ["retriever", "reranker", "generator"], "assembly is for tracers alone"
    assert "".join(watcher.seen[3:]) == "Rome lies on the Tiber."
    assert len(recorded.spans) == 6


def test_metrics_are_those_of_the_conventions():
    recorded = RecordedTelemetry()
    pipeline = make(recorded, Timed(ToyEncoder()), cache=DictCache())
    for _ in range(2):
        pipeline.ask(Question(ASKED, given(ROME)))
    with pytest.raises(ConfigError):
        pipeline.ask(Question(ASKED, index="xyzzy"))
    metrics = recorded.metrics()
    assert set(metrics) == {
        "gen_ai.server.request.duration",
        "gen_ai.server.time_to_first_token",
        "gen_ai.server.time_per_output_token",
    }
    common = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "rag_posfix", "gen_ai.request.model": "fake"}
    durations = {
        tuple(sorted(point.attributes.items())): point.count for point in metrics["gen_ai.server.request.duration"]
    }
    assert durations == {
        tuple(sorted(common.items())): 2,
        tuple(sorted({**common, "error.type": "UnknownNameError"}.items())): 1,
    }
    (first,) = metrics["gen_ai.server.time_to_first_token"]
    assert (first.count, dict(first.attributes)) == (1, common), "a cached answer has no first token"
    assert 3.0 <= first.sum < 4.0, "1 s in the queue and 2 s of prefill"
    (each,) = metrics["gen_ai.server.time_per_output_token"]
    assert (each.count, each.sum) == (1, pytest.approx(3.0 / 4)), "3 s for the four tokens after the first"
    assert list(each.explicit_bounds)[:3] == [0.01, 0.025, 0.05]


def test_telemetry_that_is_off_adds_no_object_to_a_question():
    tracer = OFF.question_tracer()
    plain = Pipeline(FakeGenerator(ToyEncoder()), Assembler(ToyEncoder(), 8192))
    assert plain.tracer is tracer
    question = Question(ASKED)
    with tracer.question(question, "fake", stream=False) as trace_of_one:
        assert trace_of_one is tracer
        with trace_of_one.stage("retriever", ASKED) as stage:
            assert stage is tracer


def test_a_tracer_of_the_process_is_used_if_none_is_given():
    pipeline = Pipeline(FakeGenerator(ToyEncoder()), Assembler(ToyEncoder(), 8192), tracer=question_tracer())
    assert pipeline.ask(Question(ASKED, given(ROME))).text == "Rome lies on the Tiber."
