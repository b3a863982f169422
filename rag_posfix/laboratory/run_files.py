"""The files of one training run: a checkpoint while it runs, then the decoder and what was measured.

A checkpoint is one safetensors file that is replaced whole: weights, Adam's states, and as metadata the step and the
measures so far.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rag_posfix.encodings.decoder import Decoder
from rag_posfix.evaluation.record import write_whole
from rag_posfix.laboratory.measuring import Measured
from rag_posfix.training_tensors import flattened, separated

_log = logging.getLogger(__name__)

CHECKPOINT, RESULT = "checkpoint.safetensors", "run.json"


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A point of a training run.

    Attributes:
        step: Steps done.
        seconds: Time that they took, evaluations included.
        history: (step, measure in distribution) of each evaluation.
    """

    step: int = 0
    seconds: float = 0.0
    history: tuple[tuple[int, Measured], ...] = ()

    def text(self) -> str:
        """Return the snapshot as JSON."""
        return json.dumps(
            {
                "step": self.step,
                "seconds": self.seconds,
                "history": [[step, asdict(result)] for step, result in self.history],
            }
        )

    @classmethod
    def read(cls, text: str) -> Snapshot:
        """Return the snapshot that ``text`` wrote."""
        payload: dict[str, Any] = json.loads(text)
        history = tuple((step, Measured.of(result)) for step, result in payload["history"])
        return cls(payload["step"], payload["seconds"], history)


@dataclass(frozen=True, slots=True, eq=False)
class FinishedRun:
    """What came out of a training run.

    Attributes:
        snapshot: Its end.
        splits: The measure of each split.
        parameters: Number of trained numbers.
    """

    snapshot: Snapshot
    splits: dict[str, Measured]
    parameters: int


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The folder of one training run; None keeps nothing.

    Attributes:
        folder: The folder.
    """

    folder: Path | None

    def finished(self) -> FinishedRun | None:
        """Return the result of a run that came to its end earlier, or None."""
        if self.folder is None:
            return None
        try:
            payload = json.loads((self.folder / RESULT).read_text("utf-8"))
            splits = {name: Measured.of(result) for name, result in payload["splits"].items()}
            return FinishedRun(Snapshot.read(json.dumps(payload["snapshot"])), splits, payload["parameters"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s cannot be used (%s); the run is repeated", self.folder / RESULT, error)
            return None

    def finish(self, decoder: Decoder, run: FinishedRun) -> None:
        """Write the decoder and the result, and remove the checkpoint."""
        if self.folder is None:
            return
        decoder.save(self.folder)
        payload = {
            "parameters": run.parameters,
            "splits": {name: asdict(result) for name, result in run.splits.items()},
            "snapshot": json.loads(run.snapshot.text()),
        }
        self._write(RESULT, json.dumps(payload, indent=2).encode() + b"\n")
        (self.folder / CHECKPOINT).unlink(missing_ok=True)

    def keep(self, decoder: Decoder, optimizer: torch.optim.Optimizer, snapshot: Snapshot) -> None:
        """Write a checkpoint."""
        if self.folder is None:
            return
        from safetensors.torch import save

        content = save(flattened(decoder.state_dict(), optimizer), {"run": snapshot.text()})
        self._write(CHECKPOINT, content)

    def resume(self, decoder: Decoder, optimizer: torch.optim.Optimizer) -> Snapshot:
        """Put weights and Adam's states of the checkpoint in place and return its snapshot; without one, the start.

        A checkpoint that cannot be read counts as none, with a warning.
        """
        if self.folder is None or not (self.folder / CHECKPOINT).exists():
            return Snapshot()
        from safetensors import SafetensorError, safe_open

        path = self.folder / CHECKPOINT
        try:
            with safe_open(path, framework="pt") as file:
                snapshot = Snapshot.read((file.metadata() or {})["run"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            _put(tensors, decoder, optimizer)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            _log.warning("%s cannot be used (%s); the run starts again", path, error)
            return Snapshot()
        return snapshot

    def _write(self, name: str, content: bytes) -> None:
        if self.folder is not None:
            write_whole(self.folder / name, [content])


def _put(tensors: dict[str, Tensor], decoder: Decoder, optimizer: torch.optim.Optimizer) -> None:
    """Load the tensors of a checkpoint."""
    weights, states = separated(tensors)
    decoder.load_state_dict(weights)
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
