"""A model that computes nothing and records what it was asked to do, for tests of who runs when."""

from __future__ import annotations

import threading

import torch

from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, MitigationInfo, Sampling
from tests.support.number_encoder import NumberEncoder
from tests.support.tiny import toy_layout
from tests.support.waiting import wait_until

FIRST = 10
VOCABULARY = 100


def ask(name="a", max_tokens=5, **sampling):
    """A request for ``RecordingEngine``: the name of its mitigation is its own."""
    return GenerationRequest(toy_layout(()), MitigationChoice(name), Sampling(max_tokens=max_tokens, **sampling))


def answer(max_tokens=5):
    """What every request is answered with."""
    return "".join(f"{FIRST + i}," for i in range(max_tokens))


class RecordingSession:
    def __init__(self, engine, name):
        self.engine, self.name = engine, name
        self.prefill_seconds = 0.0
        self.cached_tokens = 0
        self.can_share_pass = name not in engine.alone
        self.weighted = False
        self.at = 0

    def attention(self):
        return ()

    def next_log_probs(self):
        self.engine.may_fail("write", self.name)
        return torch.nn.functional.one_hot(torch.tensor(FIRST + self.at), VOCABULARY).float().log()

    def advance(self, token):
        assert token == FIRST + self.at
        self.at += 1


class RecordingEngine(Generator):
    """Records ``open a`` for a prompt that it reads and ``step ab`` for a step of two answers, in order.

    With ``by_turns`` each of them waits for a turn. ``failures`` maps what is to fail (``open a``, ``step ab``,
    ``write a``) to the error. Answers whose names are in ``alone`` share no step.
    """

    model_id, fingerprint, context_window = "recording", "print", 512
    capabilities = frozenset({"steps"})

    def __init__(self, by_turns=False, alone=""):
        self.encoder = NumberEncoder()
        self.events = []
        self.failures = {}
        self.salts = []
        self.alone = alone
        self.next_up = None  # decided, and waiting for its turn
        self._by_turns = by_turns
        self._turns = threading.Semaphore(0)

    def install(self, monkeypatch):
        monkeypatch.setattr("rag_posfix.generation.batching.scheduler.advance_batch", self._advance)
        return self

    def describe(self, choice):
        return MitigationInfo(choice.name, choice.name, False)

    def stream(self, request):
        raise NotImplementedError

    def plan(self, layout, choice, max_tokens):
        return None

    def open(self, layout, mitigation=None, max_tokens=1, salt=""):
        self._turn("open", mitigation.name)
        self.salts.append(salt)
        return RecordingSession(self, mitigation.name)

    def let(self, count):
        """Let ``count`` prompts or steps run."""
        self._turns.release(count)

    def turns(self, count):
        """Let ``count`` prompts or steps run, and wait until the one after them is decided."""
        before = len(self.events)
        self.let(count)
        wait_until(lambda: len(self.events) == before + count and self.next_up)

    def run_free(self):
        """Wait for turns no longer."""
        self._by_turns = False
        self.let(1)

    def may_fail(self, what, names):
        error = self.failures.get(f"{what} {names}")
        if error is not None:
            raise error

    def _advance(self, sessions, tokens):
        self._turn("step", "".join(session.name for session in sessions))
        for session, token in zip(sessions, tokens, strict=True):
            session.advance(token)

    def _turn(self, what, names):
        if self._by_turns:
            self.next_up = f"{what} {names}"
            if not self._turns.acquire(timeout=60):
                raise TimeoutError("the test gave no turn")
            self.next_up = None
        self.events.append(f"{what} {names}")
        self.may_fail(what, names)
