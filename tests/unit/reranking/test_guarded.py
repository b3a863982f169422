"""A reranker that fails or is late leaves the documents in their order."""

import asyncio
import copy
import math
import threading

import pytest
from langchain_core.documents import BaseDocumentCompressor, Document

from rag_posfix.cancellation import run_until_cancelled, set_cancel_check
from rag_posfix.contracts.answer import collected_warnings
from rag_posfix.contracts.request import current_salt, salted
from rag_posfix.contracts.retrieval import RerankerHealth
from rag_posfix.errors import ConfigError, GenerationCancelled
from rag_posfix.reranking import GuardedReranker, LikelihoodReranker, ListwiseReranker
from rag_posfix.reranking.base import ranked_copies
from tests.support.reader import ScriptedReader, order
from tests.support.waiting import wait_until

GIVEN = [
    Document(page_content="a", metadata={"relevance_score": 0.3, "tags": ["t"]}),
    Document(page_content="b", metadata={"relevance_score": 0.9}),
    Document(page_content="c"),
]


class Acting(BaseDocumentCompressor):
    """Does what it is told, then scores by place."""

    act: object

    def compress_documents(self, documents, query, callbacks=None):
        self.act()
        return ranked_copies(documents, [place / 10 for place in range(len(documents))])

    async def acompress_documents(self, documents, query, callbacks=None):
        return await run_until_cancelled(lambda: self.compress_documents(documents, query, callbacks))


def guard(act, seconds=60.0):
    return GuardedReranker(reranker=Acting(act=act), deadline_seconds=seconds)


def fail():
    raise RuntimeError("secret text of a document")


async def both(guarded, documents=GIVEN):
    return [
        list(guarded.compress_documents(documents, "why?")),
        list(await guarded.acompress_documents(documents, "why?")),
    ]


@pytest.mark.parametrize("seconds", [60.0, 1e10, math.inf, None])
async def test_what_works_is_returned_as_it_is(seconds):
    guarded = guard(lambda: None, seconds)
    for result in await both(guarded):
        assert order(result) == ["c", "b", "a"]
    assert (guarded.failures, guarded.timeouts) == (0, 0)


@pytest.mark.parametrize("seconds", [60.0, None])
async def test_a_failure_returns_copies_in_their_order_with_a_warning_and_a_count(caplog, seconds):
    guarded, before = guard(fail, seconds), copy.deepcopy(GIVEN)
    for result in await both(guarded):
        assert result == GIVEN == before
        assert all(one is not other for one, other in zip(result, GIVEN, strict=True))
        result[0].metadata["relevance_score"] = 7
        assert before == GIVEN
    assert guarded.counts() == {"error": 2, "timeout": 0}
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "reranker Acting failed (RuntimeError); the documents keep their order" in caplog.text
    assert "secret" not in caplog.text


async def test_each_failure_is_a_warning_of_the_question_without_the_text_of_the_error():
    with collected_warnings() as warnings:
        await both(guard(fail))
        await both(guard(lambda: None))
    assert warnings == ["reranker Acting failed (RuntimeError); the documents keep their order"] * 2
    await both(guard(fail))
    assert len(warnings) == 2, "another question's"


async def test_three_failures_in_a_row_are_described_with_their_start_until_a_success():
    times = iter([0.0, 60.0])  # read at the first failure of a row alone
    health, acts = RerankerHealth(lambda: next(times)), [fail, fail, fail, lambda: None, fail]
    guarded = GuardedReranker(reranker=Acting(act=lambda: acts.pop(0)()), health=health)
    await both(guarded)
    assert (health.failures()["Acting"].in_a_row, health.describe_failing()) == (2, None)
    guarded.compress_documents(GIVEN, "why?")
    assert health.describe_failing() == (
        "reranker Acting failed 3 times in a row since 1970-01-01T00:00:00Z (RuntimeError); documents keep their order"
    )
    await both(guarded)  # succeeds, then fails
    assert health.describe_failing() is None
    failures = health.failures()["Acting"]
    assert (failures.in_a_row, failures.since, failures.counts) == (1, 60.0, {"error": 4, "timeout": 0})


def test_rerankers_that_share_their_health_are_counted_by_name():
    health = RerankerHealth()
    reader, _ = late_reader()
    late = LikelihoodReranker(generator=reader)
    for reranker, seconds in ((Acting(act=fail), 60), (Acting(act=fail), 60), (late, 0.01)):
        guarded = GuardedReranker(reranker=reranker, deadline_seconds=seconds, health=health)
        guarded.compress_documents(GIVEN, "why?")
    assert {name: failures.counts for name, failures in health.failures().items()} == {
        "Acting": {"error": 2, "timeout": 0},
        "likelihood": {"error": 0, "timeout": 1},
    }


