"""What a rank of a split model is told, and how it finds the others. Loads nothing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from rag_posfix.patching.ranks import Ranks

FOREVER = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class RankConfig:
    """What a rank needs to know to load its share.

    Attributes:
        model: As in ``load_engine``, as is ``dtype``.
        dtype: The numbers it computes with.
        device: ``cpu`` or ``cuda``.
        cache_dir: Where converted weights are.
        rank: Which rank, from 0.
        count: How many ranks.
        timeout_seconds: How long ranks wait for each other in the middle of a step.
        folder: Where ranks on one machine find each other; None where torchrun has told them.
        threads: With which each computes on a CPU; None leaves them as they are.
    """

    model: str
    dtype: str
    device: str
    cache_dir: str | None
    rank: int
    count: int
    timeout_seconds: float
    folder: str | None = None
    threads: int | None = None


def rendezvous_store(config: RankConfig) -> Any:
    """Return the store in which ranks find each other, a file on this machine; None under torchrun."""
    if config.folder is None:
        return None
    file = str(Path(config.folder) / "store")
    return distributed.FileStore(file, config.count)  # type: ignore[attr-defined]  # documented, not in __all__


def join_group(config: RankConfig, store: Any) -> Ranks:
    """Meet the other ranks and return them. Waits for them."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    patience = timedelta(seconds=config.timeout_seconds)
    backend = "nccl" if config.device == "cuda" else "gloo"
    if store is None:
        distributed.init_process_group(backend, timeout=patience)
    else:
        distributed.init_process_group(
            backend, store=store, rank=config.rank, world_size=config.count, timeout=patience
        )
    # Between requests the others wait for the first rank as long as it takes.
    control = distributed.new_group(backend="gloo", timeout=FOREVER)
    return Ranks(config.count, config.rank, control, patience)


def leave_group() -> None:
    """Part from the other ranks; if they were never met, nothing is done."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def abort_group() -> None:
    """Let fail what waits for the GPU of a rank that is gone. On CPUs the broken connection does that."""
    group = distributed.group.WORLD
    if group is not None and distributed.get_backend() == "nccl":
        group.abort()
