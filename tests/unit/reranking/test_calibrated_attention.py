import json

import pytest
import torch
from langchain_core.documents import Document

from rag_posfix.errors import ConfigError
from rag_posfix.mitigations.calibrated_attention import slot_bias
from rag_posfix.plan.bias_profile import stretched
from rag_posfix.reranking import CalibratedAttentionReranker
from rag_posfix.reranking.build import RerankerModels, build_reranker
from tests.support.reader import ScriptedReader, order, raw

BIAS = [5.0, 1.0, 3.0]
RELEVANCE = {"aa": 0.0, "bb": 2.0, "cc": 1.0}


def attention(text, place):
    """More attention by slot than by relevance: uncalibrated, the passage in the first slot would be the best."""
    return BIAS[place] + RELEVANCE.get(text, 0.0)


def documents(*texts):
    return [Document(page_content=text) for text in texts]


def made(reader, **parameters):
    models = RerankerModels(embeddings=lambda: None, generator=lambda: reader)
    return build_reranker("calibrated_attention", parameters, models)


@pytest.mark.parametrize("given", [["aa", "bb", "cc"], ["bb", "cc", "aa"], ["cc", "aa", "bb"]])
def test_the_attention_to_a_dummy_in_the_same_slot_is_subtracted(given):
    reader = ScriptedReader(attention)
    result = CalibratedAttentionReranker(generator=reader, order="given").compress_documents(documents(*given), "why?")
    assert raw(result) == RELEVANCE
    assert order(result) == ["bb", "cc", "aa"]
    assert len(reader.seen) == 4
    assert reader.seen[0] == given
    for slot in range(3):
        kept = [text for place, text in enumerate(reader.seen[1 + slot]) if place != slot]
        assert kept == [text for place, text in enumerate(given) if place != slot]
        assert reader.seen[1 + slot][slot] not in RELEVANCE


def test_a_stored_profile_replaces_the_dummies(tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"profile": BIAS}))
    # Attention 5, 3, 4 has mean 4, the profile 3: scaled to 20/3, 4/3, 4.
    for given in (BIAS, str(profile)):
        reader = ScriptedReader(attention)
        result = made(reader, profile=given, order="given").compress_documents(documents("aa", "bb", "cc"), "why?")
        assert raw(result) == pytest.approx({"aa": 5 - 20 / 3, "bb": 3 - 4 / 3, "cc": 0.0})
        assert reader.seen == [["aa", "bb", "cc"]]


@pytest.mark.parametrize(("slots", "count"), [(2, 5), (3, 3), (7, 4), (5, 1), (4, 2)])
def test_a_profile_is_stretched_as_the_mitigation_stretches_it(slots, count):
    generator = torch.Generator().manual_seed(slots)
    profile, measured = torch.rand(slots, generator=generator), torch.rand(count, generator=generator)
    expected = slot_bias(profile, measured).tolist()
    assert stretched(profile.tolist(), measured.tolist()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bad", [[1.0], [0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0] * 1001])
def test_a_profile_that_is_none_is_refused(bad):
    with pytest.raises(ConfigError, match="2 to 1000 numbers between 0 and 1e6"):
        made(ScriptedReader(attention), profile=bad)


def test_a_profile_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"calibrated_attention: profile=.*none\.json' cannot be read"):
        made(ScriptedReader(attention), profile=str(tmp_path / "none.json"))


def test_one_passage_is_the_average_passage():
    result = made(ScriptedReader(attention)).compress_documents(documents("aa"), "why?")
    assert result[0].metadata["relevance_score"] == 0.5
