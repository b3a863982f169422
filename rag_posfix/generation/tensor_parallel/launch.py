"""A model that is split over several processes by tensor parallelism: starts them, loads a share in each.

Every process, a *rank*, holds some of the heads and channels of each layer, and all run the same steps. This process
is the first rank. The other ranks are started on this machine (``python -m ...tensor_parallel.launch CONFIG``), or, by
torchrun, on any: it runs the same command everywhere, and all but the first rank end up in ``run_torchrun_worker``.
They talk over gloo on CPUs and NCCL on GPUs, neither of which authenticates: several machines need a private network.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from rag_posfix.errors import ConfigError, GenerationError, RagPosfixError, missing_extra
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.load import DEMO_MODEL, load_engine, read_shape, source_of, usable_device
from rag_posfix.generation.tensor_parallel.leader import Channel, Processes, TensorParallelGenerator, run_worker
from rag_posfix.patching.spec import Ranks

TIMEOUT_SECONDS = 600.0
STARTING_SECONDS = 600.0
WORKER_MODULE = "rag_posfix.generation.tensor_parallel.launch"
PATIENCE_SECONDS = 2.0
"""Until the end of a process is known that another process has noticed by a broken connection."""
_GRACE_SECONDS = 0.5
_FOREVER = timedelta(days=365)


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

    def torchrun_rank(self, tp: int) -> int | None:
        """Return torchrun's rank of this process, one of ``tp``; None if torchrun has not started it."""
        if self.rank is None or self.world_size is None:
            return None
        if self.world_size != tp:
            raise ConfigError(f"torchrun started {self.world_size} processes and tp={tp}; give both the same number")
        return self.rank


