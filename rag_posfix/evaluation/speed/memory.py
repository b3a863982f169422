"""Peak memory of a piece of work: on the GPU if it runs there, else of the process."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""What Linux wants written to ``clear_refs`` to set VmHWM, the most a process ever held, to what it holds now."""


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """What one piece of work held at most.

    Attributes:
        peak_bytes: The most that was held, weights included.
        extra_bytes: The same less what was held before the work began.
    """

    peak_bytes: int
    extra_bytes: int


def peak_memory(action: Callable[[], object], device: torch.device) -> PeakMemory | None:
    """Run ``action`` and return its peak memory; None if the operating system does not report it.

    On a GPU the value counts torch's tensors there, otherwise the resident memory of this process, whose maximum Linux
    records.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        action()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
        return PeakMemory(peak, peak - before)
    _give_back_free_memory()
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
        before = _status_bytes("VmRSS")
    except (OSError, ValueError):  # not Linux, or a sandbox without these files
        action()
        return None
    action()
    peak = _status_bytes("VmHWM")
    return PeakMemory(peak, max(peak - before, 0))


def _give_back_free_memory() -> None:
    """Make the allocator release memory that it holds for reuse, which would hide a lower peak."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # another C library than glibc
        return


def _status_bytes(key: str) -> int:
    for line in _STATUS.read_text("utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise ValueError(f"{_STATUS} has no {key}")
