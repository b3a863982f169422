"""What an order promises: a permutation, the same each time, and by content alone where it says so."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from rag_posfix.assembly.orders import OrderInputs, apply_order
from rag_posfix.conformance.models import plugins

of_each_order = pytest.mark.parametrize(("name", "cls"), plugins("order"))
SCORES: tuple[tuple[float | None, ...], ...] = ((), (0.5,), (0.9, 0.1, 0.5), (0.5, 0.5, None), (None, None))


@of_each_order
def test_the_order_has_the_name_that_it_is_registered_by(name: str, cls: Any) -> None:
    assert cls.name == name


@of_each_order
@pytest.mark.parametrize("relevance", SCORES)
def test_each_list_of_documents_gets_a_permutation_and_the_same_one_again(
    name: str, cls: Any, relevance: tuple[float | None, ...]
) -> None:
    inputs = OrderInputs(relevance, 3, tuple("abcde"[: len(relevance)]))
    first = apply_order(cls(**cls.example), inputs)
    assert sorted(first) == list(range(len(relevance)))
    assert apply_order(cls(**cls.example), inputs) == first


@of_each_order
def test_an_order_by_content_gives_one_prompt_for_every_order_of_the_documents(name: str, cls: Any) -> None:
    if not cls.by_content:
        pytest.skip("by_content is False")
    scored = {"a": 0.5, "b": 0.5, "c": 0.9, "d": None}
    prompts = set()
    for keys in itertools.permutations(scored):
        inputs = OrderInputs(tuple(scored[key] for key in keys), keys=keys)
        prompts.add("".join(keys[index] for index in apply_order(cls(**cls.example), inputs)))
    assert len(prompts) == 1


@of_each_order
def test_each_parameter_is_described(name: str, cls: Any) -> None:
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        assert f"    {field.name}: " in (cls.__doc__ or ""), f"describe {field.name} under Args of the docstring"
