"""Files of a training run, and its evaluation on held-out samples."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rag_posfix.checkpoints import flattened, separated
from rag_posfix.errors import ConfigError, EvaluationError
from rag_posfix.evaluation.record import writing_results
from rag_posfix.evaluation.statistics import mean
from rag_posfix.files import replace_durably
from rag_posfix.lab.training.data.make_data import Sample
from rag_posfix.lab.training.objectives import Objective, place_at
from rag_posfix.lab.training.prompts import PromptMaker, answer_logits, answer_loss
from rag_posfix.lab.training.tuned_model import TunedModel
from rag_posfix.mitigations.base import Mitigation

Curves = dict[str, tuple[float, ...]]
"""Method -> mean log-probability per token of the answer at each place."""


def shares(count: int) -> tuple[float, ...]:
    """Return ``count`` positions from the first (0) to the last (1); a single position is the first."""
    return tuple(index / max(1, count - 1) for index in range(count))


def measure_places(
    model: TunedModel, prompts: PromptMaker, objective: Objective, samples: Sequence[Sample], count: int
) -> Curves:
    """Return the mean log-probability per token of the answers at each place, for each method of the objective.

    An order-invariant method is measured at one position.

    Cost: one forward pass per sample, place and method.
    """
    curves = {}
    model.loaded.model.eval()
    with torch.no_grad(), model.computing():
        for method in objective.methods:
            positions = shares(1 if method.is_order_invariant else count)
            curves[method.name] = tuple(
                mean([_score(model, prompts, method, sample, at_share) for sample in samples])
                for at_share in positions
            )
    return curves


def _score(model: TunedModel, prompts: PromptMaker, method: Mitigation, sample: Sample, share: float) -> float:
    prompt = prompts.make(sample.move_gold(place_at(sample, share)))
    plan = method.checked_plan(prompt.layout, model.loaded.spec.shape)
    return -float(answer_loss(answer_logits(model.loaded, prompt.layout, plan, prompt.answer), prompt.answer))


def worst_of(curves: Curves) -> float:
    """Return the lowest value of all methods and places; NaN if one is NaN."""
    values = [value for curve in curves.values() for value in curve]
    return math.nan if any(map(math.isnan, values)) else min(values)


def best_share(curves: Curves) -> float:
    """Return the place with the highest value of the first method, 0 (first) to 1 (last)."""
    curve = next(iter(curves.values()))
    index = max(range(len(curve)), key=lambda index: curve[index])
    return shares(len(curve))[index]


_log = logging.getLogger(__name__)

CHECKPOINT, BEST, RESULT = "checkpoint.safetensors", "best.safetensors", "result.json"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation during training.

    Attributes:
        step: Steps before it.
        curves: Mean log-probability per token by method and place.
        loss: Mean loss of the steps since the last evaluation; 0 before the first step.
    """

    step: int
    curves: Curves
    loss: float

    @property
    def worst(self) -> float:
        """The lowest value of all methods and places; NaN if one is NaN."""
        return worst_of(self.curves)


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a training run is.

    Attributes:
        step: Steps done.
        seconds: Time that they took, evaluations included.
        history: The evaluations so far; the first is of the untrained model.
        trained_parameters: Number of trained numbers, at the end of a run; None: not known.
    """

    step: int = 0
    seconds: float = 0.0
    history: tuple[Evaluation, ...] = ()
    trained_parameters: int | None = None

    def with_evaluation(self, curves: Curves, loss: float) -> RunState:
        """Return the state with another evaluation."""
        return replace(self, history=(*self.history, Evaluation(self.step, curves, loss)))

    @property
    def best(self) -> Evaluation:
        """The evaluation with the best worst place, one with NaN only if all have; the earliest of equal ones."""

        def rank(evaluation: Evaluation) -> tuple[bool, float, int]:
            return not math.isnan(evaluation.worst), evaluation.worst, -evaluation.step

        return max(self.history, key=rank)

    @property
    def is_new_best(self) -> bool:
        """Whether the last evaluation is the best."""
        return self.best is self.history[-1]

    def evaluations_since_best(self) -> int:
        """Return how many evaluations came after the best."""
        return len(self.history) - 1 - self.history.index(self.best)

    def as_json(self) -> dict[str, Any]:
        """Return the state as JSON."""
        history = [
            {"step": evaluation.step, "curves": evaluation.curves, "loss": evaluation.loss}
            for evaluation in self.history
        ]
        return {
            "step": self.step, "seconds": self.seconds, "history": history,
            "trained_parameters": self.trained_parameters,
        }  # fmt: skip

    @classmethod
    def of(cls, payload: dict[str, Any]) -> RunState:
        """Return the state that ``as_json`` wrote."""
        history = tuple(
            Evaluation(entry["step"], {name: tuple(curve) for name, curve in entry["curves"].items()}, entry["loss"])
            for entry in payload["history"]
        )
        # Results of earlier versions lack the last.
        return cls(payload["step"], payload["seconds"], history, payload.get("trained_parameters"))


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The folder of one training run.

    A checkpoint is one file that replaces the former one at once: it is whole whenever the process ends.

    Attributes:
        folder: The folder.
        run: Digest of what decides the run.
    """

    folder: Path
    run: str

    def finished(self) -> RunState | None:
        """Return the end of a run that was finished earlier, or None."""
        try:
            payload = json.loads((self.folder / RESULT).read_text("utf-8"))
            self._check(payload["run"])
            return RunState.of(payload)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            _log.warning("%s cannot be used (%s); the run is repeated", self.folder / RESULT, error)
            return None

    def finish(self, state: RunState) -> None:
        """Write the result and remove the checkpoint and the best weights."""
        self._write(RESULT, json.dumps({**state.as_json(), "run": self.run}, indent=2).encode() + b"\n")
        for name in (CHECKPOINT, BEST):
            (self.folder / name).unlink(missing_ok=True)

    def keep(self, model: TunedModel, optimizer: torch.optim.Optimizer, state: RunState) -> None:
        """Write a checkpoint, and before it the weights if they are the best so far."""
        weights = model.trained()
        if state.is_new_best:
            self._save(BEST, weights, state)
        self._save(CHECKPOINT, flattened(weights, optimizer), state)

    def resume(self, model: TunedModel, optimizer: torch.optim.Optimizer) -> RunState:
        """Put weights and states of the checkpoint in place and return its state; without one, the start.

        A checkpoint that cannot be read counts as none, with a warning.
        """
        path = self.folder / CHECKPOINT
        if not path.exists():
            return RunState()
        try:
            tensors, state = self._load(path)
            _put(tensors, model, optimizer)
        except ConfigError:
            raise
        except Exception as error:  # a file of safetensors that is damaged raises an error of that package
            _log.warning("%s cannot be used (%s); the run starts again", path, error)
            return RunState()
        return state

    def restore_best(self, model: TunedModel, state: RunState) -> None:
        """Put the weights of the best evaluation in place."""
        path = self.folder / BEST
        try:
            tensors, best = self._load(path)
            if best.step != state.best.step:
                raise ValueError(f"it is of step {best.step}, and step {state.best.step} was best")
            model.put(tensors)
        except Exception as error:
            raise EvaluationError(f"{path} cannot be used ({error}); remove {self.folder} and train again") from error

    def _check(self, run: str) -> None:
        if run != self.run:
            raise ConfigError(
                f"--out {str(self.folder)!r} holds a run with another model, data or settings; choose another folder, "
                "or give the same options to continue it"
            )

    def _load(self, path: Path) -> tuple[dict[str, Tensor], RunState]:
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            payload = json.loads((file.metadata() or {})["state"])
            self._check(payload["run"])
            return {name: file.get_tensor(name) for name in file.keys()}, RunState.of(payload)  # noqa: SIM118

    def _save(self, name: str, tensors: dict[str, Tensor], state: RunState) -> None:
        from safetensors.torch import save

        content = save(
            {key: tensor.detach().to("cpu").contiguous().clone() for key, tensor in tensors.items()},
            {"state": json.dumps({**state.as_json(), "run": self.run})},
        )
        self._write(name, content)

    def _write(self, name: str, content: bytes) -> None:
        with writing_results(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_durably(self.folder / name, content)


def _put(tensors: dict[str, Tensor], model: TunedModel, optimizer: torch.optim.Optimizer) -> None:
    """Load the tensors of a checkpoint."""
    weights, states = separated(tensors)
    model.put(weights)
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