@dataclass(frozen=True, slots=True)
class RankConfig:
    """Settings for loading the share of one rank; ``model`` and ``dtype`` as in ``load_engine``.

    Attributes:
        device: ``cpu`` or ``cuda``.
        rank: Which rank, from 0, of ``count``.
        timeout_seconds: How long ranks wait for each other in the middle of a step.
        folder: Where ranks on one machine find each other; None under torchrun.
        threads: Threads of each rank on a CPU; None leaves them unchanged.
    """

    model: str
    dtype: str
    device: str
    cache_dir: str | None
    count: int
    timeout_seconds: float
    rank: int = 0
    folder: str | None = None
    threads: int | None = None


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
    process. On a CPU, this process computes with its share of the threads until then. ``model``, ``dtype``, ``device``
    and ``cache_dir`` as in ``load_engine``.

    Args:
        tp: How many ranks, 2 or more; a divisor of the number of key/value heads. One GPU each, where there are GPUs.
        environment: What this process was started with.
        timeout_seconds: How long ranks wait for each other in the middle of a step: a rank that hangs is given up
            after it. A rank that ends is noticed at once.

    Raises:
        ConfigError: the model cannot be loaded or split, or a setting is outside of what is allowed.
        UnsupportedModelError: its family is not supported, or the attention hook changes what it computes.
        GenerationError: a rank has ended while it was loading.
    """
    config = _checked_config(model, tp, environment, dtype, device, cache_dir, timeout_seconds)
    threads, folder, commands = torch.get_num_threads(), None, []
    if environment.torchrun_rank(tp) is None:
        folder = Processes.shared_folder()
        share = max(1, threads // tp) if config.device == "cpu" else None
        config = replace(config, folder=str(folder), threads=share)
        commands = [["-m", WORKER_MODULE, json.dumps(asdict(replace(config, rank=rank)))] for rank in range(1, tp)]

    def leave() -> None:
        _leave_group()
        torch.set_num_threads(threads)

    # Under torchrun there are none: it ends all processes when one ends.
    processes = Processes(commands, folder, environment.variables, on_failure=_abort_group, on_close=leave)
    try:
        ranks = _join_group(config, processes)
        return TensorParallelGenerator(_load_share(config, ranks), Channel(ranks), processes)
    except BaseException as error:
        unforeseen = isinstance(error, Exception) and not isinstance(error, RagPosfixError)
        failure = processes.failure(PATIENCE_SECONDS if unforeseen else 0.0)
        processes.kill()
        processes.close()
        if unforeseen:
            reason = failure or " ".join(str(error).split())
            raise GenerationError(f"the model could not be split over {tp} processes: {reason}") from error
        raise


def run_torchrun_worker(
    model: str = DEMO_MODEL,
    *,
    tp: int,
    environment: LaunchEnvironment,
    dtype: str = "auto",
    device: str = "auto",
    cache_dir: Path | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> bool:
    """Run the first rank's commands until it ends and return True, if torchrun started this process as another rank.

    Returns False at once in the first rank and without torchrun. Args and errors: as ``load_parallel``, which the
    first rank calls.
    """
    if not environment.torchrun_rank(tp):
        return False
    _run_rank(_checked_config(model, tp, environment, dtype, device, cache_dir, timeout_seconds))
    return True


def _run_rank(config: RankConfig) -> None:
    ranks = _join_group(config)
    run_worker(_load_share(config, ranks), Channel(ranks))
    _leave_group()


def _load_share(config: RankConfig, ranks: Ranks) -> Engine:
    cache_dir = None if config.cache_dir is None else Path(config.cache_dir)
    return load_engine(config.model, dtype=config.dtype, device=config.device, cache_dir=cache_dir, ranks=ranks)


def _join_group(config: RankConfig, processes: Processes | None = None) -> Ranks:
    """Meet the other ranks and return them; waits for them. The first rank watches the ``processes`` it started."""
    patience = timedelta(seconds=config.timeout_seconds)
    meeting: dict[str, Any] = {}
    if config.folder is not None:
        file = str(Path(config.folder) / "store")
        store = distributed.FileStore(file, config.count)  # type: ignore[attr-defined]  # documented, not in __all__
        meeting = {"store": store, "rank": config.rank, "world_size": config.count}
        if processes is None:
            store.set(f"ready-{config.rank}", "1")
        else:
            _wait_until_ready(store, config.count, processes)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    backend = "nccl" if config.device == "cuda" else "gloo"
    distributed.init_process_group(backend, timeout=patience, **meeting)
    # Between requests the other ranks wait for the first one without a limit.
    control = distributed.new_group(backend="gloo", timeout=_FOREVER)
    return Ranks(config.count, config.rank, control, patience)


def _wait_until_ready(store: Any, count: int, processes: Processes) -> None:
    """Wait until all ranks have finished their imports: from then on the other ranks notice a broken one."""
    deadline = time.monotonic() + STARTING_SECONDS
    while not store.check([f"ready-{rank}" for rank in range(1, count)]):
        if processes.failure(patience_seconds=0.05) is not None:
            raise RuntimeError("a rank ended before it was ready")  # the caller names it
        if time.monotonic() > deadline:
            raise GenerationError(
                f"the processes of the other {count - 1} ranks did not get ready in {STARTING_SECONDS:g} s"
            )


def _leave_group() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _abort_group() -> None:
    """Make fail what waits for the GPU of a rank that is gone. On CPUs the broken connection does that."""
    group = distributed.group.WORLD
    if group is not None and distributed.get_backend() == "nccl":
        group.abort()


def _checked_config(
    model: str,
    tp: int,
    environment: LaunchEnvironment,
    dtype: str,
    device: str,
    cache_dir: Path | None,
    timeout_seconds: float,
) -> RankConfig:
    """Return the config of this rank, after checking that the model can be split so."""
    torchrun_rank = environment.torchrun_rank(tp)
    if find_spec("accelerate") is None:
        raise missing_extra("accelerate", "tp")
    if tp < 2:
        raise ConfigError(f"tp={tp} must be 2 or more; one process needs no other: use load_engine")
    if timeout_seconds <= 0:
        raise ConfigError(f"timeout_seconds={timeout_seconds:g} must be above 0")
    resolved_device = usable_device(device)
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    if resolved_device != expected:
        raise ConfigError(
            f"device={device!r} cannot be used with tp={tp}: ranks compute on GPUs where there are any, one each, and "
            f"on the CPU elsewhere; use 'auto' or {expected!r}"
        )
    if distributed.is_initialized():
        raise ConfigError(
            f"tp={tp} needs torch.distributed, which this process uses already; close the other model, or leave it to "
            "rag_posfix to set it up"
        )
    if resolved_device == "cuda" and torchrun_rank is None and torch.cuda.device_count() < tp:
        raise ConfigError(f"tp={tp} needs as many GPUs and {torch.cuda.device_count()} can be seen; lower tp")
    heads = read_shape(source_of(model, cache_dir), is_split=True).n_kv_heads
    if heads % tp:
        allowed = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
        raise ConfigError(
            f"tp={tp} cannot split {model}: its layers have {heads} key/value heads, which are split evenly; "
            f"allowed: {allowed}"
        )
    folder = None if cache_dir is None else str(cache_dir)
    return RankConfig(model, dtype, resolved_device, folder, tp, timeout_seconds, rank=torchrun_rank or 0)


def main() -> None:
    """Run as a rank that ``load_parallel`` started; an error is the last line on stderr, where the first finds it."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    config = RankConfig(**json.loads(sys.argv[1]))
    parent = threading.Thread(target=_end_with_parent, args=(config.folder,), daemon=True)
    parent.start()
    exit_code = 1
    try:
        _run_rank(config)
        exit_code = 0
    except RagPosfixError as error:
        sys.stderr.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")
    except Exception:
        parent.join(_GRACE_SECONDS)  # the connection breaks too when the first rank is gone
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(exit_code)  # taking down what was imported takes seconds, and the first rank waits


def _end_with_parent(folder: str) -> None:
    """End this process, whatever it is doing, once the first rank's end of the pipe is closed."""
    while os.read(0, 4096):  # not through sys.stdin, whose lock the end of the interpreter would wait for
        pass
    shutil.rmtree(folder, ignore_errors=True)  # the first rank may have had no time to remove it
    os._exit(1)


if __name__ == "__main__":
    main()
