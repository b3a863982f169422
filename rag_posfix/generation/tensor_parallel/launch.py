"""A model that is split over several processes by tensor parallelism: starts them, loads a share in each.

Every process, a *rank*, holds some of the heads and channels of each layer, and all run the same steps. This process
is the first rank. The others are started on this machine, or, by torchrun, on any: it runs the same command
everywhere, and all but the first rank end up in ``follow_torchrun``. They talk over gloo on CPUs and NCCL on GPUs,
neither of which asks who is there: several machines need a network of their own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rag_posfix.errors import ConfigError, GenerationError, RagPosfixError, missing_extra
from rag_posfix.generation.load import DEMO_MODEL, load_engine, read_shape, source_of, usable_device
from rag_posfix.generation.tensor_parallel.leader import Channel, TensorParallelGenerator, follow
from rag_posfix.generation.tensor_parallel.processes import Processes
from rag_posfix.generation.tensor_parallel.rank_config import (
    RankConfig,
    abort_group,
    join_group,
    leave_group,
    rendezvous_store,
)

TIMEOUT_SECONDS = 600.0
STARTING_SECONDS = 600.0
FOLLOWER = "rag_posfix.generation.tensor_parallel.follower"
PATIENCE_SECONDS = 2.0
"""Until the end of a process is known that another process has noticed by a broken connection."""


@dataclass(frozen=True, slots=True)
class LaunchEnvironment:
    """What this process was started with. ``pipeline.build.launch_environment`` reads it.

    Attributes:
        rank: Which of torchrun's processes this one is, from 0; None where torchrun has not started it.
        world_size: How many processes torchrun started on all machines; None as above.
        variables: Environment variables, which ranks that are started inherit.
    """

    rank: int | None = None
    world_size: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


def load_parallel(
    model: str = DEMO_MODEL,
    *,
    tp: int,
    environment: LaunchEnvironment,
    dtype: str = "auto",
    device: str = "auto",
    cache_dir: Path | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> TensorParallelGenerator:
    """Split a model over ``tp`` ranks and return the generator of the first, which is this process.

    Close it to end the other ranks; they also end with this process, however it ends. One at a time can be open in a
    process. On a CPU, this process computes with its share of the threads until then.

    Args:
        model: As in ``load_engine``.
        tp: How many ranks, 2 or more; a divisor of the number of key/value heads. One GPU each, where there are GPUs.
        environment: What this process was started with.
        dtype: As in ``load_engine``.
        device: As in ``load_engine``.
        cache_dir: As in ``load_engine``.
        timeout_seconds: How long ranks wait for each other in the middle of a step: a rank that hangs is given up
            after it. A rank that ends is noticed at once.

    Raises:
        ConfigError: the model cannot be loaded or split, or a setting is outside of what is allowed.
        UnsupportedModelError: its family is not supported, or the attention hook changes what it computes.
        GenerationError: a rank has ended while it was loading.
    """
    torchrun_rank = _torchrun_rank(environment, tp)
    config = _rank_config(model, tp, dtype, device, cache_dir, timeout_seconds, torchrun_rank)
    if torchrun_rank is not None:
        return _first_rank(config, None)
    folder = Processes.shared_folder()
    config = replace(config, folder=str(folder), threads=_threads(tp) if config.device == "cpu" else None)
    others = [["-m", FOLLOWER, json.dumps(asdict(replace(config, rank=rank)))] for rank in range(1, tp)]
    return _first_rank(config, Processes(others, folder, environment.variables, abort_group))


def follow_torchrun(
    model: str = DEMO_MODEL,
    *,
    tp: int,
    environment: LaunchEnvironment,
    dtype: str = "auto",
    device: str = "auto",
    cache_dir: Path | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> bool:
    """Follow the first rank until it ends and return True, if torchrun started this process as another; else False.

    Args and errors: as ``load_parallel``, which the first rank calls.
    """
    rank = _torchrun_rank(environment, tp)
    if not rank:
        return False
    follow_job(replace(_rank_config(model, tp, dtype, device, cache_dir, timeout_seconds, rank), rank=rank))
    return True


def follow_job(config: RankConfig) -> None:
    """Load this rank's share of a model and follow the first rank until it ends."""
    store = rendezvous_store(config)
    if store is not None:
        store.set(f"ready-{config.rank}", "1")
    ranks = join_group(config, store)
    engine = load_engine(
        config.model, dtype=config.dtype, device=config.device, cache_dir=_path(config.cache_dir), ranks=ranks
    )
    follow(engine, Channel(ranks))
    leave_group()


