"""Training: it learns, continues after an interruption as if there had been none, and stops early."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from safetensors.torch import load_file

from rag_posfix.errors import ConfigError
from rag_posfix.lab.encodings import create_encoding, load_decoder
from rag_posfix.lab.experiment import RunConfig, RunFiles, TrainingSettings, measure, new_decoder, train
from rag_posfix.lab.tasks.flip_flop import FlipFlop
from rag_posfix.lab.tasks.key_value import KeyValue
from rag_posfix.lab.tasks.language import Language

CPU = torch.device("cpu")
TINY = TrainingSettings(
    steps=12, batch=4, evaluate_every=4, examples=16, layers=1, heads=2, width=16, warmup=2, dropout=0.1
)


def config(task=None, encoding="cope", settings=TINY, seed=0, **parameters):
    return RunConfig(task or FlipFlop(pairs=6), create_encoding(encoding, parameters), settings, seed)


class Killed(Exception):
    """Stands for the end of the process."""


def killed_at(step):
    def report(done, total):
        if done == step:
            raise Killed

    return report


@pytest.mark.slow
def test_a_decoder_learns_flip_flop_and_its_error_is_measured(tmp_path):
    settings = TrainingSettings(
        steps=150, batch=32, evaluate_every=50, examples=200, layers=2, heads=2, width=32, warmup=10,
        learning_rate=3e-3, patience=1,
    )  # fmt: skip
    run = train(config(FlipFlop(pairs=6, ignored=0.3), "rope", settings), CPU, RunFiles(tmp_path))
    assert run.splits["in"].value < 20  # chance is 50
    assert run.snapshot.history[-1][1].loss < run.snapshot.history[0][1].loss or run.snapshot.history[0][1].value == 0
    loaded = load_decoder(tmp_path)
    assert measure(loaded, FlipFlop(pairs=6, ignored=0.3), "in", 200, CPU) == run.splits["in"]


def test_a_decoder_that_diverged_has_an_infinite_perplexity():
    task = Language(length=16)
    decoder = new_decoder(config(task), CPU)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1e4)
    measured = measure(decoder, task, "in", 8, CPU)
    assert measured.value == math.inf
    assert 709 < measured.loss < math.inf


@pytest.mark.parametrize("killed", [3, 6, 9, 12])
def test_a_run_that_was_killed_continues_to_the_result_of_one_that_was_not(killed, tmp_path):
    whole = train(config(), CPU, RunFiles(tmp_path / "whole"))
    files = RunFiles(tmp_path / "killed")
    with pytest.raises(Killed):
        train(config(), CPU, files, killed_at(killed))
    steps = []
    resumed = train(config(), CPU, files, lambda done, total: steps.append(done))
    assert steps[0] == 1 + 4 * ((killed - 1) // 4)  # the step after the last checkpoint
    assert resumed.splits == whole.splits
    assert [one for _, one in resumed.snapshot.history] == [one for _, one in whole.snapshot.history]
    for name in ("whole", "killed"):
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == [
            "config.json", "model.safetensors", "run.json",
        ]  # fmt: skip
    weights = [load_decoder(tmp_path / name).state_dict() for name in ("whole", "killed")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_finished_run_is_not_repeated(tmp_path):
    first = train(config(), CPU, RunFiles(tmp_path))
    steps = []
    again = train(config(), CPU, RunFiles(tmp_path), lambda done, total: steps.append(done))
    assert steps == [12]
    assert (again.splits, again.snapshot.history, again.parameters) == (
        first.splits, first.snapshot.history, first.parameters,
    )  # fmt: skip


def test_damaged_files_are_told_and_the_run_starts_again(tmp_path, caplog):
    whole = train(config(), CPU, RunFiles(tmp_path))
    (tmp_path / "run.json").write_text("{", "utf-8")
    (tmp_path / "checkpoint.safetensors").write_bytes(b"\x00" * 20)
    assert train(config(), CPU, RunFiles(tmp_path)).splits == whole.splits
    assert "the run is repeated" in caplog.text
    assert "the run starts again" in caplog.text


def test_seeds_differ_and_encodings_of_one_seed_see_the_same_examples():
    first, second = (new_decoder(config(seed=seed), CPU) for seed in (0, 1))
    assert not torch.equal(first.embedding, second.embedding)
    assert torch.equal(first.embedding, new_decoder(config(seed=0), CPU).embedding)
    before = torch.random.get_rng_state()
    train(config(), CPU, RunFiles(None))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_training_stops_after_evaluations_without_error_and_not_before(monkeypatch):
    values = iter([5.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])

    def measured(*arguments):
        return dataclasses.replace(measure(*arguments), value=next(values))

    monkeypatch.setattr("rag_posfix.lab.experiment.measure", measured)
    settings = dataclasses.replace(TINY, steps=100, patience=2)
    run = train(config(settings=settings), CPU, RunFiles(None))
    assert run.snapshot.step == 3 * 4


def test_perplexity_stops_after_evaluations_without_a_new_best(monkeypatch):
    values = iter([9.0, 7.0, 8.0, 6.0, 6.5, 6.2, 0.0, 0.0, 0.0, 0.0])

    def measured(*arguments):
        return dataclasses.replace(measure(*arguments), value=next(values))

    monkeypatch.setattr("rag_posfix.lab.experiment.measure", measured)
    settings = dataclasses.replace(TINY, steps=100, patience=2)
    run = train(config(Language(length=8), settings=settings), CPU, RunFiles(None))
    assert run.snapshot.step == 6 * 4


def test_without_patience_all_steps_are_taken(monkeypatch):
    monkeypatch.setattr(
        "rag_posfix.lab.experiment.measure",
        lambda *arguments: dataclasses.replace(measure(*arguments), value=0.0),
    )
    run = train(config(settings=dataclasses.replace(TINY, patience=0)), CPU, RunFiles(None))
    assert run.snapshot.step == 12


@pytest.mark.parametrize(
    ("steps", "recalibration", "first"),
    # 12 * .25 = 3 steps, the last ones: from 9. 12 * .01 = .12 step: at least one. All of 12. One of one.
    [(12, 0.25, 9), (12, 0.01, 11), (12, 1.0, 0), (1, 0.1, 0)],
)
def test_the_recalibration_of_drope_is_its_share_of_the_steps_and_one_at_least(steps, recalibration, first):
    settings = dataclasses.replace(TINY, steps=steps)
    assert config(encoding="drope", settings=settings, recalibration=recalibration).final_step == first
    assert config(encoding="rope", settings=settings).final_step == 0


def test_the_learning_rate_rises_and_falls_again_after_the_drop_of_drope():
    settings = dataclasses.replace(TINY, steps=220, warmup=22, learning_rate=1.0)
    plan = config(encoding="drope", settings=settings, recalibration=0.5)
    # Two phases of 110 steps. The second one's warmup is its share of 22 steps: 22 * 110 / 220 = 11.
    assert plan.rate(21) == plan.rate(22) == 1.0
    assert plan.rate(66) == pytest.approx(0.55)  # halfway from 22 to 110: 0.1 + 0.45 (1 + cos(pi / 2))
    assert plan.rate(109) < 0.101
    assert plan.rate(110) == pytest.approx(1 / 11)
    assert plan.rate(120) == plan.rate(121) == 1.0
    plain = config(encoding="rope", settings=settings)
    assert [plain.rate(step) for step in range(220)] == [settings.rate(step) for step in range(220)]


def test_drope_trains_as_rope_before_the_drop_and_its_trained_decoder_is_nope(tmp_path):
    plan = config(encoding="drope", recalibration=0.25)  # drops before step 9 of 12; a checkpoint is after step 8
    nine = config(encoding="rope", settings=dataclasses.replace(TINY, steps=9))
    for name, run in (("rope", nine), ("drope", plan)):
        with pytest.raises(Killed):
            train(run, CPU, RunFiles(tmp_path / name), killed_at(9))
    before = {name: load_file(tmp_path / name / "checkpoint.safetensors") for name in ("rope", "drope")}
    assert not before["drope"].pop("model.positions.dropped")
    assert all(torch.equal(before["drope"][name], tensor) for name, tensor in before["rope"].items())
    resumed, whole = (train(plan, CPU, RunFiles(tmp_path / name)) for name in ("drope", "whole"))
    assert resumed.splits == whole.splits

    loaded, ids = load_decoder(tmp_path / "drope").eval(), torch.arange(8)[None] % 4
    weights = loaded.state_dict()
    assert weights.pop("positions.dropped")
    logits = {}
    for name in ("rope", "nope"):
        other = new_decoder(config(encoding=name), CPU).eval()
        other.load_state_dict(weights)
        logits[name] = other(ids)[0]
    assert torch.equal(loaded(ids)[0], logits["nope"])
    assert not torch.allclose(logits["rope"], logits["nope"], atol=1e-3)


def test_drope_with_a_recalibration_of_all_steps_trains_as_nope():
    without = train(config(encoding="nope"), CPU, RunFiles(None))
    assert train(config(encoding="drope", recalibration=1.0), CPU, RunFiles(None)).splits == without.splits


def test_evaluations_before_the_drop_of_drope_do_not_end_the_training(monkeypatch):
    monkeypatch.setattr(
        "rag_posfix.lab.experiment.measure",
        lambda *arguments: dataclasses.replace(measure(*arguments), value=0.0),
    )
    settings = dataclasses.replace(TINY, steps=20, evaluate_every=2, patience=2)
    # The drop is before step 10. The evaluation after 10 steps is still that of RoPE; those after 12 and 14 count.
    for encoding, parameters, end in (("rope", {}, 4), ("drope", {"recalibration": 0.5}, 14)):
        run = train(config(encoding=encoding, settings=settings, **parameters), CPU, RunFiles(None))
        assert run.snapshot.step == end


def test_the_measure_of_a_decoder_that_knows_nothing_is_chance_and_by_place():
    task = KeyValue(pairs=3, keys=8, values=4, questions=1)
    decoder = new_decoder(config(task), CPU)
    with torch.no_grad():
        decoder.embedding.zero_()  # all logits are 0: the first token, which is never right
    found = measure(decoder, task, "in", 60, CPU)
    assert (found.value, found.token_error) == (100, 100)
    assert found.loss == pytest.approx(math.log(task.vocabulary), abs=1e-5)
    assert found.by_place == (100, 100, 100)
    words = Language(length=16)
    blank = new_decoder(config(words), CPU)
    with torch.no_grad():
        blank.embedding.zero_()
    assert measure(blank, words, "x5", 4, CPU).value == pytest.approx(45, rel=1e-4)


def test_an_evaluation_in_parts_is_that_of_one_part(monkeypatch):
    task = KeyValue(pairs=3, keys=8, values=4, questions=1)
    decoder = new_decoder(config(task), CPU)
    whole = measure(decoder, task, "longer", 50, CPU)
    monkeypatch.setattr("rag_posfix.lab.experiment.TOKENS_AT_ONCE", 40)
    parts = measure(decoder, task, "longer", 50, CPU)
    assert (parts.value, parts.by_place) == (whole.value, whole.by_place)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)


def test_the_learning_rate_rises_then_falls_to_a_tenth():
    settings = TrainingSettings(steps=110, warmup=10, learning_rate=1.0)
    assert settings.rate(0) == pytest.approx(0.1)
    assert settings.rate(9) == settings.rate(10) == 1.0
    assert settings.rate(60) == pytest.approx(0.55)  # 0.1 + 0.45 (1 + cos(pi / 2))
    assert settings.rate(110) == pytest.approx(0.1)


def test_settings_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="lab: learning_rate=0 must be a number above 0"):
        TrainingSettings(learning_rate=0)
    with pytest.raises(ConfigError, match="width=12 must be a multiple of twice heads=4"):
        TrainingSettings(width=12).shape(5)
