"""Turns and commands of ranks that run in lockstep, without processes; those are in the integration tests."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import ConfigError, GenerationError, PlanConflictError, PromptTooLongError
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.tensor_parallel import leader
from rag_posfix.generation.tensor_parallel.leader import (
    Advance,
    End,
    Free,
    Prefill,
    TensorParallelGenerator,
    decode,
    encode,
    run_worker,
)
from tests.support.number_encoder import NumberEncoder
from tests.support.tiny import loaded_model, toy_layout
from tests.unit.generation.scheduling import DaemonThreads

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


class Recorder:
    """A channel that keeps what it is told to send, and hands out what it is given."""

    def __init__(self, commands=()):
        self.sent = []
        self.commands = iter(commands)
        self.breaks = False

    def send(self, command):
        if self.breaks:
            raise RuntimeError("Connection closed by peer")
        self.sent.append(decode(command))

    def receive(self):
        return next(self.commands)


class Others:
    """Ranks that never do anything but may be told to have ended."""

    def __init__(self):
        self.ended = None
        self.did = []

    def failure(self, patience_seconds=0.0):
        return self.ended

    def kill(self):
        self.did.append("kill")

    def close(self):
        self.did.append("close")


@pytest.fixture(scope="module")
def engine():
    return Engine(loaded_model(), NumberEncoder(), "tiny", "print")


class Rank0:
    def __init__(self, engine):
        self.channel, self.others, self.engine = Recorder(), Others(), engine
        self.generator = TensorParallelGenerator(engine, self.channel, self.others)

    @property
    def kinds(self):
        return [type(command).__name__ for command in self.channel.sent]


@pytest.fixture
def first(engine):
    return Rank0(engine)


def request(mitigation="none", **sampling):
    return GenerationRequest(toy_layout(), MitigationChoice(mitigation), Sampling(**sampling))


class TestCommands:
    @given(
        lengths=st.lists(st.integers(0, 5), max_size=4),
        parameters=st.dictionaries(st.text(), JSON, max_size=3),
        relevance=st.booleans(),
    )
    def test_a_prompt_arrives_as_it_was_sent(self, lengths, parameters, relevance):
        scores = tuple(0.1 + 0.8 / (i + 3) for i in range(len(lengths))) if relevance else None
        layout = toy_layout(lengths, relevance=scores)
        sent = Prefill(7, layout, MitigationChoice("none", parameters), 12)
        assert decode(encode(sent)) == sent

    @pytest.mark.parametrize("command", [Advance(3, 131_071), Free(2**40), End()])
    def test_a_short_command_arrives_as_it_was_sent(self, command):
        assert decode(encode(command)) == command

    def test_a_parameter_that_json_lacks_is_refused_by_the_name_of_its_method(self):
        sent = Prefill(0, toy_layout(), MitigationChoice("stack", {"a": object()}), 1)
        with pytest.raises(ConfigError, match=r"parameters of stack cannot be sent .* give numbers, text, lists"):
            encode(sent)


class TestTheFirstRank:
    def test_it_answers_as_the_engine_does_and_tells_every_step(self, first, engine):
        asked = request(max_tokens=5)
        answer = first.generator.generate(asked)
        assert answer.token_ids == engine.generate(asked).token_ids
        read, *steps, free = first.channel.sent
        assert (read.layout, read.mitigation, read.max_tokens) == (asked.layout, asked.mitigation, 5)
        assert steps == [Advance(read.session, token) for token in answer.token_ids[:-1]]  # the last is not read
        assert free == Free(read.session)

    def test_a_closed_stream_is_not_advanced_any_more(self, first):
        stream = first.generator.stream(request(max_tokens=50))
        next(stream)
        next(stream)
        stream.close()
        assert first.kinds == ["Prefill", "Advance", "Free"]

    def test_a_stream_that_nobody_reads_is_not_even_opened(self, first):
        first.generator.stream(request())
        assert first.channel.sent == []

    def test_streams_side_by_side_take_turns(self, first, engine):
        asked = [request(max_tokens=6), request("context_experts", max_tokens=6)]
        streams = [first.generator.stream(one) for one in asked]
        chunks = [[], []]
        for _ in range(7):
            for stream, seen in zip(streams, chunks, strict=True):
                seen.append(next(stream))
        for one, seen in zip(asked, chunks, strict=True):
            assert seen[-1].generation.token_ids == engine.generate(one).token_ids
        assert first.kinds[:4] == ["Prefill", "Prefill", "Advance", "Advance"]

    def test_a_stream_that_ends_inside_of_a_turn_does_not_wait_for_it(self, first, engine):
        """As when the memory of an abandoned stream is collected in the middle of a forward pass."""
        abandoned = first.generator.stream(request(max_tokens=9))
        next(abandoned)
        handle = engine.loaded.model.register_forward_pre_hook(lambda *_: abandoned.close())
        try:
            first.generator.generate(request(max_tokens=2))
        finally:
            handle.remove()
        assert first.kinds == ["Prefill", "Prefill", "Free", "Advance", "Free"]

    @pytest.mark.parametrize(
        ("asked", "error"),
        [
            (GenerationRequest(toy_layout(), MitigationChoice("nope")), ConfigError),
            (GenerationRequest(toy_layout(), MitigationChoice("context_experts", {"answer_weight": 2})), ConfigError),
            (request(max_tokens=1000), PromptTooLongError),
        ],
    )
    def test_a_request_at_fault_is_refused_before_anybody_hears_of_it(self, first, asked, error):
        with pytest.raises(error):
            first.generator.stream(asked)
        assert first.channel.sent == []
        assert first.generator.generate(request(max_tokens=2)).token_ids

    def test_an_error_that_every_rank_raises_ends_the_request_only(self, first, engine, monkeypatch):
        monkeypatch.setattr(engine, "prefill", raising(PlanConflictError("two rows")))
        with pytest.raises(PlanConflictError):
            first.generator.generate(request())
        monkeypatch.undo()
        assert first.generator.generate(request(max_tokens=2)).token_ids
        assert first.others.did == []

    def test_any_other_error_in_a_step_ends_the_others_and_all_later_requests(self, first, engine, monkeypatch):
        monkeypatch.setattr(engine, "prefill", raising(RuntimeError("out of\nmemory")))
        with pytest.raises(GenerationError, match="a step failed: out of memory; start it again"):
            first.generator.generate(request())
        monkeypatch.undo()
        assert first.others.did == ["kill"]
        with pytest.raises(GenerationError, match="out of memory"):
            first.generator.generate(request())
        assert first.kinds == ["Prefill"]

    def test_an_interrupted_step_ends_the_others_too(self, first, engine, monkeypatch):
        monkeypatch.setattr(engine, "prefill", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            first.generator.generate(request())
        assert first.others.did == ["kill"]

    def test_a_rank_that_ended_while_nothing_ran_is_told_of(self, first):
        first.others.ended = "the process of rank 1 of 2 ended with exit code -9"
        assert first.generator.failure == first.others.ended
        with pytest.raises(GenerationError, match="rank 1 of 2 ended with exit code -9"):
            first.generator.generate(request())
        assert first.channel.sent == []

    def test_a_connection_that_breaks_when_a_stream_is_freed_harms_nobody(self, first):
        stream = first.generator.stream(request(max_tokens=9))
        next(stream)
        first.channel.breaks = True
        stream.close()
        with pytest.raises(GenerationError, match="Connection closed by peer"):
            first.generator.generate(request())

    def test_closing_tells_the_others_once_and_later_requests_fail(self, first):
        first.generator.close()
        first.generator.close()
        assert first.channel.sent == [End()]
        with pytest.raises(GenerationError, match="it was closed"):
            first.generator.generate(request())

    def test_closing_over_a_broken_connection_ends_the_others(self, first):
        first.channel.breaks = True
        first.generator.close()
        assert first.others.did == ["kill", "close"]

    def test_closing_during_a_step_that_hangs_kills_the_others(self, first, monkeypatch, caplog):
        monkeypatch.setattr(leader, "CLOSING_SECONDS", 0.05)
        sending, killed = threading.Event(), threading.Event()

        def hang(command):
            sending.set()
            assert killed.wait(60)
            raise RuntimeError("Connection closed by peer")  # as when the other ranks are dead

        monkeypatch.setattr(first.channel, "send", hang)
        asking = DaemonThreads().submit(first.generator.generate, request())
        assert sending.wait(60)
        first.generator.close()
        assert first.others.did == ["kill", "close"]
        assert "the other ranks could not be told to end: a step still runs after 0.05 s" in caplog.text
        killed.set()
        with pytest.raises(GenerationError, match="Connection closed by peer"):
            asking.result(60)


class TestTheOtherRanks:
    def test_they_run_what_the_first_rank_ran(self, first, engine):
        """Every forward pass, in its order, with the same number of tokens."""
        seen = []
        handle = engine.loaded.model.register_forward_pre_hook(
            lambda module, arguments, keywords: seen.append(tuple(keywords["input_ids"].flatten().tolist())),
            with_kwargs=True,
        )
        try:
            first.generator.generate(request("context_experts", max_tokens=4))
            first.generator.generate(request("passage_answers", max_tokens=4))
            there, seen[:] = list(seen), []
            run_worker(engine, Recorder([*first.channel.sent, End()]))
        finally:
            handle.remove()
        assert seen == there

    def test_an_error_in_reading_leaves_them_following(self, engine, monkeypatch):
        choice = MitigationChoice()
        first, second = Prefill(0, toy_layout(), choice, 1), Prefill(1, toy_layout(), choice, 1)
        commands = [first, Free(0), second, Advance(1, 5), End()]
        real, calls = engine.prefill, []

        def read(layout, plan):
            calls.append(plan)
            if len(calls) == 1:
                raise PlanConflictError("two rows")
            return real(layout, plan)

        monkeypatch.setattr(engine, "prefill", read)
        run_worker(engine, Recorder(commands))
        assert len(calls) == 2


def raising(error):
    def raises(*_):
        raise error

    return raises
