import pytest
from langchain_core.documents import Document

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.errors import ConfigError
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
    return build_reranker(MethodSpec("calibrated_attention", parameters), models)


@pytest.mark.parametrize("given", [["aa", "bb", "cc"], ["bb", "cc", "aa"], ["cc", "aa", "bb"]])
def test_the_attention_to_a_dummy_in_the_same_slot_is_subtracted(given):
    reader = ScriptedReader(attention)
    result = CalibratedAttentionReranker(generator=reader, order="input").compress_documents(documents(*given), "why?")
    assert raw(result) == RELEVANCE
    assert order(result) == ["bb", "cc", "aa"]
    assert len(reader.seen) == 4
    assert reader.seen[0] == given
    for slot in range(3):
        kept = [text for place, text in enumerate(reader.seen[1 + slot]) if place != slot]
        assert kept == [text for place, text in enumerate(given) if place != slot]
        assert reader.seen[1 + slot][slot] not in RELEVANCE


def test_without_calibration_the_first_place_would_win():
    attended = [attention(text, place) for place, text in enumerate(["aa", "bb", "cc"])]
    assert max(range(3), key=lambda place: attended[place]) == 0


def test_a_stored_profile_replaces_the_dummies():
    # Attention 5, 3, 4 has mean 4, the profile 3: scaled to 20/3, 4/3, 4.
    reader = ScriptedReader(attention)
    result = made(reader, profile=BIAS, order="input").compress_documents(documents("aa", "bb", "cc"), "why?")
    assert raw(result) == pytest.approx({"aa": 5 - 20 / 3, "bb": 3 - 4 / 3, "cc": 0.0})
    assert reader.seen == [["aa", "bb", "cc"]]


@pytest.mark.parametrize("bad", ["slots.json", [1.0], [0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0] * 1001])
def test_a_profile_that_is_none_is_refused(bad):
    with pytest.raises(ConfigError, match=r"profile.* must be a .*numbers? between 0 and 1e\+06"):
        made(ScriptedReader(attention), profile=bad)


def test_one_passage_is_the_average_passage():
    result = made(ScriptedReader(attention)).compress_documents(documents("aa"), "why?")
    assert result[0].metadata["relevance_score"] == 0.5