async def test_a_late_reranker_is_left_behind(caplog):
    release = threading.Event()
    guarded = guard(lambda: release.wait(60), 0.05)
    for result in await both(guarded):  # the reranker works until the event is set
        assert result == GIVEN
    assert guarded.counts() == {"error": 0, "timeout": 2}
    assert "took longer than 0.05 s" in caplog.text
    release.set()
    guarded.close()


async def test_what_the_caller_did_wrong_is_raised():
    def refuse():
        raise ConfigError("the question is empty")

    guarded = guard(refuse)
    with pytest.raises(ConfigError):
        guarded.compress_documents(GIVEN, "")
    with pytest.raises(ConfigError):
        await guarded.acompress_documents(GIVEN, "")
    assert guarded.counts() == {"error": 0, "timeout": 0}


def end():
    raise GenerationCancelled("the client has gone")


async def test_a_request_that_has_ended_is_no_failure_of_the_reranker():
    guarded = guard(end, None)

    async def ask(compress):
        set_cancel_check(end)
        await compress()

    async def compress():
        guarded.compress_documents(GIVEN, "why?")

    for way in (compress, lambda: guarded.acompress_documents(GIVEN, "why?")):
        with pytest.raises(GenerationCancelled):
            await asyncio.create_task(ask(way))  # a context of its own
    assert guarded.counts() == {"error": 0, "timeout": 0}


async def test_a_task_that_is_cancelled_is_no_failure_of_the_reranker():
    reader, release = late_reader()
    guarded = GuardedReranker(reranker=LikelihoodReranker(generator=reader))
    task = asyncio.create_task(guarded.acompress_documents(GIVEN, "why?"))
    await asyncio.to_thread(wait_until, lambda: reader.waiting == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    assert guarded.counts() == {"error": 0, "timeout": 0}


def test_the_salt_reaches_the_thread():
    seen = []
    with salted("tenant"):
        guard(lambda: seen.append(current_salt())).compress_documents(GIVEN, "why?")
    assert seen == ["tenant"]
    assert current_salt() == ""


def late_reader():
    """A reader that waits before each reading until its event is set, and that event."""
    release = threading.Event()
    values = dict.fromkeys("abc", -1.0)
    return ScriptedReader(values, written="[1] > [2] > [3]", before_each=lambda: release.wait(60)), release


def reranking_threads():
    """The threads of all guarded rerankers that have not ended."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("rag-posfix-reranking")}


@pytest.mark.parametrize(("kind", "options"), [(LikelihoodReranker, {"batch_size": 1}), (ListwiseReranker, {})])
def test_a_late_ranking_releases_the_model_at_its_next_step(kind, options):
    before = reranking_threads()
    reader, release = late_reader()
    inner = kind(generator=reader, **options)
    guarded = GuardedReranker(reranker=inner, deadline_seconds=0.05)
    assert order(guarded.compress_documents(GIVEN, "why?")) == ["a", "b", "c"]
    assert guarded.timeouts == 1
    release.set()
    guarded.close()
    assert reranking_threads() <= before
    assert len(reader.seen) <= 1, "it stopped at the first of three batches, or after the first token"
    assert order(inner.compress_documents(GIVEN, "why?")) == ["a", "b", "c"], "the model is free again"


def test_waiting_for_another_ranking_counts_against_the_deadline():
    before = reranking_threads()
    reader, release = late_reader()
    inner = LikelihoodReranker(generator=reader)
    guarded = GuardedReranker(reranker=inner, deadline_seconds=0.1)
    first = threading.Thread(target=inner.compress_documents, args=(GIVEN, "why?"))
    first.start()
    wait_until(lambda: reader.waiting == 1)
    assert order(guarded.compress_documents(GIVEN, "why?")) == ["a", "b", "c"]
    assert guarded.timeouts == 1
    guarded.close()
    assert reranking_threads() <= before
    assert reader.seen == [], "neither has read anything"
    release.set()
    first.join()
    assert len(reader.seen) == 1, "the second never began"


async def test_a_cancelled_ranking_releases_the_model_at_its_next_step():
    reader, release = late_reader()
    inner = LikelihoodReranker(generator=reader, batch_size=1)
    task = asyncio.create_task(inner.acompress_documents(GIVEN, "why?"))
    await asyncio.to_thread(wait_until, lambda: reader.waiting == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    result = await inner.acompress_documents(GIVEN, "why?")  # waits for the cancelled one
    assert order(result) == ["a", "b", "c"]
    assert len(reader.seen) == 1 + 3, "one batch of the cancelled ranking, three of the other"
