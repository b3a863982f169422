"""What probes receive of a language model and of small decoders, against the models' own forward passes."""

from __future__ import annotations

import pytest
import torch

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.lab.encodings import ENCODINGS
from rag_posfix.lab.probing.subject import Change, Watch, language_model, open_subject
from rag_posfix.settings import Settings
from tests.unit.lab.probing.probed import small_decoder, tiny_model

IDS = torch.arange(3, 33)[None]
CAUSAL = [name for name, cls in ENCODINGS.items() if cls.causal]


def test_watching_a_language_model_changes_nothing_and_tells_everything():
    model = tiny_model()
    plain = model.read(IDS, keep=30)
    seen = {name: {} for name in ("states", "inputs", "weights", "attended")}
    watch = Watch(**{name: found.__setitem__ for name, found in seen.items()})
    torch.testing.assert_close(model.read(IDS, watch, keep=30), plain, atol=1e-4, rtol=1e-4)
    assert all(sorted(found) == [0, 1, 2] for found in seen.values())
    assert seen["states"][1].shape == seen["inputs"][1].shape == (1, 30, 64)
    assert seen["attended"][0].shape == (1, 8, 30, 8)
    for weights in seen["weights"].values():
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(1, 8, 30))
        assert weights.triu(1).abs().max() == 0
    layer = model.engine.loaded.model.model.layers[1]
    torch.testing.assert_close(layer.input_layernorm(seen["states"][1]), seen["inputs"][1])


def test_positions_that_are_all_moved_change_nothing_and_others_do():
    model = tiny_model()
    plain = model.read(IDS)
    at = torch.arange(30)
    torch.testing.assert_close(model.read(IDS, change=Change(positions=at + 50)), plain, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(model.read(IDS, change=Change(positions=at * 3)), plain, atol=1e-4)


def test_tokens_whose_ids_step_back_still_see_the_text_before_them():
    """transformers takes ids that step back for a second text in the same row, and hides the first from it."""
    model, at, weights = tiny_model(), torch.arange(30), {}
    moved = Change(positions=torch.where((at >= 20) & (at < 25), at - 10, at))
    states = [{}, {}, {}]
    model.read(IDS, Watch(states=states[0].__setitem__), moved)
    model.read(IDS, Watch(states=states[1].__setitem__, weights=weights.__setitem__), moved)
    other = IDS.clone()
    other[0, 0] = 99
    model.read(other, Watch(states=states[2].__setitem__), moved)
    assert weights[0][0, :, 20, :21].min() > 0
    torch.testing.assert_close(states[0][2], states[1][2], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(states[0][2][0, 22], states[2][2][0, 22], atol=1e-4)  # token 0 reaches the span


def test_a_mask_and_scores_reach_attention():
    model, plain = tiny_model(), tiny_model().read(IDS)
    own = Change(mask=lambda query, key: key <= query, scores=lambda layer, scores: scores)
    torch.testing.assert_close(model.read(IDS, change=own), plain, atol=1e-4, rtol=1e-4)
    alone = {}
    model.read(IDS, Watch(weights=alone.__setitem__), Change(mask=lambda query, key: key == query))
    torch.testing.assert_close(alone[2][0, 3], torch.eye(30))


@pytest.mark.parametrize("encoding", CAUSAL)
def test_a_decoder_with_any_encoding_can_be_watched(encoding):
    model = small_decoder(encoding)
    plain, _ = model.decoder(IDS)
    seen = {name: {} for name in ("states", "inputs", "weights", "attended")}
    found = model.read(IDS, Watch(**{name: one.__setitem__ for name, one in seen.items()}), keep=30)
    torch.testing.assert_close(found, plain.detach(), atol=1e-5, rtol=1e-4)
    assert all(sorted(one) == [0, 1, 2, 3] for one in seen.values())
    total = seen["weights"][0].sum(dim=-1)
    assert total.max() <= 1 + 1e-5
    if encoding != "stable_mask":  # whose rows sum to less than 1
        torch.testing.assert_close(total, torch.ones_like(total))
    assert seen["weights"][0].triu(1).abs().max() == 0


def test_what_a_small_decoder_cannot_do_is_told():
    with pytest.raises(UnsupportedModelError, match="belong to its encoding"):
        small_decoder().read(IDS, change=Change(positions=IDS[0]))
    with pytest.raises(UnsupportedModelError, match="attention-mass reads text"):
        language_model(small_decoder(), "attention-mass")


def test_a_folder_with_a_saved_decoder_is_opened_as_one(tmp_path):
    made = small_decoder("cope")
    made.decoder.save(tmp_path)
    found = open_subject(Settings(model=str(tmp_path), device="cpu"))
    torch.testing.assert_close(found.read(IDS), made.read(IDS))
    assert found.facts()["encoding"] == "cope"


def test_a_pass_after_a_prefix_equals_the_whole_one_and_leaves_the_prefix():
    model = tiny_model()
    doubled = Change(scores=lambda layer, scores: scores * (1 + (torch.arange(30) == 4)))
    whole, after = {}, {}
    plain = model.read(IDS, Watch(weights=whole.__setitem__))
    prefix = model.read_prefix(IDS[0, :-1].tolist())
    for change in (doubled, Change()):  # the branch of the first pass does not reach the second
        last = model.read(IDS[:, -1:], Watch(weights=after.__setitem__), change, prefix=prefix.branch())
    torch.testing.assert_close(last, plain, atol=1e-4, rtol=1e-4)
    for layer, weights in after.items():
        torch.testing.assert_close(weights[0, :, 0], whole[layer][0, :, -1], atol=1e-5, rtol=1e-4)
