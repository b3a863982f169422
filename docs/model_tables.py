"""The tables of docs/choosing-a-model.md, from the record of ``python -m benchmarks.models``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.chat_models import CHAT_MODELS
from benchmarks.keep_record import RESULTS
from rag_posfix.evaluation.record import read_head
from rag_posfix.mitigations import MITIGATIONS

_READINGS = {"listed": "hook, listed", "proved": "hook, proved", "plain": "plain prompts"}


def families_table() -> str:
    """Return how a tiny model of each type loads."""
    kinds: dict[tuple[int, str], list[str]] = {}
    for name, model in _summary()["models"].items():
        kinds.setdefault(_loading(model), []).append(f"`{name}`")
    others = kinds.pop((5, "not supported"))
    rows = [
        f"| {', '.join(sorted(names, key=lambda name: name.strip('`')))} | {how} |"
        for (_, how), names in sorted(kinds.items())
    ]
    rows.append(f"| the {len(others)} others | not supported |")
    return "\n".join(["| `model_type` in config.json | |", "|---|---|", *rows])


def snapshots_table() -> str:
    """Return the bytes of snapshots of published models, and what a warm store saves, by type."""
    rows = ["| model | MB of 128 tokens | kB per further token | ms, cold and warm | difference |", "|" + "---|" * 5]
    for _, entry in sorted(read_head(RESULTS / "snapshots.json")["summary"]["models"].items()):
        cold, warm = (round(1000 * entry[name]) for name in ("cold_seconds", "warm_seconds"))
        rows += [
            f"| {name} | {size['bytes'] / 1e6:.3g} | {size['bytes_per_token'] / 1e3:.3g} | {cold}, {warm} | "
            f"{entry['difference']:.0e} |".replace("0e+00", "0")
            for name, size in entry["published"].items()
        ]
    return "\n".join(rows)


def chat_models_table() -> str:
    """Return size, licence, loading, methods and traps of each chat model."""
    entries = _summary()["chat_models"]
    rows = ["| model | type | billions | licence | loads with | methods | tokenizer and template |", "|" + "---|" * 7]
    for model in CHAT_MODELS.values():
        entry = entries[model.name]
        rows.append(
            f"| {model.name} | `{model.model_type}` | {model.parameters} | {model.licence} | "
            f"{_READINGS[entry['reading']]} | {_methods(entry, model.window)} | {model.traps or '-'} |"
        )
    return "\n".join(rows)


def _summary() -> dict[str, Any]:
    summary: dict[str, Any] = read_head(RESULTS / "models.json")["summary"]
    return summary


def _methods(entry: Mapping[str, Any], window: int | None) -> str:
    """Return how many methods run, at any length and within sliding windows, and the one that does not."""
    any_length, within = entry["methods"], entry["in_windows"]
    text = f"{len(any_length)}"
    if within:
        text += f", {len(within)} more within {window:,} tokens"
    missing = [f"`{name}`" for name in MITIGATIONS.names() if name not in {*any_length, *within}]
    return f"{text}; not {missing[0]}" if len(missing) == 1 else text


def _loading(model: Mapping[str, Any]) -> tuple[int, str]:
    """Return the place of a row and its text."""
    structure = model.get("structure", {})
    stored = (structure.get("stored_keys", False), structure.get("stored_snapshots", False))
    texts = {
        "listed": (0, "attention hook, in the table of families"),
        "proved": (1, "attention hook, proved at load"),
        "plain": {
            (True, False): (2, "plain prompts, keys are stored"),
            (False, True): (3, "plain prompts, snapshots are stored"),
            (False, False): (4, "plain prompts, nothing is stored"),
        }[stored],
        "refused": (5, "not supported"),
        "not built": (6, "not examined: no tiny model could be built"),
    }
    return texts[model["reading"]]
