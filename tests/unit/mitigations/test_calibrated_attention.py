import dataclasses
import math

import pytest
import torch

from rag_posfix.errors import ConfigError
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.mitigations import create
from rag_posfix.mitigations.calibrated_attention import RedistributedAttention, passage_weights, redistribute
from rag_posfix.plan.bias_profile import filler, scaled, with_dummy
from rag_posfix.plan.layout import Layout, Span
from tests.support.attending import reference_scores
from tests.support.tiny import FAMILIES, loaded_model, toy_layout
from tests.unit.mitigations.attend_states import FREQUENCIES, N_HEADS, N_KV_HEADS, distances, random_states

LAYOUT = toy_layout()
N = len(LAYOUT.token_ids)
TOKENS = (5, 9, 11, 20)
SHAPE = loaded_model().spec.shape


def plan(parameters=None, layout=LAYOUT):
    return create("calibrated_attention", parameters).checked_plan(layout, SHAPE)


def test_weights_worked_by_hand():
    # rel = (5, 4) - (2, 3) = (3, 1): mean 2, standard deviation 1, so (1, -1); t = 2: softmax(0.5, -0.5) =
    # 1 / (1 + e^-1) = 0.731059
    found = passage_weights(torch.tensor([5.0, 4.0]), torch.tensor([2.0, 3.0]), 2.0)
    assert found.tolist() == pytest.approx([0.731059, 0.268941], abs=1e-6)


def test_weights_do_not_depend_on_the_size_of_attention():
    measured, bias = torch.tensor([5.0, 4.0, 7.0]), torch.tensor([2.0, 3.0, 1.0])
    small = passage_weights(measured * 1e-5, bias * 1e-5, 0.5)
    assert torch.allclose(small, passage_weights(measured, bias, 0.5), atol=1e-6)


def test_passages_that_stand_out_by_nothing_but_rounding_are_alike():
    measured = torch.full((7,), 1e-4) + torch.tensor([0, 1, 0, 2, 0, 0, 1]) * 1e-11
    assert passage_weights(measured, torch.full((7,), 3e-5), 0.5).tolist() == pytest.approx([1 / 7] * 7, rel=0.05)
    assert passage_weights(measured, measured, 0.5).tolist() == pytest.approx([1 / 7] * 7)


def test_mass_is_shared_out_by_hand():
    # Two passages of two tokens with mass 0.3 and 0.1; shares 1/4 and 3/4 of 0.4: 0.1 and 0.3.
    # First passage: factor 0.1 / 0.3 = 1/3; second: 0.3 / 0.1 = 3.
    probabilities = torch.tensor([0.2, 0.1, 0.04, 0.06])
    segments, share = torch.tensor([0, 0, 1, 1]), torch.tensor([0.25, 0.75])
    found = redistribute(probabilities, segments, share, 1.0)
    assert found.tolist() == pytest.approx([0.2 / 3, 0.1 / 3, 0.12, 0.18])
    half = redistribute(probabilities, segments, share, 0.5)
    assert half.tolist() == pytest.approx([0.2 * 2 / 3, 0.1 * 2 / 3, 0.08, 0.12])
    assert torch.equal(redistribute(probabilities, segments, share, 0.0), probabilities)


