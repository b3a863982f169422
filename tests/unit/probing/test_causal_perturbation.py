"""Models whose channel is known to come from ids, or from the mask: the probe tells which."""

from __future__ import annotations

import pytest
import torch

from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.probing.causal_perturbation import CausalPerturbation, cropped_mask, implied_shift, shifted_positions
from rag_posfix.probing.subject import Change, LanguageModel, Watch
from tests.support.probed import small_decoder, tiny_model

MODEL = tiny_model(400)
SIZES = {"first": 80, "last": 120, "shift": 40, "tokens": 140, "strings": 2, "pairs": 6}


class Planted(LanguageModel):
    """A model of which channel 9 is the position id, or the number of tokens that are seen."""

    follows = "ids"

    def read(self, ids, watch=Watch(), change=Change(), keep=1):  # noqa: B008
        count = ids.shape[1]
        if watch.inputs is None:
            return super().read(ids, watch, change, keep)
        at = torch.arange(count)
        mask = change.mask or (lambda query, key: key <= query)
        seen = mask(at[:, None], at[None]).sum(dim=-1)
        value = seen if self.follows == "mask" else at if change.positions is None else change.positions
        for layer in range(self.n_layers):
            states = torch.randn(1, count, self.width, generator=torch.Generator().manual_seed(layer))
            states[..., 9] = 0.5 * value
            watch.inputs(layer, states)
        return torch.zeros(1, keep, self.vocabulary)


@pytest.mark.parametrize(("follows", "ids", "mask"), [("ids", -40, 0), ("mask", 0, -40)])
def test_what_the_channel_follows_is_told(follows, ids, mask):
    planted = Planted(MODEL.engine)
    object.__setattr__(planted, "follows", follows)
    summary = CausalPerturbation(**SIZES).run(planted).summary
    assert summary["channel"] == 9
    assert summary["implied_shift"] == {
        "position ids shifted": pytest.approx(ids, abs=1e-3), "causal mask cropped": pytest.approx(mask, abs=1e-3),
    }  # fmt: skip


def test_the_changes_by_hand():
    assert shifted_positions(6, 3, 5, 2).positions.tolist() == [0, 1, 2, 1, 2, 5]
    at = torch.arange(4)
    seen = cropped_mask(2, 3, 1).mask(at[:, None], at[None])
    assert seen.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]]


def test_the_shift_is_in_tokens():
    own = 3 * torch.arange(50.0)
    changed = own.clone()
    changed[20:30] -= 3 * 7
    assert implied_shift(own, changed, 20, 30, 10) == pytest.approx(-7)


def test_a_real_model_is_probed_with_retrieval_inside_and_outside(tmp_path):
    record = CausalPerturbation(**SIZES, channel=3).run(MODEL, out=tmp_path)
    losses = record.summary["retrieval_loss"]
    assert set(losses) == {"unchanged", "position ids shifted", "causal mask cropped"}
    assert record.summary["gold_pairs"]["inside"] + record.summary["gold_pairs"]["outside"] == len(record.rows) == 2
    assert losses["unchanged"]["outside"] != losses["position ids shifted"]["outside"]
    assert set(record.files) == {"record", "svg", "png"}


def test_a_span_outside_the_text_and_a_small_decoder_are_refused():
    with pytest.raises(ConfigError, match="must not fall from left to right"):
        CausalPerturbation(first=500, last=400)
    with pytest.raises(ConfigError, match="channel=99 must be below 64"):
        CausalPerturbation(**SIZES, channel=99).run(MODEL)
    with pytest.raises(UnsupportedModelError, match="no tokenizer"):
        CausalPerturbation().run(small_decoder())
