"""Training on the device: logits, losses and gradients of the CPU, and a run from beginning to end."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rag_posfix.generation.engine import Engine
from rag_posfix.generation.load import load_engine
from rag_posfix.generation.model.one_pass import forward_with_answers
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.lab.training.loop import tune
from rag_posfix.lab.training.prompts import answer_logits, answer_loss, answered_prompt, distillation_loss
from rag_posfix.mitigations import create
from tests.support.tiny import toy_layout
from tests.support.tiny_training import OBJECTIVES, SETTINGS, tiny_folders
from tests.support.twin_engines import TOLERANCE, tiny_engine_on

pytestmark = pytest.mark.slow

ANSWER = (17, 90, 4, 33)
TRAINABLE = ["none", "parallel_windows", "set_prompting", "parallel_encoding", "layer_scaling"]


def gradients(device: str, name: str) -> list[torch.Tensor]:
    """Return the loss of an answer and its gradient in every weight."""
    loaded, layout = tiny_engine_on(device).loaded, toy_layout()
    model = loaded.model.requires_grad_(True)
    model.zero_grad(set_to_none=True)
    loss = answer_loss(
        answer_logits(loaded, layout, create(name).checked_plan(layout, loaded.spec.shape), ANSWER), ANSWER
    )
    loss.backward()
    result = [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
    model.zero_grad(set_to_none=True)
    model.requires_grad_(False)
    return result


def packed(device: str) -> list[torch.Tensor]:
    """Return the logits of prompts that are read in one pass, and their distance from each other."""
    loaded, layouts = tiny_engine_on(device).loaded, (toy_layout(), toy_layout(seed=1))
    plans = [create("none").checked_plan(layout, loaded.spec.shape) for layout in layouts]
    prompts = [answered_prompt(loaded, *pair, ANSWER) for pair in zip(layouts, plans, strict=True)]
    first, second = forward_with_answers(loaded, prompts)
    return [first, second, distillation_loss(first, second, 2.0)]


def tuned(device: str, name: str, rank: int) -> list[object]:
    """Train a few steps, and return the losses, and the scores before and after."""
    with tempfile.TemporaryDirectory() as folder:
        model, samples = tiny_folders(Path(folder))
        engine = load_engine(str(model), dtype="float32", device="cpu")
        loaded = LoadedModel(engine.loaded.model.to(device), engine.loaded.spec)
        settings = replace(SETTINGS, steps=1, rank=rank, held_out=1)
        record = tune(
            Engine(loaded, engine.encoder, "tiny", "print"), OBJECTIVES[name], samples, settings, Path(folder) / "out",
            base=str(model),
        )  # fmt: skip
    return [record.summary["loss"], record.summary["before"], record.summary["after"]]


@pytest.mark.parametrize("name", TRAINABLE)
def test_gradients_are_those_of_the_cpu(on_both, name):
    assert on_both(gradients, name).difference <= TOLERANCE


def test_prompts_in_one_pass_have_the_logits_of_the_cpu(on_both):
    assert on_both(packed).difference <= TOLERANCE


@pytest.mark.parametrize(("name", "rank"), [("in2", 2), ("distill", 2), ("block", 0)])
def test_a_run_learns_on_the_device_what_it_learns_on_the_cpu(on_both, name, rank):
    readings = on_both(tuned, name, rank)
    assert readings.difference <= 1e-4
