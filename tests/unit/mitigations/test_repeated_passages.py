"""Passages twice, or the most relevant once more: equal to the unmodified model on a prompt with that text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.mitigations import create
from rag_posfix.plan.layout import Layout
from tests.support.tiny import loaded_model, toy_layout
from tests.support.tiny_evaluation import tiny_engine

LAYOUT = replace(toy_layout((7, 4, 9)), relevance=(0.2, 0.9, 0.4))


def written_out(layout: Layout, order: tuple[int, ...]) -> Layout:
    """Return the prompt with the passages of ``order`` written one after the other, as a prompt without passages."""
    ids = list(layout.tokens(layout.prefix))
    for index in order:
        ids += layout.tokens(layout.passages[index])
    return Layout.plain([*ids, *layout.tokens(layout.suffix)])


@pytest.mark.parametrize(("repeat", "order"), [("all", (0, 1, 2, 0, 1, 2)), ("best", (0, 1, 2, 1))])
def test_the_prompt_is_read_as_the_unmodified_model_reads_the_repeated_text(repeat, order):
    loaded = loaded_model()
    plan = create("repeated_passages", {"repeat": repeat}).plan(LAYOUT, loaded.spec.shape)
    session = Session(loaded, LAYOUT, plan)
    plain = Session(loaded, written_out(LAYOUT, order), create("none").plan(LAYOUT, loaded.spec.shape))
    assert torch.equal(session.next_log_probs(), plain.next_log_probs())


def test_a_repeated_passage_has_the_attention_of_both_copies():
    loaded = loaded_model()
    plan = create("repeated_passages").plan(LAYOUT, loaded.spec.shape)
    shares = Session(loaded, LAYOUT, plan).attention()
    copies = LAYOUT.select((0, 1, 2, 0, 1, 2))
    distinct = replace(copies, keys=tuple("abcdef"))
    of_each = Session(loaded, distinct, create("none").plan(distinct, loaded.spec.shape)).attention()
    assert shares == pytest.approx([a + b for a, b in zip(of_each[:3], of_each[3:], strict=True)], abs=1e-6)


def test_of_equally_relevant_passages_the_first_by_content_is_repeated_whatever_their_order():
    layout = replace(LAYOUT, relevance=(0.5, 0.5, 0.5))
    chosen = set()
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        ordered = layout.select(order)
        (row,) = create("repeated_passages", {"repeat": "best"}).plan(ordered, loaded_model().spec.shape).rows
        chosen.add(ordered.keys[row.passages[-1]])
    assert chosen == {min(LAYOUT.keys)}


def test_a_warm_prompt_gives_the_bits_of_a_cold_one():
    engine = tiny_engine().with_passages(PassageStore([MemoryTier(2**24)]))
    choice = MitigationChoice("repeated_passages")
    layout = toy_layout((7, 4, 9))
    cold = engine.next_log_probs(layout, choice)
    assert torch.equal(engine.next_log_probs(layout, choice), cold)
