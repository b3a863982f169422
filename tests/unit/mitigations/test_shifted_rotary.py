import dataclasses

import pytest
import torch

from rag_posfix.attention.masks import attend_with_lse
from rag_posfix.errors import ConfigError
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.mitigations import create
from rag_posfix.mitigations.shifted_rotary import attend_band
from tests.support.attending import reference_attention, reference_scores
from tests.support.tiny import FAMILIES, loaded_model, toy_layout
from tests.unit.mitigations.attend_states import FREQUENCIES, HEAD_DIM, States, distances, random_states

LAYOUT = toy_layout((9, 12, 8, 10))
TOKENS = (5, 9, 11, 20)
SHAPE = loaded_model().spec.shape
ROTATING = [family for family in FAMILIES if create("shifted_rotary").refusal(loaded_model(family).spec.shape) is None]


def attend_of(threshold, window):
    plan = create("shifted_rotary", {"threshold": threshold, "window": window}).plan(LAYOUT, SHAPE)
    return plan.rows[0].attend


def session(loaded, name, parameters=None, layout=LAYOUT):
    return Session(loaded, layout, create(name, parameters).checked_plan(layout, loaded.spec.shape))


def reference(states, n_tokens, threshold, window):
    """Attention by the matrix of relative distances, far ones shifted."""
    distance = distances(n_tokens)
    shifted = torch.where(distance >= threshold, distance - threshold + window, distance)
    scores = reference_scores(states.query, states.key, shifted, FREQUENCIES, states.scaling)
    out = reference_attention(scores, states.value, distance >= 0)
    return out, scores.masked_fill(distance < 0, -torch.inf).softmax(dim=-1)


def test_a_far_key_is_read_at_its_shifted_distance_worked_by_hand():
    # Two channels at frequency 1, q = k = (1, 0): the score of distance d is cos d. Three tokens, S = 2, W = 1: from
    # the last token the distances are 0, 1, 2, and 2 -> 2 - 2 + 1 = 1. With V = identity rows (1, 2, 3 as numbers):
    # scores of keys 0, 1, 2: cos 1, cos 1, cos 0 = 0.540302, 0.540302, 1; exp: 1.716525, 1.716525, 2.718282;
    # sum 6.151332; out = (1 * 1.716525 + 2 * 1.716525 + 3 * 2.718282) / 6.151332 = 13.304421 / 6.151332 = 2.162852
    unit = torch.zeros((1, 3, HEAD_DIM))
    unit[..., 0] = 1.0  # frequency 1 = 100^0
    value = torch.zeros((1, 3, HEAD_DIM))
    value[..., 0] = torch.tensor([1.0, 2.0, 3.0])
    out, newest = States(unit, unit, value, scaling=1.0).run(attend_of(2, 1), 0, 3)
    assert float(out[0, 0, 2, 0]) == pytest.approx(2.162852, abs=1e-5)
    assert newest[0].tolist() == pytest.approx([0.279049, 0.279049, 0.441901], abs=1e-5)


@pytest.mark.parametrize(
    ("threshold", "window", "start"), [(2, 0, 0), (5, 2, 6), (7, 7, 29), (16, 3, 1), (29, 4, 28), (30, 4, 20)]
)
def test_the_two_pieces_equal_the_matrix_of_distances(threshold, window, start):
    n = 30
    states = random_states(n)
    expected, probabilities = reference(states, n, threshold, window)
    out, newest = states.run(attend_of(threshold, window), start, n)
    assert torch.allclose(out[0], expected[:, start:], atol=1e-5)
    if n > threshold:
        assert torch.allclose(newest[0], probabilities[:, -1].mean(dim=0), atol=1e-5)
    else:
        assert newest is None


