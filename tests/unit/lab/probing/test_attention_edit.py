"""What one edited score does to its own probability, and that the edit reaches only what it names."""

from __future__ import annotations

import math

import pytest
import torch

from rag_posfix.lab.probing.attention_edit import FACTORS, AttentionEdit, choice_of, scaled_score
from rag_posfix.lab.probing.subject import Change, Watch, key_value_prompts
from tests.unit.lab.probing.probed import tiny_model

MODEL = tiny_model(400)
IDS = torch.arange(40, 60)[None]


def weights_and_scores(change):
    weights, scores = {}, {}

    def keep(layer, found):
        scores[layer] = found.clone()
        return found if change is None else change(layer, found)

    MODEL.read(IDS, Watch(weights=weights.__setitem__), Change(scores=keep))
    return weights, scores


def test_a_doubled_score_has_the_probability_that_follows_from_the_softmax():
    weights, scores = weights_and_scores(None)
    edited, _ = weights_and_scores(scaled_score(7, 2.0, layer=1, heads=[2]))
    score, before = float(scores[1][0, 2, -1, 7]), float(weights[1][0, 2, -1, 7])
    raised = before * math.exp(abs(score))
    assert float(edited[1][0, 2, -1, 7]) == pytest.approx(raised / (1 - before + raised), rel=1e-4)
    torch.testing.assert_close(edited[0], weights[0])  # another layer, before
    torch.testing.assert_close(edited[1][:, [0, 1, 3, 4, 5, 6, 7]], weights[1][:, [0, 1, 3, 4, 5, 6, 7]])
    torch.testing.assert_close(edited[1][0, 2, :-1], weights[1][0, 2, :-1])  # earlier queries


def test_the_choice_is_where_the_values_differ():
    prompt = key_value_prompts(MODEL, 3, 1)[0]
    choice = choice_of(prompt, 1)
    own, rival = bytes(prompt.answer), bytes(prompt.ids[prompt.values[1].slice])
    step = next(n for n in range(5) if own[n] != rival[n])
    assert (choice.gold, choice.other) == (own[step], rival[step])
    assert (choice.ids[choice.gold_at], choice.ids[choice.other_at]) == (own[step], rival[step])
    third = prompt.values[2]
    assert third.start <= choice.third_at < third.stop
    assert choice.ids == prompt.ids + prompt.answer[:step]


@pytest.mark.slow
def test_factor_one_moves_nothing_and_a_large_one_does(tmp_path):
    still = AttentionEdit(pairs=3, prompts=2, factor=1.0).run(MODEL).summary
    assert all(abs(edit["shift"]["value"]) < 1e-4 for edit in still["edits"].values())
    record = AttentionEdit(pairs=3, prompts=2, factor=50.0).run(MODEL, out=tmp_path)
    summary = record.summary
    assert abs(summary["edits"]["all layers"]["shift"]["value"]) > 1e-3
    assert len(summary["edits"]) == 1 + 3 + 8
    heads = [label for label in summary["edits"] if "head" in label]
    assert len(summary["random_heads"]) == 8
    assert not set(heads) & set(summary["random_heads"])
    assert [label.split(",")[0] for label in summary["random_heads"]] == [label.split(",")[0] for label in heads]
    assert list(summary["controls"]) == ["all layers, a third pair"]
    doses = summary[f"doses, {heads[0]}"]
    assert [float(factor) for factor in doses] == list(FACTORS)
    assert doses["2"]["shift"]["n"] == 2
    assert set(record.files) == {"record", "svg", "png"}
