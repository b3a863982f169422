"""Perplexity before and after training: worked by hand, and equal for equal models."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from typer.testing import CliRunner

from rag_posfix.cli.main import app
from rag_posfix.errors import ConfigError
from rag_posfix.generation.load import load_engine
from rag_posfix.lab.training.objectives import compare_perplexity, text_losses
from tests.support.tiny_training import tiny_folders, tiny_tune

TEXTS = ["the sum of two numbers is a number", "a stone lies in a box", "box"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a model, and that of its adapter."""
    folders = tiny_folders(tmp_path_factory.mktemp("model"))
    out = tmp_path_factory.mktemp("trained")
    tiny_tune(*folders, out)
    return folders[0], out / "adapter"


def test_the_perplexity_is_that_of_the_plain_model(trained):
    engine = load_engine(str(trained[0]), dtype="float32")
    tokens = engine.encoder.encode_text(TEXTS[0])
    with torch.no_grad():
        log_probs = engine.loaded.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    wanted = [-float(log_probs[at, token]) for at, token in enumerate(tokens[1:])]
    [found] = text_losses(engine, TEXTS[:1], 100)
    assert found == pytest.approx(wanted, abs=1e-5)
    assert text_losses(engine, TEXTS[:1], 3)[0] == pytest.approx(wanted[:2], abs=1e-5)


def test_a_text_of_a_model_with_a_token_that_begins_texts_is_read_after_it(trained, monkeypatch):
    engine = load_engine(str(trained[0]), dtype="float32")
    tokens = [1, *engine.encoder.encode_text(TEXTS[0])]
    monkeypatch.setattr(type(engine.encoder), "encode_prompt", lambda self, text: [1])
    with torch.no_grad():
        log_probs = engine.loaded.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    wanted = [-float(log_probs[at, token]) for at, token in enumerate(tokens[1:])]
    assert text_losses(engine, TEXTS[:1], 100)[0] == pytest.approx(wanted, abs=1e-5)


def test_the_difference_is_the_mean_over_texts_of_what_a_model_gains_on_its_base(trained):
    base = load_engine(str(trained[0]), dtype="float32")
    adapted = load_engine(str(trained[0]), dtype="float32", adapter=trained[1])
    summary = compare_perplexity({"base": base, "same": base, "adapted": adapted}, TEXTS, 100, None).summary
    assert summary["same"] == summary["base"]
    assert summary["same"]["difference"] == 0
    before, after = ([mean_log_probability(engine, text) for text in TEXTS] for engine in (base, adapted))
    gains = [one - other for one, other in zip(after, before, strict=True)]
    assert max(map(abs, gains)) > 1e-4
    assert summary["adapted"]["difference"] == pytest.approx(sum(gains) / 3, abs=1e-6)
    low, high = summary["adapted"]["difference_ci95"]
    assert min(gains) - 1e-6 <= low < summary["adapted"]["difference"] < high <= max(gains) + 1e-6
    losses = [loss for text in text_losses(base, TEXTS, 100) for loss in text]
    assert summary["base"]["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)))


def mean_log_probability(engine, text):
    """Return that per token of a text after its first, as the model says it without the code under test."""
    tokens = engine.encoder.encode_text(text)
    with torch.no_grad():
        log_probs = engine.loaded.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return sum(float(log_probs[at, token]) for at, token in enumerate(tokens[1:])) / (len(tokens) - 1)


def test_the_command_compares_an_adapter_with_its_base_also_in_a_folder_called_base(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained[1], "base")
    arguments = ["train", "forgetting", "--model", str(trained[0]), "--tuned", "base", "--texts", "demo",
                 "--limit", "2", "--tokens", "20", "--out", "out", "--json"]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["base"]["difference"] == 0 != found["./base"]["difference"]


def test_texts_without_two_tokens_are_refused(trained):
    base = load_engine(str(trained[0]), dtype="float32")
    with pytest.raises(ConfigError, match="no text has two tokens"):
        compare_perplexity({"base": base}, ["", ""], 10, None)