class _WorkerGroup:
    """The other ranks, for ``TensorParallelGenerator``: their processes, where this process started them.

    Args:
        processes: None where torchrun started them, and ends them all when one ends.
    """

    def __init__(self, processes: Processes | None, threads: int) -> None:
        self._processes = processes
        self._threads = threads

    def failure(self, patience_seconds: float = 0.0) -> str | None:
        return None if self._processes is None else self._processes.failure(patience_seconds)

    def kill(self) -> None:
        if self._processes is not None:
            self._processes.kill()

    def close(self) -> None:
        import torch

        leave_group()
        torch.set_num_threads(self._threads)
        if self._processes is not None:
            self._processes.close()


def _first_rank(config: RankConfig, processes: Processes | None) -> TensorParallelGenerator:
    import torch

    workers = _WorkerGroup(processes, torch.get_num_threads())
    try:
        store = rendezvous_store(config)
        if processes is not None:
            _wait_until_ready(store, config, processes)
        ranks = join_group(config, store)
        engine = load_engine(
            config.model, dtype=config.dtype, device=config.device, cache_dir=_path(config.cache_dir), ranks=ranks
        )
        return TensorParallelGenerator(engine, Channel(ranks), workers)
    except BaseException as error:
        unforeseen = isinstance(error, Exception) and not isinstance(error, RagPosfixError)
        failure = workers.failure(PATIENCE_SECONDS if unforeseen else 0.0)
        workers.kill()
        workers.close()
        if unforeseen:
            reason = failure or " ".join(str(error).split())
            raise GenerationError(f"the model could not be split over {config.count} processes: {reason}") from error
        raise


def _wait_until_ready(store: Any, config: RankConfig, processes: Processes) -> None:
    """Wait until all processes have imported what they need: from there on a broken one is noticed by the others."""
    deadline = time.monotonic() + STARTING_SECONDS
    names = [f"ready-{rank}" for rank in range(1, config.count)]
    while not store.check(names):
        failure = processes.failure(patience_seconds=0.05)
        if failure is not None:
            raise GenerationError(f"the model could not be split over {config.count} processes: {failure}")
        if time.monotonic() > deadline:
            raise GenerationError(
                f"the processes of the other {config.count - 1} ranks did not get ready in {STARTING_SECONDS:g} s"
            )


def _rank_config(
    model: str,
    tp: int,
    dtype: str,
    device: str,
    cache_dir: Path | None,
    timeout_seconds: float,
    torchrun_rank: int | None,
) -> RankConfig:
    """Return the config of the first rank, after checking that the model can be split so."""
    import torch

    if find_spec("accelerate") is None:
        raise missing_extra("accelerate", "tp")
    if tp < 2:
        raise ConfigError(f"tp={tp} must be 2 or more; one process needs no other: use load_engine")
    if timeout_seconds <= 0:
        raise ConfigError(f"timeout_seconds={timeout_seconds:g} must be above 0")
    place = usable_device(device)
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    if place != expected:
        raise ConfigError(
            f"device={device!r} cannot be used with tp={tp}: ranks compute on GPUs where there are any, one each, and "
            f"on the CPU elsewhere; use 'auto' or {expected!r}"
        )
    if torch.distributed.is_initialized():
        raise ConfigError(
            f"tp={tp} needs torch.distributed, which this process uses already; close the other model, or leave it to "
            "rag_posfix to set it up"
        )
    if place == "cuda" and torchrun_rank is None and torch.cuda.device_count() < tp:
        raise ConfigError(f"tp={tp} needs as many GPUs and {torch.cuda.device_count()} can be seen; lower tp")
    heads = read_shape(source_of(model, cache_dir)).n_kv_heads
    if heads % tp:
        allowed = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
        raise ConfigError(
            f"tp={tp} cannot split {model}: its layers have {heads} key/value heads, which are dealt out evenly; "
            f"allowed: {allowed}"
        )
    return RankConfig(model, dtype, place, None if cache_dir is None else str(cache_dir), 0, tp, timeout_seconds)


def _torchrun_rank(environment: LaunchEnvironment, tp: int) -> int | None:
    """Return which of its processes torchrun says that this is; None if torchrun has not started it.

    Raises:
        ConfigError: torchrun started more processes than the model is to be split over, or fewer.
    """
    if environment.rank is None or environment.world_size is None:
        return None
    if environment.world_size != tp:
        raise ConfigError(
            f"torchrun started {environment.world_size} processes and tp={tp}; give both the same number"
        )
    return environment.rank


def _threads(tp: int) -> int:
    import torch

    return max(1, torch.get_num_threads() // tp)


def _path(path: str | None) -> Path | None:
    return None if path is None else Path(path)
