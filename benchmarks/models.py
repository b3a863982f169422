"""Which decoders load and which methods they run: ``python -m benchmarks.models [NAME...] [--out RECORD]``.

A tiny random model of every decoder in transformers and a tiny copy of every chat model of ``chat_models`` are built,
prepared as at load, and asked which methods they run. A model that cannot be built is listed with the error. With
names, model types or chat models, the others keep their entries in the record.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.chat_models import CHAT_MODELS, decoder_types, tiny_config, tiny_model
from benchmarks.keep_record import RESULTS
from rag_posfix.errors import UnsupportedModelError
from rag_posfix.evaluation.record import environment, read_head, save_record
from rag_posfix.mitigations import MITIGATIONS

SECONDS = 60
"""Seconds that one model may take: a default that cannot be made small is skipped."""


def examine(name: str) -> dict[str, Any]:
    """Return how a tiny model loads: ``reading``, ``methods``, ``in_windows``, ``reason``, ``structure`` and seconds.

    Args:
        name: A model type, or a chat model.
    """
    from transformers import CONFIG_MAPPING

    from rag_posfix.patching.install import prepare

    try:
        with _limited(SECONDS):
            if name not in CHAT_MODELS and getattr(CONFIG_MAPPING[name](), "is_encoder_decoder", False):
                return {"reading": "refused", "reason": "it has an encoder"}
            model = tiny_model(CHAT_MODELS[name].config() if name in CHAT_MODELS else tiny_config(name))
    except Exception as error:  # configurations of any kind
        return {"reading": "not built", "reason": " ".join(str(error).split())[:120] or type(error).__name__}
    started = time.perf_counter()
    try:
        with _limited(SECONDS):
            spec = prepare(model)
    except (UnsupportedModelError, TimeoutError) as error:
        return {"reading": "refused", "reason": str(error)}
    seconds = time.perf_counter() - started
    within = spec.windowed
    methods = [name for name, cls in MITIGATIONS.items() if cls().refusal(spec.shape) is None]
    in_windows = [] if within is None else [n for n, cls in MITIGATIONS.items() if cls().refusal(within.shape) is None]
    kind = "plain" if spec.unhooked is not None else "listed" if spec.is_listed else "proved"
    return {
        "reading": kind,
        "reason": "" if spec.unhooked is None else spec.unhooked.reason,
        "methods": methods,
        "in_windows": [name for name in in_windows if name not in methods],
        "lacks": sorted(set(spec.shape.lacks.values())) if spec.unhooked is None else [],
        "structure": spec.structure,
        "seconds": round(seconds, 3),
    }


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"it took more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def summarize(entries: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return how many model types load in each way, and the median seconds that preparing a tiny model took.

    Args:
        entries: Of model types and chat models, as ``examine`` returns them.
    """
    models = {name: entry for name, entry in sorted(entries.items()) if name not in CHAT_MODELS}
    kinds = [model["reading"] for model in models.values()]
    counts = {kind: kinds.count(kind) for kind in ("listed", "proved", "plain", "refused", "not built")}
    seconds = {
        kind: round(median([m["seconds"] for m in models.values() if m["reading"] == kind] or [0.0]), 3)
        for kind in ("listed", "proved", "plain")
    }
    chat_models = {name: entries[name] for name in CHAT_MODELS if name in entries}
    return {"counts": counts, "median_seconds": seconds, "models": models, "chat_models": chat_models}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="model types and chat models; all if none is named")
    parser.add_argument("--out", type=Path, default=RESULTS / "models.json")
    options = parser.parse_args(arguments)
    entries: dict[str, dict[str, Any]] = {}
    if options.names and options.out.exists():
        summary = read_head(options.out)["summary"]
        entries = {**summary["models"], **summary.get("chat_models", {})}
    for name in options.names or (*decoder_types(), *CHAT_MODELS):
        entries[name] = examine(name)
        print(f"{name}: {entries[name]['reading']} {entries[name]['reason']}".rstrip(), flush=True)
    summary = summarize(entries)
    save_record(options.out, {"kind": "models", "summary": summary, "environment": environment()}, None)
    print(summary["counts"])


if __name__ == "__main__":
    main()
