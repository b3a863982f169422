"""A planted positional channel is found, its factor is searched, and scaling is what the method does."""

from __future__ import annotations

import pytest
import torch

from rag_posfix.generation.engine import Engine
from rag_posfix.generation.prefill.prefill import prefill
from rag_posfix.mitigations import create
from rag_posfix.plan.plan import HiddenScale
from rag_posfix.probing import positional_dimensions
from rag_posfix.probing.positional_dimensions import PositionalDimensions, best_scale, segmented_fit
from rag_posfix.probing.prompts import key_value_prompts
from rag_posfix.probing.subject import Change, LanguageModel, Watch
from tests.support.probed import small_decoder, tiny_model
from tests.support.tiny import loaded_model, toy_layout
from tests.support.toy_encoder import ToyEncoder

MODEL = tiny_model(200)


class Planted(LanguageModel):
    """A model of which attention reads a slow curve of the position in channel 17."""

    def read(self, ids, watch=Watch(), change=Change(), keep=1):  # noqa: B008
        def inputs(layer, states):
            at = torch.arange(states.shape[1])
            states = states.clone()
            states[..., 17] = torch.where(at < 100, 0.05 * at, 5 + 0.01 * (at - 100))
            watch.inputs(layer, states)

        return super().read(ids, Watch(inputs=inputs) if watch.inputs is not None else watch, change, keep)


def test_a_planted_channel_is_found_with_its_bend(tmp_path):
    record = PositionalDimensions(strings=4, tokens=180, factor=0.5).run(Planted(MODEL.engine), out=tmp_path)
    assert (record.head["channel"], record.head["factor"]) == (17, 0.5)
    curve = record.head["curves"][0]
    assert [piece["slope"] for piece in curve["segments"]] == pytest.approx([0.05, 0.01], abs=1e-3)
    assert curve["segments"][1]["first"] == pytest.approx(100, abs=2)
    assert set(record.files) == {"profile", "svg", "png"}


def test_scaling_in_a_probe_is_what_the_method_does():
    loaded, layout = loaded_model(), toy_layout()
    method = create("hidden_scaling", {"channel": 5, "factor": -1.0, "first_layer": 1, "last_layer": 1})
    with torch.inference_mode():
        expected = prefill(loaded, layout, method.plan(layout, loaded.spec.shape))[0].logits[0, -1]
    model = LanguageModel(Engine(loaded, ToyEncoder(), "tiny", "print"))
    ids = torch.tensor([layout.token_ids])
    change = Change(hidden_scale=HiddenScale(5, -1.0, range(1, 2)), prompt_length=len(layout.token_ids))
    torch.testing.assert_close(model.read(ids, change=change)[0, 0], expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(model.read(ids)[0, 0], expected, atol=1e-3)


def test_tokens_after_the_prompt_are_scaled_as_generated_ones_are():
    loaded, layout = loaded_model(), toy_layout()
    method = create("hidden_scaling", {"channel": 5, "factor": -1.0, "first_layer": 1, "last_layer": 2})
    after = torch.tensor([[7, 9, 11]])
    with torch.inference_mode():
        batch = prefill(loaded, layout, method.plan(layout, loaded.spec.shape))[0].batch
        expected = torch.cat([batch.forward(one, batch.next_positions(), 1) for one in after.split(1, dim=1)], dim=1)
    model = LanguageModel(Engine(loaded, ToyEncoder(), "tiny", "print"))
    ids = torch.cat((torch.tensor([layout.token_ids]), after), dim=1)
    change = Change(hidden_scale=HiddenScale(5, -1.0, range(1, 3)), prompt_length=len(layout.token_ids))
    torch.testing.assert_close(model.read(ids, change=change, keep=3), expected, atol=1e-4, rtol=1e-4)


def test_the_channel_and_the_factor_with_the_lowest_loss_are_chosen(monkeypatch):
    def losses(model, prompts, change):
        scale = change(prompts[0]).hidden_scale
        base = 2.0 if scale is None else {3: 1.5, 8: 1.0}[scale.channel] + abs(scale.factor + 0.5)
        return torch.full((len(prompts),), base, dtype=torch.float64)

    monkeypatch.setattr(positional_dimensions, "retrieval_losses", losses)
    channel, factor, tried = best_scale(MODEL, [3, 8], key_value_prompts(MODEL, 2, 2))
    assert (channel, factor) == (8, -0.5)
    assert [(one["channel"], one["factor"]) for one in tried] == [
        (None, 1.0), (3, 0.0), (8, 0.0), (8, 0.5), (8, -0.5), (8, -1.0),
    ]  # fmt: skip


def test_the_search_is_in_the_record():
    head = PositionalDimensions(strings=2, tokens=100, top=2, pairs=2).run(Planted(MODEL.engine)).head
    assert len(head["tried"]) == 1 + len(head["candidates"]) + 3
    assert head["tried"][0]["loss"] == pytest.approx(sum(head["tried"][0]["by_position"]) / 2)


def test_a_small_decoder_is_ranked_without_a_search():
    head = PositionalDimensions(strings=4, tokens=100).run(small_decoder("sinusoidal")).head
    assert head["tried"] == []
    assert head["candidates"]


def test_a_broken_line_is_fitted_by_its_pieces():
    curve = torch.cat((torch.arange(10.0), 9 - 2 * torch.arange(1.0, 11.0)))  # up by 1, then down by 2
    (a, b) = segmented_fit(curve)
    assert (a[0], b[1]) == (0, 19)
    assert a[1] + 1 == b[0]
    assert (a[3], b[3]) == (pytest.approx(1), pytest.approx(-2))
    assert segmented_fit(2 + 3 * torch.arange(6.0)) == [(0, 5, pytest.approx(2), pytest.approx(3))]
