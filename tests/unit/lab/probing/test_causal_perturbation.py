"""Models whose channel is known to come from ids, or from the mask: the probe tells which."""

from __future__ import annotations

import pytest
import torch

from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.lab.probing.causal_perturbation import (
    CHANGES,
    CROPPED,
    CROPPED_WITH_SINK,
    RANDOM,
    SHIFTED,
    SINK,
    CausalPerturbation,
    implied_shift,
)
from rag_posfix.lab.probing.subject import Change, LanguageModel, Watch, answer_loss, key_value_prompts, random_strings
from tests.unit.lab.probing.probed import small_decoder, tiny_model

MODEL = tiny_model(400)
SIZES = {"first": 80, "last": 120, "shift": 40, "tokens": 140, "strings": 3, "pairs": 6, "prompts": 6}


class Planted(LanguageModel):
    """A model of which channel 9 is the position id, the number of tokens that are seen, or whether token 0 is."""

    follows = "ids"

    def read(self, ids, watch=Watch(), change=Change(), keep=1, prefix=None):  # noqa: B008
        before = 0 if prefix is None else prefix.get_seq_length()
        logits = super().read(ids, Watch(), change, keep, prefix)
        if watch.states is None:
            return logits
        at = torch.arange(before + ids.shape[1])
        mask = change.mask or (lambda query, key: key <= query)
        seen = mask(at[:, None], at[None]).sum(dim=-1)
        sink = at - 1000.0 * ~mask(at[:, None], torch.zeros(1, 1, dtype=torch.long))[..., 0]
        ids_seen = at if change.positions is None else change.positions
        value = {"mask": seen, "sink": sink, "ids": ids_seen}[self.follows]
        value = value.reshape(-1, len(at)).expand(len(ids), -1)[:, before:]
        for layer in range(self.n_layers):
            states = torch.randn(1, len(at), self.width, generator=torch.Generator().manual_seed(layer))
            states = states[:, before:].repeat(len(ids), 1, 1)
            states[..., 9] = 0.5 * value
            watch.states(layer, states)
        return logits


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
    probe = CausalPerturbation(first=3, last=5, shift=2, tokens=64)
    at, rows = torch.arange(6), [(name, 0) for name in (SHIFTED, CROPPED, SINK, CROPPED_WITH_SINK, CHANGES[0])]
    change = probe.changes(rows, 6)
    assert change.positions.tolist() == [[0, 1, 2, 1, 2, 5], *[[0, 1, 2, 3, 4, 5]] * 4]
    seen = change.mask(at[:, None], at[None])[:, 0].int()
    assert seen[1].tolist() == [
        [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 0], [1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1],
    ]  # fmt: skip
    assert seen[:, 3].tolist() == [
        [1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 0, 0], [0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0],
    ]  # fmt: skip


def test_the_random_window_has_the_size_of_the_crop_and_lies_between_token_0_and_the_span():
    probe, at = CausalPerturbation(**SIZES), torch.arange(140)
    seen = probe.changes([(RANDOM, number) for number in range(20)], 140).mask(at[100:101, None], at[None])[:, 0, 0]
    windows = [(~row)[:101].nonzero()[:, 0] for row in seen]
    assert {len(window) for window in windows} == {39}
    assert min(int(window[0]) for window in windows) >= 1
    assert max(int(window[-1]) for window in windows) < 80
    assert len({int(window[0]) for window in windows}) > 5


def whole_pass(probe, name, ids, number, watch=Watch(), keep=1):  # noqa: B008
    """Read a text under a change in one pass, from its first token to its last."""
    at, shift = torch.arange(ids.shape[1]), probe.shift
    window = probe.changes([(RANDOM, number)], len(at)).mask(torch.tensor([[probe.first]]), at[None])[0, 0, 0]
    start = next((number for number, seen in enumerate(window.tolist()) if not seen), 0)
    hidden = {CROPPED: (1, shift), RANDOM: (start, start + shift - 1), SINK: (0, 1), CROPPED_WITH_SINK: (0, shift)}

    def mask(query, key):
        first, stop = hidden.get(name, (0, 0))
        return (key <= query) & ((query < probe.first) | (query >= probe.last) | (key < first) | (key >= stop))

    moved = torch.where((at >= probe.first) & (at < probe.last), at - shift, at)
    change = Change() if name == CHANGES[0] else Change(moved if name == SHIFTED else None, mask)
    return MODEL.read(ids, watch, change, keep)


def test_rows_after_a_shared_prefix_equal_whole_passes_of_each_change():
    probe, layer, channel = CausalPerturbation(**SIZES), 2, 3
    curves = probe.curves(MODEL, channel, layer, lambda done, total: None)
    assert curves.shape == (len(CHANGES), 3, 140)
    for number, ids in enumerate(random_strings(MODEL, 3, 140, 0)):
        for row, name in zip(curves[:, number], CHANGES, strict=True):
            states = {}
            whole_pass(probe, name, ids, number, Watch(states=states.__setitem__))
            torch.testing.assert_close(row, states[layer][0, :, channel], atol=1e-4, rtol=1e-4)
    assert len({round(float(row[-1]), 4) for row in curves[:, 0]}) == len(CHANGES)


@pytest.mark.parametrize("first", [80, 1000])  # 1000: the span is behind every prompt
@pytest.mark.slow
def test_losses_of_prompts_that_share_their_pairs_equal_whole_passes_of_each_change(first):
    probe = CausalPerturbation(first=first, last=1040, shift=40, tokens=1100, pairs=6)
    prompts = key_value_prompts(MODEL, 6, 9)  # six of the first pairs, three of the second
    losses = probe.losses(MODEL, prompts, lambda done, total: None)
    for row, name in zip(losses, CHANGES, strict=True):
        for loss, prompt in zip(row, prompts, strict=True):
            logits = whole_pass(probe, name, prompt.with_answer, prompt.gold, keep=len(prompt.answer))
            assert float(loss) == pytest.approx(float(answer_loss(logits[0], prompt)), abs=1e-4)
    assert len({round(float(loss), 4) for loss in losses[:, 0]}) == (len(CHANGES) if first == 80 else 1)


def test_the_shift_is_in_tokens():
    own = 3 * torch.arange(50.0)
    changed = own.clone()
    changed[20:30] -= 3 * 7
    assert implied_shift(own, changed, 20, 30, 10) == pytest.approx(-7)


@pytest.mark.slow
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


def test_prompts_are_different_however_many_are_asked_for_and_the_defaults_stay():
    probe = CausalPerturbation(**CausalPerturbation.small)  # 24 prompts of 10 pairs: three texts, of which 30 are made
    prompts = probe.retrieval_prompts(MODEL)
    assert len({prompt.ids for prompt in prompts}) == len(prompts) == 24
    # Of 0 to 29, every fifth is left out: 4, 9, 14, 19, 24 and 29.
    assert [prompt.gold for prompt in prompts] == [0, 1, 2, 3, 5, 6, 7, 8] * 3
    few = CausalPerturbation(pairs=6, prompts=7)  # at least two texts, as before: of 0 to 11
    every = key_value_prompts(MODEL, 6, 12)
    assert few.retrieval_prompts(MODEL) == [every[number] for number in (0, 1, 3, 5, 6, 8, 10)]


def test_more_prompts_than_two_texts_have_pairs_are_counted_as_what_they_are():
    record = CausalPerturbation(**{**SIZES, "strings": 1, "channel": 3, "pairs": 2, "prompts": 6}).run(MODEL)
    losses = [row["unchanged"] for row in record.rows]
    assert len({round(loss, 9) for loss in losses}) == len(losses) == 6
