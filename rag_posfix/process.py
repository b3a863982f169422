"""The environment of this process, and what torch needs of it: threads, spinning, and the allocator's thresholds."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

SPINS_OF_A_WAITING_THREAD = "10000"

MALLOC_OPTIONS = {-3: 64 * 2**20, -1: 256 * 2**20}
"""glibc's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, bytes: freed buffers up to the first stay in the process.

A much higher first one would keep the gaps between stored passages, where they cannot be used again."""


def environment_with(**changes: str) -> dict[str, str]:
    """Return the environment of this process with ``changes``, for a process that is started."""
    return {**os.environ, **changes}


_PIP_VARIABLES = frozenset(
    {
        "PATH", "HOME", "LANG", "TMPDIR", "TEMP", "TMP", "NETRC", "SYSTEMROOT", "USERPROFILE", "APPDATA",
        "LOCALAPPDATA", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    }
)  # fmt: skip


def environment_of_pip() -> dict[str, str]:
    """Return the variables of this process that pip reads: index, proxies, certificates. None is an API key."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.upper() in _PIP_VARIABLES or name.startswith(("PIP_", "XDG_", "LC_"))
    }


def keep_running_on_hangup() -> None:
    """Ignore SIGHUP from now on, unless its cause is that the terminal was closed; in the main thread only.

    The signal reloads the indexes of the service. Sent before the service handles it, it would end the process.
    """
    if not hasattr(signal, "SIGHUP") or threading.current_thread() is not threading.main_thread():
        return
    has_terminal = os.isatty(0)

    def handle(number: int, frame: FrameType | None) -> None:
        if has_terminal and not os.isatty(0):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    signal.signal(signal.SIGHUP, handle)


def limit_openmp_spinning() -> None:
    """Limit the spinning of OpenMP threads that wait for each other. Must be called before torch is imported.

    The default of OpenMP spins so long that another busy program on the same cores makes the model many times slower.
    The function does nothing if ``GOMP_SPINCOUNT`` or ``OMP_WAIT_POLICY`` is set in the environment.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS_OF_A_WAITING_THREAD)


def keep_freed_buffers() -> bool:
    """Let glibc keep freed buffers for the next operation instead of mapping them again; return whether it does.

    The function does nothing without glibc, or if ``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_TRIM_THRESHOLD_`` or
    ``GLIBC_TUNABLES`` is set in the environment.
    """
    variables = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
    if sys.platform != "linux" or any(name in os.environ for name in variables):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(option, size) for option, size in MALLOC_OPTIONS.items())


def quiet_libraries() -> None:
    """Keep warnings of libraries, such as the Hub's retries, off the terminal. Must be called before their import.

    Our errors say what went wrong. ``HF_HUB_VERBOSITY`` and ``TRANSFORMERS_VERBOSITY`` of the environment stay.
    """
    for variable in ("HF_HUB_VERBOSITY", "TRANSFORMERS_VERBOSITY"):
        os.environ.setdefault(variable, "error")
    for library in ("faiss", "pypdf", "sentence_transformers"):
        logging.getLogger(library).setLevel(logging.ERROR)


def prepare_process() -> None:
    """Set what torch needs of the process where the environment leaves it open. Before torch is imported."""
    limit_openmp_spinning()
    keep_freed_buffers()


def allowed_threads(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int | None:
    """Return how many threads a container may keep busy; None where it has no limit or the environment sets one.

    torch counts the cores of the machine. ``OMP_NUM_THREADS`` and ``MKL_NUM_THREADS`` set the threads in any case.
    """
    if {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        return None
    try:
        microseconds, period = quota.read_text().split()
        return max(1, int(microseconds) // int(period))
    except (OSError, ValueError, ZeroDivisionError):  # "max": no limit
        return None


def memory_of_machine(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Return the bytes of main memory of this machine, or those that its container may take if they are fewer."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        memory = 8 * 2**30
    try:
        return min(memory, int(limit.read_text()))
    except (OSError, ValueError):  # "max": no limit
        return memory
