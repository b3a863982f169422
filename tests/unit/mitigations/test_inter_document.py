"""Inter-document attention: against a plain implementation, by hand, and against ties."""

from __future__ import annotations

import itertools

import pytest
import torch

from rag_posfix.attention.attend import AttendInput
from rag_posfix.attention.inter_document import ByImportance
from rag_posfix.attention.reference import reference_attention, reference_scores
from tests.support.tiny import loaded_model, toy_layout
from rag_posfix.patching.rotation import LayerRotation

SCALING = 0.3


def plain_importance(query, key, lengths, documents, own):
    """Return Imp(own -> j) or, for ``own`` None, Imp(token -> j) of each head: {j: (Hq, Tq)}; summed over own's."""
    scores = query.float() @ key.repeat_interleave(query.shape[0] // key.shape[0], dim=0).float().transpose(1, 2)
    scores = scores * SCALING  # (Hq, Tq, Tk)
    counted = [j for j in range(len(documents)) if j != own]
    chosen = torch.cat([scores[:, :, documents[j]] for j in counted], dim=-1).softmax(dim=-1)
    pieces = chosen.split([lengths[j] for j in counted], dim=-1)
    return {j: piece.sum(dim=-1) / lengths[j] for j, piece in zip(counted, pieces, strict=True)}


def key_positions(ranking, lengths, documents, end, n_key):
    """Return each key's position where ``ranking`` lists documents from the last slot on."""
    positions = torch.arange(n_key).float()
    for j in ranking:
        end -= lengths[j]
        positions[documents[j]] = torch.arange(end, end + lengths[j]).float()
    return positions


def plain(query, key, value, layout, frequencies):
    """PINE as written: for each head a T x T matrix of distances between re-assigned positions. (Hq, Tq, D), ..."""
    n_heads, n_query, _ = query.shape
    n_key = key.shape[1]
    start = n_key - n_query
    documents = [span.slice for span in layout.passages]
    lengths = [len(span) for span in layout.passages]
    end = layout.suffix.start
    distance = torch.zeros(n_heads, n_query, n_key)
    index = torch.arange(n_key)
    visible = index[None] <= index[start:, None]
    for i, document in enumerate(documents):
        if start > 0:
            continue
        importance = plain_importance(query[:, document], key, lengths, documents, i)
        for h in range(n_heads):
            others = sorted(importance, key=lambda j: -float(importance[j][h].sum()))
            at = key_positions([i, *others], lengths, documents, end, n_key)
            distance[h, document] = at[document][:, None] - at
        for other in documents:
            if other != document:
                visible[document, other] = True
    for m in range(n_query):
        if start + m < layout.prefix.stop:
            distance[:, m] = m - index
        if start + m >= end:
            importance = plain_importance(query[:, m : m + 1], key, lengths, documents, None)
            for h in range(n_heads):
                ranking = sorted(importance, key=lambda j: -float(importance[j][h, 0]))
                distance[h, m] = start + m - key_positions(ranking, lengths, documents, end, n_key)
    scores = reference_scores(query, key, distance, frequencies, SCALING)
    weights = scores[:, -1].softmax(dim=-1).mean(dim=0)
    return reference_attention(scores, value, visible), weights


def given(loaded, query, key, value):
    rotation = LayerRotation(loaded.spec)
    positions = torch.arange(key.shape[2]).float()[None]
    return AttendInput(query, key, value, positions, SCALING, 0, rotation, lambda: query)


def states(heads, kv_heads, n_tokens, seed, scale=2.0):
    torch.manual_seed(seed)
    return tuple(torch.randn(1, h, n_tokens, 8) * scale for h in (heads, kv_heads, kv_heads))


LAYOUTS = {
    "four": toy_layout(),
    "no prefix": toy_layout((5, 3, 6), prefix=0),
    "single tokens": toy_layout((1, 4, 1, 1, 3), prefix=2, suffix=1),
    "two": toy_layout((6, 3)),
    "long suffix": toy_layout((5, 9, 4), suffix=150),
}


@pytest.mark.parametrize("shape", LAYOUTS)
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_equals_the_plain_implementation(shape, heads, seed):
    layout = LAYOUTS[shape]
    loaded = loaded_model()
    frequencies = loaded.model.model.rotary_emb.inv_freq
    query, key, value = states(*heads, len(layout.token_ids) + 3, seed)
    attend = ByImportance.over(layout)
    for n_key, n_query in (
        (len(layout.token_ids), len(layout.token_ids)),
        (len(layout.token_ids) + 1, 1),
        (len(layout.token_ids) + 3, 3),
    ):
        q, k, v = query[:, :, n_key - n_query : n_key], key[:, :, :n_key], value[:, :, :n_key]
        out, newest = attend(given(loaded, q, k, v))
        expected, weights = plain(q[0], k[0], v[0], layout, frequencies)
        torch.testing.assert_close(out[0], expected, atol=2e-5, rtol=0)
        torch.testing.assert_close(newest[0], weights, atol=1e-5, rtol=0)
