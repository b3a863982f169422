"""Deadlines and clients that leave reach the decode loop: the steps of the model are counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.contracts.request import Chunk, GenerationRequest
from rag_posfix.generation.engine import Engine
from rag_posfix.pipeline.pipeline import Pipeline
from tests.support.serving import BRIDGE, CHAT, EndlessGenerator, chat, in_flight, make_pipeline, post, serving
from tests.support.waiting import wait_until

STEP_SECONDS = 0.05


class SlowGenerator(EndlessGenerator):
    """Takes a twentieth of a second for each step, until it is closed."""

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        try:
            while True:
                self.steps += 1
                time.sleep(STEP_SECONDS)
                yield Chunk("word ")
        finally:
            self.closed.set()


class Steps:
    """Counts the passes of a model: those that read a prompt, and one for each step of decoding."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: Any) -> None:
        self.count += 1


@contextmanager
def counted(engine: Engine) -> Iterator[Steps]:
    steps = Steps()
    handle = engine.loaded.model.register_forward_pre_hook(steps)
    try:
        yield steps
    finally:
        handle.remove()


def leave_after_the_first_piece(url: str, **fields: Any) -> None:
    body = chat(documents=[BRIDGE], stream=True, **fields)
    with (
        httpx2.Client(timeout=60) as client,
        client.stream("POST", url + CHAT, json=body) as response,
    ):
        assert next(response.iter_lines()).startswith("data: ")


def leave_without_an_answer(url: str, seconds: float, **fields: Any) -> None:
    with httpx2.Client(timeout=seconds) as client, pytest.raises(httpx2.TimeoutException):
        client.post(url + CHAT, json=chat(documents=[BRIDGE], **fields))


def test_a_slow_generator_makes_one_step_more_at_most_when_the_time_is_over():
    generator = SlowGenerator()
    with serving(make_pipeline(generator), request_timeout_seconds=0.5) as url:
        assert post(url).status_code == 504
        assert generator.closed.wait(5)
    assert 1 <= generator.steps <= 0.5 / STEP_SECONDS + 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_slow_generator_makes_one_step_more_at_most_when_the_client_left(stream: bool):
    generator = SlowGenerator()
    with serving(make_pipeline(generator)) as url:
        if stream:
            leave_after_the_first_piece(url)
        else:
            leave_without_an_answer(url, 0.5)
        steps = generator.steps
        assert generator.closed.wait(5)
        assert steps >= 1
        # It is told between two steps; the busy machine of a test may be late by some.
        assert generator.steps - steps <= 4


@pytest.mark.weights
@pytest.mark.parametrize("together", [1, 4])
def test_the_decode_loop_of_real_weights_ends(engine: Engine, together: int):
    pipeline = Pipeline(engine, Assembler(engine.encoder, engine.context_window))
    lines = {
        "question": "Write down the numbers from 1 to 2000, one in each line.",
        "max_tokens": 1500,
        "model": "default",
    }
    with counted(engine) as steps, serving(pipeline, max_concurrent=together, request_timeout_seconds=60) as url:
        leave_after_the_first_piece(url, **lines)
        wait_until(lambda: in_flight(url) == 0, 30)
        assert_it_stands_still(steps, most=400)
    with counted(engine) as steps, serving(pipeline, max_concurrent=together, request_timeout_seconds=2) as url:
        late = post(url, **lines)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        wait_until(lambda: in_flight(url) == 0, 30)
        assert_it_stands_still(steps, most=1000)


def assert_it_stands_still(steps: Steps, most: int) -> None:
    """No step is made any more, and far fewer were made than the answer would have taken."""
    seen = steps.count
    time.sleep(0.5)
    assert steps.count <= seen + 1, "a step that had begun"
    assert 1 <= steps.count < most
