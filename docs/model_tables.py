"""The generated tables about models: families, memory, and what each method needs of a model."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from rag_posfix.mitigations import MITIGATIONS

PROMPT, EXPERTS_PROMPT = 3064, 4344
"""Tokens of 20 passages of 150 tokens with prefix and suffix of 32: read once, and by ``context_experts``."""
_BYTES = 2  # of a number in bfloat16
_GiB, _KiB = 1024**3, 1024


class KnownModel(NamedTuple):
    """What the memory of a model is computed from; the numbers are those of its config.json."""

    name: str
    parameters: float  # in billions
    layers: int
    kv_heads: int
    head_dim: int


MODELS = (
    KnownModel("HuggingFaceTB/SmolLM2-135M-Instruct (`smollm2`)", 0.135, 30, 3, 64),
    KnownModel("HuggingFaceTB/SmolLM2-1.7B-Instruct", 1.71, 24, 32, 64),
    KnownModel("Qwen/Qwen2.5-7B-Instruct", 7.62, 28, 4, 128),
    KnownModel("meta-llama/Llama-3.1-8B-Instruct", 8.03, 32, 8, 128),
    KnownModel("Qwen/Qwen3-8B", 8.19, 36, 8, 128),
)


def families_table(results: Path) -> str:
    """Return how a tiny model of each type loads, from the record of ``python -m benchmarks.models``."""
    models = json.loads((results / "models.json").read_text("utf-8"))["summary"]["models"]
    kinds: dict[tuple[int, str], list[str]] = {}
    for name, model in models.items():
        kinds.setdefault(_loading(model), []).append(f"`{name}`")
    rows = [
        f"| {', '.join(sorted(names, key=lambda name: name.strip('`')))} | {how} |"
        for (_, how), names in sorted(kinds.items())
    ]
    return "\n".join(["| `model_type` in config.json | |", "|---|---|", *rows])


def _loading(model: dict[str, Any]) -> tuple[int, str]:
    """Return the place of a row and its text; reasons are cut after their first part and name no class."""
    reason = re.split(r"[:(,]", model["reason"])[0].strip().replace("|", "\\|")
    reason = re.sub(r"^\w+(ForCausalLM|LMHeadModel|Decoder) ", "it ", re.sub(r"by \d\S* ", "", reason))
    texts = {
        "listed": (0, "attention hook, in the table of families"),
        "proved": (1, "attention hook, proved at load"),
        "plain": (2, f"plain prompts: {reason}"),
        "refused": (3, f"not supported: {reason}"),
        "not built": (4, "not examined: no tiny model could be built"),
    }
    return texts[model["reading"]]


def memory_table() -> str:
    """Return weights, and keys and values of one request, in bfloat16: 2 x layers x KV heads x head dimension."""
    rows = []
    for model in MODELS:
        token = 2 * model.layers * model.kv_heads * model.head_dim * _BYTES
        rows.append(
            f"| {model.name} | {model.parameters * _BYTES:.1f} GB | {token / _KiB:.1f} KiB | "
            f"{token * PROMPT / _GiB:.2f} GiB | {token * EXPERTS_PROMPT / _GiB:.2f} GiB |"
        )
    head = "| model | weights | per token | a request, one row | a request, `context_experts` |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def needs_table() -> str:
    """Return what each method needs of the model, whether it is order-invariant, and its cost."""
    rows = []
    for name, kind in MITIGATIONS.items():
        needs = ", ".join(f"`{need.value}`" for need in sorted(kind.requires)) or "-"
        free = "yes" if kind.order_invariant else "no"
        rows.append(f"| [`{name}`](methods/{name}.md) | {free} | {needs} | {_cost(kind)} |")
    return "\n".join(["| method | order-invariant | needs | cost |", "|---|---|---|---|", *rows])


def _cost(kind: type) -> str:
    """Return the first sentence of the section Cost of a docstring."""
    found = re.search(r"^Cost: *(.*?)(?=^\w[\w ]*:|\Z)", inspect.getdoc(kind) or "", re.DOTALL | re.MULTILINE)
    text = " ".join(found[1].split()) if found else ""
    return re.split(r"(?<=[a-z)`])[.;] ", text)[0].rstrip(".").replace("|", "\\|")
