"""Retrieval by position before and after IN2: ``python -m benchmarks.val_probes FILM_VAL --out DIR``.

FILM_VAL holds the pieces of FILM's VaL probes: document_sentences, code_functions and database_entities, each
``.jsonl.gz``. One piece stands among others at the first, the middle and the last position, and ``rag-posfix eval
positions`` asks about it. Training data are questions about the demo and key-value retrieval, and not of the
form of the probes. The record has the curves of both models; the log-probability of the answer is the finest number.

Source: An et al. (2024), Make Your LLM Fully Utilize the Context, section 3, https://arxiv.org/abs/2404.16811
Differs from the paper: a small model, contexts of a few hundred tokens, our questions.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fine_tuning import command, gains, last_record, scores, training
from benchmarks.keep_record import position_row
from rag_posfix.evaluation.answers.experiment import summarize_positions
from rag_posfix.evaluation.record import environment, file_digest, read_record, write_record

BATCH, HELD_OUT = 4, 4
PROBES = ("document_sentences", "code_functions", "database_entities")
"""Files of pieces, without their suffixes."""


def train(chosen: argparse.Namespace) -> Path:
    """Train an adapter with IN2; return its folder."""
    samples = chosen.out / "samples"
    command(
        "train", "data", "--pairs", "demo", "--templates", "key_value", "--multi", 0, "--min-tokens", 150,
        "--max-tokens", 300, "--segment-words", 60, "--samples", BATCH * chosen.steps + HELD_OUT,
        "--model", chosen.model, "--out", samples,
    )  # fmt: skip
    command(
        "-v", "train", "in2", "--data", samples / "samples.jsonl", "--steps", chosen.steps,
        "--batch", BATCH, "--held-out", HELD_OUT, "--evaluate-every", chosen.steps, "--learning-rate", 5e-4,
        "--model", chosen.model, "--out", chosen.out / "in2",
    )  # fmt: skip
    return Path(chosen.out, "in2", "adapter")


def evaluate(chosen: argparse.Namespace, name: str, adapter: Path | None) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each probe with a model."""
    positions = ",".join(map(str, (0, chosen.pieces // 2, chosen.pieces - 1)))
    rows = {}
    for probe in PROBES:
        out = chosen.out / name / probe
        command(
            "eval", "positions", "--data", chosen.pieces_of / f"{probe}.jsonl.gz", "--documents", chosen.pieces,
            "--limit", chosen.questions, "--gold-positions", positions, "--mitigation", "none", "--max-tokens", 16,
            "--model", chosen.model, "--out", out, *(() if adapter is None else ("--adapter", adapter)),
        )  # fmt: skip
        rows[probe] = [dict(row) for row in read_record(last_record(out, "positions")).rows]
    return rows


def curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the measures by position, and those with the gold piece alone."""
    summary = summarize_positions([position_row(row) for row in rows])
    return {"gold_only": summary["gold_only"], "none": summary["mitigations"]["none"]["positions"]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.val_probes", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pieces_of", type=Path, metavar="FILM_VAL", help="folder with the three files of pieces")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=16, help="of each probe")
    parser.add_argument("--pieces", type=int, default=16, help="in a prompt")
    parser.add_argument("--steps", type=int, default=24, help="of the training")
    parser.add_argument("--model", default="smollm2")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    before = evaluate(chosen, "before", None)
    after = evaluate(chosen, "after", train(chosen))
    files = [chosen.pieces_of / f"{name}.jsonl.gz" for name in PROBES]
    head = {
        "kind": "val-probes", **environment(), "model": chosen.model,
        "data": {file.name: file_digest(file) for file in files},
        "settings": {
            **{name: getattr(chosen, name) for name in ("questions", "pieces", "steps")},
            "commands": "benchmarks/val_probes.py",
        },
        "summary": {
            "models": {
                name: {probe: curves(found) for probe, found in model.items()}
                for name, model in (("before", before), ("in2", after))
            },
            "gains": {probe: gains(scores(before[probe]), scores(after[probe]))["none"] for probe in PROBES},
            "training": training(chosen.out / "in2"),
        },
    }  # fmt: skip
    print(write_record(chosen.out, "val-probes", head))


if __name__ == "__main__":
    main()
