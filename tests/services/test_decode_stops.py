"""Deadlines and clients that leave reach the decode loop: the steps of the model are counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.generation.engine import Engine
from rag_posfix.pipeline.pipeline import Pipeline
from tests.support.serving import (
    BRIDGE,
    CHAT,
    GeneratorByTurns,
    chat,
    in_flight,
    leaving,
    make_pipeline,
    noticed_leaving,
    post,
    serving,
)
from tests.support.waiting import wait_until


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


@pytest.mark.parametrize("stream", [False, True])
def test_no_step_begins_after_the_client_left(stream: bool, monkeypatch: pytest.MonkeyPatch):
    generator, noticed = GeneratorByTurns(), noticed_leaving(monkeypatch)
    with serving(make_pipeline(generator)) as url:
        if stream:
            leave_after_the_first_piece(url)
        else:
            with leaving(url):
                wait_until(lambda: generator.steps == 2)
        assert noticed.wait(60)
        generator.turns.release(10)
        assert generator.closed.wait(60)
    assert generator.steps == 2, "the second step was under way"


@pytest.mark.weights
@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.slow
def test_the_decode_loop_of_real_weights_ends(engine: Engine, together: int):
    pipeline = Pipeline(engine, Assembler(engine.encoder, engine.context_window))
    lines = {
        "question": "Write down the numbers from 1 to 2000, one in each line.",
        "max_tokens": 1500,
        "model": "default",
    }
    with counted(engine) as steps, serving(pipeline, max_concurrent=together, request_timeout_seconds=60) as url:
        leave_after_the_first_piece(url, **lines)
        wait_until(lambda: in_flight(url) == 0)
        assert 1 <= steps.count < 1000
    with counted(engine) as steps, serving(pipeline, max_concurrent=together, request_timeout_seconds=2) as url:
        late = post(url, **lines)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        wait_until(lambda: in_flight(url) == 0)
        assert 1 <= steps.count < 1000  # of 1500; the permit is free: no step is made any more
