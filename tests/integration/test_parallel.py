"""A tiny model split over two processes, gloo between them: the same numbers as in one process."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
import torch

from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import ConfigError, GenerationError
from rag_posfix.generation.load import load_engine
from rag_posfix.generation.tensor_parallel import launch
from rag_posfix.generation.tensor_parallel.launch import load_parallel
from rag_posfix.mitigations import MITIGATIONS, create
from rag_posfix.pipeline.build import launch_environment
from tests.support.tiny import save_tiny, toy_layout

pytestmark = pytest.mark.slow

LAYOUT = toy_layout(relevance=(0.9, 0.2, 0.4, 0.3))
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def alone(folder):
    return load_engine(folder, dtype="float32")


@pytest.fixture(scope="module")
def shares():
    """The engines that ``split`` is made of, as far as they are in this process."""
    return []


@pytest.fixture(scope="module")
def split(folder, shares):
    def load_share(*arguments, **options):
        shares.append(load_engine(*arguments, **options))
        return shares[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(launch, "load_engine", load_share)
        generator = load_parallel(folder, tp=2, environment=launch_environment(), dtype="float32")
    yield generator
    generator.close()


def choice(name):
    return MitigationChoice(name, dict(MITIGATIONS.get(name).example))


def request(name="none", **sampling):
    return GenerationRequest(LAYOUT, choice(name), Sampling(**{"max_tokens": 8, **sampling}))


def followers():
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "rag_posfix.generation.tensor_parallel.launch" in child.cmdline()
    ]


class TestTheSameNumbers:
    @pytest.mark.parametrize("name", MITIGATIONS.names())
    def test_two_ranks_answer_as_one_process_does(self, name, split, alone):
        """Methods that compare all heads with each other included: head_scaling ranks one key head of each rank."""
        assert create(name, choice(name).parameters).refusal(alone.loaded.spec.shape) is None
        found = split.next_log_probs(LAYOUT, choice(name))
        torch.testing.assert_close(found, alone.next_log_probs(LAYOUT, choice(name)), rtol=0, atol=TOLERANCE)
        there, here = alone.generate(request(name)), split.generate(request(name))
        assert (here.token_ids, here.text, here.usage) == (there.token_ids, there.text, there.usage)
        assert here.attention == pytest.approx(there.attention, abs=TOLERANCE)

    def test_what_names_the_weights_is_the_same(self, split, alone):
        assert (split.model_id, split.fingerprint) == (alone.model_id, alone.fingerprint)
        assert split.context_window == alone.context_window
        assert split.describe(choice("none")) == alone.describe(choice("none"))

    def test_only_a_share_of_the_weights_is_here(self, split, shares, alone):
        def elements(engine):
            weights = [layer.self_attn.q_proj.weight for layer in engine.loaded.model.model.layers]
            return sum(getattr(weight, "to_local", lambda w=weight: w)().numel() for weight in weights)

        (share,) = shares
        assert elements(share) * 2 == elements(alone)

    def test_a_prompt_longer_than_any_block_arrives(self, split, alone):
        long = toy_layout(lengths=(90, 80, 95, 70), relevance=(0.9, 0.2, 0.4, 0.3))
        found = split.next_log_probs(long, choice("context_experts"))
        torch.testing.assert_close(
            found, alone.next_log_probs(long, choice("context_experts")), rtol=0, atol=TOLERANCE
        )


class TestInStep:
    """Whatever happens on the first rank, the other one is where it is: the next answer is right."""

    @pytest.fixture(autouse=True)
    def _still_right(self, split, alone):
        yield
        assert split.generate(request()).token_ids == alone.generate(request()).token_ids

    def test_a_draw_without_a_seed_is_the_same_token_everywhere(self, split):
        for _ in range(3):
            assert split.generate(request(temperature=2.0, max_tokens=12)).token_ids

    def test_a_closed_stream(self, split):
        stream = split.stream(request(max_tokens=100))
        assert next(stream).text
        stream.close()

    def test_a_stream_that_nobody_closes(self, split):
        assert next(split.stream(request("context_experts", max_tokens=100))).text

    def test_streams_side_by_side(self, split, alone):
        names = ("parallel_encoding", "sorted_inter_document")
        streams = [split.stream(request(name)) for name in names]
        seen = [[], []]
        for _ in range(9):
            for stream, chunks in zip(streams, seen, strict=True):
                chunks.extend(chunk for chunk in [next(stream, None)] if chunk is not None)
        for name, chunks in zip(names, seen, strict=True):
            assert chunks[-1].generation.token_ids == alone.generate(request(name)).token_ids

    def test_a_request_at_fault(self, split):
        for wrong in (MitigationChoice("nope"), MitigationChoice("context_experts", {"answer_weight": 7})):
            with pytest.raises(ConfigError):
                split.generate(GenerationRequest(LAYOUT, wrong))

    def test_a_second_model_is_refused(self, split, folder):
        with pytest.raises(ConfigError, match="close the other model"):
            load_parallel(folder, tp=2, environment=launch_environment())


class TestARankThatIsGone:
    """Each with ranks of its own: after this there are none."""

    @pytest.fixture(autouse=True)
    def _one_at_a_time(self, split):
        split.close()

    def start(self, folder, timeout_seconds=600.0):
        generator = load_parallel(
            folder, tp=2, environment=launch_environment(), dtype="float32", timeout_seconds=timeout_seconds
        )
        (follower,) = followers()
        return generator, follower

    def test_killed_in_the_middle_of_an_answer_it_is_named(self, folder):
        """At once: ranks that wait for each other do so for ten minutes, longer than a test may take."""
        generator, follower = self.start(folder)
        stream = generator.stream(request(max_tokens=100))
        next(stream)
        os.kill(follower.pid, signal.SIGKILL)
        with pytest.raises(GenerationError, match=r"rank 1 of 2 ended with exit code -9; start it again"):
            list(stream)
        with pytest.raises(GenerationError, match="exit code -9"):
            generator.generate(request())
        generator.close()
        assert not torch.distributed.is_initialized()
        assert followers() == []

    def test_one_that_hangs_is_given_up_after_the_timeout(self, folder):
        generator, follower = self.start(folder, timeout_seconds=3.0)
        os.kill(follower.pid, signal.SIGSTOP)
        with pytest.raises(GenerationError, match=r"a step failed: .*[Tt]imed out"):
            generator.generate(request())
        generator.close()
        assert followers() == []
