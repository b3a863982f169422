"""Peak memory: the most that was held while something ran."""

from __future__ import annotations

import pytest
import torch

from rag_posfix.evaluation.speed import bench
from rag_posfix.evaluation.speed.bench import peak_memory

CPU = torch.device("cpu")
MIB = 1 << 20


def held(mebibytes):
    """Hold so much for a moment: the pages count once they are written."""
    torch.ones(mebibytes * MIB, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def _linux():
    if peak_memory(lambda: None, CPU) is None:
        pytest.skip("this system does not tell the peak memory of a process (/proc/self/clear_refs)")


def test_what_was_held_for_a_moment_counts():
    found = peak_memory(lambda: held(200), CPU)
    assert 190 * MIB < found.extra_bytes < 260 * MIB
    assert found.peak_bytes > found.extra_bytes


@pytest.mark.slow
def test_a_large_peak_before_does_not_hide_a_small_one_after():
    peak_memory(lambda: held(300), CPU)
    assert 50 * MIB < peak_memory(lambda: held(60), CPU).extra_bytes < 120 * MIB


def test_an_error_of_the_work_comes_through():
    with pytest.raises(ZeroDivisionError):
        peak_memory(lambda: 1 // 0, CPU)


def test_a_system_that_does_not_tell_still_runs_the_work(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(bench, "CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    assert peak_memory(lambda: ran.append(1), CPU) is None
    assert ran == [1]
