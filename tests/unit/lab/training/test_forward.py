"""The training forward: equal to inference on logits, and its gradients are those of finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from rag_posfix.attention.masks import attend_with_lse, merge
from rag_posfix.errors import PlanConflictError, RagPosfixError
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.one_pass import mask_with_answer, recompute_layers
from rag_posfix.lab.training.prompts import answer_logits, answer_loss, distillation_loss
from rag_posfix.mitigations import MITIGATIONS, create
from rag_posfix.plan.plan import Plan, RowPlan
from tests.support.tiny import loaded_model, toy_layout
from tests.support.toy_encoder import ToyEncoder

ANSWER = (17, 90, 4, 33)
TRAINABLE = ("none", "parallel_windows", "parallel_windows:windows=2", "set_prompting", "parallel_encoding")


@pytest.fixture(scope="module")
def loaded():
    return loaded_model()


def method(name):
    base, _, rest = name.partition(":")
    return create(base, {"windows": 2} if rest else {})


def inferred(loaded, layout, name, answer=ANSWER):
    """Return the log-probabilities of the answer's tokens by prefill and decoding."""
    engine = Engine(loaded, ToyEncoder(), "tiny", "print")
    made = method(name)
    with torch.inference_mode():
        session = engine.prefill(layout, made.checked_plan(layout, loaded.spec.shape))
        found = [session.next_log_probs()]
        for token in answer[:-1]:
            session.advance(token)
            found.append(session.next_log_probs())
    return torch.stack(found)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "smollm3"])
@pytest.mark.parametrize("name", TRAINABLE)
def test_the_training_forward_says_what_inference_says(name, family):
    loaded, layout = loaded_model(family), toy_layout()
    plan = method(name).checked_plan(layout, loaded.spec.shape)
    found = answer_logits(loaded, layout, plan, ANSWER).float().log_softmax(-1)
    torch.testing.assert_close(found, inferred(loaded, layout, name), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name in MITIGATIONS.names() if not MITIGATIONS.get(name).nested_methods])
def test_every_method_is_trained_as_it_is_inferred_or_refused(name, loaded):
    layout = toy_layout(relevance=(0.2, 0.9, 0.5, 0.1))
    cls = MITIGATIONS.get(name)
    made = cls(**cls.example)
    plan = made.checked_plan(layout, loaded.spec.shape)
    refused = None
    try:
        found = answer_logits(loaded, layout, plan, ANSWER).float().log_softmax(-1)
    except RagPosfixError as error:
        refused = str(error)
    if refused is not None:
        assert "train under none" in refused
        assert name not in TRAINABLE
        return
    engine = Engine(loaded, ToyEncoder(), "tiny", "print")
    with torch.inference_mode():
        session = engine.prefill(layout, plan)
        expected = [session.next_log_probs()]
        for token in ANSWER[:-1]:
            session.advance(token)
            expected.append(session.next_log_probs())
    torch.testing.assert_close(found, torch.stack(expected), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", TRAINABLE)
def test_gradients_are_those_of_finite_differences(name):
    loaded, layout = loaded_model(), toy_layout()
    loaded.model.double()
    plan = method(name).checked_plan(layout, loaded.spec.shape)

    def loss():
        return answer_loss_64(answer_logits(loaded, layout, plan, ANSWER))

    def answer_loss_64(logits):
        return torch.nn.functional.cross_entropy(logits, torch.tensor(ANSWER))

    attention = loaded.model.model.layers[1].self_attn
    for weight in (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight):
        (gradient,) = torch.autograd.grad(loss(), weight)
        at = divmod(int(gradient.abs().argmax()), gradient.shape[1])
        step = 1e-4
        with torch.no_grad():
            weight[at] += step
            above = loss()
            weight[at] -= 2 * step
            below = loss()
            weight[at] += step
        # Merged attention computes in float32, whose rounding bounds the difference quotient.
        assert float(above - below) / (2 * step) == pytest.approx(float(gradient[at]), rel=2e-2)


def test_the_log_sum_exp_of_merged_attention_has_a_gradient():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 6, 8, generator=generator) for heads in (4, 2, 2))
    query.requires_grad_()
    merged = merge([attend_with_lse(query, key[:, :, at], value[:, :, at], 0.3) for at in (slice(0, 2), slice(2, 6))])[
        0
    ]
    whole = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=0.3, enable_gqa=True)
    weights = torch.randn(whole.shape, generator=generator)
    (found,) = torch.autograd.grad((merged * weights).sum(), query)
    (expected,) = torch.autograd.grad((whole * weights).sum(), query)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", TRAINABLE)
def test_recomputed_layers_give_the_same_gradients(name):
    layout, gradients = toy_layout(), []
    for checkpointed in (False, True):
        loaded = loaded_model()
        loaded.model.train()
        if checkpointed:
            recompute_layers(loaded.model)
        plan = method(name).checked_plan(layout, loaded.spec.shape)
        torch.autograd.backward(answer_loss(answer_logits(loaded, layout, plan, ANSWER), ANSWER))
        gradients.append([parameter.grad for parameter in loaded.model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_only_the_answer_is_in_the_loss():
    # Uniform logits over four tokens: ln 4 for each. A token that is certain adds nothing.
    assert float(answer_loss(torch.zeros(3, 4), (0, 1, 2))) == pytest.approx(math.log(4))
    logits = torch.zeros(2, 4)
    logits[0, 3] = 1e4
    assert float(answer_loss(logits, (3, 0))) == pytest.approx(math.log(4) / 2)


def test_the_divergence_of_a_case_worked_by_hand():
    # Teacher (1/2, 1/2), student (3/4, 1/4): KL = 1/2 ln(2/3) + 1/2 ln 2 = 0.143841
    student = torch.tensor([[math.log(3.0), 0.0]])
    assert float(distillation_loss(student, torch.zeros(1, 2), 1.0)) == pytest.approx(0.1438410362, abs=1e-6)
    assert float(distillation_loss(student, student, 2.0)) == pytest.approx(0.0, abs=1e-7)


def test_tokens_of_an_answer_see_all_before_them():
    def mask(query, key):
        return (key <= query) & (key != 0)

    at = torch.arange(5)
    found = mask_with_answer(mask, 3)(at[:, None], at[None, :])
    assert found.int().tolist() == [
        [0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]
    ]  # fmt: skip


def test_a_plan_of_several_rows_is_refused(loaded):
    plan = Plan(rows=(RowPlan(), RowPlan()), combine=lambda scores: (scores.log_probs[0], scores.confidence))
    with pytest.raises(PlanConflictError, match="2 rows"):
        answer_logits(loaded, toy_layout(), plan, ANSWER)
