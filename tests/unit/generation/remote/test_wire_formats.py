"""Answers in the wire formats of hosted APIs and local servers, replayed through the generator and ``yes_no``.

The files in tests/data/servers have the fields that these servers send; texts and numbers are short.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.contracts.generator import collected_usage, sum_usage
from rag_posfix.contracts.request import GenerationRequest, Sampling, Usage
from rag_posfix.errors import OverloadedError, UpstreamError
from rag_posfix.generation.remote.connection import error_message
from rag_posfix.generation.remote.generator import RemoteGenerator
from rag_posfix.generation.remote.judge import Form
from rag_posfix.reranking import YesNoReranker
from tests.support.upstream import Reply, Upstream, as_json, event, piece, record_pauses, whole
from tests.unit.generation.remote.requests import asking

FOLDER = Path(__file__).parents[3] / "data" / "servers"
QUESTION = "In which year did the ferry Ostrilla sink?"
HARBOUR, FERRY = (
    Document("The harbour froze in 1901.", id="harbour"),
    Document("The ferry Ostrilla sank in 1963.", id="ferry"),
)
WITH_LOG_PROBS = ("openai", "llama_cpp", "ollama")
REJECTING = sorted(path.stem for path in FOLDER.glob("rejects_logprobs_*.json"))


def replayed(name: str, **options: Any) -> AbstractContextManager[tuple[RemoteGenerator, Upstream]]:
    """Serve the first exchange of a file that fits a request: what it asks for, and what its prompt contains."""
    exchanges = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))["exchanges"]
    used: Counter[int] = Counter()

    def answer(body: dict[str, Any]) -> Reply:
        prompt = body.get("prompt") or body["messages"][-1]["content"]
        for number, exchange in enumerate(exchanges):
            asks = exchange.get("asks")
            if asks is not None and not body.get(asks):
                continue
            if exchange.get("contains", "") not in prompt or used[number] == exchange.get("times", -1):
                continue
            used[number] += 1
            if "events" in exchange:
                return Reply(*map(event, exchange["events"]), event(b"[DONE]"))
            return as_json(exchange["body"], exchange.get("status", 200), headers=exchange.get("headers", {}))
        raise AssertionError(f"{name} holds no answer to {body}")

    return asking(answer, **options)


def request_of(generator: RemoteGenerator) -> GenerationRequest:
    layout = Assembler(generator.encoder, 8192).assemble(QUESTION, [FERRY], order="original").layout
    return GenerationRequest(layout, sampling=Sampling(max_tokens=16))


def ranked(generator: RemoteGenerator) -> dict[str, float]:
    """Return the raw scores of the two passages, best first."""
    found = YesNoReranker(generator=generator).compress_documents([HARBOUR, FERRY], QUESTION)
    return {str(document.id): document.metadata["reranking"]["raw_score"] for document in found}


@pytest.mark.parametrize("name", WITH_LOG_PROBS)
def test_log_probabilities_rank_the_passages(name: str):
    def spread(*values: float) -> float:
        return math.log(sum(map(math.exp, values)))

    with replayed(name) as (generator, server), collected_usage() as spent:
        scores = ranked(generator)
        assert list(scores) == ["ferry", "harbour"]
        # The alternatives are spellings of yes and of no; without a passage they are yes -1.3133 and no -0.3133.
        bare = -1.3133 + 0.3133
        yes = spread(-0.0031, -11.5031, -12.0031, -14.2531) + 5.7531
        no = -7.8754 - spread(-0.0004, -12.5004, -13.3754)
        assert scores["ferry"] - scores["harbour"] == pytest.approx(yes - no, abs=1e-6)
        assert scores["ferry"] == pytest.approx(yes - bare, abs=1e-6)
        usage = sum_usage(spent)
    assert {body["top_logprobs"] for body in server.bodies} == {20}
    assert usage.prompt_tokens == 88 * len(server.bodies)
    assert usage.cached_tokens == (61 * len(server.bodies) if name == "llama_cpp" else 0)


@pytest.mark.parametrize("name", WITH_LOG_PROBS)
def test_an_answer_and_a_stream_are_read(name: str):
    with replayed(name) as (generator, server):
        generation = generator.generate(request_of(generator))
        *pieces, last = list(generator.stream(request_of(generator)))
    assert (generation.text, generation.finish_reason) == ("In 1963.", "stop")
    assert "".join(piece.text for piece in pieces) == "In 1963."
    for found in (generation, last.generation):
        assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (96, 5 if name == "openai" else 8)
    assert [body["stream"] for body in server.bodies] == [False, True]


@pytest.mark.parametrize("name", ["ollama_without_log_probabilities", *REJECTING])
def test_a_server_without_log_probabilities_votes(name: str, caplog: pytest.LogCaptureFixture):
    with replayed(name) as (generator, server):
        scores = ranked(generator)
        assert generator.probe().judgements is Form.SAMPLES
    assert list(scores) == ["ferry", "harbour"]
    # Five of five: (5 + 1/2) / (0 + 1/2) = 11 on one side or the other.
    assert scores["ferry"] - scores["harbour"] == pytest.approx(2 * math.log(11))
    assert "judged by sampled answers" in caplog.text
    assert sum(body.get("seed") is not None for body in server.bodies) == 15


def test_servers_without_null_send_an_empty_finish_reason():
    parts = [event(piece("In ", "")), event(piece("1963.", "")), event(piece("", "length")), event(b"[DONE]")]
    with asking(whole("In 1963.", ""), Reply(*parts)) as (generator, _):
        answer = generator.generate(request_of(generator))
        *_, last = generator.stream(request_of(generator))
    assert (answer.text, answer.finish_reason) == ("In 1963.", "stop")
    assert (last.generation.text, last.generation.finish_reason) == ("In 1963.", "length")


@pytest.mark.parametrize("choices", [{}, {"choices": None}])
def test_usage_without_choices_in_a_stream_is_read_and_ends_nothing(choices: dict[str, Any]):
    counted = {**choices, "usage": {"prompt_tokens": 30, "completion_tokens": 4}}
    parts = [event(piece("In ")), event(counted), event(piece("1963.", "stop")), event(b"[DONE]")]
    with asking(Reply(*parts), as_json(counted), Reply(event(piece("In ")), event({**counted, "error": "x"}))) as (
        generator,
        _,
    ):
        *_, last = generator.stream(request_of(generator))
        with pytest.raises(UpstreamError, match="without choices"):
            generator.generate(request_of(generator))
        with pytest.raises(UpstreamError, match="failed while it generated the answer: x"):
            list(generator.stream(request_of(generator)))
    assert (last.generation.text, last.generation.usage) == ("In 1963.", Usage(30, 4))


def test_the_rate_limit_of_openai_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    pauses = record_pauses(monkeypatch)
    with replayed("rate_limited", limits={"retries": 1}) as (generator, server):
        assert generator.generate(request_of(generator)).text == "In 1963."
        assert 0.25 <= pauses[0] <= 0.5, "half to all of the first pause: retry-after-ms says 96"
        assert len(server.bodies) == 2
    with replayed("rate_limited", limits={"retries": 1}) as (generator, server):
        assert list(ranked(generator)) == ["ferry", "harbour"]


def test_a_long_rate_limit_is_passed_on_at_once_without_the_text_of_the_server():
    with replayed("over_quota", limits={"retries": 2}) as (generator, server):
        with pytest.raises(OverloadedError) as caught:
            generator.generate(request_of(generator))
        with pytest.raises(OverloadedError):
            ranked(generator)
    assert caught.value.retry_seconds == 60
    assert "quota" not in str(caught.value)
    assert len(server.bodies) == 2


def test_a_rejected_max_tokens_names_the_setting():
    with replayed("max_completion_tokens") as (generator, _):
        for ask in (ranked, lambda generator: generator.generate(request_of(generator))):
            with pytest.raises(UpstreamError, match="set RAG_POSFIX_REMOTE_MAX_TOKENS_FIELD=max_completion_tokens"):
                ask(generator)


@pytest.mark.parametrize("name", REJECTING)
def test_the_reason_of_a_rejection_is_read_in_every_form(name: str):
    exchanges = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))["exchanges"]
    (body,) = (exchange["body"] for exchange in exchanges if exchange.get("asks") == "logprobs")
    reason = error_message(body)
    assert "ogprobs" in reason or reason == "Extra inputs are not permitted"
