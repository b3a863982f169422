from __future__ import annotations

import threading
import time

import pytest

from rag_posfix.errors import OverloadedError
from rag_posfix_api.http.errors import OPENAI, RequestError
from rag_posfix_api.http.middleware import error_response
from rag_posfix_api.runtime.admission import Admission, Ticket, WorkRate
from tests.support.clock import Clock
from tests.support.waiting import wait_until


def ticket() -> Ticket:
    return Ticket(600, time.monotonic())


def test_the_rate_is_tokens_by_seconds_of_work():
    clock = Clock()
    rate = WorkRate(clock)
    assert rate.seconds_for(100) is None
    rate.begins()
    clock.advance(2)
    rate.begins()  # it works already
    rate.finished(300, idle=False)
    clock.advance(1)
    rate.finished(300, idle=True)
    clock.advance(1000)  # idle seconds do not count
    # 600 tokens in 3 s; the first second counts a little less than the last ones.
    assert rate.seconds_for(200) == pytest.approx(1.0, rel=0.02)


def test_an_old_rate_fades():
    clock = Clock()
    rate = WorkRate(clock)
    rate.begins()
    for seconds, tokens in ((60, 60), (60, 6000)):
        clock.advance(seconds)
        rate.finished(tokens, idle=False)
    # Half of the first minute: (60 / 2 + 6000) tokens in (60 / 2 + 60) seconds.
    assert rate.seconds_for(6030) == pytest.approx(90)


def test_permits_have_no_more_tokens_than_allowed():
    admission = Admission(8, 8, 600.0)
    admission.limit_tokens(100)
    first, second = ticket(), ticket()
    admission.acquire(first, 70)
    waiting = threading.Thread(target=admission.acquire, args=(second, 31))
    waiting.start()
    wait_until(lambda: admission.waiting_tokens == 31)
    assert admission.working_tokens == 70
    admission.release(first)
    waiting.join(60)
    assert (admission.working_tokens, admission.waiting_tokens) == (31, 0)
    admission.acquire(ticket(), 69)  # exactly as many as allowed
    with pytest.raises(RequestError, match="take 101 tokens, at most max_tokens_in_flight=100"):
        admission.acquire(ticket(), 101)


def test_who_need_not_wait_is_not_refused_for_tokens_that_wait():
    admission = Admission(1, 8, 0.05, max_queued_tokens=50)
    admission.acquire(ticket(), 1000)
    with pytest.raises(OverloadedError, match="0 tokens wait for the model and this request has 51; at most"):
        admission.acquire(ticket(), 51)
    assert admission.waiting == 0
    with pytest.raises(OverloadedError, match=r"within queue_timeout_seconds=0\.05"):
        admission.acquire(ticket(), 50)  # exactly as many as may wait


def test_when_to_try_again_comes_from_the_measured_rate():
    clock = Clock()
    rate = WorkRate(clock)
    admission = Admission(1, 8, 0.05, max_queued_tokens=50, rate=rate)
    done, running = ticket(), ticket()
    admission.acquire(done, 100)
    clock.advance(10)  # ten tokens a second
    admission.release(done)
    admission.acquire(running, 40)
    with pytest.raises(OverloadedError) as refused:
        admission.acquire(ticket(), 200)
    assert refused.value.retry_seconds == pytest.approx(15)  # 150 too many
    assert error_response(refused.value, OPENAI).headers["retry-after"] == "15"
    with pytest.raises(OverloadedError, match="queue_timeout_seconds") as refused:
        admission.acquire(ticket(), 33)
    assert error_response(refused.value, OPENAI).headers["retry-after"] == "4"
    full = Admission(1, 0, 1.0, rate=rate)
    full.acquire(ticket(), 70)
    with pytest.raises(OverloadedError, match="1 are allowed") as refused:
        full.acquire(ticket(), 1)
    assert error_response(refused.value, OPENAI).headers["retry-after"] == "7"


def test_before_the_first_measurement_the_header_is_a_second_and_it_is_never_more_than_ten_minutes():
    for seconds, told in ((None, "1"), (0.2, "1"), (1.2, "2"), (1e6, "600")):
        assert error_response(OverloadedError("full", seconds), OPENAI).headers["retry-after"] == told