def test_a_passage_that_a_head_does_not_see_gets_nothing_and_the_mass_is_kept():
    probabilities = torch.tensor([[0.2, 0.1, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    found = redistribute(probabilities, torch.tensor([0, 0, 1, 1]), torch.tensor([0.25, 0.75]), 1.0)
    assert torch.allclose(found, probabilities)


def reference(states, alpha, n_tokens, strength):
    """The paper's formula, C solved for, in every row from the prompt's last token on."""
    distance = distances(n_tokens)
    scores = reference_scores(states.query, states.key, distance, FREQUENCIES, states.scaling)
    probabilities = scores.masked_fill(distance < 0, -math.inf).softmax(dim=-1)
    for head in range(N_HEADS):
        for row in range(N - 1, n_tokens):
            original = probabilities[head, row].clone()
            raw = torch.zeros_like(original)  # a' without C
            for k, span in enumerate(LAYOUT.passages):
                raw[span.slice] = alpha[k] / original[span.slice].mean() * original[span.slice]
            passages = slice(LAYOUT.prefix.stop, LAYOUT.suffix.start)
            constant = original[passages].sum() / raw[passages].sum()
            mixed = (1 - strength) * original[passages] + strength * constant * raw[passages]
            probabilities[head, row, passages] = mixed
    value = states.value.repeat_interleave(N_HEADS // N_KV_HEADS, dim=0)
    return probabilities @ value, probabilities


@pytest.mark.parametrize("strength", [1.0, 0.4])
@pytest.mark.parametrize(("start", "stop"), [(0, N), (N - 3, N), (N - 1, N), (N, N + 1), (N, N + 5), (N - 2, N + 5)])
def test_the_fast_path_equals_the_formula(start, stop, strength):
    states = random_states(N + 5)
    alpha = torch.tensor([0.1, 0.6, 0.25, 0.05])
    expected, probabilities = reference(states, alpha, N + 5, strength)
    out, newest = states.run(RedistributedAttention.of(LAYOUT, range(3), alpha, strength), start, stop)
    assert torch.allclose(out[0], expected[:, start:stop], atol=1e-5)
    assert torch.allclose(newest[0, :stop], probabilities[:, stop - 1, :stop].mean(dim=0), atol=1e-6)


def test_tokens_before_the_last_of_the_prompt_are_as_they_were():
    states = random_states(N)
    alpha = torch.tensor([0.1, 0.6, 0.25, 0.05])
    plain, _ = states.run(RedistributedAttention.of(LAYOUT, range(3), alpha, 0.0), 0, N)
    out, _ = states.run(RedistributedAttention.of(LAYOUT, range(3), alpha, 1.0), 0, N)
    assert torch.equal(out[:, :, : N - 1], plain[:, :, : N - 1])
    assert not torch.allclose(out[:, :, N - 1], plain[:, :, N - 1], atol=1e-3)


def test_the_dummy_repeats_what_stands_in_the_most_passages():
    # Texts (7 8 7) and (8 9): 8 stands in both; 7 and 9 in one, 7 twice. Headings are 1, separators 2.
    layout = Layout(
        token_ids=(0, 1, 7, 8, 7, 2, 1, 8, 9, 2, 3),
        prefix=Span(0, 1), passages=(Span(1, 6), Span(6, 10)), texts=(Span(2, 5), Span(7, 9)),
        suffix=Span(10, 11), question=Span(10, 11), keys=("a", "b"),
    )  # fmt: skip
    assert filler(layout) == (8, 7, 9)
    assert filler(layout.select((1, 0))) == (8, 7, 9)
    # All of four tokens stand once in one passage: by their number, whatever stands first.
    alike = dataclasses.replace(layout, token_ids=(0, 1, 60, 7, 60, 2, 1, 33, 9, 2, 3), texts=(Span(2, 4), Span(7, 9)))
    assert filler(alike) == filler(alike.select((1, 0))) == (7, 9, 33, 60)
    found = with_dummy(layout, 0)
    assert found.token_ids == (0, 8, 7, 9, 8, 2, 1, 8, 9, 2, 3)
    assert found.passages == layout.passages
    assert with_dummy(layout, 1).token_ids == (0, 1, 7, 8, 7, 2, 8, 7, 9, 2, 3)


def test_passages_without_text_stay_as_they_are():
    empty = dataclasses.replace(LAYOUT, texts=tuple(Span(p.start, p.start) for p in LAYOUT.passages))
    assert with_dummy(empty, 1).token_ids == LAYOUT.token_ids


def test_the_survey_reads_the_prompt_and_a_dummy_in_every_slot():
    calibration = plan().calibration
    assert calibration.layouts == (LAYOUT, *(with_dummy(LAYOUT, slot) for slot in range(4)))
    assert calibration.continue_from == 0
    measured = torch.tensor([[4.0, 3.0, 2.0, 1.0], [3.0, 9, 9, 9], [9, 1.0, 9, 9], [9, 9, 2.0, 9], [9, 9, 9, 1.0]])
    attend = calibration.decide(measured).rows[0].attend
    alpha = passage_weights(torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.tensor([3.0, 1.0, 2.0, 1.0]), 0.5)
    lengths = torch.tensor([7.0, 4.0, 9.0, 6.0])
    assert torch.allclose(attend.share, alpha * lengths / (alpha * lengths).sum())
    assert attend.layers == range(1, 3)


def test_temperature_and_strength_reach_the_attention():
    # Two passages, rel 3 and 1: (1, -1) in standard deviations. t = 2: 1 / (1 + e^-1) of the attention per token;
    # t = .5, unless it is said: 1 / (1 + e^-4). The first has 7 tokens and the second 3.
    layout = toy_layout((7, 3))
    measured = torch.tensor([[5.0, 4.0], [2.0, 9.0], [9.0, 3.0]])
    for parameters, exponent, strength in (({"temperature": 2.0, "strength": 0.25}, 1, 0.25), ({}, 4, 1.0)):
        attend = plan(parameters, layout).calibration.decide(measured).rows[0].attend
        first = 7 / (1 + math.exp(-exponent))
        second = 3 / (1 + math.exp(exponent))
        assert attend.share.tolist() == pytest.approx([first / (first + second), second / (first + second)])
        assert attend.strength == strength


def test_with_a_profile_the_prompt_alone_is_read():
    given = plan({"profile": [4, 2, 6]}).calibration
    assert given.layouts == (LAYOUT,)
    attend = given.decide(torch.tensor([[4.0, 3.0, 2.0, 1.0]])).rows[0].attend
    measured = torch.tensor([4.0, 3.0, 2.0, 1.0])
    alpha = passage_weights(measured, torch.tensor(scaled([4.0, 2.0, 6.0], measured.tolist())), 0.5)
    lengths = torch.tensor([7.0, 4.0, 9.0, 6.0])
    assert torch.allclose(attend.share, alpha * lengths / (alpha * lengths).sum())


@pytest.mark.parametrize("family", FAMILIES)
def test_continuing_the_reading_equals_reading_under_the_plan_that_was_decided_on(family):
    loaded = loaded_model(family)
    decided = []
    asked = create("calibrated_attention").checked_plan(LAYOUT, loaded.spec.shape)

    def decide(measured):
        decided.append(asked.calibration.decide(measured))
        return decided[-1]

    calibrated = dataclasses.replace(asked, calibration=dataclasses.replace(asked.calibration, decide=decide))
    running = Session(loaded, LAYOUT, calibrated)
    whole = Session(loaded, LAYOUT, decided[0])
    plain = Session(loaded, LAYOUT, create("none").plan(LAYOUT, loaded.spec.shape))
    assert float((running.next_log_probs() - plain.next_log_probs()).abs().max()) > 1e-4
    assert running.attention() == pytest.approx(whole.attention(), abs=1e-5)
    assert running.attention() != pytest.approx(plain.attention(), abs=1e-3)
    for token in TOKENS:
        assert float((running.next_log_probs() - whole.next_log_probs()).abs().max()) < 1e-5
        running.advance(token)
        whole.advance(token)


def test_one_passage_or_no_strength_leaves_nothing_to_survey():
    assert plan({"strength": 0.0}).calibration is None
    assert plan(layout=toy_layout((7,))).calibration is None
    assert plan(layout=toy_layout((7, 3))).calibration is not None


@pytest.mark.parametrize("profile", [[1.0], [1.0, -2.0], [0, 0.0]])
def test_a_profile_that_is_none_is_refused(profile):
    with pytest.raises(ConfigError, match="calibrated_attention: profile"):
        create("calibrated_attention", {"profile": profile})
