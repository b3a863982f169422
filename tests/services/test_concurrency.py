from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from langchain_core.documents import BaseDocumentCompressor

from rag_posfix.caching.answers.tiered import TieredAnswerCache
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.errors import GenerationCancelled, GenerationError, OverloadedError
from rag_posfix.reranking import GuardedReranker
from rag_posfix.reranking.deadline import check_deadline
from rag_posfix_api.http.errors import RequestError
from rag_posfix_api.runtime.admission import Admission, Ticket
from tests.support.serving import (
    BRIDGE,
    HARBOUR,
    ClockedGenerator,
    DictCache,
    FailingGenerator,
    GatedGenerator,
    chat,
    clock_of_requests,
    gauge,
    in_flight,
    leaving,
    make_pipeline,
    noticed_leaving,
    post,
    serving,
)
from tests.support.waiting import wait_until


def test_no_more_answers_than_allowed_work_on_the_model_and_others_wait():
    generator = GatedGenerator()
    with serving(make_pipeline(generator), max_concurrent=1) as url, ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(post, url, stream=bool(i % 2)) for i in range(4)]
        wait_until(lambda: in_flight(url) == 4)
        wait_until(lambda: gauge(url, "rag_posfix_running_answers") == 1)
        generator.gate.set()
        assert [answer.result().status_code for answer in answers] == [200] * 4
        assert generator.most_running == 1
        wait_until(lambda: in_flight(url) == 0)


def test_an_answer_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch):
    generator = ClockedGenerator(clock_of_requests(monkeypatch))
    with serving(make_pipeline(generator), request_timeout_seconds=0.5) as url:
        late = post(url)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        assert generator.closed.wait(60)
        streamed = post(url, stream=True)
        assert streamed.status_code == 200
        last = streamed.text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        wait_until(lambda: in_flight(url) == 0)
        assert generator.steps == 2 * 2


class StepwiseReranker(BaseDocumentCompressor):
    """Takes twenty steps; ``begun`` is called in each of them."""

    begun: Any
    steps: int = 0

    def compress_documents(self, documents: Any, query: str, callbacks: Any = None) -> Any:
        for _ in range(20):
            check_deadline()
            self.steps += 1
            self.begun()
        return [document.model_copy(update={"metadata": {"relevance_score": 0.5}}) for document in documents]


def test_a_reranking_stops_with_its_request_and_counts_as_no_failure_of_the_reranker(
    monkeypatch: pytest.MonkeyPatch,
):
    clock, noticed = clock_of_requests(monkeypatch), noticed_leaving(monkeypatch)
    reranker = StepwiseReranker(begun=lambda: clock.advance(0.25))
    pipeline = make_pipeline(reranker=GuardedReranker(reranker=reranker, deadline_seconds=600))
    scored = {"query": "x", "documents": [BRIDGE, HARBOUR]}

    with serving(pipeline, request_timeout_seconds=1) as url:
        late = httpx2.post(url + "/v1/rerank", json=scored, timeout=60)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        assert reranker.steps == 4
        assert post(url, documents=[BRIDGE, HARBOUR]).status_code == 504
        assert reranker.steps == 8
        reranker.begun = lambda: noticed.wait(60)
        noticed.clear()
        with leaving(url, "/v1/rerank", **scored):
            wait_until(lambda: reranker.steps == 9)
        wait_until(lambda: in_flight(url) == 0)
        assert reranker.steps == 9
        assert httpx2.get(url + "/readyz", timeout=60).json() == {"status": "ready"}


def test_a_client_that_goes_away_while_it_waits_never_reaches_the_model():
    generator = GatedGenerator()
    with serving(make_pipeline(generator), max_concurrent=1) as url, ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, url)
        assert generator.entered.wait(60)
        with leaving(url, **chat(documents=[BRIDGE])):
            wait_until(lambda: in_flight(url) == 2)
        wait_until(lambda: in_flight(url) == 1)
        generator.gate.set()
        assert first.result().status_code == 200
        assert generator.most_running == 1
        counted = 'rag_posfix_request_duration_seconds_count{route="/v1/chat/completions",status="499"} 1.0'
        wait_until(lambda: counted in httpx2.get(url + "/metrics", timeout=60).text)


