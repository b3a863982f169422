"""Many questions at once: the answers of one by one, errors, limits, and threads."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from contextvars import ContextVar

import pytest
from langchain_core.documents import Document

from rag_posfix import Question, Sampling
from rag_posfix.adapters.langchain.rag import PosfixRAG
from rag_posfix.assembly.assembler import Assembler
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import ConfigError, UnknownNameError
from rag_posfix.generation.batching.scheduler import BatchingGenerator, batched, unbatched
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.pipeline.batch import as_completed
from rag_posfix.pipeline.build import build_pipeline
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.settings import CacheSettings, Settings
from tests.support.serving import ANSWER, BRIDGE, QUESTION, ListRetriever, make_pipeline
from tests.support.tiny import loaded_model
from tests.support.toy_encoder import ToyEncoder
from tests.support.waiting import wait_until

BRIDGE_DOCUMENT = Document(page_content=BRIDGE)


@pytest.fixture(scope="module")
def tiny():
    return Engine(loaded_model(vocab_size=ToyEncoder.vocab_size), ToyEncoder(), "tiny", "print")


def questions_of(method, count):
    """Return questions with two passages each, and answers of 1 to 8 tokens."""
    return [
        Question(
            f"Q{number}?",
            [Document(page_content=f"{number} lies on {number % 7}."), Document(page_content=f"Bread {number}.")],
            mitigation=MitigationChoice(method),
            sampling=Sampling(max_tokens=1 + number % 8),
        )
        for number in range(count)
    ]


class TestAnswers:
    @pytest.mark.parametrize("method", ["none", "default"])
    @pytest.mark.slow
    def test_64_questions_are_answered_as_one_by_one_and_share_steps(self, tiny, method):
        assembler, together = Assembler(tiny.encoder, 512), []
        questions = questions_of(method, 64)
        alone = [Pipeline(tiny, assembler).ask(question) for question in questions]
        with closing(BatchingGenerator(tiny, on_step=together.append)) as generator:
            answers = Pipeline(generator, assembler).batch(questions)
        assert [answer.text for answer in answers] == [answer.text for answer in alone]
        assert [answer.usage.completion_tokens for answer in answers] == [1 + number % 8 for number in range(64)]
        assert max(together) > 1

    def test_a_built_pipeline_batches_without_being_told_and_an_engine_of_ones_own_too(self, tiny, tmp_path):
        settings = Settings(cache_dir=tmp_path, cache=CacheSettings(enabled=False), max_tokens=2)
        with closing(build_pipeline(settings, generator=tiny)) as pipeline:
            assert isinstance(pipeline.generator, BatchingGenerator)
            assert isinstance(unbatched(pipeline.generator), Engine)
            assert batched(pipeline.generator) is pipeline.generator
            assert pipeline.batch([]) == []


class TestFailures:
    def test_the_others_go_on_and_the_failed_one_has_its_exception(self):
        questions = [
            Question(QUESTION, [BRIDGE_DOCUMENT]),
            Question(QUESTION, [BRIDGE_DOCUMENT], index="sideways"),
        ] * 3
        answers = make_pipeline().batch(questions, return_exceptions=True)
        assert [answer.text for answer in answers[::2]] == [ANSWER] * 3
        assert all(isinstance(error, UnknownNameError) and "sideways" in str(error) for error in answers[1::2])

    def test_without_return_exceptions_the_failure_is_raised_and_no_further_question_begins(self):
        begun = []

        def call(number):
            begun.append(number)
            if number == 1:
                raise ConfigError("no")
            return number

        with closing(as_completed(call, range(100), 1)) as results:
            assert next(results) == (0, 0)
            assert isinstance(next(results)[1], ConfigError)
        assert len(begun) <= 3

    @pytest.mark.parametrize("count", [0, -1, "many"])
    def test_a_wrong_number_is_refused(self, count):
        with pytest.raises(ConfigError, match="max_concurrency"):
            make_pipeline().batch(["Why?"], max_concurrency=count)
        with pytest.raises(ConfigError, match="questions"):
            make_pipeline().batch("Why?")


class TestThreads:
    def test_at_most_so_many_are_open_and_each_sees_the_context_of_the_caller(self):
        variable = ContextVar("tenant", default="none")
        variable.set("ours")
        running, most, lock, gate = 0, 0, threading.Lock(), threading.Barrier(3, timeout=60)

        def call(_):
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            gate.wait()  # three are open at the same time
            with lock:
                running -= 1
            return variable.get()

        assert sorted(as_completed(call, range(6), 3)) == [(number, "ours") for number in range(6)]
        assert most == 3

    def test_the_event_loop_is_free_meanwhile(self):
        async def both():
            batch = asyncio.create_task(make_pipeline().abatch([Question(QUESTION, [BRIDGE_DOCUMENT])] * 2))
            await asyncio.sleep(0)
            return not batch.done(), await batch

        was_free, answers = asyncio.run(both())
        assert was_free
        assert [answer.text for answer in answers] == [ANSWER] * 2

    def test_a_batch_that_is_cancelled_begins_no_further_question(self):
        class Counting(FakeGenerator):
            def __init__(self, encoder):
                super().__init__(encoder)
                self.asked, self.go_on = 0, threading.Event()

            def generate(self, request):
                self.asked += 1
                assert self.asked < 3 or self.go_on.wait(60)
                return super().generate(request)

        async def cancelled(batch, generator):
            running = asyncio.ensure_future(batch)
            await asyncio.to_thread(wait_until, lambda: generator.asked == 3)
            running.cancel()
            for _ in range(20):  # turns of the event loop, until the thread is told
                await asyncio.sleep(0)
            generator.go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await running

        questions = [f"{QUESTION} {number}" for number in range(300)]
        for langchain in (False, True):
            generator = Counting(ToyEncoder())
            asked = make_pipeline(generator, retriever=ListRetriever(BRIDGE))
            if langchain:
                batch = PosfixRAG(pipeline=asked).abatch(questions, {"max_concurrency": 1})
            else:
                batch = asked.abatch(questions, max_concurrency=1)
            asyncio.run(cancelled(batch, generator))  # waits for its threads
            assert generator.asked == 3


class TestLangchain:
    INPUTS = ({"question": QUESTION, "documents": [BRIDGE]}, {"question": ""}, {"question": QUESTION, "documents": []})

    def test_a_batch_keeps_the_order_and_the_exceptions(self):
        rag = PosfixRAG(pipeline=make_pipeline(), output="text")
        first, error, last = rag.batch(list(self.INPUTS), return_exceptions=True)
        assert (first, last) == (ANSWER, "No passage was found that answers this question.")
        assert isinstance(error, ConfigError)
        assert asyncio.run(rag.abatch([self.INPUTS[0]] * 3)) == [ANSWER] * 3
        with pytest.raises(ConfigError, match="max_concurrency"):
            rag.batch([self.INPUTS[0]], {"max_concurrency": 0})
