import math

import pytest
import torch

from rag_posfix.attention.masks import pseudo_log_mass
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.mitigations import create
from tests.support.attending import reference_scores
from tests.support.tiny import FAMILIES, loaded_model, toy_layout
from tests.unit.mitigations.attend_states import FREQUENCIES, N_HEADS, N_KV_HEADS, distances, random_states

LAYOUT = toy_layout()
N = len(LAYOUT.token_ids)


def attend_of(shape, **parameters):
    return create("stable_mask", parameters).plan(LAYOUT, shape).rows[0].attend


def log_mass(n_tokens, gamma):
    return pseudo_log_mass(torch.arange(n_tokens), n_tokens, gamma)


def test_pseudo_scores_worked_by_hand():
    # gamma = ln 2: exp(-gamma (j - 1)) = 1, 1/2, 1/4, 1/8 for j = 1..4.
    # Row 1 sums j = 2, 3, 4: 1/2 + 1/4 + 1/8 = 7/8; row 2: 3/8; row 3: 1/8; row 4 has none.
    found = log_mass(4, math.log(2)).exp()
    assert found.tolist() == pytest.approx([7 / 8, 3 / 8, 1 / 8, 0.0])


@pytest.mark.parametrize("gamma", [1e-6, 0.01, 1.0, 100.0])
def test_the_closed_form_is_the_log_sum_exp_of_the_scores(gamma):
    n = 300
    j = torch.arange(n, dtype=torch.float64)
    above = j > j[:, None]
    exact = (-gamma * j).expand(n, n).masked_fill(~above, -math.inf).logsumexp(dim=-1)
    found = log_mass(n, gamma)
    assert found.dtype == torch.float32
    assert torch.allclose(found[:-1].double(), exact[:-1], rtol=1e-5, atol=1e-5)
    assert found[-1] == -math.inf


def reference(states, n_tokens, total, gamma):
    """The paper's formula as it stands: a T x n matrix with pseudo-scores above the diagonal."""
    scores = reference_scores(states.query, states.key, distances(n_tokens), FREQUENCIES, states.scaling)
    pseudo = -gamma * torch.arange(total).float()
    full = pseudo.expand(N_HEADS, n_tokens, total).clone()
    causal = torch.arange(total) <= torch.arange(n_tokens)[:, None]
    full[..., :n_tokens] = torch.where(causal[:, :n_tokens], scores, full[..., :n_tokens])
    probabilities = (full.softmax(dim=-1) * causal)[..., :n_tokens]
    value = states.value.repeat_interleave(N_HEADS // N_KV_HEADS, dim=0)
    return probabilities @ value, probabilities


@pytest.mark.parametrize(
    ("train_length", "total"), [(None, N), (1, N), (N - 1, N), (N, N), (N + 1, N + 1), (N + 7, N + 7)]
)
def test_the_virtual_column_equals_the_matrix_with_pseudo_scores(train_length, total):
    states = random_states(N)
    expected, probabilities = reference(states, N, total, 0.03)
    attend = attend_of(None, gamma=0.03, train_length=train_length)
    out, newest = states.run(attend, 0, N)
    assert torch.allclose(out[0], expected, atol=1e-5)
    for start in (1, N - 5, N - 1):  # later tokens against cached keys
        assert torch.allclose(states.run(attend, start, N)[0][0], expected[:, start:], atol=1e-5)
    assert attend.standard_from == total - 1
    if total == N:
        assert newest is None  # nothing above the diagonal: the last token attends in the ordinary way
    else:
        share = probabilities[:, -1].mean(dim=0)
        assert torch.allclose(newest[0], share / share.sum(), atol=1e-6)
        assert float(share.sum()) < 1 - 1e-4  # a part is discarded, so that the rest has to be scaled


def test_tokens_after_the_last_column_attend_in_the_ordinary_way():
    states = random_states(N + 4)
    attend = attend_of(None, gamma=0.03)
    out, newest = states.run(attend, N - 1, N + 4)
    ordinary, _ = states.run(attend_of(None, gamma=100.0), N - 1, N + 4)
    assert torch.equal(out, ordinary)
    assert newest is None
    assert attend.standard_from == N - 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_steep_gamma_is_the_unmodified_model_and_a_flat_one_is_not(family):
    loaded = loaded_model(family)
    plain = Session(loaded, LAYOUT, create("none").plan(LAYOUT, loaded.spec.shape)).next_log_probs()

    def difference(gamma):
        plan = create("stable_mask", {"gamma": gamma}).checked_plan(LAYOUT, loaded.spec.shape)
        return float((Session(loaded, LAYOUT, plan).next_log_probs() - plain).abs().max())

    assert difference(100.0) < 1e-5
    assert difference(0.01) > 1e-3


def test_a_prompt_and_its_continuation_agree_while_both_are_shorter_than_in_training():
    loaded = loaded_model()
    plan = create("stable_mask", {"train_length": N + 20}).plan(LAYOUT, loaded.spec.shape)
    tokens = (5, 9, 11, 20)
    running = Session(loaded, LAYOUT, plan)
    at_once = running.score(tokens)
    for token, expected in zip(tokens, at_once, strict=True):
        assert float(running.next_log_probs()[token]) == pytest.approx(expected, abs=1e-5)
        running.advance(token)
    ordinary = Session(loaded, LAYOUT, create("stable_mask").plan(LAYOUT, loaded.spec.shape)).score(tokens)
    assert max(abs(a - b) for a, b in zip(at_once, ordinary, strict=True)) > 1e-5
