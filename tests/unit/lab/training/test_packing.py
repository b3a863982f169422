"""Packing: prompts in one pass are read as if each were alone, and gradients are those of one pass each."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_posfix.errors import ConfigError, PlanConflictError
from rag_posfix.generation.load import load_engine
from rag_posfix.generation.model import one_pass
from rag_posfix.generation.model.one_pass import AnsweredPrompt, forward_with_answers
from rag_posfix.lab.training.data.make_data import read_samples
from rag_posfix.lab.training.data.settings import TrainSettings
from rag_posfix.lab.training.loop import TrainingRun, train
from rag_posfix.lab.training.objectives import LossTerm, add_gradients
from rag_posfix.lab.training.prompts import PromptMaker, answered_prompt, packs, read_packed
from rag_posfix.lab.training.run_files import RunFiles
from rag_posfix.lab.training.tuned_model import prepare
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.patching.attention_hook import Overrides
from tests.support.tiny import loaded_model, toy_layout
from tests.support.tiny_training import OBJECTIVES, SETTINGS, tiny_folders

ANSWERS = ((17, 90, 4, 33), (5,), (60, 61, 62, 63, 64, 65, 66), (9, 8))
MIXES = {
    "causal": ("none", "none", "none"),
    "windows": ("parallel_windows", "parallel_windows", "parallel_windows"),
    "mixed": ("none", "parallel_windows", "set_prompting", "none"),
    "fractions": ("parallel_windows", "halved", "none"),
}


@pytest.fixture(scope="module")
def loaded():
    return loaded_model()


def prompt_of(loaded, name, number=0):
    """Return a prompt under a method; each number has tokens, lengths and an answer of its own."""
    layout = toy_layout((4 + number, 9, 6 - number), prefix=3 + number, seed=number, relevance=(0.2, 0.9, 0.5))
    cls = MITIGATIONS.get("none" if name == "halved" else name)
    made = cls(**cls.example)
    found = answered_prompt(loaded, layout, made.checked_plan(layout, loaded.spec.shape), ANSWERS[number])
    return dataclasses.replace(found, positions=found.positions / 2) if name == "halved" else found


def alone(loaded, prompts):
    return [forward_with_answers(loaded, [one])[0] for one in prompts]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "smollm3", "llama_yarn", "granite"])
@pytest.mark.parametrize("mix", MIXES)
def test_a_packed_pass_says_what_single_passes_say(mix, family):
    loaded = loaded_model(family)
    prompts = [prompt_of(loaded, name, number) for number, name in enumerate(MIXES[mix])]
    assert packs(loaded, prompts, 1000) == [list(range(len(prompts)))]
    for found, expected in zip(forward_with_answers(loaded, prompts), alone(loaded, prompts), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def test_every_method_is_packed_without_a_difference_or_read_alone(loaded):
    shared = {}
    for name in MITIGATIONS.names():
        try:
            prompts = [prompt_of(loaded, "none"), prompt_of(loaded, name, 1), prompt_of(loaded, name, 2)]
            expected = alone(loaded, prompts)
        except PlanConflictError:  # the method has no training forward
            continue
        found = {}
        for numbers, logits in read_packed(loaded, prompts, 1000):
            found |= dict(zip(numbers, logits, strict=True))
        for number, one in enumerate(expected):
            torch.testing.assert_close(found[number], one, atol=2e-6, rtol=1e-5)
        shared[name] = packs(loaded, prompts, 1000) == [[0, 1, 2]]
    assert all(shared[name] for name in ("none", "parallel_windows", "set_prompting"))
    assert not shared["parallel_encoding"]


@pytest.mark.parametrize("changed", [0, 1, 2, 3])
def test_a_token_of_another_prompt_has_no_influence(loaded, changed):
    prompts = [prompt_of(loaded, name, number) for number, name in enumerate(MIXES["mixed"])]
    before = forward_with_answers(loaded, prompts)
    tokens = list(prompts[changed].prompt)
    tokens[4] = (tokens[4] + 1) % 100
    prompts[changed] = dataclasses.replace(prompts[changed], prompt=tokens)
    after = forward_with_answers(loaded, prompts)
    same = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    assert same == [number != changed for number in range(4)]


def test_prompts_go_into_the_first_pass_with_room_for_them(loaded):
    def sized(n_tokens, **overrides):
        return AnsweredPrompt((3,) * (n_tokens - 1), torch.arange(n_tokens - 1.0)[None], Overrides(**overrides), (4,))

    masked = {"mask": one_pass.causal_mask}
    sizes = [sized(60), sized(50, **masked), sized(120), sized(40), sized(30, layer_scale=(2.0,) * 3), sized(45)]
    # 60 + 40; 50 + 45; 120 has more than 100 tokens; a scale of layers would be that of the whole pass.
    assert packs(loaded, sizes, 100) == [[0, 3], [1, 5], [2], [4]]
    assert packs(loaded, sizes, 0) == [[0], [1], [2], [3], [4], [5]]


@settings(deadline=None)
@given(sizes=st.lists(st.integers(2, 60), max_size=20), most=st.integers(0, 100))
def test_each_prompt_is_in_one_pass_and_no_pass_is_too_long(loaded, sizes, most):
    prompts = [AnsweredPrompt((3,) * (size - 1), torch.zeros(1, size - 1), Overrides(), (4,)) for size in sizes]
    found = packs(loaded, prompts, most)
    assert sorted(number for one in found for number in one) == list(range(len(sizes)))
    assert all(len(one) == 1 or sum(sizes[number] for number in one) <= most for one in found)


LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128,
    "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "own"), [("mistral", {"sliding_window": 16}), ("llama", {"rope_parameters": LONG})]
)
def test_models_that_read_a_prompt_differently_beside_another_read_each_alone(family, own):
    loaded = loaded_model(family, **own)
    prompts = [prompt_of(loaded, "none", number) for number in range(3)]
    assert packs(loaded, prompts, 1000) == [[0], [1], [2]]
    with pytest.raises(PlanConflictError, match="read it in a pass of its own"):
        forward_with_answers(loaded, prompts)


def test_plans_that_change_more_than_mask_and_positions_are_refused_in_one_pass(loaded):
    prompts = [prompt_of(loaded, "none"), prompt_of(loaded, "parallel_encoding", 1)]
    assert packs(loaded, prompts, 1000) == [[0], [1]]
    with pytest.raises(PlanConflictError, match="read it in a pass of its own"):
        forward_with_answers(loaded, prompts)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders(tmp_path_factory.mktemp("packing"))


def trained(folders, chosen):
    engine = load_engine(str(folders[0]), dtype="float32", device="cpu")
    model = prepare(engine, chosen, "tiny")
    model.loaded.model.train()
    return model


def terms_of(model, samples, name) -> list[LossTerm]:
    prompts = PromptMaker(model.engine.encoder, model.engine.context_window)
    found = []
    for number, sample in enumerate(samples):
        found += OBJECTIVES[name].terms(model.loaded, prompts, sample, Random(number), 0.0)
    return found


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.slow
def test_packed_gradients_are_those_of_one_pass_each(folders, name, checkpointing):
    samples = list(read_samples(folders[1]))[:4]
    gradients, losses = [], []
    for packing in (0, 400):
        model = trained(folders, dataclasses.replace(SETTINGS, checkpointing=checkpointing and packing > 0))
        with torch.no_grad():  # LoRA that adds nothing has gradients in one of its matrices alone
            for number, one in enumerate(model.trained().values()):
                one.normal_(0, 0.1, generator=torch.Generator().manual_seed(number))
        losses.append(add_gradients(model, terms_of(model, samples, name), len(samples), packing))
        gradients.append({key: one.grad for key, one in model.trained().items()})
    assert len(losses[0]) == len(losses[1]) == (4 if name == "in2" else 8)
    assert sum(losses[0]) == pytest.approx(sum(losses[1]), abs=1e-4)
    for key, expected in gradients[0].items():
        assert expected.abs().max() > 0
        torch.testing.assert_close(gradients[1][key], expected, atol=1e-6, rtol=1e-4)


def passes_of(monkeypatch, run):
    """Return the tokens of each pass of the model while ``run`` runs."""
    seen, actual = [], one_pass.run_model

    def counted(loaded, context, cache, ids, *rest):
        seen.append(ids.shape[1])
        return actual(loaded, context, cache, ids, *rest)

    monkeypatch.setattr(one_pass, "run_model", counted)
    run()
    return seen


@pytest.mark.slow
def test_the_untrained_model_reads_packed_prompts_once(folders, monkeypatch):
    model = trained(folders, SETTINGS)
    terms = terms_of(model, list(read_samples(folders[1]))[:4], "distill")
    sizes = [one.prompt.n_tokens for one in terms]
    found = passes_of(monkeypatch, lambda: add_gradients(model, terms, 4, 10_000))
    assert found == [sum(sizes) // 2, sum(sizes)]  # four prompts of the teacher, eight of the student


def test_prompts_of_one_step_share_passes_and_others_do_not(folders, tmp_path, monkeypatch):
    samples = list(read_samples(folders[1]))
    model = trained(folders, SETTINGS)
    prompts = PromptMaker(model.engine.encoder, model.engine.context_window)
    chosen = dataclasses.replace(SETTINGS, steps=3, batch=2, packing=10_000, held_out=1)
    training_run = TrainingRun(OBJECTIVES["in2"], samples[:6], samples[6:7], chosen, prompts)
    found = passes_of(monkeypatch, lambda: train(model, training_run, RunFiles(tmp_path, "run")))
    evaluation = len(prompts.make(samples[6]).layout.token_ids) + len(prompts.make(samples[6]).answer)
    trained_on = [one for one in found if one != evaluation]
    assert len(trained_on) == 3
    total = sum(len(prompts.make(one).layout.token_ids) + len(prompts.make(one).answer) for one in samples[:6])
    assert sum(trained_on) == total


@pytest.mark.parametrize("packing", [-1, 1.5, True])
def test_a_number_of_tokens_that_makes_no_sense_is_refused(packing):
    with pytest.raises(ConfigError, match="packing"):
        TrainSettings(packing=packing)
