"""Training of a tiny model on generated samples, in milliseconds; run as a program, for tests that kill it."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path

from rag_posfix.generation.load import load_engine
from rag_posfix.lab.training.data.make_data import DataSources, make_training_data
from rag_posfix.lab.training.data.settings import DataSettings, TrainSettings
from rag_posfix.lab.training.loop import tune
from rag_posfix.lab.training.objectives import Block, Distill, InformationIntensive
from rag_posfix.mitigations import create
from tests.support.tiny import save_tiny

SETTINGS = TrainSettings(
    steps=4, batch=2, learning_rate=5e-3, warmup=1, rank=2, alpha=4.0, dtype="float32", evaluate_every=2, held_out=2,
    places=3, patience=0,
)  # fmt: skip
OBJECTIVES = {
    "in2": InformationIntensive(create("none")),
    "block": Block(create("none"), create("parallel_windows")),
    "distill": Distill(create("none")),
}


def tiny_samples(folder: Path) -> Path:
    """Write a few samples whose tokens are characters, and return their file."""
    settings = DataSettings(samples=8, min_tokens=80, max_tokens=160, length_bins=2, multi=0.2)
    return make_training_data(DataSources("key_value"), settings, len, folder).files["samples"]


def tiny_folders(folder: Path, layers: int = 2) -> tuple[Path, Path]:
    """Write a tiny model and samples; return the folder of the model and the file of the samples."""
    model = save_tiny(folder / "tiny", max_position_embeddings=1024, num_hidden_layers=layers)
    return model, tiny_samples(folder / "data")


def tiny_tune(
    model: Path, data: Path, out: Path, *, name="in2", objective=None, settings=SETTINGS, steps=None, teacher=None
):
    """Train the tiny model with an objective, or that of a name; ``steps`` is called with each step that was done."""

    @contextmanager
    def progress(_step):
        yield lambda done, total: steps(done) if steps is not None else None

    engine = load_engine(str(model), dtype="float32", device="cpu")
    return tune(
        engine, objective or OBJECTIVES[name], data, settings, out, base=str(model), teacher=teacher, progress=progress
    )  # fmt: skip


def main() -> None:
    """Train, write a line for each step that was done, and go on at each line that is read."""

    def steps(done: int) -> None:
        sys.stdout.write(f"{done}\n")
        sys.stdout.flush()
        sys.stdin.readline()

    tiny_tune(*map(Path, sys.argv[1:4]), steps=steps)


if __name__ == "__main__":
    main()
