"""Attention whose advantage and slope are known: the crossing is where the bound says."""

from __future__ import annotations

import math

import pytest
import torch

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.lab.encodings import Decoder, DecoderShape, create_encoding
from rag_posfix.lab.probing.score_advantage import ScoreAdvantage, crossing, score_curves
from rag_posfix.lab.probing.subject import SmallDecoder
from tests.unit.lab.probing.probed import small_decoder, tiny_model


class Linear:
    """Attention with the score D for the query's own word, and -d per token of distance: head h of layer 0."""

    n_layers, n_heads, width, vocabulary, longest = 1, 3, 4, 500, 1000
    words, steps = (2.0, 0.5, -1.0), (0.1, 0.0, 0.1)

    def facts(self):
        return {"model": "linear", "model_fingerprint": "x", "dtype": "float32", "device": "cpu"}

    def read(self, ids, watch=None, change=None, keep=1):
        count = ids.shape[1]
        distance = torch.arange(count - 1, -1, -1).double()
        scores = torch.stack(
            [word * (ids == ids[:, -1:]) - step * distance for word, step in zip(self.words, self.steps, strict=True)],
            dim=1,
        )
        watch.weights(0, scores.softmax(dim=-1)[:, :, None].expand(-1, -1, count, -1))
        return torch.zeros(1, keep, self.vocabulary)


@pytest.mark.slow
def test_the_crossing_is_where_the_bound_says(tmp_path):
    record = ScoreAdvantage(strings=3, farthest=64).run(Linear(), out=tmp_path)
    first, level, blind = record.summary["by_head"]
    assert (first["D"], first["d"]) == (pytest.approx(2.0, abs=1e-4), pytest.approx(0.1, rel=1e-3))
    assert first["predicted"] == pytest.approx(20, rel=1e-3)
    assert first["measured"] == pytest.approx(20, rel=1e-3)
    assert level["measured"] is None  # never loses
    assert (blind["predicted"], blind["measured"]) == (0, 1)  # loses at the nearest tested distance, 2
    assert record.summary["heads_with_advantage"] == 2
    assert record.summary["agreement"] == 1
    texts = record.summary["varied"]["texts"]
    assert {(text["tokens"], text["occurrences"]) for text in texts.values()} == {(80, 1), (160, 1), (80, 2), (80, 4)}
    for text in texts.values():  # linear scores depend on neither
        assert text["D"]["value"] == pytest.approx(2.0, abs=1e-3)
        assert text["median_D"]["value"] == pytest.approx(0.5, abs=1e-3)
        assert text["heads_with_advantage"]["value"] == pytest.approx(2 / 3)
    assert set(record.files) == {"record", "svg", "png"}


@pytest.mark.parametrize("occurrences", [1, 4])
def test_a_word_is_at_its_distance_and_nowhere_else_but_at_its_copies(occurrences):
    read = []

    class Recording(Linear):
        def read(self, ids, *arguments):
            read.append(ids)
            return super().read(ids, *arguments)

    score_curves(Recording(), [2, 8, 32], 5, 60, occurrences=occurrences)
    assert len(read) == 5
    for ids in read:
        assert len({tuple(row) for row in ids[:, :-1].tolist()}) == 1  # one text, other last tokens
        for row, distance in zip(ids, [2, 8, 32], strict=True):
            places = (59 - (row[:-1] == row[-1]).nonzero()[:, 0]).tolist()
            assert distance in places
            assert len(places) == occurrences
            assert max(places) < 59  # never the first token


def test_reading_a_text_once_for_all_last_tokens_equals_reading_it_with_each():
    model = tiny_model()

    class Whole:
        """The same model, which the probe reads in whole rows, as it does small decoders."""

        n_layers, n_heads, vocabulary = model.n_layers, model.n_heads, model.vocabulary
        read = staticmethod(model.read)

    for once, whole in zip(*(score_curves(each, [2, 8], 3, 40) for each in (model, Whole())), strict=True):
        torch.testing.assert_close(once, whole, atol=1e-4, rtol=1e-4)


def test_the_crossing_lies_between_tested_distances():
    assert crossing([2, 4, 8], torch.tensor([3.0, 1.0, -3.0]), 0.0) == pytest.approx(4 - 1 + 4 * 0.25)
    assert crossing([2, 4], torch.tensor([3.0, 1.0]), 0.0) == math.inf
    assert crossing([2, 4], torch.tensor([-1.0, 1.0]), 0.0) == 1


@pytest.mark.parametrize("subject", [tiny_model(), small_decoder("cope")], ids=["language model", "decoder"])
def test_both_kinds_of_models_are_probed(subject):
    summary = ScoreAdvantage(strings=2, farthest=16).run(subject).summary
    assert summary["distances"] == [2, 4, 8, 16]
    assert len(summary["by_head"]) == subject.n_layers * subject.n_heads


def test_a_model_with_no_token_ids_beside_the_words_is_refused():
    # Words at the distances 2, 4, 8, 16 and 32, and at least one other token id for the rest of the text.
    for vocabulary, fits in ((5, False), (6, True)):
        shape = DecoderShape(vocabulary=vocabulary, layers=1, heads=1, width=8)
        subject = SmallDecoder(Decoder(create_encoding("nope"), shape).eval(), "few")
        if fits:
            assert len(ScoreAdvantage(strings=1, farthest=32).run(subject).summary["distances"]) == 5
        else:
            with pytest.raises(UnsupportedModelError, match="few has 5 token ids; score-advantage needs one for each"):
                ScoreAdvantage(strings=1, farthest=32).run(subject)
