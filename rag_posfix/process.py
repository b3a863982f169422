"""The environment of this process, and what torch needs of it: threads, spinning, and the allocator's thresholds.

Names of devices, checked before torch is imported.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from rag_posfix.errors import ConfigError
from rag_posfix.parameters import shown

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


_KINDS = ("cpu", "cuda", "mps", "xpu", "hpu", "npu", "mtia", "xla")
_DEVICE = re.compile(rf"auto|(?:{'|'.join(_KINDS)})(?::\d{{1,4}})?")
_GPU_FILES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/kfd", "/dev/dxg", "/proc/driver/nvidia", "/dev/nvmap")
"""Files of the drivers of NVIDIA and AMD GPUs, in Windows' subsystem for Linux and on Tegra too."""


def checked_device(device: str) -> str:
    """Return ``device`` if it names a kind of device, whether this machine has it or not.

    Raises:
        ConfigError: it is another name.
    """
    if not isinstance(device, str) or _DEVICE.fullmatch(device) is None:
        kinds = ", ".join(_KINDS)
        raise ConfigError(
            f"device={shown(device)} cannot be used: it must be one of {kinds}, or cuda:1, ...; use 'auto' or 'cpu'"
        )
    return device


def check_device_is_here(device: str) -> None:
    """Raise if this machine certainly lacks the device; torch, once it is imported, finds the other cases.

    Raises:
        ConfigError: ``cuda`` on Linux without the driver of a GPU, or ``mps`` on another system than macOS.
    """
    checked_device(device)
    kind = device.partition(":")[0]
    no_gpu = kind == "cuda" and sys.platform == "linux" and not any(Path(file).exists() for file in _GPU_FILES)
    if no_gpu or (kind == "mps" and sys.platform != "darwin"):
        missing = "no GPU driver is installed here" if no_gpu else "it needs macOS"
        raise ConfigError(f"device={device!r} cannot be used: {missing}; use 'auto' or 'cpu'")
