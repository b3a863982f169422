"""Inter-document attention: against a plain implementation, by hand, and against ties."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from rag_posfix.attention import pine as attention_module
from rag_posfix.attention.pine import (
    ImportanceOrderedAttention,
    batches,
    distances,
    document_importance,
)
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.mitigations import create
from rag_posfix.patching.attention_hook import LayerRotation
from rag_posfix.plan.plan import AttentionInput, Plan, RowPlan
from tests.support.attending import reference_attention, reference_scores, use_products
from tests.support.tiny import loaded_model, toy_layout

SCALING = 0.3
FREQUENCIES = 100.0 ** -(torch.arange(4) / 4)


class Angles:
    """Stands for a model's: rotates the first 2 x ``pairs`` channels and scales what it rotates."""

    def __init__(self, pairs=4, scaling=1.0):
        self.frequencies, self.scaling = FREQUENCIES[:pairs], scaling

    def angles(self, states, positions, base_factor):
        angle = positions[..., None].float() * self.frequencies
        angle = torch.cat((angle, angle), dim=-1)
        return (angle.cos() * self.scaling).to(states.dtype), (angle.sin() * self.scaling).to(states.dtype)


def plain_importance(query, key, documents, own):
    """Return {j: (Hq, Tq)}: what each query token gives to document j, over n_j; ``own`` None for later tokens."""
    scores = query @ key.repeat_interleave(query.shape[0] // key.shape[0], dim=0).transpose(1, 2) * SCALING
    counted = [j for j in range(len(documents)) if j != own]
    weights = torch.cat([scores[:, :, documents[j].slice] for j in counted], dim=-1).softmax(dim=-1)
    pieces = weights.split([len(documents[j]) for j in counted], dim=-1)
    return {j: piece.sum(dim=-1) / max(len(documents[j]), 1) for j, piece in zip(counted, pieces, strict=True)}


def key_positions(ranking, documents, end, n_key):
    """Return each key's position if ``ranking`` lists the documents from the last slot towards the first."""
    positions = torch.arange(n_key).float()
    for j in ranking:
        end -= len(documents[j])
        positions[documents[j].slice] = torch.arange(end, end + len(documents[j])).float()
    return positions


def by_distance(query, key, distance):
    return reference_scores(query, key, distance, FREQUENCIES, SCALING)


def plain_attention(query, key, value, layout, score=by_distance):
    """Return the output as the paper writes it: a T x T matrix per head of distances between re-assigned positions.

    Shapes:
        query: (Hq, Tq, D). key, value: (Hkv, Tk, D). returns: (Hq, Tq, D), (Tk,).
    """
    n_heads, n_query, n_key = query.shape[0], query.shape[1], key.shape[1]
    documents, end, start = layout.passages, layout.suffix.start, n_key - n_query
    index = torch.arange(n_key)
    visible = index[None] <= index[start:, None]
    distance = (index[start:, None] - index[None]).float().repeat(n_heads, 1, 1)
    for i, own in enumerate(documents if start == 0 else ()):
        given = plain_importance(query[:, own.slice], key, documents, i)
        for h in range(n_heads):
            others = sorted(given, key=lambda j: -float(given[j][h].sum()))
            at = key_positions([i, *others], documents, end, n_key)
            distance[h, own.slice] = at[own.slice, None] - at
        for other in documents:
            if other != own:
                visible[own.slice, other.slice] = True
    for m in range(max(end - start, 0), n_query):
        given = plain_importance(query[:, m : m + 1], key, documents, None)
        for h in range(n_heads):
            ranking = sorted(given, key=lambda j: -float(given[j][h, 0]))
            distance[h, m] = start + m - key_positions(ranking, documents, end, n_key)
    scores = score(query, key, distance)
    return reference_attention(scores, value, visible), scores[:, -1].softmax(dim=-1).mean(dim=0)


def states(heads, kv_heads, n_tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, h, n_tokens, 8, generator=generator) * 2 for h in (heads, kv_heads, kv_heads))


def run(layout, query, key, value, rotation=None):
    """Return what the fast attention makes of the newest ``query`` tokens."""
    rotation = rotation or LayerRotation(Angles())
    positions = torch.arange(key.shape[2]).float()[None]
    return ImportanceOrderedAttention.over(layout)(
        AttentionInput(query, key, value, positions, SCALING, 0, rotation, lambda: query)
    )


