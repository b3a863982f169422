"""The least time of a cold prompt and of a token: arithmetic, bytes and operator calls against a machine's limits.

    python -m benchmarks.roofline [--documents 20] [--tokens 150]

Two tables: SmolLM2-135M against the limits of this machine, measured first, and Llama-3.1-8B against those of an H100
on paper. A bound is the largest of the three times, which could overlap at best. Calls are those of
``benchmarks.device_calls`` (8 passages): the calls of a layer times the layers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.keep_record import RESULTS

METHODS = ("stock", "none", "parallel_encoding", "sorted_inter_document", "inter_document")
PREFIX_AND_SUFFIX = 66
COUNTED_LAYERS = 30
MOVING_BYTES = 14
"""What PINE moves for a number of a key: cos and sin gathered, and two products, each read and written in bfloat16."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model in bfloat16."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of a layer."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.inner

    @property
    def weights(self) -> int:
        """Numbers in all matrices that a token is multiplied with."""
        return self.layers * self.layer_weights + self.vocabulary * self.hidden


@dataclass(frozen=True)
class Machine:
    """Limits: FLOP/s in bfloat16, bytes per second, seconds per operator call."""

    name: str
    flops: float
    bandwidth: float
    call: float


@dataclass(frozen=True)
class Work:
    """What a pass asks of a machine."""

    flops: float
    moved_bytes: float
    calls: float

    def bound(self, machine: Machine) -> float:
        """Return the least seconds that it takes."""
        return max(self.flops / machine.flops, self.moved_bytes / machine.bandwidth, self.calls * machine.call)


SMOLLM2 = Shape(30, 576, 9, 3, 64, 1536, 49152)
LLAMA = Shape(32, 4096, 32, 8, 128, 14336, 128256)
H100 = Machine("H100 (on paper)", 800e12, 3.35e12, 5e-6)


def score_pairs(method: str, documents: int, tokens: int) -> float:
    """Return the pairs of a query and a key of one head for which ``method`` reads a value or ranks a passage."""
    passages = documents * tokens
    causal = (passages + PREFIX_AND_SUFFIX) ** 2 / 2
    others = passages**2 * (documents - 1) / documents  # between passages, both directions
    if method == "parallel_encoding":
        return causal - others / 2
    if method == "sorted_inter_document":
        return causal + others / 2
    return causal + others / 2 + others if method == "inter_document" else causal


def prompt_work(shape: Shape, method: str, documents: int, tokens: int, calls: float) -> Work:
    """Return the work of a cold prompt; ``calls`` of one layer."""
    n_tokens, width = documents * tokens + PREFIX_AND_SUFFIX, shape.heads * shape.head_dim
    attention = 4 * score_pairs(method, documents, tokens) * width
    states = 2 * n_tokens * (6 * shape.hidden + 3 * shape.inner + 4 * width)  # activations written and read, bfloat16
    moved = documents * n_tokens * width * MOVING_BYTES if method == "inter_document" else 0
    flops = shape.layers * (2 * n_tokens * shape.layer_weights + attention)
    return Work(flops, 2 * shape.weights + shape.layers * (states + moved), shape.layers * calls)


def step_work(shape: Shape, method: str, documents: int, tokens: int, calls: float) -> Work:
    """Return the work of a token after the prompt; ``calls`` of one layer."""
    n_tokens, width = documents * tokens + PREFIX_AND_SUFFIX, shape.heads * shape.head_dim
    keys = n_tokens * shape.kv_heads * shape.head_dim
    if method == "inter_document":  # keys unrotated and rotated, and a version of the query for each segment
        read, products = 3 * keys, 2 * (documents + 4) * n_tokens * width
    else:
        read, products = 2 * keys, 4 * n_tokens * width
    flops = 2 * shape.weights + shape.layers * products
    return Work(flops, 2 * shape.weights + shape.layers * 2 * read, shape.layers * calls)


def measure_machine() -> Machine:
    """Return the limits of this machine's processor: the best of several rounds."""
    matrix = torch.randn(2048, 2048, dtype=torch.bfloat16)
    large, small = torch.empty(2**26), torch.zeros(4)
    return Machine(
        "this machine",
        2 * 2048**3 / _least_seconds(lambda: matrix @ matrix),
        2 * large.nbytes / _least_seconds(lambda: large.add_(1.0)),
        _least_seconds(lambda: [small.add_(1.0) for _ in range(1000)]) / 1000,
    )


def _least_seconds(work: Callable[[], object], rounds: int = 5) -> float:
    work()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def table(shape: Shape, machine: Machine, documents: int, tokens: int) -> str:
    """Return the bounds of all methods, and their ratios to the unmodified model's."""
    record = json.loads((RESULTS / "device-calls.json").read_text())["summary"]["methods"]
    rows = [
        f"{machine.name}: {machine.flops / 1e12:.3g} TFLOP/s, {machine.bandwidth / 1e9:.3g} GB/s, "
        f"{machine.call * 1e6:.2g} us a call",
        "| method | prompt: arithmetic | bytes | calls | bound / stock | step: bytes | calls | stock / bound |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    stock: tuple[float, float] | None = None
    for method in METHODS:
        counts = {part: record[method][part]["calls"] / COUNTED_LAYERS for part in ("prompt", "step")}
        prompt = prompt_work(shape, method, documents, tokens, counts["prompt"])
        step = step_work(shape, method, documents, tokens, counts["step"])
        bounds = prompt.bound(machine), step.bound(machine)
        stock = stock or bounds
        times = (prompt.flops / machine.flops, prompt.moved_bytes / machine.bandwidth, prompt.calls * machine.call)
        steps = (step.moved_bytes / machine.bandwidth, step.calls * machine.call)
        cells = [f"`{method}`", *(f"{1e3 * value:.3g} ms" for value in times), f"{bounds[0] / stock[0]:.2f}"]
        cells += [*(f"{1e3 * value:.3g} ms" for value in steps), f"{stock[1] / bounds[1]:.2f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=150)
    options = parser.parse_args()
    print(table(SMOLLM2, measure_machine(), options.documents, options.tokens), end="\n\n")
    print(table(LLAMA, H100, options.documents, options.tokens))


if __name__ == "__main__":
    main()
