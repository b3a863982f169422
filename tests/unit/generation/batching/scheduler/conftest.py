"""A tiny model, a recording engine, and threads that ask."""

from __future__ import annotations

import pytest
import torch

from rag_posfix.generation.batching.scheduler import BatchingGenerator
from rag_posfix.generation.engine import Engine
from tests.support.number_encoder import NumberEncoder
from tests.support.stepped import RecordingEngine
from tests.support.tiny import loaded_model
from tests.unit.generation.scheduling import CLOSING_SECONDS, DaemonThreads


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
    """Runs each call in a daemon thread: one that never returns fails its test and does not keep the process alive."""
    return DaemonThreads()


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
        generator.close(CLOSING_SECONDS)
