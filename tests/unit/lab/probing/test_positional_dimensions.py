"""A planted positional channel is found, its factor is searched, and scaling is what the method does."""

from __future__ import annotations

import pytest
import torch

from rag_posfix.generation.engine import Engine
from rag_posfix.generation.prefill.prefill import prefill
from rag_posfix.lab.probing.base import ProfileRecord
from rag_posfix.lab.probing.positional_dimensions import PositionalDimensions, broken_line, segmented_fit
from rag_posfix.lab.probing.scale_trials import (
    FACTORS,
    UNCHANGED,
    ScaleTrials,
    best_scale,
    held_out,
    logits_after_prefix,
    random_channels,
)
from rag_posfix.lab.probing.subject import Change, LanguageModel, Watch, after_context, answer_loss, key_value_prompts
from rag_posfix.mitigations import create
from rag_posfix.mitigations.hidden_scaling import default_layers
from rag_posfix.plan.layout import Layout, Span
from rag_posfix.plan.plan import HiddenScale
from tests.support.tiny import loaded_model
from tests.support.toy_encoder import ToyEncoder
from tests.unit.lab.probing.probed import small_decoder, tiny_model

MODEL = tiny_model(200)


class Planted(LanguageModel):
    """A model of which attention reads a slow curve of the position in channel 17."""

    def read(self, ids, watch=Watch(), change=Change(), keep=1, prefix=None):  # noqa: B008
        def planted(layer, states):
            at = torch.arange(states.shape[1])
            states = states.clone()
            states[..., 17] = torch.where(at < 100, 0.05 * at, 5 + 0.01 * (at - 100))
            watch.states(layer, states)

        watched = Watch(states=planted, inputs=watch.inputs) if watch.states is not None else watch
        return super().read(ids, watched, change, keep, prefix)


@pytest.mark.slow
def test_a_planted_channel_is_found_with_its_bend(tmp_path):
    record = PositionalDimensions(strings=4, tokens=180, factor=0.5).run(Planted(MODEL.engine), out=tmp_path)
    assert (record.head["channel"], record.head["factor"]) == (17, 0.5)
    curve = record.head["curves"][0]
    assert [piece["slope"] for piece in curve["segments"]] == pytest.approx([0.05, 0.01], abs=1e-3)
    assert curve["segments"][1]["first"] == pytest.approx(100, abs=2)
    assert curve["residual"] < 1e-3
    assert set(record.files) == {"profile", "svg", "png"}


@torch.inference_mode()
def logits_of_the_method(model, prompt, scale):
    """Return the logits of the answer's tokens as a request with the method ``hidden_scaling`` computes them."""
    loaded, n = model.engine.loaded, len(prompt.ids)
    method = create("hidden_scaling", {"channel": scale.channel, "factor": scale.factor,
                                       "first_layer": scale.layers[0], "last_layer": scale.layers[-1]})  # fmt: skip
    passage, question = Span(1, n - 1), Span(n - 1, n)
    layout = Layout(prompt.ids, Span(0, 1), (passage,), (passage,), question, question, ("pairs",))
    row = prefill(loaded, layout, method.plan(layout, loaded.spec.shape))[0]
    after = [row.batch.forward(torch.tensor([[token]]), row.batch.next_positions(), 1) for token in prompt.answer[:-1]]
    return torch.cat((row.logits[:, None], *after), dim=1)[0]


@torch.inference_mode()
@pytest.mark.slow
def test_trials_after_a_shared_prefix_are_what_the_method_does():
    scales = [HiddenScale(channel, factor, range(1, 3)) for channel in (5, 17) for factor in FACTORS]
    for prompt, prefix, context in after_context(MODEL, key_value_prompts(MODEL, 3, 4)):
        rows = logits_after_prefix(MODEL, scales, prompt, prefix, context)
        plain = MODEL.read(prompt.with_answer, keep=len(prompt.answer))[0]
        for row, scale in zip(rows, scales, strict=True):
            torch.testing.assert_close(row, logits_of_the_method(MODEL, prompt, scale), atol=1e-4, rtol=1e-4)
            assert not torch.allclose(row, plain, atol=1e-3)


