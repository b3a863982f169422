"""What every registered order promises. A new order needs no line here."""

from __future__ import annotations

import inspect
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.assembly.orders import ORDERS, OrderInputs, apply_order
from tests.support.toy_encoder import ToyEncoder

BUILT_IN = {"cache_aware", "ends_first", "original", "profile", "random", "relevance", "reverse"}

scores = st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1), max_size=30)


def example(name):
    """Return the order; with the parameters of its example, if it needs some."""
    return ORDERS.get(name)(**ORDERS.get(name).example)


def test_the_built_in_orders_are_registered():
    assert set(ORDERS.names()) >= BUILT_IN


@given(scores, st.integers(), st.sampled_from(ORDERS.names()))
def test_every_order_is_a_deterministic_permutation(relevance, seed, name):
    first = apply_order(example(name), OrderInputs(tuple(relevance), seed))
    assert sorted(first) == list(range(len(relevance)))
    assert apply_order(example(name), OrderInputs(tuple(relevance), seed)) == first


@pytest.mark.parametrize("name", ORDERS.names())
def test_every_order_orders_a_prompt(name):
    assembler = Assembler(ToyEncoder(), 4096, order_parameters={name: ORDERS.get(name).example})
    documents = [Document(page_content=f"text {i}", metadata={"relevance_score": 1 - i / 10}) for i in range(5)]
    assembled = assembler.assemble("Why?", documents, order=name, seed=3)
    keys = assembler_keys(assembler, documents)
    expected = apply_order(example(name), OrderInputs(tuple(1 - i / 10 for i in range(5)), 3, keys))
    assert [document.page_content for document in assembled.documents] == [f"text {i}" for i in expected]
    assert assembled.order == name


def assembler_keys(assembler, documents):
    """Return the content keys of the documents, in the given order."""
    return assembler.assemble("Why?", documents, order="original").layout.keys


@pytest.mark.parametrize("name", ORDERS.names())
def test_every_order_and_every_parameter_is_described(name):
    text = inspect.getdoc(ORDERS.get(name)) or ""
    assert text.partition("\n")[0].endswith(".")
    for parameter in inspect.signature(ORDERS.get(name)).parameters:
        assert f"    {parameter}: " in text


BY_CONTENT = [name for name in ORDERS.names() if ORDERS.get(name).by_content]


@pytest.mark.parametrize("name", BY_CONTENT)
def test_an_order_by_content_gives_one_prompt_for_every_order_of_the_documents(name):
    scored = {"a": 0.5, "b": 0.5, "c": 0.9, "d": None, "e": None}  # equal scores, and none at all
    prompts = set()
    for keys in itertools.permutations(scored):
        inputs = OrderInputs(tuple(scored[key] for key in keys), keys=keys)
        prompts.add("".join(keys[index] for index in apply_order(example(name), inputs)))
    assert len(prompts) == 1


def test_the_orders_by_content_are_those_that_follow_from_scores_alone():
    assert {"relevance", "reverse", "ends_first", "profile"} <= set(BY_CONTENT)
    assert not {"original", "random"} & set(BY_CONTENT)
