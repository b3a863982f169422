"""Names of devices, checked before torch is imported."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rag_posfix.errors import ConfigError
from rag_posfix.parameters import shown

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