def test_losses_are_those_of_each_setting_and_prompt_and_of_the_unchanged_model():
    prompts = key_value_prompts(MODEL, 3, 4)
    losses = ScaleTrials(MODEL, prompts).losses([(5, 0.0), (17, 2.0)])
    assert list(losses) == [UNCHANGED, (5, 0.0), (17, 2.0)]
    layers = default_layers(MODEL.n_layers)
    for number, prompt in enumerate(prompts):
        plain = MODEL.read(prompt.with_answer, keep=len(prompt.answer))[0]
        assert float(losses[UNCHANGED][number]) == pytest.approx(float(answer_loss(plain, prompt)), abs=1e-4)
        scaled = logits_of_the_method(MODEL, prompt, HiddenScale(17, 2.0, layers))
        assert float(losses[17, 2.0][number]) == pytest.approx(float(answer_loss(scaled, prompt)), abs=1e-4)


def planted_losses(monkeypatch, by_channel, best=-0.5):
    """Make the loss of a prompt a channel's own plus the distance of the factor from the best one; 2 unchanged."""

    def losses(self, settings, progress=None):
        planted = {(c, f): by_channel.get(c, 2.1) + abs(f - best) for c, f in settings}
        count = len(self.prompts)
        return {key: torch.full((count,), loss).double() for key, loss in {UNCHANGED: 2.0, **planted}.items()}

    monkeypatch.setattr(ScaleTrials, "losses", losses)
    return ScaleTrials(MODEL, key_value_prompts(MODEL, 2, 4))


def test_the_channel_and_the_factor_with_the_lowest_loss_are_chosen(monkeypatch):
    channel, factor, tried = best_scale(planted_losses(monkeypatch, {3: 1.5, 8: 1.0}), [3, 8])
    assert (channel, factor) == (8, -0.5)
    assert [(row["channel"], row["factor"]) for row in tried] == [
        (None, 1.0), (3, 0.0), (8, 0.0), *((8, dose) for dose in FACTORS if dose != 0),
    ]  # fmt: skip
    assert {min(FACTORS), max(FACTORS)} == {-2.0, 2.0}


def test_the_controls_tell_the_chosen_channel_from_random_ones(monkeypatch):
    trials = planted_losses(monkeypatch, {8: 1.0, 3: 1.5, 4: 1.7, 30: 0.9})
    found = held_out(trials, 8, -0.5, [8, 3, 4], [30, 31, 32])
    assert [row["factor"] for row in found["doses"]] == sorted(FACTORS)
    # Changes: 8 -1, 3 -.5, 4 -.3; random -1.1, .1, .1: mean -.3.
    assert found["causality"]["chosen_less_random"]["value"] == pytest.approx(-0.7)
    assert found["causality"]["random_as_low"] == 1
    assert found["monotony"]["candidates_less_random"]["value"] == pytest.approx(-0.3)
    assert found["monotony"]["rank_correlation"] == pytest.approx(1)  # the smoothest has the lowest loss
    assert found["scaling"]["chosen_less_zero"]["value"] == pytest.approx(-0.5)
    assert found["scaling"]["best_factor"] == -0.5
    assert found["prompts"] == found["unchanged"]["n"] == 4


def test_primacy_is_the_change_of_late_pairs_less_that_of_early_ones():
    losses = {UNCHANGED: torch.zeros(4).double(), (1, 2.0): torch.tensor([0.1, 0.4, 0.1, 0.6]).double()}
    trial = ScaleTrials(MODEL, key_value_prompts(MODEL, 2, 4)).trial((1, 2.0), losses)  # places 0, 1, 0, 1
    assert trial["late_less_early"]["value"] == pytest.approx(0.4)
    assert trial["by_position"] == pytest.approx([0.1, 0.5])


def test_random_channels_have_the_size_of_the_chosen_one_and_follow_no_position():
    sizes = torch.ones(64)
    sizes[:40] = torch.arange(1.0, 41.0)

    class Sized(LanguageModel):
        def read(self, ids, watch=Watch(), change=Change(), keep=1):  # noqa: B008
            for layer in range(self.n_layers):
                watch.inputs(layer, sizes.expand(1, ids.shape[1], -1))
            return torch.zeros(1, keep, self.vocabulary)

    model = Sized(MODEL.engine)
    controls = random_channels(model, key_value_prompts(MODEL, 2, 2), 39, [37, 38], 0)
    assert len(set(controls)) == 8
    assert min(controls) >= 5  # the 32 nearest in size to 40, but for the left out: 5 to 36
    assert max(controls) <= 36
    assert controls == random_channels(model, key_value_prompts(MODEL, 2, 2), 39, [37, 38], 0)


