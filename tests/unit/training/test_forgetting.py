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
from rag_posfix.training.forgetting import compare_perplexity, text_losses
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


def test_equal_models_do_not_differ_and_an_adapter_does(trained, tmp_path):
    folder, adapter = trained
    base = load_engine(str(folder), dtype="float32")
    record = compare_perplexity({"base": base, "same": base}, TEXTS, 100, tmp_path)
    assert record.summary["same"] == record.summary["base"]
    assert record.summary["same"]["difference"] == 0
    losses = [one for text in text_losses(base, TEXTS, 100) for one in text]
    assert record.summary["base"]["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)))
    arguments = ["train", "forgetting", "--model", str(folder), "--tuned", str(adapter), "--texts", "demo",
                 "--limit", "3", "--tokens", "20", "--out", str(tmp_path / "out"), "--json"]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["base"]["difference"] == 0 != found[str(adapter)]["difference"]
    low, high = found[str(adapter)]["difference_ci95"]
    assert low <= found[str(adapter)]["difference"] <= high


def test_a_tuned_folder_called_base_is_not_taken_for_the_model_before(trained, tmp_path, monkeypatch):
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