@pytest.mark.parametrize(("width", "start"), [(2, 0), (8, 0), (3, 5), (40, 29)])
def test_a_band_is_attention_with_a_band_mask(width, start):
    n = 30
    states = random_states(n, seed=1)
    query, key, value = (part[None] for part in (states.query, states.key, states.value))
    out, lse = attend_band(query[:, :, start:], key, value, 0.6, start, width)
    distance = distances(n)
    scores = states.query @ key[0].repeat_interleave(3, dim=0).transpose(-1, -2) * 0.6
    visible = (distance >= 0) & (distance < width)
    assert torch.allclose(out[0], reference_attention(scores, states.value, visible)[:, start:], atol=1e-5)
    spelled = scores.masked_fill(~visible, -torch.inf).logsumexp(dim=-1)
    assert torch.allclose(lse[0], spelled[:, start:], atol=1e-5)


def test_no_piece_is_as_large_as_queries_times_keys(monkeypatch):
    seen = []

    def watching(query, key, *arguments, **options):
        seen.append((query.shape[2], key.shape[2]))
        return attend_with_lse(query, key, *arguments, **options)

    for module in ("mitigations.shifted_rotary", "attention.masks"):
        monkeypatch.setattr(f"rag_posfix.{module}.attend_with_lse", watching)
    states = random_states(200)
    states.run(attend_of(20, 4), 0, 200)
    assert (180, 180) in seen  # the far corner, causal in the fused kernel
    assert max(n_query for n_query, n_key in seen if n_key != 180) <= 20


@pytest.mark.parametrize("family", ROTATING)
def test_a_prompt_below_the_threshold_is_the_unmodified_model_bit_for_bit(family):
    loaded = loaded_model(family)
    found, plain = session(loaded, "shifted_rotary"), session(loaded, "none")
    for token in TOKENS:
        assert torch.equal(found.next_log_probs(), plain.next_log_probs())
        found.advance(token)
        plain.advance(token)


@pytest.mark.parametrize("family", ROTATING)
def test_a_window_as_wide_as_the_threshold_changes_nothing_and_a_narrow_one_does(family):
    loaded = loaded_model(family)
    plain = session(loaded, "none")
    same = session(loaded, "shifted_rotary", {"threshold": 12, "window": 12})
    other = session(loaded, "shifted_rotary", {"threshold": 12, "window": 2})
    assert float((other.next_log_probs() - plain.next_log_probs()).abs().max()) > 1e-3
    for token in TOKENS:
        assert float((same.next_log_probs() - plain.next_log_probs()).abs().max()) < 1e-5
        assert same.attention() == pytest.approx(plain.attention(), abs=1e-6)
        same.advance(token)
        plain.advance(token)


@pytest.mark.parametrize("family", ROTATING)
@pytest.mark.parametrize("threshold", [12, 54])  # far from the start on; reached while the answer is written
def test_reading_at_once_equals_reading_step_by_step(family, threshold):
    loaded = loaded_model(family)
    parameters = {"threshold": threshold, "window": 3}
    assert len(LAYOUT.token_ids) == 52
    longer = dataclasses.replace(
        LAYOUT,
        token_ids=(*LAYOUT.token_ids, *TOKENS),
        suffix=dataclasses.replace(LAYOUT.suffix, stop=LAYOUT.suffix.stop + len(TOKENS)),
    )
    stepped = session(loaded, "shifted_rotary", parameters)
    at_once = stepped.score(TOKENS)
    for token, expected in zip(TOKENS, at_once, strict=True):
        assert float(stepped.next_log_probs()[token]) == pytest.approx(expected, abs=1e-5)
        stepped.advance(token)
    whole = session(loaded, "shifted_rotary", parameters, longer)
    assert float((stepped.next_log_probs() - whole.next_log_probs()).abs().max()) < 1e-5


def test_the_threshold_is_a_share_of_the_context_window():
    attend = create("shifted_rotary").plan(LAYOUT, SHAPE).rows[0].attend
    assert (attend.threshold, attend.window) == (171, 128)  # 512 / 3
    assert create("shifted_rotary", {"threshold": 512}).plan(LAYOUT, SHAPE).rows[0].attend is None
    with pytest.raises(ConfigError, match="window=128 must be at most the threshold, which is 51"):
        create("shifted_rotary", {"share": 0.1}).plan(LAYOUT, SHAPE)
    with pytest.raises(ConfigError, match="window=100"):
        create("shifted_rotary", {"window": 100, "threshold": 99})
