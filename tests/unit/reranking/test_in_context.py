import math
import statistics

import pytest
from langchain_core.documents import Document

from rag_posfix.contracts.request import salted
from rag_posfix.errors import ConfigError, RerankingError
from rag_posfix.reranking import InContextReranker
from rag_posfix.reranking.in_context import calibrated_score
from tests.support.reader import ScriptedReader, order, raw, scores

# Attention of (question, N/A) to each letter of a text.
TABLE = {
    "aaaa": ((5.0, 5.0, 5.0, 5.0), (4.0, 4.0, 4.0, 4.0)),  # +1 each: 4
    "bb": ((9.0, 9.0), (1.0, 2.0)),  # 8 + 7: 15
    "cccccc": ((1.0,) * 6, (2.0,) * 6),  # -1 each: -6
}


def paid(question, text):
    return TABLE[text][question == "N/A"]


def documents(*texts):
    return [Document(page_content=text) for text in texts]


def test_calibrated_attention_is_summed_over_the_text_of_each_passage():
    reader = ScriptedReader(tokens=paid)
    result = InContextReranker(generator=reader).compress_documents(documents("cccccc", "aaaa", "bb"), "why?")
    assert raw(result) == {"bb": 15.0, "aaaa": 4.0, "cccccc": -6.0}
    assert order(result) == ["bb", "aaaa", "cccccc"]
    mean, deviation = statistics.fmean([15, 4, -6]), statistics.pstdev([15, 4, -6])
    expected = {text: 1 / (1 + math.exp(-(value - mean) / deviation)) for text, value in raw(result).items()}
    assert scores(result) == pytest.approx(expected)


def test_normalized_scores_are_means_over_tokens():
    reader = ScriptedReader(tokens=paid)
    result = InContextReranker(generator=reader, normalize=True).compress_documents(documents(*TABLE), "why?")
    assert raw(result) == {"bb": 7.5, "aaaa": 1.0, "cccccc": -1.0}


def test_layers_are_those_that_were_asked_for():
    reader = ScriptedReader(tokens=paid)
    for layers in (None, (18, 20)):
        InContextReranker(generator=reader, layers=layers).compress_documents(documents(*TABLE), "why?")
        assert reader.layers == layers
    for wrong in ([], [-1], ["middle"]):
        with pytest.raises(ConfigError):
            InContextReranker(generator=reader, layers=wrong)


def test_heads_are_those_that_were_asked_for():
    reader = ScriptedReader(tokens=paid)
    for heads in (None, ((3, 1), (2, 0))):
        InContextReranker(generator=reader, heads=heads).compress_documents(documents(*TABLE), "why?")
        assert (reader.heads, reader.layers) == (heads, None)
    with pytest.raises(ConfigError, match="layers and heads exclude each other"):
        InContextReranker(generator=reader, heads=((3, 1),), layers=(3,))


def test_documents_are_cut_to_fit_with_the_longer_of_the_two_questions():
    reader = ScriptedReader(tokens=lambda question, text: [0.0] * len(text), context_window=600)
    InContextReranker(generator=reader).compress_documents(documents("a" * 400, "b" * 300), "why? " * 30)
    lengths = [[len(text) for text in texts] for texts in reader.seen]  # the reader checks that both prompts fit
    assert lengths[0] == lengths[1]
    assert lengths[0][0] == lengths[0][1] < 300


def test_tokens_far_below_the_mean_of_their_passage_are_left_out():
    # Ten tokens of 1 and one of -10: mean 0, std with n - 1 = sqrt(110 / 10) = 3.32; -10 is below -6.63.
    assert calibrated_score([1.0] * 10 + [-10.0]) == 10.0
    assert calibrated_score([1.0] * 10 + [-10.0], normalize=True) == 1.0
    # Three of 1 and one of -1: mean .5, std 1; -1 is above -1.5 and stays.
    assert calibrated_score([1.0, 1.0, 1.0, -1.0]) == 2.0
    # Mean 1, squares 16 + 0 + 4 = 20, over n - 1 = 5: std 2; -3 is the bound itself and stays.
    assert calibrated_score([-3.0, 1.0, 2.0, 2.0, 2.0, 2.0]) == 6.0
    assert calibrated_score([2.0, 2.0]) == 4.0
    assert calibrated_score([-3.0]) == -3.0
    assert calibrated_score([]) == 0.0


def test_the_content_free_question_is_read_first_about_the_same_passages():
    reader = ScriptedReader(tokens=paid)
    with salted("tenant"):
        InContextReranker(generator=reader).compress_documents(documents(*TABLE), "why?")
    assert len(reader.seen) == 2
    assert reader.seen[0] == reader.seen[1]
    assert reader.salts == ["tenant"] * 2


def test_passages_stand_in_an_order_that_their_content_decides_unless_told_otherwise():
    seen = {"canonical": set(), "input": set()}
    for how, orders in seen.items():
        for given in (["aaaa", "bb", "cccccc"], ["cccccc", "bb", "aaaa"], ["bb", "cccccc", "aaaa"]):
            reader = ScriptedReader(tokens=paid)
            InContextReranker(generator=reader, order=how).compress_documents(documents(*given), "why?")
            orders.add(tuple(reader.seen[0]))
    assert len(seen["canonical"]) == 1
    assert seen["input"] == {("aaaa", "bb", "cccccc"), ("cccccc", "bb", "aaaa"), ("bb", "cccccc", "aaaa")}


def test_numbers_that_are_none_are_an_error():
    reader = ScriptedReader(tokens=lambda question, text: [math.nan] * len(text))
    with pytest.raises(RerankingError, match="in_context: the model returned a score of nan"):
        InContextReranker(generator=reader).compress_documents(documents("aaaa", "bb"), "why?")
