"""Background jobs: one at a time, with progress, cancelled between two batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rag_posfix.errors import ConfigError, GenerationCancelled
from rag_posfix_api.http.errors import RequestError
from rag_posfix_api.runtime.admission import Admission
from rag_posfix_api.runtime.jobs import PrecomputeJobs, PrecomputeState, batch_permit
from tests.support.waiting import wait_until


@pytest.fixture
def jobs() -> Iterator[PrecomputeJobs]:
    made = PrecomputeJobs()
    yield made
    made.close()


def ended(jobs: PrecomputeJobs, key: str) -> PrecomputeState:
    wait_until(lambda: jobs.state(key).ended)
    return jobs.state(key)


class Stepping:
    """Work of three batches; each waits until it is let on."""

    def __init__(self) -> None:
        self.on = threading.Semaphore(0)

    def __call__(self, progress, cancelled: threading.Event) -> int:
        for batch in range(1, 4):
            assert self.on.acquire(timeout=60)
            progress(2 * batch, 6)
        return 60


def test_a_job_tells_how_far_it_is_and_what_it_computed(jobs: PrecomputeJobs):
    work = Stepping()
    assert jobs.state("a") is None
    assert jobs.start("a", work).status == "queued"
    work.on.release()
    wait_until(lambda: jobs.state("a").done == 2)
    assert jobs.state("a") == PrecomputeState("running", 2, 6)
    work.on.release(2)
    assert ended(jobs, "a") == PrecomputeState("done", 6, 6, tokens=60)


def test_one_job_runs_at_a_time_and_one_for_each_collection(jobs: PrecomputeJobs):
    first, second = Stepping(), Stepping()
    jobs.start("a", first)
    jobs.start("b", second)
    with pytest.raises(RequestError, match="is running"):
        jobs.start("a", first)
    second.on.release(3)
    assert jobs.state("b").status == "queued"
    first.on.release(3)
    assert ended(jobs, "b").status == "done"
    jobs.start("a", first)
    first.on.release(3)
    assert ended(jobs, "a").status == "done"


def test_a_job_is_cancelled_after_its_batch_and_a_queued_one_never_begins(jobs: PrecomputeJobs):
    first, second = Stepping(), Stepping()
    jobs.start("a", first)
    jobs.start("b", second)
    jobs.cancel("b")
    jobs.cancel("a")
    first.on.release()
    assert ended(jobs, "a") == PrecomputeState("cancelled", 2, 6)
    assert ended(jobs, "b") == PrecomputeState("cancelled")
    assert jobs.cancel("c") is None


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConfigError("none is\nnot independent"), "none is not independent"),
        (ZeroDivisionError("secret"), "internal error"),
    ],
)
def test_a_job_that_fails_says_why_and_nothing_secret(error: Exception, told: str, jobs: PrecomputeJobs):
    def fail(progress, cancelled):
        raise error

    jobs.start("a", fail)
    state = ended(jobs, "a")
    assert state.status == "failed"
    assert told in state.error
    assert "secret" not in state.error


def test_jobs_start_again_after_they_were_closed(jobs: PrecomputeJobs):
    running, queued = threading.Event(), Stepping()

    def work(progress, cancelled: threading.Event) -> int:
        running.set()
        assert cancelled.wait(60)
        progress(2, 6)
        return 20

    jobs.start("a", work)
    jobs.start("b", queued)
    assert running.wait(60)
    jobs.close()
    assert jobs.state("a") == PrecomputeState("cancelled", 2, 6)
    assert jobs.state("b") == PrecomputeState("cancelled")
    queued.on.release(3)
    jobs.start("b", queued)
    assert ended(jobs, "b").status == "done"


def test_a_job_that_was_forgotten_leaves_nothing(jobs: PrecomputeJobs):
    work = Stepping()
    jobs.start("a", work)
    jobs.forget("a")
    work.on.release(3)
    jobs.start("b", work)
    work.on.release(3)
    ended(jobs, "b")
    assert jobs.state("a") is None


def test_a_job_that_was_forgotten_changes_nothing_of_the_next_one_with_its_key(jobs: PrecomputeJobs):
    forgotten, states = Stepping(), []

    def work(progress, cancelled: threading.Event) -> int:
        states.append(jobs.state("a"))
        return 20

    jobs.start("a", forgotten)
    wait_until(lambda: jobs.state("a").status == "running")
    jobs.forget("a")
    jobs.start("a", work)
    forgotten.on.release()  # its batch of 2 of 6 documents ends, and it is cancelled
    assert ended(jobs, "a") == PrecomputeState("done", tokens=20)
    assert states == [PrecomputeState("running")]


def test_a_batch_is_charged_to_its_tenant():
    charged: list[str] = []
    admission = Admission(1, 1, queue_timeout=20, on_release=lambda ticket: charged.append(ticket.tenant))
    with batch_permit(admission, threading.Event(), "acme"):
        assert charged == []
    assert charged == ["acme"]


def test_a_batch_takes_a_permit_and_waits_while_there_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rag_posfix_api.runtime.jobs.PAUSE_SECONDS", 0.01)
    admission, cancelled = Admission(1, 1, queue_timeout=0.05, max_open=10), threading.Event()
    with batch_permit(admission, cancelled):
        assert admission.working == 1
    assert admission.working == admission.in_flight == 0
    with admission.admit(20) as ticket:
        admission.acquire(ticket)
        threading.Timer(0.3, cancelled.set).start()
        with pytest.raises(GenerationCancelled), batch_permit(admission, cancelled):
            raise AssertionError("there was no permit")
