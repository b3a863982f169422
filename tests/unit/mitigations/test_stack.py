"""Stacks: what goes together, what is refused and how, and that a stack does what its methods do."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from rag_posfix.errors import ConfigError, PlanConflictError, UnknownNameError
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.mitigations import create
from rag_posfix.mitigations.stack import compose
from rag_posfix.plan.plan import AttentionOverride, HiddenScale, Plan, RowPlan
from tests.support.tiny import loaded_model, toy_layout

RELEVANCE = (0.9, 0.2, 0.4, 0.3)


def log_probs(layout, *methods):
    loaded = loaded_model()
    method = create("stack", {"methods": list(methods)}) if len(methods) > 1 else create(methods[0])
    return Session(loaded, layout, method.checked_plan(layout, loaded.spec.shape)).next_log_probs()


def planned(*methods):
    method = create("stack", {"methods": list(methods)})
    return method.plan(toy_layout(relevance=RELEVANCE), loaded_model().spec.shape)


def test_fields_of_both_methods_are_in_the_plan():
    row = planned("head_scaling", "sorted_inter_document").rows[0]
    assert row.head_scale is not None
    assert row.attend is not None
    assert row.passages is not None


def test_every_row_of_an_ensemble_gets_what_the_other_method_asks_for():
    rows = planned("context_experts", "layer_scaling").rows
    assert len(rows) == 5
    assert all(row.layer_scale is not None for row in rows)
    bases = [row.rope_base_factor for row in planned("sorted_inter_document", "multi_base").rows]
    assert len(bases) == len(set(bases)) > 1


@pytest.mark.parametrize(
    "methods",
    [("head_scaling", "sorted_inter_document"), ("layer_scaling", "parallel_windows"), ("layer_scaling", "none")],
)
def test_a_stack_differs_from_each_of_its_methods_and_not_from_itself_in_another_sequence(methods):
    layout = toy_layout(relevance=RELEVANCE)
    both = log_probs(layout, *methods)
    assert torch.equal(both, log_probs(layout, *methods[::-1]))
    for one in methods:
        same = float((both - log_probs(layout, one)).abs().max()) < 1e-4
        assert same == ("none" in methods and one != "none")


@pytest.mark.parametrize("methods", [("head_scaling", "sorted_inter_document"), ("context_experts", "layer_scaling")])
def test_every_order_gives_the_same(methods):
    layout = toy_layout(relevance=RELEVANCE)
    base = log_probs(layout, *methods)
    assert create("stack", {"methods": list(methods)}).is_order_invariant
    for order in itertools.permutations(range(4)):
        assert float((log_probs(layout.select(order), *methods) - base).abs().max()) < 1e-5, order


def test_head_ratios_reach_what_another_method_rotates():
    # Far queries are turned once more, each head by its own divisor: ratios of 1 change nothing, others do.
    layout, far = toy_layout(), {"name": "shifted_rotary", "threshold": 20, "window": 5}
    ones = {"name": "head_scaling", "low": 1.0, "high": 1.0, "skip_layers": 0}
    others = {"name": "head_scaling", "skip_layers": 0}
    loaded = loaded_model()
    alone = create("shifted_rotary", {"threshold": 20, "window": 5}).plan(layout, loaded.spec.shape)
    base = Session(loaded, layout, alone).next_log_probs()
    assert torch.allclose(log_probs(layout, far, ones), base, atol=1e-5)
    assert float((log_probs(layout, far, others) - base).abs().max()) > 1e-4


def test_a_stack_of_methods_that_depend_on_order_depends_on_order():
    assert not create("stack", {"methods": ["head_scaling", "layer_scaling"]}).is_order_invariant


class Nothing(AttentionOverride):
    """An attention of its own."""

    def __call__(self, given):
        raise AssertionError


MASKED = Plan(rows=(RowPlan(mask=lambda query, key: key <= query),))
ATTENDING = Plan(rows=(RowPlan(attend=Nothing()),))


@pytest.mark.parametrize(
    ("first", "second", "field"),
    [
        (ATTENDING, ATTENDING, r"attend \(both set it\)"),
        (MASKED, ATTENDING, "(attend and mask|mask and attend)"),
        (
            Plan(rows=(RowPlan(hidden_scale=HiddenScale(0, 0.0, range(2))),)),
            ATTENDING,
            "(attend and hidden_scale|hidden_scale and attend)",
        ),
        (
            Plan(rows=(RowPlan(passages=(0,)),)),
            Plan(rows=(RowPlan(positions=torch.zeros(1, 3)),)),
            "(passages and positions|positions and passages)",
        ),
        (Plan(independent_passages=True), ATTENDING, "attend .passages that are read alone"),
        (*[Plan(rows=(RowPlan(), RowPlan()), combine=lambda scores: None)] * 2, r"rows \(both read several rows\)"),
    ],
)
def test_plans_that_conflict_are_refused_with_both_names_and_the_field(first, second, field):
    for pair in ([("left", first), ("right", second)], [("left", second), ("right", first)]):
        with pytest.raises(PlanConflictError, match=r"(left and right|right and left) cannot be stacked") as caught:
            compose(pair)
        assert re.search(field, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    "methods",
    [
        ("parallel_windows", "sorted_inter_document"),
        ("context_experts", "multi_base"),
        ("parallel_encoding", "sorted_inter_document"),
        ("set_prompting", "parallel_windows"),
        ("calibrated_attention", "layer_scaling"),
    ],
)
def test_methods_that_change_the_same_thing_are_refused(methods):
    with pytest.raises(PlanConflictError, match=f"{methods[0]} and {methods[1]} cannot be stacked"):
        planned(*methods)


def test_parameters_of_the_methods_are_part_of_the_fingerprint():
    plain = create("stack", {"methods": ["head_scaling", "none"]})
    other = create("stack", {"methods": [{"name": "head_scaling", "low": 1.1}, "none"]})
    assert plain.fingerprint() != other.fingerprint()
    assert plain == create("stack", {"methods": ({"name": "head_scaling"}, "none")})


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ([], "must be a list of 1 to 16 methods"),
        (["none"] * 17, "must be a list of 1 to 16 methods"),
        ("head_scaling", "must be a list of 1 to 16 methods"),
        ([3], "must be a name, or"),
        ([{"low": 1.0}], "must be a name, or"),
        (["stack"], "cannot hold a stack"),
        ([{"name": "head_scaling", "lo": 1.0}], "head_scaling has no parameter 'lo'"),
    ],
)
def test_a_wrong_list_is_refused(methods, message):
    with pytest.raises(ConfigError, match=message):
        create("stack", {"methods": methods})


def test_an_unknown_method_in_a_stack_is_refused_with_a_suggestion():
    with pytest.raises(UnknownNameError, match="head_scaling"):
        create("stack", {"methods": ["head_scalin"]})


def test_sixteen_methods_are_not_too_many():
    assert len(create("stack", {"methods": ["none"] * 16}).methods) == 16
