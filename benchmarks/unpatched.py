"""What a model costs that runs without the attention hook: loading, first token and decoding, against the hook.

    python -m benchmarks.unpatched [--model smollm2] [--documents 10] [--tokens 100] [--rounds 3] [--new-tokens 12]
        [--out DIR]

The same weights are checked as a listed family, as a model that is proved when it is loaded, and as one that reads
plain prompts. The ``default`` then runs with the hook, and without it in four ways: its rows in one batch and one
after another, without a passage store and with one that has the passages. Times are divided by those of the stock
model on a prompt of all passages, timed in the same round. All numbers are medians of rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from benchmarks.study import study_options, write_study
from benchmarks.tables import filled, table
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.evaluation.record import model_facts
from rag_posfix.evaluation.speed.bench import bench_layout, method_run, stock_run
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.load import load_engine
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.patching.install import install, prepare, stock_copy, verify, verify_plain
from rag_posfix.patching.spec import PlainForward
from rag_posfix.patching.structure import read_structure

METHOD = MitigationChoice("default")


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = study_options("unpatched", __doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--documents", type=int, default=10, help="passages of the prompt")
    parser.add_argument("--tokens", type=int, default=100, help="tokens per passage")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=12, help="tokens that are decoded")
    return parser.parse_args(arguments)


def loading_seconds(engine: Engine, rounds: int) -> dict[str, float]:
    """Return the seconds of installing and checking a model that is loaded, by the way of loading."""

    def fresh() -> Any:
        return stock_copy(engine.loaded.model, engine.loaded.spec)

    def prove(model: Any) -> None:
        verify(model, install(model, structure=read_structure(model)), thorough=True)

    ways: dict[str, Callable[[Any], object]] = {
        "listed": prepare,
        "proved": prove,
        "plain": lambda model: verify_plain(model, PlainForward.of(model, "measured")),
    }
    return {name: round(median(_seconds(way, fresh()) for _ in range(rounds)), 3) for name, way in ways.items()}


def _seconds(call: Callable[[Any], object], model: Any) -> float:
    started = time.perf_counter()
    call(model)
    return time.perf_counter() - started


def engines(engine: Engine) -> dict[str, Engine]:
    """Return the model with the hook, and without it: rows in a batch or one after another, with and without a store.

    Raises:
        SystemExit: without the hook the model cannot read rows in a batch, or keeps no keys.
    """
    model = stock_copy(engine.loaded.model, engine.loaded.spec)
    with torch.inference_mode():
        forward, _ = verify_plain(model, PlainForward.of(model, "measured"))
    if not forward.batch or forward.kept is None:
        raise SystemExit(f"{engine.model_id} reads no rows in a batch or keeps no keys: choose a model with attention")
    result = {"hook": engine}
    for name, plain in {"batch": forward, "one by one": replace(forward, batch="")}.items():
        spec = replace(engine.loaded.spec, unhooked=plain, handles=(), windowed=None, extended=None)
        loaded = LoadedModel(model, spec)
        loaded = replace(loaded, spec=replace(loaded.spec, shape=replace(loaded.spec.shape, capabilities=frozenset())))
        for stored in (False, True):
            store = PassageStore([MemoryTier()]) if stored else None
            key = f"{name}, stored" if stored else name
            result[key] = Engine(loaded, engine.encoder, engine.model_id, engine.fingerprint, passages=store)
    return result


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    chosen = options(arguments)
    engine = load_engine(chosen.model)
    loading = loading_seconds(engine, chosen.rounds)
    layout = bench_layout(engine.encoder, chosen.documents, chosen.tokens)
    stock = stock_run(engine, layout)
    runs = {name: method_run(each, layout, METHOD, chosen.new_tokens) for name, each in engines(engine).items()}
    rounds = []
    for _ in range(chosen.rounds + 1):  # the first one sets up kernels and fills the stores, and is left out
        first, decode = stock(chosen.new_tokens)
        times = {name: run(chosen.new_tokens) for name, run in runs.items()}
        rounds.append({name: (a / first, decode / b) for name, (a, b) in times.items()})
    ratios = {
        name: {
            "first_token": round(median(each[name][0] for each in rounds[1:]), 3),
            "tokens_per_s": round(median(each[name][1] for each in rounds[1:]), 3),
        }
        for name in runs
    }
    summary = {"loading_s": loading, "ratios": ratios}
    columns = {
        "`default`": "{name}", "first token": "{first_token:~.2f}", "tokens per second": "{tokens_per_s:~.2f}",
    }  # fmt: skip
    tables = {"unpatched": filled(columns, ({"name": name, **row} for name, row in ratios.items()))}
    print(loading)
    print(table([{"kind": "unpatched", "tables": tables}]))
    write_study(chosen, "unpatched", summary, **model_facts(engine), threads=torch.get_num_threads(), tables=tables)
    return summary


if __name__ == "__main__":
    main()