@pytest.mark.parametrize(
    ("error", "code"),
    [(GenerationError("secret state"), "generation_failed"), (ZeroDivisionError("secret"), "internal_error")],
)
def test_a_failure_in_the_middle_of_a_stream_is_told_in_the_stream(error: Exception, code: str):
    with serving(make_pipeline(FailingGenerator(3, error))) as url:
        response = post(url, stream=True)
        assert response.status_code == 200
        *_, last = response.text.strip().split("\n\n")
        told = json.loads(last.removeprefix("data: "))["error"]
        assert set(told) == {"message", "type", "param", "code"}
        assert told["code"] == code
        assert "secret" not in response.text
        assert "[DONE]" not in response.text
        wait_until(lambda: in_flight(url) == 0)


def test_a_ticket_that_is_cancelled_or_late_gets_no_permit():
    admission = Admission(1, 10, 600.0)
    admission.acquire(Ticket(600, time.monotonic()))
    cancelled = Ticket(600, time.monotonic())

    def cancel() -> None:
        wait_until(lambda: admission.waiting == 1)
        admission.cancel(cancelled)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(cancel)
        with pytest.raises(GenerationCancelled):
            admission.acquire(cancelled)
        done.result()
    # Its own deadline ends the wait: that of the queue is beyond the time limit of this test.
    with pytest.raises(RequestError, match=r"request_timeout_seconds=0\.05"):
        admission.acquire(late := Ticket(0.05, time.monotonic()))
    assert late.queued_seconds > 0


def test_no_more_places_than_capacity():
    admission = Admission(1, 0, 1.0)
    with admission.admit(1) as ticket:
        admission.acquire(ticket)
        with admission.admit(1) as other, pytest.raises(OverloadedError, match="1 requests"):
            admission.acquire(other)
        admission.take_slot(ticket)  # it has one already
    with admission.admit(1) as ticket:  # permit and ticket are back
        admission.acquire(ticket)
    assert admission.in_flight == 0


def test_the_age_of_the_oldest_request_is_in_the_metrics(monkeypatch: pytest.MonkeyPatch):
    generator, clock = GatedGenerator(), clock_of_requests(monkeypatch)
    with serving(make_pipeline(generator)) as url, ThreadPoolExecutor(1) as pool:
        assert gauge(url, "rag_posfix_oldest_request_seconds") == 0
        answer = pool.submit(post, url)
        assert generator.entered.wait(60)
        assert gauge(url, "rag_posfix_oldest_request_seconds") == 0
        clock.advance(2.5)
        assert gauge(url, "rag_posfix_oldest_request_seconds") == 2.5
        generator.gate.set()
        assert answer.result().status_code == 200
        wait_until(lambda: gauge(url, "rag_posfix_oldest_request_seconds") == 0)


@pytest.mark.slow
def test_a_full_queue_turns_no_stored_answer_away():
    generator = GatedGenerator()
    generator.gate.set()
    pipeline = make_pipeline(generator, cache=DictCache())
    with serving(pipeline, max_concurrent=1, max_queue=1) as url, ThreadPoolExecutor(14) as pool:
        assert post(url).json()["cached"] is False
        generator.gate.clear()
        slow = [pool.submit(post, url, cache=False) for _ in range(2)]
        wait_until(lambda: in_flight(url) == 2)
        stored = [pool.submit(post, url, stream=bool(i % 2)) for i in range(12)]
        assert [answer.result().status_code for answer in stored] == [200] * 12
        assert post(url, cache=False).status_code == 429
        generator.gate.set()
        assert [answer.result().status_code for answer in slow] == [200, 200]


def test_who_waits_for_an_equal_question_and_leaves_lets_go_at_once():
    generator = GatedGenerator()
    cache = TieredAnswerCache([MemoryTier(max_entries=10)])
    served = serving(make_pipeline(generator, cache=cache), max_concurrent=1, max_queue=3)
    with served as url, ThreadPoolExecutor(2) as pool:
        first = pool.submit(post, url)
        assert generator.entered.wait(60)
        with leaving(url), leaving(url), leaving(url):
            wait_until(lambda: in_flight(url) == 4)
        wait_until(lambda: in_flight(url) == 1)
        other = pool.submit(post, url, documents=[HARBOUR])  # there is a place for it
        wait_until(lambda: in_flight(url) == 2)
        generator.gate.set()
        assert (first.result().status_code, other.result().status_code) == (200, 200)
    cache.close()
