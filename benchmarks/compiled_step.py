"""Whether `torch.compile` of a decode step pays.

    python -m benchmarks.compiled_step [METHOD]

Times one decode step of one request, 20 passages of 150 tokens, as it is and with parts of the model compiled in
place: the norms, the multi-layer perceptrons, both, and whole decoder layers. Compiled code may round differently, so
each line also says how far the next token's log-probabilities move. Steps of the kinds alternate; the least counts.
With weights packed ahead (`freezing`), each module is compiled on its own, which takes minutes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.evaluation.speed.runs import bench_layout
from rag_posfix.generation.decode.session import Session
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.load import load_engine

STEPS = 30


def layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the decoder layers."""
    yield from model.get_submodule("model.layers").children()


def norms(model: nn.Module) -> list[nn.Module]:
    """Return the norms of every layer, and the last one."""
    found = [part for layer in layers(model) for name, part in layer.named_children() if name.endswith("layernorm")]
    return [*found, model.get_submodule("model.norm")]


def perceptrons(model: nn.Module) -> list[nn.Module]:
    """Return the multi-layer perceptron of every layer."""
    return [layer.get_submodule("mlp") for layer in layers(model)]


Parts = Callable[[nn.Module], list[nn.Module]]

KINDS: dict[str, tuple[Parts, bool]] = {
    "as it is": (lambda model: [], False),
    "norms": (norms, False),
    "perceptrons": (perceptrons, False),
    "norms and perceptrons": (lambda model: [*norms(model), *perceptrons(model)], False),
    "whole layers": (lambda model: list(layers(model)), False),
    "perceptrons, packed": (perceptrons, True),
}


def opened(name: str, parts: Parts, packed: bool) -> tuple[Engine, Session, float]:
    """Return an engine with parts compiled, a session that has decoded a little, and the seconds that took."""
    engine = load_engine()
    session = engine.open(bench_layout(engine.encoder, 20, 150), MitigationChoice(name), 2 * STEPS)
    for part in parts(engine.loaded.model):  # after the prompt: only steps are compiled
        part.compile(dynamic=True)
    started = time.perf_counter()
    torch._inductor.config.freezing = packed
    for token in range(4):
        session.advance(100 + token)
    return engine, session, time.perf_counter() - started


def main() -> None:
    """Print a line for each kind."""
    name = sys.argv[1] if len(sys.argv) > 1 else "none"
    torch._dynamo.config.recompile_limit = 256  # a packed module shares no code with the next layer's
    ready = {}
    for kind, (parts, packed) in KINDS.items():
        try:
            ready[kind] = opened(name, parts, packed)
        except Exception as error:
            print(f"{kind}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
    times: dict[str, list[float]] = {kind: [] for kind in ready}
    for step in range(STEPS):
        for kind, (_, session, _) in ready.items():
            started = time.perf_counter()
            session.advance(200 + step)
            times[kind].append(time.perf_counter() - started)
    plain = ready["as it is"][1].next_log_probs()
    for kind, (_, session, first) in ready.items():
        moved = float((session.next_log_probs() - plain).abs().max())
        ratio = min(times["as it is"]) / min(times[kind])
        print(
            f"{kind}: {min(times[kind]) * 1e3:.1f} ms a step, {ratio:.2f} times as fast; "
            f"first four steps {first:.1f} s; log-probabilities move by {moved:.3g}"
        )


if __name__ == "__main__":
    main()
