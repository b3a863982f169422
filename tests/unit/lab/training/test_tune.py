"""Training runs: they learn, continue after a kill as if there had been none, keep the best weights, stop early."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from random import Random

import pytest
import torch
from safetensors.torch import load_file

from rag_posfix.errors import ConfigError, EvaluationError, GenerationError
from rag_posfix.evaluation.record import read_record
from rag_posfix.generation.load import load_engine
from rag_posfix.lab.training import loop as module
from rag_posfix.lab.training.data.make_data import read_samples
from rag_posfix.lab.training.data.settings import TrainSettings
from rag_posfix.lab.training.loop import tune
from rag_posfix.lab.training.objectives import Block, add_gradients
from rag_posfix.lab.training.prompts import PromptMaker, end_of_answer
from rag_posfix.lab.training.run_files import (
    Evaluation,
    RunFiles,
    RunState,
    best_share,
    measure_places,
    shares,
    worst_of,
)
from rag_posfix.lab.training.tuned_model import TunedModel, prepare
from rag_posfix.mitigations import create
from tests.support.tiny import save_tiny
from tests.support.tiny_training import OBJECTIVES, SETTINGS, tiny_folders, tiny_tune
from tests.support.toy_encoder import ToyEncoder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def whole(folders, tmp_path_factory):
    """The folder of a run that nobody interrupted, and its record."""
    out = tmp_path_factory.mktemp("whole")
    return out, tiny_tune(*folders, out)


@pytest.fixture(autouse=True)
def _no_figure(whole, monkeypatch):
    """Runs of single tests draw nothing: a figure takes as long as three steps. That of ``whole`` is drawn."""
    monkeypatch.setattr(module, "with_figure", lambda record, *_: record)


def test_the_figure_of_a_run_lies_beside_its_record(whole):
    record = whole[1].files["record"]
    assert whole[1].files["svg"] == record.with_suffix(".svg")
    drawn = whole[1].files["svg"].read_text()
    assert "held-out samples" in drawn
    assert module.CAPTION[:40] in drawn
    assert whole[1].files["png"].read_bytes().startswith(b"\x89PNG")


def weights(folder):
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.slow
def test_every_objective_lowers_its_loss(folders, tmp_path, name):
    settings = dataclasses.replace(SETTINGS, steps=6, evaluate_every=3, learning_rate=1e-2)
    record = tiny_tune(*folders, tmp_path, name=name, settings=settings)
    assert record.summary["loss"][-1] < record.summary["loss"][0]
    assert record.head["kind"] == f"train-{name}"
    if name != "distill":
        assert record.summary["after"]["worst"] > record.summary["before"]["worst"]
    assert set(record.summary["before"]["log_probability"]) == {one.name for one in OBJECTIVES[name].methods}
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


@pytest.mark.slow
def test_a_run_whose_process_is_killed_continues_to_the_weights_of_one_that_was_not(folders, whole, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.tiny_training", *map(str, folders), str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        for line in process.stdout:
            if int(line) == 3:  # after the checkpoint of step 2
                process.kill()
                break
            print(file=process.stdin, flush=True)
        assert process.wait() == -9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.safetensors", "checkpoint.safetensors"]
    steps = []
    record = tiny_tune(*folders, tmp_path, steps=steps.append)
    assert steps[0] == 3
    for name, tensor in weights(whole[0]).items():
        torch.testing.assert_close(weights(tmp_path)[name], tensor, atol=1e-6, rtol=1e-4)
    assert record.summary["steps_of_evaluations"] == whole[1].summary["steps_of_evaluations"] == [0, 2, 4]


@pytest.fixture(scope="module")
def with_dropout(folders, tmp_path_factory):
    """The folder of a model whose configuration has dropout, and the file of the samples."""
    dropout = {"resid_pdrop": 0.3, "attention_dropout": 0.3}
    small = {"max_position_embeddings": 1024, "num_hidden_layers": 1}
    return save_tiny(tmp_path_factory.mktemp("dropout"), "phi3", **small, **dropout), folders[1]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_dropout_of_the_base_model_is_off(with_dropout, tmp_path, checkpointing):
    settings = dataclasses.replace(SETTINGS, steps=1, places=2, checkpointing=checkpointing)
    for name in "ab":
        tiny_tune(*with_dropout, tmp_path / name, settings=settings)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_the_untrained_model_says_the_same_twice_and_layers_are_computed_again_in_steps(with_dropout):
    engine = load_engine(str(with_dropout[0]), dtype="float32")
    model = prepare(engine, dataclasses.replace(SETTINGS, checkpointing=True), "tiny")
    prompts = PromptMaker(engine.encoder, engine.context_window)
    sample = next(iter(read_samples(with_dropout[1])))
    terms = list(OBJECTIVES["distill"].terms(model.loaded, prompts, sample, Random(0), 0.0))
    model.begin_steps()
    passes = []
    first_layer = engine.loaded.model.model.layers[0]
    first_layer.mlp.register_forward_pre_hook(lambda *given: passes.append(torch.is_grad_enabled()))
    assert add_gradients(model, terms[1:], 1, 0) == [pytest.approx(0, abs=1e-6)]
    assert passes == [False, True, True]  # the untrained model, the model, and its layers for the gradient


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("killed", [3, 4])
@pytest.mark.slow
def test_a_run_that_was_interrupted_gives_the_same_bits(folders, whole, tmp_path, killed):
    def steps(done):
        if done == killed:
            raise Killed

    with pytest.raises(Killed):
        tiny_tune(*folders, tmp_path, steps=steps)
    record = tiny_tune(*folders, tmp_path)
    assert same(weights(tmp_path), weights(whole[0]))
    assert record.summary["loss"] == whole[1].summary["loss"]
    assert not (tmp_path / "checkpoint.safetensors").exists()


@pytest.mark.slow
def test_a_packed_run_that_was_interrupted_gives_the_same_bits_and_learns_what_an_unpacked_one_does(folders, tmp_path):
    packed = dataclasses.replace(SETTINGS, steps=3, places=2, held_out=1, packing=300)
    whole = tiny_tune(*folders, tmp_path / "whole", name="distill", settings=packed)

    def steps(done):
        if done == 3:
            raise Killed

    with pytest.raises(Killed):
        tiny_tune(*folders, tmp_path / "again", name="distill", settings=packed, steps=steps)
    tiny_tune(*folders, tmp_path / "again", name="distill", settings=packed)
    assert same(weights(tmp_path / "again"), weights(tmp_path / "whole"))
    unpacked = tiny_tune(*folders, tmp_path / "one", name="distill", settings=dataclasses.replace(packed, packing=0))
    assert whole.summary["loss"] == pytest.approx(unpacked.summary["loss"], abs=1e-3)


def test_a_damaged_checkpoint_starts_again_and_one_of_other_settings_is_refused(folders, whole, tmp_path, caplog):
    (tmp_path / "checkpoint.safetensors").write_bytes(b"half of a file")
    tiny_tune(*folders, tmp_path)
    assert "the run starts again" in caplog.text
    assert same(weights(tmp_path), weights(whole[0]))
    with pytest.raises(ConfigError, match="another model, data or settings"):
        tiny_tune(*folders, tmp_path, settings=dataclasses.replace(SETTINGS, seed=1))


def test_a_finished_run_is_not_repeated(folders, whole):
    steps = []
    again = tiny_tune(*folders, whole[0], steps=steps.append)
    assert steps == []
    assert again.summary == whole[1].summary
    assert again.head["trained_parameters"] == whole[1].head["trained_parameters"] > 0
    assert read_record(again.files["record"]).rows[0]["step"] == 0


def test_a_result_without_the_number_of_trained_parameters_is_read(folders, whole, tmp_path):
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    result = json.loads((tmp_path / "result.json").read_text())
    del result["trained_parameters"]
    (tmp_path / "result.json").write_text(json.dumps(result))
    steps = []
    assert tiny_tune(*folders, tmp_path, steps=steps.append).head["trained_parameters"] is None
    assert steps == []


def test_the_folder_of_a_finished_adapter_is_refused_for_all_weights(folders, whole):
    before = (whole[0] / "result.json").read_bytes()
    with pytest.raises(ConfigError, match="another model, data or settings"):
        tiny_tune(*folders, whole[0], settings=dataclasses.replace(SETTINGS, rank=0))
    assert (whole[0] / "result.json").read_bytes() == before


def test_a_target_that_matches_no_module_is_named(folders, tmp_path):
    settings = dataclasses.replace(SETTINGS, targets="q_proj,v_porj")
    with pytest.raises(ConfigError, match=r"no module 'v_porj'; choose other --targets of .*q_proj, up_proj, v_proj"):
        tiny_tune(*folders, tmp_path, settings=settings)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_embeddings_of_input_and_output_are_trained_only_where_they_are_two_matrices(folders, tmp_path, target):
    settings = dataclasses.replace(SETTINGS, targets=f"q_proj,{target}", learning_rate=2e-2, steps=2)
    tied = save_tiny(tmp_path / "tied", max_position_embeddings=1024, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=f"one matrix, and an adapter of it cannot be saved; leave out {target}$"):
        tiny_tune(tied, folders[1], tmp_path / "refused", settings=settings)
    record = tiny_tune(*folders, tmp_path / "out", settings=settings)
    engine = load_engine(str(folders[0]), dtype="float32", adapter=record.files["adapter"])
    held_out = list(read_samples(folders[1]))[-2:]
    prompts = PromptMaker(engine.encoder, engine.context_window)
    curves = measure_places(TunedModel(engine), prompts, OBJECTIVES["in2"], held_out, 3)
    assert curves["none"] == pytest.approx(record.summary["after"]["log_probability"]["none"], abs=1e-4)


@pytest.mark.slow
def test_the_weights_of_the_best_worst_place_are_kept(folders, tmp_path):
    # A rate that destroys the model: the untrained one, before step 1, is the best, and LoRA adds nothing to it.
    fast = {"batch": 1, "held_out": 1, "places": 2}
    settings = dataclasses.replace(SETTINGS, learning_rate=1.0, patience=2, steps=40, evaluate_every=1, **fast)
    record = tiny_tune(*folders, tmp_path, settings=settings)
    worst = record.summary["worst"]
    best = worst.index(max(worst))
    assert record.summary["best_step"] == best
    assert record.summary["steps"] == best + 2 < 40  # patience
    assert record.summary["after"]["worst"] == max(worst)
    if best == 0:
        assert all(not one.any() for name, one in weights(tmp_path).items() if "lora_B" in name)


def test_all_weights_are_trained_with_rank_0_and_the_model_is_loaded_again(folders, tmp_path):
    settings = dataclasses.replace(SETTINGS, rank=0, learning_rate=1e-3, steps=2)
    record = tiny_tune(*folders, tmp_path, settings=settings)
    tuned = load_engine(str(record.files["model"]), dtype="float32")
    base = load_engine(str(folders[0]), dtype="float32")
    assert tuned.fingerprint != base.fingerprint
    differs = [
        name for (name, one), other in zip(
            tuned.loaded.model.named_parameters(), base.loaded.model.parameters(), strict=True
        ) if not torch.equal(one, other)
    ]  # fmt: skip
    assert len(differs) == len(list(base.loaded.model.parameters()))


def test_the_teacher_of_distillation_is_the_untrained_model(folders, tmp_path):
    settings = dataclasses.replace(SETTINGS, rank=0, learning_rate=1e-3, steps=2)
    teacher = load_engine(str(folders[0]), dtype="float32").loaded
    before = {name: one.clone() for name, one in teacher.model.named_parameters()}
    record = tiny_tune(*folders, tmp_path, name="distill", settings=settings, teacher=teacher)
    assert all(torch.equal(one, before[name]) for name, one in teacher.model.named_parameters())
    assert record.summary["loss"][0] >= 0
    with pytest.raises(ConfigError, match="teacher of its own"):
        tiny_tune(*folders, tmp_path / "none", name="distill", settings=settings)


def test_without_training_distillation_diverges_by_nothing_at_the_best_place(folders):
    engine = load_engine(str(folders[0]), dtype="float32")
    model = prepare(engine, SETTINGS, "tiny")
    prompts = PromptMaker(engine.encoder, engine.context_window)
    sample = next(iter(read_samples(folders[1])))
    terms = list(OBJECTIVES["distill"].terms(model.loaded, prompts, sample, Random(0), 0.0))
    losses = add_gradients(model, terms, 1, 0)
    assert losses[0] > 1e-4
    assert losses[1] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("method", ["parallel_windows", "parallel_encoding", "set_prompting"])
def test_bfloat16_and_recomputed_layers_train_too(folders, tmp_path, method):
    objective = Block(create("none"), create(method))
    one = {"steps": 1, "places": 2, "held_out": 1}
    settings = dataclasses.replace(SETTINGS, rank=0, dtype="bfloat16", checkpointing=True, learning_rate=1e-3, **one)
    found = tiny_tune(*folders, tmp_path, objective=objective, settings=settings).summary
    assert all(math.isfinite(one) for one in found["loss"])


def test_block_refuses_a_method_whose_passages_depend_on_each_other(folders, tmp_path):
    engine = load_engine(str(folders[0]), dtype="float32")
    with pytest.raises(ConfigError, match="does not read passages independently"):
        tune(engine, Block(create("none"), create("none")), folders[1], SETTINGS, tmp_path, base="tiny")


def test_what_cannot_be_trained_is_told(folders, tmp_path):
    with pytest.raises(ConfigError, match="held out"):
        tiny_tune(*folders, tmp_path, settings=dataclasses.replace(SETTINGS, held_out=8))
    with pytest.raises(ConfigError, match="choose other --targets"):
        tiny_tune(*folders, tmp_path, settings=dataclasses.replace(SETTINGS, targets="nothing"))
    with pytest.raises(ConfigError, match="steps"):
        TrainSettings(steps=0)
    long = tmp_path / "long.jsonl"
    row = {"question": "q", "answers": ["a"], "ctxs": [{"text": "x" * 2000, "isgold": True}, {"text": "y"}]}
    long.write_text("".join(json.dumps({**row, "question": f"q{n}"}) + "\n" for n in range(3)))
    with pytest.raises(ConfigError, match="context window"):
        tiny_tune(folders[0], long, tmp_path / "b")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(EvaluationError, match="choose another --out"):
        tiny_tune(*folders, blocked / "folder")


def test_questions_of_held_out_samples_are_not_trained_on(folders, tmp_path, monkeypatch):
    rows = folders[1].read_text().splitlines(keepends=True)
    repeated = tmp_path / "repeated.jsonl"
    repeated.write_text("".join([*rows[:4], rows[0], rows[1]]))
    seen = []
    made = module.new_training_run
    monkeypatch.setattr(module, "new_training_run", lambda *given: seen.append(made(*given)) or seen[-1])
    tiny_tune(folders[0], repeated, tmp_path / "out", settings=dataclasses.replace(SETTINGS, steps=1))
    questions = [json.loads(row)["question"] for row in rows]
    assert [one.question for one in seen[0].samples] == questions[2:4]
    assert [one.question for one in seen[0].held_out] == questions[:2]
    same_question = tmp_path / "same.jsonl"
    same_question.write_text(rows[0] * 3)
    with pytest.raises(ConfigError, match="more pairs"):
        tiny_tune(folders[0], same_question, tmp_path / "same")


def test_a_loss_that_is_no_number_ends_the_run(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "rag_posfix.lab.training.objectives.answer_loss", lambda logits, answer: logits.sum() * math.nan
    )
    with pytest.raises(GenerationError, match="lower --learning-rate"):
        tiny_tune(*folders, tmp_path)


def test_places_and_curves_of_cases_worked_by_hand():
    assert shares(3) == (0.0, 0.5, 1.0)
    assert shares(1) == (0.0,)
    assert worst_of({"none": (-1.0, -3.0), "x": (-2.0,)}) == -3.0
    assert math.isnan(worst_of({"none": (-2.0, math.nan), "x": (-1.0,)}))
    assert best_share({"none": (-2.0, -1.0, -3.0)}) == 0.5
    state = (
        RunState()
        .with_evaluation({"a": (-2.0,)}, 0)
        .with_evaluation({"a": (-1.0,)}, 0)
        .with_evaluation({"a": (-1.5,)}, 0)
    )
    assert state.evaluations_since_best() == 1
    assert RunState.of(json.loads(json.dumps(state.as_json()))) == state
    assert not state.is_new_best
    for values, best in (((math.nan, -2.0, -1.0), 2), ((-2.0, math.nan, -3.0), 0), ((math.nan, math.nan), 0)):
        history = tuple(Evaluation(step, {"a": (-0.5, value)}, 0) for step, value in enumerate(values))
        assert RunState(history=history).best.step == best


def test_the_rate_rises_and_falls_as_worked_by_hand():
    settings = TrainSettings(steps=110, warmup=10, learning_rate=1.0)
    assert settings.rate(0) == pytest.approx(0.1)
    assert settings.rate(10) == pytest.approx(1.0)
    assert settings.rate(60) == pytest.approx(0.55)  # 0.1 + 0.45 (1 + cos(pi / 2))
    assert settings.rate(110) == pytest.approx(0.1)


def test_an_answer_ends_as_the_chat_template_ends_it():
    assert end_of_answer(ToyEncoder()) == 257


def test_a_result_that_cannot_be_read_is_repeated(tmp_path, caplog):
    (tmp_path / "result.json").write_text("{")
    assert RunFiles(tmp_path, "run").finished() is None
    assert "the run is repeated" in caplog.text
