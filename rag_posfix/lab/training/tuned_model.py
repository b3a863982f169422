"""The model that is trained: with LoRA through peft, or with all its weights."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError, missing_extra
from rag_posfix.evaluation.record import writing_results
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.one_pass import recompute_layers
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.lab.training.data.settings import TrainSettings


@dataclass(frozen=True, slots=True, eq=False)
class TunedModel:
    """A model that is trained.

    Attributes:
        engine: The model with its tokenizer.
        adapted: peft's wrapper around the same model, for LoRA; None if all weights are trained.
        teacher: The model before training, where all weights are trained and a teacher is needed.
        autocast: Whether products are computed in bfloat16 from float32 weights.
    """

    engine: Engine
    adapted: Any = None
    teacher: LoadedModel | None = None
    autocast: bool = False

    @property
    def loaded(self) -> LoadedModel:
        """The model with the attention hook, LoRA included."""
        return self.engine.loaded

    def trained(self) -> dict[str, Tensor]:
        """Return the tensors that are trained, by name."""
        return {name: parameter for name, parameter in self.loaded.model.named_parameters() if parameter.requires_grad}

    def begin_steps(self) -> None:
        """Make the model ready for steps: dropout is off, and layers that ``recompute_layers`` chose are recomputed.

        No seed of a run reaches dropout: a run that goes on would draw other numbers than one that nobody
        interrupted, and the untrained model of ``distill`` would say something else each time.
        """
        self.loaded.model.eval()
        for module in self.loaded.model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = True  # this module alone, not those in it

    def put(self, tensors: dict[str, Tensor]) -> None:
        """Replace the values of the tensors that are trained."""
        with torch.no_grad():
            for name, parameter in self.trained().items():
                parameter.copy_(tensors[name])

    def computing(self) -> Any:
        """Return the context in which the model computes."""
        return torch.autocast(self.loaded.device.type, torch.bfloat16) if self.autocast else nullcontext()

    @contextmanager
    def untrained(self) -> Iterator[LoadedModel]:
        """Give the model as it was before training, without gradients."""
        with torch.no_grad(), self.computing():
            if self.adapted is not None:
                with self.adapted.disable_adapter():
                    yield self.loaded
            elif self.teacher is not None:
                yield self.teacher
            else:
                raise ConfigError("a model whose weights are all trained needs a teacher of its own; use LoRA")

    def save(self, folder: Path) -> Path:
        """Write the adapter, or the whole model with its tokenizer, to a new folder, and return that folder."""
        target = folder / ("model" if self.adapted is None else "adapter")
        scratch = folder / f".{target.name}-unfinished"
        with writing_results(folder):
            shutil.rmtree(scratch, ignore_errors=True)
            if self.adapted is None:
                self.loaded.model.save_pretrained(scratch)
                self.engine.encoder.save(scratch)
            else:
                # peft would add the whole embeddings, which no run changes, where --targets names them.
                self.adapted.save_pretrained(scratch, save_embedding_layers=False)
                (scratch / "README.md").unlink(missing_ok=True)  # a form of the Hub that nobody has filled in
            shutil.rmtree(target, ignore_errors=True)
            scratch.replace(target)
        return target


def prepare(engine: Engine, settings: TrainSettings, base: str, teacher: LoadedModel | None = None) -> TunedModel:
    """Return an engine's model ready to be trained: LoRA added, or all weights trained.

    Args:
        engine: The model; it is changed. With rank 0 its weights must be float32.
        base: What the model was loaded from, which the adapter's configuration will name.
        teacher: The same model once more, for ``distill`` with rank 0.
    """
    model = engine.loaded.model
    if settings.checkpointing:
        recompute_layers(model)
    if not settings.rank:
        model.requires_grad_(True)
        return TunedModel(engine, None, teacher, autocast=settings.dtype == "bfloat16")
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise missing_extra("peft", "train") from error
    config = LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, target_modules=_targets(model, settings.targets),
        lora_dropout=0.0, bias="none", task_type="CAUSAL_LM",
    )  # fmt: skip
    devices = [] if engine.loaded.device.type == "cpu" else [engine.loaded.device]
    try:
        with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by names that it will lose
            torch.manual_seed(settings.seed)
            adapted = get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(
            f"LoRA cannot be added: {' '.join(str(error).split())[:200]}; choose other --targets"
        ) from error
    adapted.peft_config["default"].base_model_name_or_path = base
    return TunedModel(engine, adapted)


ALL_LINEAR = "all-linear"


def _targets(model: Any, text: str) -> str | list[str]:
    """Return the targets of LoRA as peft takes them.

    Raises:
        ConfigError: a name matches no module, or the embeddings of a model that has them once for input and output:
            the adapter that peft saves for those does not give the model that was trained.
    """
    if text == ALL_LINEAR:
        return text
    targets = [target.strip() for target in text.split(",")]
    modules = dict(model.named_modules())
    matched = {
        target: [name for name in modules if name == target or name.endswith(f".{target}")] for target in targets
    }
    unknown = [target for target, names in matched.items() if not names]
    if unknown:
        linear = {name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, torch.nn.Linear)}
        raise ConfigError(
            f"--targets {text!r}: the model has no module {' or '.join(map(repr, unknown))}; choose other --targets "
            f"of {', '.join(sorted(linear))}, or {ALL_LINEAR}"
        )
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if None not in ends and ends[0].weight is ends[1].weight:
        tied = [target for target, names in matched.items() if any(modules[name] in ends for name in names)]
        if tied:
            raise ConfigError(
                f"--targets {text!r}: input and output embeddings of this model are one matrix, and an adapter of it "
                f"cannot be saved; leave out {', '.join(tied)}"
            )
    return targets