LAYOUTS = {
    "four": toy_layout(),
    "no prefix": toy_layout((5, 3, 6), prefix=0),
    "single tokens": toy_layout((1, 4, 1, 1, 3), prefix=2, suffix=2),
    "an empty one": toy_layout((4, 0, 3)),
    "two": toy_layout((6, 3)),
    "a suffix of several blocks": toy_layout((5, 9, 4), suffix=150),
    "more documents than channels": toy_layout((2, 3, 3, 1, 2, 4, 2, 1, 3, 2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_prompt_and_later_tokens_equal_the_plain_implementation(name):
    layout = LAYOUTS[name]
    length = len(layout.token_ids)
    query, key, value = states(*((4, 4) if name == "four" else (8, 2)), length + 4)
    for n_key, n_query in ((length, length), (length + 1, 1), (length + 4, 3)):
        given = query[:, :, n_key - n_query : n_key], key[:, :, :n_key], value[:, :, :n_key]
        out, newest = run(layout, *given)
        expected, weights = plain_attention(*(part[0] for part in given), layout)
        torch.testing.assert_close(out[0], expected, atol=5e-5, rtol=0)
        torch.testing.assert_close(newest, weights[None], atol=1e-6, rtol=0)
        assert float(newest.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("capacity", [1, 2**10, 2**30])
def test_documents_of_one_length_in_one_batch_or_several_equal_the_plain_implementation(capacity, monkeypatch):
    monkeypatch.setattr(attention_module, "max_elements", lambda device: capacity)
    layout = toy_layout((3, 5, 5, 5, 2, 2))
    given = states(8, 2, len(layout.token_ids))
    expected, weights = plain_attention(*(part[0] for part in given), layout)
    out, newest = run(layout, *given)
    torch.testing.assert_close(out[0], expected, atol=5e-5, rtol=0)
    torch.testing.assert_close(newest, weights[None], atol=1e-6, rtol=0)


def test_batches_are_neighbours_of_one_length():
    spans = [slice(2, 5), slice(5, 10), slice(10, 15), slice(15, 20), slice(20, 20)]
    fields = [(batch.first, batch.count, batch.stop, batch.length) for batch in batches(spans, 2)]
    assert fields == [(0, 1, 5, 3), (1, 2, 10, 5), (3, 1, 20, 5)]


def test_in_bfloat16_it_is_the_plain_implementation():
    layout = toy_layout()
    given = states(8, 2, len(layout.token_ids))
    rounded = tuple(part.bfloat16() for part in given)
    expected, _ = plain_attention(*(part[0].float() for part in rounded), layout)
    out, _ = run(layout, *rounded)
    error = (out[0].float() - expected).square().mean().sqrt()
    assert error < 0.03 * expected.square().mean().sqrt()


def test_later_tokens_read_the_keys_that_the_prompt_left():
    layout, kept = toy_layout(), {}
    length = len(layout.token_ids)
    query, key, value = states(8, 2, length + 2)

    def read(start, stop, kept):
        positions = torch.arange(stop).float()[None]
        given = query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop]
        inputs = AttentionInput(*given, positions, SCALING, 0, LayerRotation(Angles()), lambda: query, kept=kept)
        return ImportanceOrderedAttention.over(layout)(inputs)[0]

    read(0, length, kept)
    branches = [dict(kept), dict(kept)]
    for start in (length, length + 1):
        anew = read(start, start + 1, {})
        for branch in branches:
            assert torch.equal(read(start, start + 1, branch), anew)


def test_scaled_partial_rotation_with_divisors_per_head_equals_the_plain_implementation():
    layout, ratios = toy_layout(), torch.tensor([1.0, 1.7])

    def score(query, key, distance):  # channels 0..5 rotate, 1.2 x 1.2 = 1.44 times as long; 6 and 7 stay
        distance = distance / ratios.repeat_interleave(4)[:, None, None]
        turned = reference_scores(query[..., :6], key[..., :6], distance, FREQUENCIES[:3], SCALING * 1.44)
        return turned + query[..., 6:] @ key[..., 6:].repeat_interleave(4, dim=0).transpose(1, 2) * SCALING

    given = states(8, 2, len(layout.token_ids))
    out, newest = run(layout, *given, LayerRotation(Angles(pairs=3, scaling=1.2), ratios=ratios))
    expected, weights = plain_attention(*(part[0] for part in given), layout, score)
    torch.testing.assert_close(out[0], expected, atol=5e-5, rtol=0)
    torch.testing.assert_close(newest[0], weights, atol=1e-6, rtol=0)


def test_without_rope_documents_still_see_each_other():
    layout = toy_layout()
    given = states(8, 2, len(layout.token_ids))
    out, _ = run(layout, *given, LayerRotation(Angles(), rotates=False))
    query, key, value = (part[0] for part in given)
    scores = query @ key.repeat_interleave(4, dim=0).transpose(1, 2) * SCALING
    visible = ImportanceOrderedAttention.over(layout).visible(len(layout.token_ids))
    torch.testing.assert_close(out[0], reference_attention(scores, value, visible), atol=5e-5, rtol=0)


def test_importance_between_three_documents_by_hand():
    # Head dimension 1, scaling 1: of the values, a document at a time. A's queries are 1 and 2; keys: B ln 2, C 0, 0.
    # query 1: e^s = 2 | 1, 1 of 4 -> B 1/2, C 1/4 + 1/4; query 2: e^s = 4 | 1, 1 of 6 -> B 2/3, C 1/6 + 1/6.
    key = torch.tensor([2.0, 1.0, 1.0]).log()[None, None, :, None]
    query = torch.tensor([1.0, 2.0])[None, None, :, None]
    members = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])[None, None]
    found = document_importance(query, key, members, 1.0)
    torch.testing.assert_close(found, torch.tensor([[[[0.0, 1 / 2, 1 / 2], [0.0, 2 / 3, 1 / 3]]]]))


def test_importance_in_bfloat16_costs_no_more_than_what_the_inputs_lost_already():
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, 6, 40, 16, generator=generator, dtype=torch.double)
    key = 3 * torch.randn(1, 2, 60, 16, generator=generator, dtype=torch.double)
    members = torch.zeros(1, 2, 60, 16, dtype=torch.double)
    members[:, :, :10, 0] = members[:, :, 10:40, 1] = members[:, :, 40:, 2] = 1.0

    def exact(query, key):
        scores = query @ key.repeat_interleave(3, dim=1).transpose(2, 3) * SCALING
        return (scores.softmax(dim=-1) @ members[:, :1]).sum(dim=2)[..., :3]

    def error(found, request):
        return ((found - request) / request).square().mean().sqrt()

    rounded = exact(query.bfloat16().double(), key.bfloat16().double())
    found = document_importance(query.bfloat16(), key.bfloat16(), members.bfloat16(), SCALING)
    assert error(found.float().sum(dim=2)[..., :3], rounded) < error(rounded, exact(query, key))


