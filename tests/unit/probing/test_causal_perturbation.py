"""Models whose channel is known to come from ids, or from the mask: the probe tells which."""

from __future__ import annotations

import pytest
import torch

from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.probing.causal_perturbation import (
    CHANGES,
    RANDOM,
    CausalPerturbation,
    hidden_keys,
    implied_shift,
    shifted_positions,
)
from rag_posfix.probing.subject import Change, LanguageModel, Watch
from tests.support.probed import small_decoder, tiny_model

MODEL = tiny_model(400)
SIZES = {"first": 80, "last": 120, "shift": 40, "tokens": 140, "strings": 3, "pairs": 6, "prompts": 6}


class Planted(LanguageModel):
    """A model of which channel 9 is the position id, the number of tokens that are seen, or whether token 0 is."""

    follows = "ids"

    def read(self, ids, watch=Watch(), change=Change(), keep=1):  # noqa: B008
        count = ids.shape[1]
        if watch.states is None:
            return super().read(ids, watch, change, keep)
        at = torch.arange(count)
        mask = change.mask or (lambda query, key: key <= query)
        seen = mask(at[:, None], at[None]).sum(dim=-1)
        sink = at - 1000.0 * ~mask(at, torch.zeros(1, dtype=torch.long))
        ids_seen = at if change.positions is None else change.positions
        value = {"mask": seen, "sink": sink, "ids": ids_seen}[self.follows]
        for layer in range(self.n_layers):
            states = torch.randn(1, count, self.width, generator=torch.Generator().manual_seed(layer))
            states[..., 9] = 0.5 * value
            watch.states(layer, states)
        return torch.zeros(1, keep, self.vocabulary)


@pytest.mark.parametrize(
    ("follows", "shifts"),
    # In the order of CHANGES: ids shifted by 40; 39 keys hidden, token 0 seen; as many in a random window; token 0
    # alone; 40 keys, token 0 too.
    [("ids", (-40, 0, 0, 0, 0)), ("mask", (0, -39, -39, -1, -40)), ("sink", (0, 0, 0, -1000, -1000))],
)
def test_what_the_channel_follows_is_told_and_the_sink_is_told_from_the_mask(follows, shifts):
    planted = Planted(MODEL.engine)
    object.__setattr__(planted, "follows", follows)
    summary = CausalPerturbation(**SIZES).run(planted).summary
    assert summary["channel"] == 9
    measured = summary["implied_shift"]
    assert list(measured) == list(CHANGES[1:])
    assert [entry["value"] for entry in measured.values()] == pytest.approx(shifts, abs=1e-2)
    for entry in measured.values():  # all strings agree
        assert entry["ci95"] == pytest.approx([entry["value"]] * 2, abs=1e-2)
        assert entry["n"] == 3


def test_the_changes_by_hand():
    assert shifted_positions(6, 3, 5, 2).positions.tolist() == [0, 1, 2, 1, 2, 5]
    at = torch.arange(4)
    seen = hidden_keys(2, 3, range(1)).mask(at[:, None], at[None])
    assert seen.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]]
    seen = hidden_keys(2, 4, range(1, 2)).mask(at[:, None], at[None])
    assert seen.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]


def test_the_random_window_has_the_size_of_the_crop_and_lies_between_token_0_and_the_span():
    probe, at = CausalPerturbation(**SIZES), torch.arange(140)
    windows = [(~probe.change_of(RANDOM, 140, number).mask(at[100], at))[:101].nonzero()[:, 0] for number in range(20)]
    assert {len(window) for window in windows} == {39}
    assert min(int(window[0]) for window in windows) >= 1
    assert max(int(window[-1]) for window in windows) < 80
    assert len({int(window[0]) for window in windows}) > 5


def test_the_shift_is_in_tokens():
    own = 3 * torch.arange(50.0)
    changed = own.clone()
    changed[20:30] -= 3 * 7
    assert implied_shift(own, changed, 20, 30, 10) == pytest.approx(-7)


def test_a_real_model_is_probed_with_retrieval_inside_and_outside(tmp_path):
    record = CausalPerturbation(**SIZES, channel=3).run(MODEL, out=tmp_path)
    losses, changes = record.summary["retrieval_loss"], record.summary["change_of_loss"]
    assert set(losses) == set(CHANGES)
    counts = [losses["unchanged"][key]["n"] for key in ("inside", "outside")]
    assert sum(counts) == len(record.rows) == 6
    for key in ("inside", "outside"):
        unchanged, hidden = losses["unchanged"][key]["value"], losses[CHANGES[2]][key]["value"]
        assert changes[CHANGES[2]][key]["value"] == pytest.approx(hidden - unchanged)
        assert hidden != unchanged
    assert set(record.files) == {"record", "svg", "png"}


def test_a_span_outside_the_text_and_a_small_decoder_are_refused():
    with pytest.raises(ConfigError, match="must not fall from left to right"):
        CausalPerturbation(first=500, last=400)
    with pytest.raises(ConfigError, match="channel=99 must be below 64"):
        CausalPerturbation(**SIZES, channel=99).run(MODEL)
    with pytest.raises(UnsupportedModelError, match="no tokenizer"):
        CausalPerturbation().run(small_decoder())
