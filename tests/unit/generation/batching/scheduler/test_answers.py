"""Answers of the scheduler: those of one request at a time, whoever shares the batch."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import GenerationError
from rag_posfix.generation.batching.scheduler import BatchingGenerator
from rag_posfix.generation.engine import Engine
from rag_posfix.pipeline.build import build_pipeline
from rag_posfix.settings import CacheSettings, Settings
from tests.support.clock import Clock
from tests.support.stepped import answer, ask
from tests.support.tiny import toy_layout
from tests.support.tiny_evaluation import CountedForwards
from tests.support.toy_encoder import ToyEncoder
from tests.support.waiting import wait_until
from tests.unit.generation.scheduling import drawn, start_all, threads


class TestAnswers:
    def test_it_follows_the_protocols(self, tiny):
        generator = BatchingGenerator(tiny)
        assert isinstance(generator, Generator)
        assert generator.capabilities == tiny.capabilities - {"steps"}
        assert (generator.model_id, generator.fingerprint, generator.context_window) == ("tiny", "print", 512)
        assert generator.encoder is tiny.encoder
        assert generator.describe(MitigationChoice()) == tiny.describe(MitigationChoice())

    def test_the_bytes_of_the_caches_of_running_answers(self, tiny):
        seen = []
        generator = BatchingGenerator(tiny, on_step=lambda _: seen.append(generator.kv_cache_bytes))
        layout = toy_layout()
        generator.generate(GenerationRequest(layout, MitigationChoice("none"), Sampling(max_tokens=3)))
        shape = tiny.loaded.spec.shape
        tokens = len(layout.token_ids) + 64  # spare capacity
        per_layer = 2 * shape.n_kv_heads * shape.head_dim * tokens * 4  # keys and values, float32
        assert seen[:1] == [shape.n_layers * per_layer]
        wait_until(lambda: generator.kv_cache_bytes == 0)
        generator.close()

    @pytest.mark.parametrize("max_running", [2, 8])
    @pytest.mark.slow
    def test_mixed_requests_that_join_and_leave_are_answered_as_by_the_engine(self, tiny, pool, max_running):
        rng = random.Random(max_running)
        jobs = [(drawn(rng), rng.choice([None, None, None, 1, 3]), rng.random() / 100) for _ in range(24)]
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
                assert begin.wait(60)
                return super().open(*request)

        generator = BatchingGenerator(Held(tiny.loaded, tiny.encoder, "tiny", "print"))
        layouts = [toy_layout(lengths, prefix=4, suffix=7) for lengths in [(7, 4), (3,), (12, 2, 5)]]
        sampling = Sampling(max_tokens=4)
        futures = start_all(pool, generator, [GenerationRequest(layout, sampling=sampling) for layout in layouts])
        with CountedForwards(tiny) as forwards:
            begin.set()
            for future in futures:
                future.result()
        generator.close()
        # Prompts of 22, 14 and 30 tokens, each followed by a step of all that run.
        assert forwards.shapes == [(1, 22), (1, 1), (1, 14), (2, 1), (1, 30), (3, 1), (2, 1), (1, 1)]

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

    def test_timings_tell_how_long_an_answer_waited_its_prompt_and_its_steps(self, make, pool, monkeypatch):
        clock = Clock()
        monkeypatch.setattr("rag_posfix.generation.batching.scheduler.time", SimpleNamespace(perf_counter=clock))
        engine, generator = make(max_running=1, by_turns=True)
        first, second = start_all(pool, generator, [ask("a", 2), ask("b", 2)])
        wait_until(lambda: engine.next_up == "open a")
        clock.advance(2)
        engine.run_free()
        assert set(first.result().timings) == {"queue", "prefill", "decode"}
        assert (first.result().timings["queue"], second.result().timings["queue"]) == (0, 2)


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
        assert engine.events == []
        assert threads() == before
        assert next(stream).text == "10,"
        (started,) = threads() - before
        assert started.daemon

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