def test_the_most_important_document_ends_where_the_documents_end():
    # Lengths 3, 1, 2. By importance: 1, 2, 0. Document 1 begins 1 before the end, 2 another 2 before, 0 another 3.
    # Second row: 2 first (2 before the end), then the tie of 0 and 1 in their order: 2 + 3 = 5, 5 + 1 = 6.
    found = distances(torch.tensor([[0.2, 0.9, 0.5], [0.5, 0.5, 0.9]]), torch.tensor([3, 1, 2]))
    assert found.tolist() == [[6.0, 1.0, 3.0], [5.0, 6.0, 2.0]]


def test_documents_see_each_other_and_nothing_sees_what_follows():
    # 1 token of prefix, documents of 2 and 1, 1 token of suffix.
    found = ImportanceOrderedAttention.over(toy_layout((2, 1), prefix=1, suffix=1)).visible(5)
    assert found.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]


def test_between_two_documents_nothing_is_scored(monkeypatch):
    def refuse(*args):
        raise AssertionError("scored")

    monkeypatch.setattr(attention_module, "document_importance", refuse)
    two, three = toy_layout((6, 3)), toy_layout((6, 3, 2))
    run(two, *states(8, 2, two.suffix.start))
    with pytest.raises(AssertionError, match="scored"):
        run(three, *states(8, 2, three.suffix.start))


@pytest.mark.parametrize("lengths", [(), (7,)])
def test_with_one_passage_or_none_there_is_nothing_to_arrange(lengths):
    plan = create("inter_document").plan(toy_layout(lengths), loaded_model().spec.shape)
    assert [dataclasses.astuple(row) for row in plan.rows] == [dataclasses.astuple(row) for row in Plan().rows]


def anagrams():
    """Four passages of the same tokens in different orders: in the first layer, equally important to every token."""
    layout = toy_layout((6, 6, 6, 6))
    ids = list(layout.token_ids)
    first = ids[layout.passages[0].slice]
    keys = []
    for i, span in enumerate(layout.passages):
        turned = first[i:] + first[:i]
        ids[span.slice] = turned
        keys.append("-".join(map(str, turned)))
    return dataclasses.replace(layout, token_ids=tuple(ids), keys=tuple(keys))


def double():
    """Four passages, two of them the same."""
    layout = toy_layout((6, 6, 4, 9))
    ids = list(layout.token_ids)
    ids[layout.passages[1].slice] = ids[layout.passages[0].slice]
    return dataclasses.replace(layout, token_ids=tuple(ids), keys=(layout.keys[0], *layout.keys[:1], *layout.keys[2:]))


@pytest.mark.parametrize("layout", [anagrams(), double(), toy_layout()], ids=["anagrams", "double", "distinct"])
@pytest.mark.parametrize(
    ("dtype", "products"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
@pytest.mark.slow
def test_ties_never_let_the_callers_order_through(layout, dtype, products, monkeypatch):
    if products:
        use_products(monkeypatch)
    loaded = loaded_model()
    loaded.model.to(dtype)

    def answer(prompt):
        session = Session(loaded, prompt, create("inter_document").plan(prompt, loaded.spec.shape))
        session.advance(9)
        return session.next_log_probs()

    base = answer(layout)
    for order in itertools.permutations(range(4)):
        assert torch.equal(answer(layout.select(order)), base), order


def test_ties_in_the_callers_order_would_show():
    loaded, layout = loaded_model(), anagrams()

    def answer(prompt):  # as the method's plan, but in the caller's order
        plan = Plan(rows=(RowPlan(attend=ImportanceOrderedAttention.over(prompt)),))
        return Session(loaded, prompt, plan).next_log_probs()

    assert float((answer(layout) - answer(layout.select((3, 1, 0, 2)))).abs().max()) > 1e-4
