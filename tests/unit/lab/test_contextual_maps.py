"""A planted counter of sentences and one of paragraphs are found, and the record has their maps."""

from __future__ import annotations

import random
from itertools import islice

import pytest
import torch

from rag_posfix.errors import ConfigError
from rag_posfix.lab.contextual_maps import above_others, gates_by_kind, map_contextual_positions, record_cope
from rag_posfix.lab.encodings import Decoder, DecoderShape, create_encoding
from rag_posfix.lab.tasks.language import END, KINDS, PARAGRAPH, WORDS, sentences, token_ids_of

SHAPE = DecoderShape(len(WORDS), layers=2, heads=4, width=64)


def counter_decoder(encoding="cope"):
    """Return a decoder whose head 2 opens its gates on sentence ends only, and head 0 on paragraph ends only.

    The norm makes of the embedding of an end 5.66 in a channel of its own and 0 in that of the other end, and of all
    other words 0 in both. A key is that channel less 2.8, a query is 40: the gate is sigmoid(+-40 * 2.8 / 4).
    """
    decoder = Decoder(create_encoding(encoding, {"p_max": 16}), SHAPE)
    with torch.no_grad():
        for parameter in decoder.layers.parameters():
            parameter.zero_()
        decoder.embedding.zero_()
        decoder.embedding[:, 4], decoder.embedding[:, 5] = 1, -1
        for word, channel in ((END, 0), (PARAGRAPH, 2)):
            decoder.embedding[WORDS.index(word)] = 0
            decoder.embedding[WORDS.index(word), channel : channel + 2] = torch.tensor([1.0, -1.0])
        for layer in decoder.layers:
            layer.norms[0].weight.fill_(1)
            for head, channel in ((2, 0), (0, 2)):
                query, key = head * 16, 64 + head * 16  # the first of 16 channels of the head
                layer.project.bias[query] = 40
                layer.project.weight[key, channel] = 1
                layer.project.bias[key] = -2.8
            for head in (1, 3):  # these count nothing
                layer.project.bias[head * 16] = 40
                layer.project.bias[64 + head * 16] = -2.8
    return decoder.eval()


def test_a_head_that_counts_sentences_has_gates_on_their_ends_alone():
    gates = gates_by_kind(counter_decoder(), texts=2, words=60)
    kinds = list(KINDS)
    assert gates.shape == (2, 4, len(kinds), len(kinds))
    expected = torch.zeros(4, len(kinds), dtype=torch.float64)
    expected[2, kinds.index("sentence end")] = 1
    expected[0, kinds.index("paragraph end")] = 1
    # Of all kinds of queries alike.
    assert torch.allclose(gates, expected[:, None].expand(2, -1, len(kinds), -1), atol=1e-6)


def test_a_head_that_counts_for_one_kind_of_query_is_found_with_it():
    decoder = counter_decoder()
    with torch.no_grad():
        for layer in decoder.layers:  # queries of head 2 become those of sentence ends: 40 there, 0 elsewhere
            layer.project.bias[32] = 0
            layer.project.weight[32, 0] = 40 / 5.66
    gates = gates_by_kind(decoder, texts=2, words=60)
    ends = list(KINDS).index("sentence end")
    assert gates[0, 2, ends, ends] == pytest.approx(1, abs=1e-6)
    assert gates[0, 2, 0].tolist() == pytest.approx([0.5] * len(KINDS))  # closed and open alike for other queries
    above = above_others(gates, "sentence end")
    assert above[0, 2].tolist() == pytest.approx([float(kind == ends) for kind in range(len(KINDS))], abs=1e-6)


def test_the_mean_gate_is_worked_out_by_hand_from_all_pairs_of_words():
    decoder = Decoder(create_encoding("cope", {"p_max": 8}), SHAPE).eval()
    (ids,) = language_ids(words=20, people=2)
    gates = record_cope(decoder, torch.tensor([ids])).gates[1][0, 3]
    kind = {word: number for number, words in enumerate(KINDS.values()) for word in words}
    kinds = [kind[WORDS[one]] for one in ids]
    pairs = [(i, j) for i in range(20) for j in range(i + 1) if (kinds[i], kinds[j]) == (1, 0)]
    expected = sum(float(gates[i, j]) for i, j in pairs) / len(pairs)
    assert float(gates_by_kind(decoder, 1, 20, people=2)[1, 3, 1, 0]) == pytest.approx(expected, abs=1e-6)


def language_ids(words, people):
    text = (word for sentence in sentences(random.Random(0), people) for word in sentence)
    return [token_ids_of(islice(text, words))]


@pytest.mark.slow
def test_the_record_names_the_counters_and_their_positions_count_ends(tmp_path):
    decoder = counter_decoder()
    decoder.save(tmp_path / "decoder")
    record = map_contextual_positions(tmp_path / "decoder", texts=2, words=40, out=tmp_path / "out")
    counters = record.summary["counters"]
    assert (counters["sentences"]["head"], counters["paragraphs"]["head"]) == (2, 0)
    assert counters["sentences"]["difference"] == pytest.approx(1, abs=1e-6)
    text = record.summary["text"]
    for name, end in (("sentences", END), ("paragraphs", PARAGRAPH)):
        wanted = [text[place:].count(end) for place in range(len(text))]
        assert counters[name]["positions_of_last"] == pytest.approx(wanted, abs=1e-4)
    assert {path.suffix for path in (tmp_path / "out").iterdir()} >= {".json", ".svg", ".png"}


def test_what_is_counted_changes_no_logit():
    decoder = Decoder(create_encoding("cope_rope", {"p_max": 8}), SHAPE).eval()
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.allclose(decoder(ids)[0], decoder(ids, positions=record_cope(decoder, ids))[0], atol=1e-5)


def test_other_decoders_are_refused(tmp_path):
    Decoder(create_encoding("rope", {}), SHAPE).save(tmp_path / "rope")
    with pytest.raises(ConfigError, match="encoding rope, which has no gates"):
        map_contextual_positions(tmp_path / "rope", texts=1)
    Decoder(create_encoding("cope", {}), DecoderShape(20)).save(tmp_path / "other")
    with pytest.raises(ConfigError, match="knows 20 tokens, the text of the task language has"):
        map_contextual_positions(tmp_path / "other", texts=1)
    Decoder(create_encoding("cope", {}), SHAPE).save(tmp_path / "cope")
    with pytest.raises(ConfigError, match="people=13 must be at most 12"):
        map_contextual_positions(tmp_path / "cope", texts=1, people=13)
