from __future__ import annotations

import gc
import queue
import random
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rag_posfix.contracts.generator import Generator, WatchedGenerator
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import ConfigError, GenerationCancelled, GenerationError, PromptTooLongError, UnknownNameError
from rag_posfix.generation.batching.decode_step import decode_step
from rag_posfix.generation.batching.request_handle import RequestHandle, RunningRequest
from rag_posfix.generation.batching.scheduler import BatchingGenerator
from rag_posfix.generation.batching.stepped import SteppedGenerator
from rag_posfix.generation.engine import Engine
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.pipeline.build import build_pipeline
from rag_posfix.settings import CacheSettings, Settings
from tests.support.number_encoder import NumberEncoder
from tests.support.stepped import RecordingEngine, answer, ask
from tests.support.tiny import loaded_model, toy_layout
from tests.support.toy_encoder import ToyEncoder
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[4]
RELEVANCE = (0.9, 0.2, 0.5, 0.4)


@pytest.fixture(scope="module", autouse=True)
def _one_thread_per_operation():
    """The sums of a tiny model are too small to be shared: on a busy machine that takes a hundred times longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny():
    return Engine(loaded_model(), NumberEncoder(eos_ids={2}), "tiny", "print")


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture
def make(monkeypatch):
    """Returns a recording engine and a generator around it; closed at the end."""
    made = []

    def make(max_running=8, **options):
        engine = RecordingEngine(**options).install(monkeypatch)
        generator = BatchingGenerator(engine, max_running)
        made.append((engine, generator))
        return engine, generator

    yield make
    for engine, generator in made:
        engine.run_free()
        generator.close()


def threads():
    """The threads that run models."""
    return {thread for thread in threading.enumerate() if thread.name == "rag-posfix-generation"}


def start_all(pool, generator, requests):
    """Ask for answers one after another, each in a thread of its own."""
    futures = []
    for request in requests:
        before = generator.waiting
        futures.append(pool.submit(generator.generate, request))
        wait_until(lambda before=before: generator.waiting == before + 1)
    return futures


def drawn(rng):
    """A random request: any method, any prompt, greedy or sampled."""
    name = rng.choice(MITIGATIONS.names())
    return GenerationRequest(
        toy_layout(rng.choice([(7, 4, 9, 6), (3, 5, 4, 2)]), seed=rng.randrange(3), relevance=RELEVANCE),
        MitigationChoice(name, dict(MITIGATIONS.get(name).example)),
        Sampling(
            max_tokens=rng.randint(1, 9),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(100),
            stop=rng.choice([(), ("7",)]),
        ),
    )


class TestAnswers:
    def test_it_follows_the_protocols(self, tiny):
        generator = BatchingGenerator(tiny)
        assert isinstance(generator, Generator)
        assert isinstance(generator, WatchedGenerator)
        assert isinstance(tiny, SteppedGenerator)
        assert not isinstance(generator, SteppedGenerator)
        assert (generator.model_id, generator.fingerprint, generator.context_window) == ("tiny", "print", 512)
        assert generator.encoder is tiny.encoder
        assert generator.describe(MitigationChoice()) == tiny.describe(MitigationChoice())

    @pytest.mark.parametrize("max_running", [2, 8])
    def test_a_hundred_mixed_requests_that_join_and_leave_are_answered_as_by_the_engine(self, tiny, pool, max_running):
        rng = random.Random(max_running)
        jobs = [(drawn(rng), rng.choice([None, None, None, 1, 3]), rng.random() / 100) for _ in range(100)]
        generator = BatchingGenerator(tiny, max_running)

        def work(config):
            request, leaves_after, pause = config
            time.sleep(pause)
            stream = generator.stream(request)
            if leaves_after is None:
                return list(stream)
            taken = [chunk for chunk, _ in zip(stream, range(leaves_after), strict=False)]
            stream.close()
            return taken

        with ThreadPoolExecutor(8) as eight:
            found = list(eight.map(work, jobs))
        generator.close()
        for (request, leaves_after, _), ours in zip(jobs, found, strict=True):
            theirs = list(tiny.stream(request))
            expected = theirs if leaves_after is None else theirs[:leaves_after]
            assert [chunk.text for chunk in ours] == [chunk.text for chunk in expected]
            if leaves_after is None:
                mine, alone = ours[-1].generation, theirs[-1].generation
                assert (mine.text, mine.token_ids, mine.finish_reason, mine.usage) == (
                    alone.text, alone.token_ids, alone.finish_reason, alone.usage
                )  # fmt: skip
                assert mine.attention == pytest.approx(alone.attention, abs=1e-6)

    def test_answers_that_can_share_a_step_share_one_forward_pass(self, tiny, pool):
        begin = threading.Event()

        class Held(Engine):
            def open(self, *request):
                assert begin.wait(10)
                return super().open(*request)

        shapes = []
        handle = tiny.loaded.model.register_forward_pre_hook(
            lambda module, arguments, keywords: shapes.append(tuple(keywords["input_ids"].shape)), with_kwargs=True
        )
        generator = BatchingGenerator(Held(tiny.loaded, tiny.encoder, "tiny", "print"))
        layouts = [toy_layout(lengths, prefix=4, suffix=7) for lengths in [(7, 4), (3,), (12, 2, 5)]]
        sampling = Sampling(max_tokens=4)
        futures = start_all(pool, generator, [GenerationRequest(layout, sampling=sampling) for layout in layouts])
        begin.set()
        for future in futures:
            future.result()
        handle.remove()
        generator.close()
        # Prompts of 22, 14 and 30 tokens, each followed by a step of all that run.
        assert shapes == [(1, 22), (1, 1), (1, 14), (2, 1), (1, 30), (3, 1), (2, 1), (1, 1)]

    def test_the_salt_of_a_request_reaches_the_engine(self, make):
        engine, generator = make()
        generator.generate(GenerationRequest(toy_layout(()), MitigationChoice("a"), Sampling(max_tokens=1), "salt"))
        assert engine.salts == ["salt"]

    def test_in_a_pipeline_it_reads_from_the_passage_store_as_its_engine_does(self, tiny, tmp_path):
        engine = Engine(tiny.loaded, ToyEncoder(), "tiny", "print")
        settings = Settings(cache=CacheSettings(enabled=False), cache_dir=tmp_path)
        generator = BatchingGenerator(engine)
        pipeline = build_pipeline(settings, generator=generator)
        served = pipeline.generator
        assert isinstance(served, BatchingGenerator)
        assert served.engine.passages is pipeline.passages is not None
        assert generator.engine is engine
        assert engine.passages is None, "the caller's engine is left as it is"
        request = GenerationRequest(toy_layout(), MitigationChoice("context_experts"), Sampling(max_tokens=2))
        assert [served.generate(request).usage.cached_tokens > 0 for _ in range(2)] == [False, True]
        pipeline.close()
        with pytest.raises(GenerationError, match="the generator is closed"):
            served.generate(request)
        assert generator.generate(request).usage.cached_tokens == 0
        generator.close()

    def test_a_seed_gives_the_same_answer_alone_and_in_company(self, tiny, pool):
        seeded = GenerationRequest(toy_layout(), sampling=Sampling(max_tokens=12, temperature=2.0, seed=7))
        workers = [GenerationRequest(toy_layout(seed=i), sampling=Sampling(temperature=2.0)) for i in range(6)]
        generator = BatchingGenerator(tiny)
        alone = generator.generate(seeded)
        others = [pool.submit(generator.generate, request) for request in workers]
        assert generator.generate(seeded).token_ids == alone.token_ids
        for other in others:
            other.result()
        generator.close()

    def test_timings_tell_how_long_an_answer_waited_its_prompt_and_its_steps(self, make, pool):
        engine, generator = make(max_running=1, by_turns=True)
        first, second = start_all(pool, generator, [ask("a", 2), ask("b", 2)])
        time.sleep(0.05)
        engine.run_free()
        assert set(first.result().timings) == {"queue", "prefill", "decode"}
        assert second.result().timings["queue"] > 0.04
        assert second.result().timings["queue"] > first.result().timings["queue"]


class TestTurns:
    def test_between_two_prompts_there_is_a_step_of_all_that_run(self, make, pool):
        engine, generator = make(by_turns=True)
        futures = start_all(pool, generator, [ask(name, 4) for name in "abcd"])
        engine.run_free()
        assert [future.result().text for future in futures] == [answer(4)] * 4
        assert engine.events == [
            "open a", "step a", "open b", "step ab", "open c", "step abc", "open d", "step bcd", "step cd", "step d",
        ]  # fmt: skip

    def test_a_newcomer_joins_at_the_next_step(self, make, pool):
        engine, generator = make(by_turns=True)
        start_all(pool, generator, [ask("a", 6)])
        engine.turns(2)
        assert engine.next_up == "step a"
        start_all(pool, generator, [ask("b", 3)])
        engine.turns(3)
        assert engine.events == ["open a", "step a", "step a", "open b", "step ab"]
        engine.run_free()

    def test_no_more_than_max_running_are_decoded_and_the_others_wait_in_order(self, make, pool):
        engine, generator = make(max_running=2, by_turns=True)
        lengths = {"a": 9, "b": 5, "c": 6, "d": 1, "e": 2}
        futures = start_all(pool, generator, [ask(name, length) for name, length in lengths.items()])
        engine.run_free()
        assert [len(future.result().token_ids) for future in futures] == [9, 5, 6, 1, 2]
        assert [event for event in engine.events if event.startswith("open")] == [f"open {name}" for name in "abcde"]
        assert max(len(event.split()[1]) for event in engine.events) == 2

    def test_the_first_piece_comes_before_the_first_step(self, make):
        engine, generator = make(by_turns=True)
        stream = generator.stream(ask())
        engine.let(1)
        assert next(stream).text == "10,"
        assert engine.events == ["open a"]

    def test_nothing_happens_before_the_first_piece_is_asked_for(self, make):
        before = threads()
        engine, generator = make()
        stream = generator.stream(ask())
        time.sleep(0.02)
        assert engine.events == []
        assert threads() == before
        assert next(stream).text == "10,"
        (started,) = threads() - before
        assert started.daemon

    def test_the_last_token_is_not_read(self, make):
        engine, generator = make()
        generator.generate(ask(max_tokens=3))
        assert engine.events == ["open a", "step a", "step a"]

    def test_a_consumer_that_does_not_read_holds_up_nobody(self, make):
        _, generator = make()
        slow = generator.stream(ask("a", 50))
        first = next(slow)
        assert generator.generate(ask("b", 60)).text == answer(60)
        assert first.text + "".join(chunk.text for chunk in slow) == answer(50)

    def test_answers_that_share_no_step_run_beside_those_that_do(self, make, pool):
        engine, generator = make(by_turns=True, alone="bd")
        futures = start_all(pool, generator, [ask(name, 4) for name in "abcd"])
        engine.run_free()
        assert [future.result().text for future in futures] == [answer(4)] * 4
        assert engine.events[:9] == [
            "open a", "step a", "open b", "step a", "step b", "open c", "step ac", "step b", "open d",
        ]  # fmt: skip


class TestLeaving:
    def test_closing_takes_an_answer_out_before_the_next_step(self, make):
        engine, generator = make(by_turns=True)
        left, stays = generator.stream(ask("a", 50)), generator.stream(ask("b", 50))
        engine.let(1)
        next(left)
        engine.let(2)
        next(stays)
        wait_until(lambda: engine.next_up == "step ab")
        left.close()  # in the middle of a step
        engine.turns(3)
        assert engine.events == ["open a", "step a", "open b", "step ab", "step b", "step b"]

    def test_closing_what_waits_takes_it_out_of_the_line(self, make, pool):
        engine, generator = make(max_running=1, by_turns=True)
        (first,) = start_all(pool, generator, [ask("a", 2)])
        box: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        gone = threading.Event()

        def leave():
            if gone.is_set():
                raise GenerationCancelled("the client went away")

        def wait():
            try:
                next(generator.stream_watched(ask("b"), leave, lambda: None))
            except GenerationError as error:
                box.put(error)

        second = pool.submit(wait)
        wait_until(lambda: generator.waiting == 2)
        (third,) = start_all(pool, generator, [ask("c", 2)])
        gone.set()
        engine.turns(1)
        assert isinstance(box.get(timeout=10), GenerationCancelled)
        second.result()
        engine.run_free()
        assert (first.result().text, third.result().text) == (answer(2), answer(2))
        assert "open b" not in engine.events

    def test_an_iterator_that_is_forgotten_is_an_iterator_that_is_closed(self, make):
        engine, generator = make()
        released = threading.Event()
        stream = generator.stream_watched(ask(max_tokens=80), lambda: None, released.set)
        next(stream)
        del stream
        gc.collect()
        assert released.wait(10)
        steps = len(engine.events)
        time.sleep(0.02)
        assert len(engine.events) == steps

    def test_a_check_is_made_before_each_step_and_ends_only_its_own_answer(self, make, pool):
        engine, generator = make(by_turns=True)
        released = []
        checked = []

        def check():
            checked.append(len(engine.events))
            if len(engine.events) >= 4:
                raise TimeoutError("late")

        watched = generator.stream_watched(ask("a", 50), check, lambda: released.append(len(engine.events)))
        engine.let(2)
        assert next(watched).text == "10,"
        wait_until(lambda: not generator.waiting)  # its first piece comes before it leaves the queue
        (other,) = start_all(pool, generator, [ask("b", 8)])
        engine.run_free()
        with pytest.raises(TimeoutError, match="late"):
            list(watched)
        assert other.result().text == answer(8)
        assert len(released) == 1
        assert [event for event in engine.events[4:] if "a" in event] == []
        assert set(range(4)) <= set(checked)

    def test_an_answer_that_is_closed_is_released(self, make):
        _, generator = make()
        released = threading.Event()
        stream = generator.stream_watched(ask(max_tokens=80), lambda: None, released.set)
        next(stream)
        stream.close()
        assert released.wait(10)

    def test_an_answer_is_released_when_it_is_computed_and_not_when_it_is_read(self, make):
        _, generator = make()
        released = threading.Event()
        stream = generator.stream_watched(ask(max_tokens=9), lambda: None, released.set)
        first = next(stream)
        assert released.wait(10)
        assert first.text + "".join(chunk.text for chunk in stream) == answer(9)

    def test_the_caches_of_an_answer_are_free_when_it_is_computed(self, tiny):
        opened = []

        class Watched(Engine):
            def open(self, *request):
                session = super().open(*request)
                opened.append(weakref.ref(session))
                return session

        generator = BatchingGenerator(Watched(tiny.loaded, tiny.encoder, "tiny", "print"))
        stream = generator.stream(GenerationRequest(toy_layout(), sampling=Sampling(max_tokens=4)))
        next(stream)
        wait_until(lambda: gc.collect() >= 0 and [session() for session in opened] == [None])
        assert list(stream)[-1].generation is not None
        generator.close()


class TestFailures:
    @pytest.mark.parametrize(
        ("error", "request_"),
        [
            (UnknownNameError, GenerationRequest(toy_layout(), MitigationChoice("context_expert"))),
            (ConfigError, GenerationRequest(toy_layout(), MitigationChoice("none", {"x": 1}))),
            (PromptTooLongError, GenerationRequest(toy_layout((600,)))),
        ],
    )
    def test_errors_of_the_engine_reach_the_caller_and_no_neighbour(self, tiny, error, request_):
        generator = BatchingGenerator(tiny)
        good = GenerationRequest(toy_layout(), sampling=Sampling(max_tokens=40))
        neighbour = generator.stream(good)
        first = next(neighbour)
        with pytest.raises(error) as ours:
            next(generator.stream(request_))
        with pytest.raises(error) as theirs:
            tiny.generate(request_)
        assert str(ours.value) == str(theirs.value)
        assert first.text + "".join(chunk.text for chunk in neighbour) == tiny.generate(good).text
        generator.close()

    @pytest.mark.parametrize("what", ["open b", "step b", "write b"])
    def test_what_fails_in_one_answer_alone_fails_that_one_alone(self, make, pool, what):
        engine, generator = make(by_turns=True, alone="b")
        engine.failures[what] = ZeroDivisionError("broken")
        good, bad, also_good = start_all(pool, generator, [ask(name) for name in "abc"])
        engine.run_free()
        with pytest.raises(ZeroDivisionError, match="broken"):
            bad.result()
        assert (good.result().text, also_good.result().text) == (answer(), answer())
        assert engine.events.count("step b") <= 1

    def test_a_step_returns_those_that_go_on_in_order(self, monkeypatch):
        engine = RecordingEngine(alone="be").install(monkeypatch)
        engine.failures["step b"] = ZeroDivisionError("broken")
        running = [RunningRequest(engine, RequestHandle(ask(name, 2 if name == "c" else 5))) for name in "abcde"]
        for one in running:
            one.write()
        assert [one.session.name for one in decode_step(running)] == ["a", "d", "e"]

    def test_a_step_that_fails_for_all_fails_those_in_it_and_the_worker_goes_on(self, make, pool, caplog):
        engine, generator = make(by_turns=True, alone="c")
        engine.failures["step ab"] = MemoryError("the prompt was: secret")
        first, second, third = start_all(pool, generator, [ask("a"), ask("b"), ask("c")])
        engine.run_free()
        errors = [future.exception() for future in (first, second)]
        for error in errors:
            assert isinstance(error, GenerationError)
            assert "2 answers shared failed with MemoryError" in str(error)
            assert isinstance(error.__cause__, MemoryError)
        assert errors[0] is not errors[1]
        assert third.result().text == answer()
        assert generator.generate(ask("d")).text == answer()
        assert [record.getMessage() for record in caplog.records] == [
            "a step that 2 answers shared failed: MemoryError"
        ]

    def test_a_shared_step_of_one_fails_with_its_own_error(self, make):
        engine, generator = make()
        engine.failures["step a"] = ZeroDivisionError("broken")
        with pytest.raises(ZeroDivisionError):
            generator.generate(ask("a"))

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_after_the_thread_has_died_the_next_request_gets_another(self, make, pool):
        engine, generator = make(by_turns=True)
        engine.failures["step a"] = SystemExit()
        before = threads()
        first, second = start_all(pool, generator, [ask("a"), ask("b")])
        (thread,) = threads() - before
        engine.let(2)
        for future in (first, second):
            with pytest.raises(GenerationError, match="the generator stopped before the answer was complete"):
                future.result()
        thread.join(10)
        engine.run_free()
        assert generator.generate(ask("c")).text == answer()


class TestClosing:
    def test_open_answers_fail_and_the_thread_ends(self, make, pool):
        engine, generator = make(max_running=1, by_turns=True)
        before = threads()
        running, waiting = start_all(pool, generator, [ask("a"), ask("b")])
        engine.turns(1)
        (thread,) = threads() - before
        closing = pool.submit(generator.close)
        wait_until(lambda: generator.closed)
        engine.run_free()
        closing.result()
        assert not thread.is_alive()
        for future in (running, waiting):
            with pytest.raises(GenerationError, match="the generator was closed before the answer was complete"):
                future.result()
        assert "open b" not in engine.events

    def test_a_closed_generator_refuses_and_may_be_closed_again(self, make):
        _, generator = make()
        generator.generate(ask())
        generator.close()
        generator.close()
        stream = generator.stream(ask())
        with pytest.raises(GenerationError, match="the generator is closed; make a new one"):
            next(stream)

    def test_one_that_was_never_asked_has_nothing_to_close(self, make):
        before = threads()
        _, generator = make()
        generator.close()
        assert generator.closed
        assert threads() == before

    def test_a_generator_that_is_forgotten_ends_its_thread(self):
        engine = RecordingEngine()
        before = threads()
        generator = BatchingGenerator(engine)
        generator.generate(ask(max_tokens=1))
        (thread,) = threads() - before
        del generator
        gc.collect()
        thread.join(10)
        assert not thread.is_alive()

    def test_at_exit_the_model_is_not_left_in_the_middle_of_a_step(self):
        code = """
import atexit, threading, time
from rag_posfix import BatchingGenerator
from tests.support.stepped import RecordingEngine, ask
class Slow(RecordingEngine):
    def open(self, *request):
        session = super().open(*request)
        session.advance = lambda token: time.sleep(0.2)
        return session
atexit.register(lambda: print(threading.active_count()))  # runs last
stream = BatchingGenerator(Slow()).stream(ask(max_tokens=50))
print(next(stream).text, threading.active_count())
"""
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "10, 2\n1\n", "")

    @pytest.mark.parametrize("max_running", [0, -1])
    def test_there_is_room_for_one_answer_at_least(self, tiny, max_running):
        with pytest.raises(ConfigError, match=f"max_running={max_running} must be >= 1"):
            BatchingGenerator(tiny, max_running)
