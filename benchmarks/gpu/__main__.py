"""Runs all parts and prints a table and what was asked: ``python -m benchmarks.gpu --out DIR``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import ge
from pathlib import Path

import torch

from benchmarks.gpu import parts
from benchmarks.gpu.bench import Bench, Part, Row, environment, run_parts, write
from benchmarks.gpu.models import REAL, TINY, Scale

PARTS = (
    Part("exactness", 0.15, parts.exactness_cells),
    Part("first-token", 0.5, parts.first_token_cells),
    Part("stores", 0.1, parts.store_cells),
    Part("batches", 0.15, parts.batch_cells),
    Part("profile", 0.1, parts.profile_cells),
)
COLUMNS = ("cold_ratio", "warm_ratio", "decode_ratio", "first_s", "tokens_per_s", "extra_bytes")


@dataclass(frozen=True)
class Ask:
    """A number that is asked of the run; value and verdict are None where it was not measured."""

    text: str
    value: float | None
    passed: bool | None


def asks(rows: Mapping[str, Sequence[Row]], scale: Scale) -> list[Ask]:
    """Return every ask with its value, for the model and the prompt that the asks are about."""
    first = rows.get("first-token", ())
    judged = [row for row in rows.get("exactness", ()) if "passed" in row or "failed" in row]

    def first_token(method: str, name: str) -> float | None:
        return _value(first, {"model": scale.model.name, "size": scale.ask_size.label, "method": method}, name)

    def requests(count: int) -> float | None:
        return _value(rows.get("batches", ()), {"method": "none", "requests": count}, "tokens_per_s")

    def ask(text: str, value: float | None, enough: Callable[[float], bool]) -> Ask:
        return Ask(text, value, None if value is None else enough(value))

    exact = sum(bool(row.get("passed")) for row in judged) / len(judged) if judged else None
    warm = {name: first_token(name, "warm_ratio") for name in ("parallel_encoding", "context_experts")}
    several, single = requests(scale.batches[-1]), requests(scale.batches[0])
    speedup = None if several is None or single is None else several / single
    return [
        ask("share of exactness checks that pass = 1", exact, lambda value: value == 1.0),
        ask("idle first token / stock <= 1.02", first_token("idle", "cold_ratio"), lambda value: value <= 1.02),
        ask("idle tokens per second / stock >= 0.98", first_token("idle", "decode_ratio"), lambda v: v >= 0.98),
        *(
            ask(f"cold {name} / stock < 1", first_token(name, "cold_ratio"), lambda value: value < 1)
            for name in ("parallel_encoding", "context_experts")
        ),
        *(
            ask(f"warm first token of {name}: stock / warm >= 20", ratio and 1 / ratio, lambda value: value >= 20)
            for name, ratio in warm.items()
        ),
        *(
            ask(f"cold {name} / stock <= {limit}", first_token(name, "cold_ratio"), partial(ge, limit))
            for name, limit in (("sorted_inter_document", 1.2), ("inter_document", 1.5))
        ),
        *(
            ask(f"decode of {name} / stock >= 1", first_token(name, "decode_ratio"), lambda value: value >= 1)
            for name in ("none", "parallel_encoding")
        ),
        ask(f"{scale.batches[-1]} requests / one request >= 12", speedup, lambda value: value >= 12),
    ]


def _value(rows: Sequence[Row], labels: Row, name: str) -> float | None:
    """Return a number of the row with these labels."""
    for row in rows:
        if all(row.get(key) == value for key, value in labels.items()) and row.get(name) is not None:
            return float(row[name])
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 1 where a cell failed or an exactness check did not pass."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the records")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all parts; what does not fit is left out")
    parser.add_argument(
        "--shape", choices=("real", "tiny"), default="real", help="tiny: small models on the CPU, to try the run out"
    )
    options = parser.parse_args(arguments)
    real = options.shape == "real"
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes:g} must be above 0")
    if real and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; run on a machine with one, or try the run out with --shape tiny")
    scale = REAL if real else TINY
    device = torch.device("cuda", torch.cuda.current_device()) if real else torch.device("cpu")
    bench = Bench(scale, device, torch.bfloat16 if real else torch.float32)
    rows = run_parts(bench, PARTS, options.out, options.minutes, lambda line: print(line, flush=True))
    judged = asks(rows, scale)
    head = {"kind": "gpu-asks", **environment(device), "scale": scale.name}
    write(options.out, "asks", head, [asdict(ask) for ask in judged])
    print(f"\n{'model':16}{'size':8}{'method':24}" + "".join(f"{name:>14}" for name in COLUMNS))
    for row in rows["first-token"]:
        numbers = "".join(f"{_number(row.get(name)):>14}" for name in COLUMNS)
        why = next((name for name in ("refused", "out_of_memory", "failed") if name in row), "")
        print(f"{row['model']:16}{row['size']:8}{row['method']:24}{numbers} {why}")
    print("\nwhat is asked" + ("" if real else "; ratios of tiny models on a CPU say nothing of a GPU"))
    for ask in judged:
        verdict = "not measured" if ask.passed is None else "passed" if ask.passed else "NOT PASSED"
        print(f"{verdict:14}{_number(ask.value):>10}  {ask.text}")
    return int(any("failed" in row or row.get("passed") is False for part_rows in rows.values() for row in part_rows))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 1e4 else f"{value:.3e}"


if __name__ == "__main__":
    sys.exit(main())