def test_the_search_and_its_controls_are_in_the_record():
    probe = PositionalDimensions(strings=2, tokens=100, top=2, pairs=2, prompts=4)
    head = probe.run(Planted(MODEL.engine)).head
    assert len(head["tried"]) == 1 + len(head["candidates"]) + len(FACTORS) - 1
    assert head["tried"][0]["loss"] == pytest.approx(sum(head["tried"][0]["by_position"]) / 2)
    assert len(head["held_out"]["random"]) == 8
    assert not {row["channel"] for row in head["held_out"]["random"]} & {row["channel"] for row in head["candidates"]}
    counts = head["channels_that_follow"]
    assert counts["residual stream, both directions"] >= counts["residual stream, one direction"] >= 2
    titles = [axes.get_title("left") for axes in probe.draw(head).axes]
    assert titles[0].startswith(f"chosen: channel {head['channel']} ")


def test_a_small_decoder_is_ranked_without_a_search():
    head = PositionalDimensions(strings=4, tokens=100).run(small_decoder("sinusoidal")).head
    assert head["tried"] == []
    assert head["candidates"]


def said(subject, folder, **settings):
    """Return the head of a record, and the lines that are printed of it."""
    probe = PositionalDimensions(**{"strings": 2, "tokens": 100, "top": 2, "pairs": 2, "prompts": 2, **settings})
    record = probe.run(subject, out=folder)
    return record.head, probe.lines(record)


@pytest.mark.slow
def test_a_command_is_shown_where_the_method_can_run_and_only_there(tmp_path):
    olmo2 = LanguageModel(Engine(loaded_model("olmo2", vocab_size=ToyEncoder.vocab_size), ToyEncoder(), "x", "y"))
    reason = "olmo2 normalises queries and keys, so that they are not linear in it"
    for subject, why in ((olmo2, reason), (small_decoder("sinusoidal"), "this is a small decoder")):
        head, lines = said(subject, tmp_path)
        assert head["factor"] is None
        assert why in head["refused"]
        assert lines[0] == f"chosen: channel {head['channel']}, factor not tried"
        told = f"hidden_scaling cannot be used with this model ({head['refused']}); the channel is a finding only"
        assert lines[1] == told
        assert not any(line.startswith(("to use it:", "profile:")) for line in lines)
    head, lines = said(Planted(MODEL.engine), tmp_path, factor=0.5)
    assert head["refused"] is None
    assert lines[0] == "chosen: channel 17, factor 0.5"
    assert lines[-1].startswith("to use it: --mitigation hidden_scaling:profile=")
    probe, old = PositionalDimensions(), {key: value for key, value in head.items() if key != "refused"}
    record = ProfileRecord(old, files={"profile": tmp_path / "old.json"})  # of before reasons were written
    assert probe.lines(record)[-1].startswith("to use it:")


def test_a_broken_line_is_fitted_by_its_pieces():
    curve = torch.cat((torch.arange(10.0), 9 - 2 * torch.arange(1.0, 11.0)))  # up by 1, then down by 2
    (a, b) = segmented_fit(curve)
    assert (a[0], b[1]) == (0, 19)
    assert a[1] + 1 == b[0]
    assert (a[3], b[3]) == (pytest.approx(1), pytest.approx(-2))
    assert segmented_fit(2 + 3 * torch.arange(6.0)) == [(0, 5, pytest.approx(2), pytest.approx(3))]


def test_h_is_the_broken_line_and_what_it_leaves_is_told():
    segments = segmented_fit(torch.cat((torch.arange(10.0), 9 - 2 * torch.arange(1.0, 11.0))))
    line = broken_line(segments, torch.tensor([0, 4, 9, 10, 19]))
    assert line.tolist() == pytest.approx([0, 4, 9, 7, -11])
