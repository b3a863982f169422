"""What a mitigation promises: shapes, order invariance where claimed, fingerprints, and no trace in the model."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from rag_posfix.attention.masks import materialize
from rag_posfix.conformance.models import TOLERANCE, hooked_model, plugins, random_model, toy_layout
from rag_posfix.errors import ConfigError
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.mitigations.base import Mitigation, create
from rag_posfix.plan.layout import Layout

METHODS = plugins("mitigation")
INVARIANT = [pair for pair in METHODS if pair[1].order_invariant]
TOKENS = (5, 9, 11, 20)
RELEVANCE = (0.9, 0.2, 0.4, 0.3)
LAYOUT = toy_layout(relevance=RELEVANCE)

of_each_method = pytest.mark.parametrize(("name", "cls"), METHODS)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return hooked_model()


def example(name: str, cls: type[Mitigation]) -> Mitigation:
    """Return the method with its example parameters, or its defaults."""
    return create(name, cls.example)


def session(model: LoadedModel, method: Mitigation, layout: Layout = LAYOUT) -> Session:
    return Session(model, layout, method.checked_plan(layout, model.spec.shape))


@of_each_method
def test_the_method_has_the_name_that_it_is_registered_by(name: str, cls: Any) -> None:
    assert cls.name == name


@of_each_method
def test_the_method_is_a_frozen_dataclass_whose_parameters_are_described(name: str, cls: Any) -> None:
    assert dataclasses.is_dataclass(cls)
    assert vars(cls)["__dataclass_params__"].frozen, "add @dataclass(frozen=True)"
    for field in dataclasses.fields(cls):
        assert f"    {field.name}: " in (cls.__doc__ or ""), f"describe {field.name} under Args of the docstring"


@of_each_method
def test_positions_and_masks_of_each_row_have_the_shape_of_its_prompt(name: str, cls: Any, model: LoadedModel) -> None:
    for row in example(name, cls).plan(LAYOUT, model.spec.shape).rows:
        read = LAYOUT if row.passages is None else LAYOUT.select(row.passages)
        length = len(read.token_ids)
        if row.positions is not None:
            assert (row.positions.shape, row.positions.dtype) == ((1, length), torch.float32)
            assert torch.isfinite(row.positions).all()
            assert (row.positions >= 0).all()
        if row.mask is not None:
            matrix = materialize(row.mask, length, length)
            assert matrix.dtype == torch.bool
            assert matrix.diagonal().all(), "every token must attend to itself"


@pytest.mark.parametrize(("name", "cls"), INVARIANT)
def test_each_order_of_the_passages_gives_the_same_answer(name: str, cls: Any, model: LoadedModel) -> None:
    method = example(name, cls)
    base = session(model, method)
    for order in itertools.permutations(range(4)):
        other = session(model, method, LAYOUT.select(order))
        difference = float((other.next_log_probs() - base.next_log_probs()).abs().max())
        assert difference < TOLERANCE, f"order_invariant is True, and order {order} differs by {difference:g}"
        attention = [other.attention()[order.index(i)] for i in range(4)]
        assert attention == pytest.approx(base.attention(), abs=1e-6)


@pytest.mark.parametrize(("name", "cls"), INVARIANT)
def test_passages_of_equal_relevance_are_ordered_by_content(name: str, cls: Any, model: LoadedModel) -> None:
    method, layout = example(name, cls), toy_layout(relevance=(0.5,) * 4)
    base = session(model, method, layout).next_log_probs()
    for order in ((3, 2, 1, 0), (1, 3, 0, 2)):
        other = session(model, method, layout.select(order)).next_log_probs()
        assert float((other - base).abs().max()) < TOLERANCE, "break ties by layout.keys"


@of_each_method
def test_the_fingerprint_is_that_of_the_parameters(name: str, cls: Any) -> None:
    method = example(name, cls)
    assert example(name, cls).fingerprint() == method.fingerprint()
    for field in dataclasses.fields(method):
        other = changed(method, field.name)
        if other is not None:
            assert other.fingerprint() != method.fingerprint(), f"{field.name} is not part of the fingerprint"


def changed(method: Mitigation, field: str) -> Mitigation | None:
    """Return the method with another allowed value of a parameter; None if none of some values is allowed."""
    value = getattr(method, field)
    for candidate in (True, False, None, 1, 2, 3, 0.25, 0.5, 1.5, "", value):
        if type(candidate) is type(value) and candidate == value:
            continue
        try:
            other = dataclasses.replace(method, **{field: candidate})
        except (ConfigError, TypeError, ValueError):
            continue
        if getattr(other, field) != value:
            return other
    return None


@of_each_method
def test_the_model_is_the_unmodified_one_bit_for_bit_after_use(name: str, cls: Any, model: LoadedModel) -> None:
    ids = torch.tensor([LAYOUT.token_ids])
    with torch.inference_mode():
        before = random_model()(input_ids=ids, use_cache=True).logits
    running = session(model, example(name, cls))
    running.advance(TOKENS[0])
    with pytest.raises((IndexError, RuntimeError)):
        running.advance(10**6)  # no such token
    with torch.inference_mode():
        after = model.model(input_ids=ids, use_cache=True).logits
    assert torch.equal(before, after)


@of_each_method
def test_a_plan_is_the_same_for_the_same_prompt(name: str, cls: Any, model: LoadedModel) -> None:
    first, second = (session(model, example(name, cls)).next_log_probs() for _ in range(2))
    assert torch.equal(first, second)


@of_each_method
def test_decoding_token_by_token_equals_scoring_at_once(name: str, cls: Any, model: LoadedModel) -> None:
    running = session(model, example(name, cls))
    at_once, stepwise = running.score(TOKENS), []
    for token in TOKENS:
        stepwise.append(float(running.next_log_probs()[token]))
        running.advance(token)
    assert at_once == pytest.approx(stepwise, abs=TOLERANCE)


@of_each_method
def test_prompts_without_a_passage_or_with_equal_ones_are_read(name: str, cls: Any, model: LoadedModel) -> None:
    twins = dataclasses.replace(toy_layout((6, 6), relevance=(0.5, 0.5)), keys=("same", "same"))
    for layout in (toy_layout(()), toy_layout((7,), relevance=(0.8,)), twins):
        assert torch.isfinite(session(model, example(name, cls), layout).next_log_probs()).all()


@of_each_method
def test_with_identity_parameters_one_passage_is_read_as_by_the_unmodified_model(
    name: str, cls: Any, model: LoadedModel
) -> None:
    layout = toy_layout((7,), relevance=(0.8,))
    found = session(model, create(name, cls.identity_parameters), layout).next_log_probs()
    unmodified = session(model, create("none"), layout).next_log_probs()
    assert float((found - unmodified).abs().max()) < TOLERANCE, "set identity_parameters"
