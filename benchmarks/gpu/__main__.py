"""Runs all parts and prints a table and what was asked: ``python -m benchmarks.gpu --out DIR``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.gpu import batches, exactness, first_token, profile, stores
from benchmarks.gpu.asks import Ask, asks
from benchmarks.gpu.bench import Bench, Part, Row, run_parts
from benchmarks.gpu.models import REAL, TINY
from benchmarks.gpu.record import environment, write

PARTS = (
    Part("exactness", 0.15, exactness.cells),
    Part("first-token", 0.5, first_token.cells),
    Part("stores", 0.1, stores.cells),
    Part("batches", 0.15, batches.cells),
    Part("profile", 0.1, profile.cells),
)
COLUMNS = ("cold_ratio", "warm_ratio", "decode_ratio", "first_s", "tokens_per_s", "extra_bytes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 1 where a cell failed or an exactness check did not pass."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the records")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all parts; what does not fit is left out")
    parser.add_argument(
        "--shape", choices=("real", "tiny"), default="real", help="tiny: small models on the CPU, to try the run out"
    )
    given = parser.parse_args(arguments)
    if given.minutes <= 0:
        parser.error(f"--minutes {given.minutes:g} must be above 0")
    if given.shape == "real" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; run on a machine with one, or try the run out with --shape tiny")
    scale = REAL if given.shape == "real" else TINY
    device = torch.device("cuda", torch.cuda.current_device()) if given.shape == "real" else torch.device("cpu")
    bench = Bench(scale, device, torch.bfloat16 if given.shape == "real" else torch.float32)
    found = run_parts(bench, PARTS, given.out, given.minutes, _say)
    judged = asks(found, scale)
    head = {"kind": "gpu-asks", **environment(device), "scale": scale.name}
    write(given.out, "asks", head, [asdict(ask) for ask in judged])
    _print_table(found["first-token"])
    _print_asks(judged, scale.name)
    return int(any("failed" in row or row.get("passed") is False for rows in found.values() for row in rows))


def _say(line: str) -> None:
    print(line, flush=True)


def _print_table(rows: Sequence[Row]) -> None:
    """Print first tokens, tokens per second and memory, one line per model, prompt and method."""
    print(f"\n{'model':16}{'size':8}{'method':24}" + "".join(f"{name:>14}" for name in COLUMNS))
    for row in rows:
        numbers = "".join(f"{_number(row.get(name)):>14}" for name in COLUMNS)
        why = next((name for name in ("refused", "out_of_memory", "failed") if name in row), "")
        print(f"{row['model']:16}{row['size']:8}{row['method']:24}{numbers} {why}")


def _print_asks(judged: Sequence[Ask], scale: str) -> None:
    print("\nwhat is asked" + ("" if scale == REAL.name else "; ratios of tiny models on a CPU say nothing of a GPU"))
    for ask in judged:
        verdict = "not measured" if ask.passed is None else "passed" if ask.passed else "NOT PASSED"
        print(f"{verdict:14}{_number(ask.value):>10}  {ask.text}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 1e4 else f"{value:.3e}"


if __name__ == "__main__":
    sys.exit(main())
