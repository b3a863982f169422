"""Counts what every method asks of a GPU: operators, values that are read, uploads; for a prompt and for a token.

    python -m benchmarks.device_calls [--layers 30] [--out benchmarks/results/device-calls.json]

Counted on the device twin (``tests/support/device_twin.py``), which computes on the CPU: no GPU is needed. Counts
depend on the layers, not on the width of the model. ``docs/gpu.md`` names the record.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.keep_record import RESULTS
from benchmarks.tables import filled, table
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.evaluation.record import environment, save_record
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.plan.layout import Layout
from tests.support.device_twin import DEVICE, Counts, counted
from tests.support.tiny import stock_model, toy_layout
from tests.support.toy_encoder import ToyEncoder
from tests.support.twin_engines import start, tiny_engine_on

STOCK = "stock"
METHODS = (STOCK, "none", "default", *(name for name in MITIGATIONS.names() if name != "none"))
PASSAGES, TOKENS = 8, 40
STEPS = 3


def count_method(name: str, layers: int) -> dict[str, dict[str, int]]:
    """Return calls, reads and uploads of a prompt and of a token after it, by a name in ``METHODS``."""
    lengths = (TOKENS,) * PASSAGES
    layout = toy_layout(lengths, relevance=tuple(1 - index / (2 * PASSAGES) for index in range(PASSAGES)))
    prepare = (_open_stock if name == STOCK else _open)(name, layout, layers)
    with torch.inference_mode():
        with counted() as prompt:
            step = prepare()
        with counted() as steps:
            for _ in range(STEPS):
                step()
    return {"prompt": _numbers(prompt, 1), "step": _numbers(steps, STEPS)}


def _open(name: str, layout: Layout, layers: int) -> Callable[[], Callable[[], None]]:
    """Return a function that reads the prompt under a method and returns the function that decodes a token."""
    engine = tiny_engine_on(DEVICE, layers=layers)
    parameters = {} if name == "default" else dict(MITIGATIONS.get(name).example)

    def read() -> Callable[[], None]:
        session = engine.open(layout, MitigationChoice(name, parameters), STEPS + 1)
        session.next_log_probs()
        return lambda: session.advance(int(session.next_log_probs().argmax()))

    return read


def _open_stock(_: str, layout: Layout, layers: int) -> Callable[[], Callable[[], None]]:
    """Return the same for transformers' own model and attention."""
    model = stock_model(vocab_size=ToyEncoder.vocab_size, num_hidden_layers=layers).to(DEVICE)

    def read() -> Callable[[], None]:
        output = model(torch.tensor([layout.token_ids], device=DEVICE), use_cache=True, logits_to_keep=1)
        cache, logits = output.past_key_values, [output.logits]

        def step() -> None:
            token = int(logits.pop()[0, -1].argmax())
            ids = torch.full((1, 1), token, device=DEVICE)
            logits.append(model(ids, past_key_values=cache, use_cache=True).logits)

        return step

    return read


def _numbers(counts: Counts, steps: int) -> dict[str, int]:
    """Return the counts of one step, rounded up."""
    totals = {"calls": counts.calls.total(), "reads": counts.reads.total(), "uploads": counts.uploads.total()}
    return {name: -(-total // steps) for name, total in totals.items()}


def table_of(methods: Mapping[str, Mapping[str, Mapping[str, int]]]) -> dict[str, Any]:
    """Return the table: calls of each method, how many times the stock model's, and waits."""
    columns = {"method": "{name}"}
    for phase, key in (("prompt", "prompt"), ("token", "step")):
        columns[f"{phase}: calls"] = f"{{{key}[calls]:,}} ({{{key}_ratio:.1f}}x)"
        columns[f"{phase}: reads + uploads"] = f"{{{key}[reads]}} + {{{key}[uploads]}}"
    stock = methods["stock"]
    return filled(
        columns,
        (
            {
                "name": "the stock model" if name == "stock" else f"`{name}`", **counts,
                **{f"{phase}_ratio": counts[phase]["calls"] / stock[phase]["calls"] for phase in counts},
            }
            for name, counts in methods.items()
        ),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS / "device-calls.json")
    options = parser.parse_args()
    start()
    methods = {name: count_method(name, options.layers) for name in METHODS}
    head = {
        "kind": "device-calls",
        "settings": {"layers": options.layers, "passages": PASSAGES, "tokens": TOKENS},
        "summary": {"methods": methods},
        "tables": {"device-calls": table_of(methods)},
        "environment": environment(),
    }
    save_record(options.out, head, None)
    print(table([head]))


if __name__ == "__main__":
    main()
