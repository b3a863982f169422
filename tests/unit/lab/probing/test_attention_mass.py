"""Key-value prompts, and a planted attention bias that is recovered."""

from __future__ import annotations

import pytest
import torch

from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.lab.probing.attention_mass import AttentionMass, slot_masses
from rag_posfix.lab.probing.subject import Change, LanguageModel, Watch, after_context, answer_loss, key_value_prompts
from tests.unit.lab.probing.probed import small_decoder, tiny_model

MODEL = tiny_model(400)


class Planted(LanguageModel):
    """A model whose head 3 of layer 1 attends to the tokens of one span alone."""

    span = slice(0, 1)

    def read(self, ids, watch=Watch(), change=Change(), keep=1, prefix=None):  # noqa: B008
        def scores(layer, found):
            if layer == 1:
                found[:, 3, :, self.span] += 1e4
            return found

        return super().read(ids, watch, Change(scores=scores), keep, prefix)


def test_the_prompts_hold_what_their_spans_say_and_the_gold_place_goes_round():
    prompts = key_value_prompts(MODEL, 4, 8)
    assert [prompt.gold for prompt in prompts] == [0, 1, 2, 3, 0, 1, 2, 3]
    for prompt in prompts:
        pair, value = (bytes(prompt.ids[span.slice]) for span in (
            prompt.pairs[prompt.gold], prompt.values[prompt.gold],
        ))  # fmt: skip
        assert value == bytes(prompt.answer)
        key = pair.split(b"\n")[0]
        assert pair == key + b"\nValue:" + value + b"\n\n"
        assert b"Key:" + bytes(prompt.ids[prompt.keys[prompt.gold].slice]) == key
        assert bytes(prompt.ids).endswith(key + b"\nValue:")
    assert prompts[0].pairs == prompts[3].pairs
    assert prompts[0].ids[: prompts[0].pairs[-1].stop] == prompts[3].ids[: prompts[3].pairs[-1].stop]
    assert key_value_prompts(MODEL, 4, 8) == prompts
    with pytest.raises(ConfigError, match="context of this model has 400"):
        key_value_prompts(MODEL, 40, 1)


def test_a_planted_bias_is_recovered_in_its_head_and_slot():
    planted = Planted(MODEL.engine)
    prompts = key_value_prompts(MODEL, 4, 4)
    object.__setattr__(planted, "span", prompts[0].pairs[2].slice)
    found, keys = slot_masses(planted, prompts)
    torch.testing.assert_close(found[:, 1, 3, 2], torch.ones(4))
    assert found[:, 1, 3, [0, 1, 3]].max() < 1e-6
    assert found[:, [0, 2]].amax() < 0.9
    weights = {}
    planted.read(prompts[0].tensor, Watch(weights=weights.__setitem__))
    key = prompts[0].keys[2]
    assert len(key) == 6  # a space and five letters
    torch.testing.assert_close(keys[0, 1, 3, 2], weights[1][0, 3, -1, key.slice].mean())
    summary = AttentionMass(pairs=4, rounds=1).run(planted).summary
    assert summary["pair_by_layer_and_head"][1][3] == pytest.approx(0.25)  # one of four prompts asks for slot 2
    own = AttentionMass(pairs=4, rounds=1).run(MODEL).summary
    raised = [a["value"] - b["value"] for a, b in zip(summary["slots_other"], own["slots_other"], strict=True)]
    assert raised.index(max(raised)) == 2


def test_the_loss_is_that_of_the_answer_given_what_stands_before():
    (prompt,) = key_value_prompts(MODEL, 3, 1)
    with torch.inference_mode():
        logits = MODEL.engine.loaded.model(torch.tensor([prompt.ids + prompt.answer])).logits.double()
    at = range(len(prompt.ids) - 1, len(prompt.ids) + len(prompt.answer) - 1)
    expected = -sum(
        float(logits[0, place].log_softmax(-1)[token]) for place, token in zip(at, prompt.answer, strict=True)
    ) / len(prompt.answer)
    logits = MODEL.read(prompt.with_answer, keep=len(prompt.answer))[0]
    assert float(answer_loss(logits, prompt)) == pytest.approx(expected, rel=1e-4)


def test_prompts_that_share_their_pairs_read_them_once_and_attend_as_alone():
    class Counting(LanguageModel):
        tokens = 0

        def read(self, ids, *arguments, **options):
            type(self).tokens += ids.numel()
            return super().read(ids, *arguments, **options)

    prompts = key_value_prompts(MODEL, 4, 8)
    pairs, keys = slot_masses(Counting(MODEL.engine), prompts)
    assert Counting.tokens == sum(len(prompt.ids) - len(prompt.context) * (prompt.gold > 0) for prompt in prompts)
    for number, prompt in enumerate(prompts):
        weights = {}
        MODEL.read(prompt.tensor, Watch(weights=weights.__setitem__))
        for layer, found in weights.items():
            pair, key = prompt.pairs[1].slice, prompt.keys[1].slice
            last = found[0, :, -1]
            torch.testing.assert_close(pairs[number, layer, :, 1], last[:, pair].sum(dim=-1), atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(keys[number, layer, :, 1], last[:, key].mean(dim=-1), atol=1e-5, rtol=1e-4)


def test_what_was_read_of_the_pairs_is_what_the_whole_prompt_reads_there():
    for prompt, prefix, inputs in after_context(MODEL, key_value_prompts(MODEL, 3, 5)):
        assert prefix.get_seq_length() == len(prompt.context) == prompt.pairs[-1].stop
        whole = {}
        MODEL.read(prompt.tensor, Watch(inputs=whole.__setitem__))
        for layer, states in whole.items():
            shared = states[:, : len(prompt.context)]
            torch.testing.assert_close(inputs[layer], shared, atol=1e-4, rtol=1e-4)


def test_the_record_has_the_mass_by_layer_and_head_and_a_decoder_is_refused(tmp_path):
    record = AttentionMass(pairs=3, rounds=1).run(MODEL, out=tmp_path)
    pairs, keys = slot_masses(MODEL, key_value_prompts(MODEL, 3, 3))
    for name, masses in (("pair", pairs), ("key", keys)):
        by_head = torch.tensor(record.summary[f"{name}_by_layer_and_head"])
        torch.testing.assert_close(by_head, torch.stack([masses[n, ..., n] for n in range(3)]).mean(dim=0))
        best = record.summary["heads"][f"by_{name}"][0]
        assert best[name]["value"] == pytest.approx(float(by_head.max()))
        assert best[name]["n"] == 3
        at = best["layer"], best["head"]
        others = [float(pairs[n, *at, slot]) for n in range(3) for slot in range(3) if slot != n]
        assert best["other_pair"]["value"] == pytest.approx(sum(others) / 6)  # two others in each of three prompts
    slots = [entry["value"] for entry in record.summary["slots_gold"]]
    assert slots == pytest.approx([float(pairs[n, ..., n].mean()) for n in range(3)])
    assert set(record.files) == {"record", "svg", "png"}
    with pytest.raises(UnsupportedModelError, match="no tokenizer"):
        AttentionMass().run(small_decoder())
