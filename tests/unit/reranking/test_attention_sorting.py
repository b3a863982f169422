import pytest
from langchain_core.documents import Document

from rag_posfix.errors import ConfigError
from rag_posfix.reranking import AttentionSortingReranker
from tests.support.reader import ScriptedReader, order, raw, scores


def documents(*texts):
    return [Document(page_content=text) for text in texts]


def reranker(values, **options):
    reader = ScriptedReader(values)
    return reader, AttentionSortingReranker(generator=reader, **{"order": "input", **options})


def test_the_passage_with_most_attention_moves_to_the_end_until_nothing_moves():
    # Attention grows with the place. Round 1 (a b c): 3, 2 + .5, 1 + 1. Round 2 (c b a): 1, 2.5, 4: sorted.
    weight = {"a": 3, "b": 2, "c": 1}
    reader, sorting = reranker(lambda text, place: weight[text] + place / 2, rounds=5)
    result = sorting.compress_documents(documents("a", "b", "c"), "why?")
    assert reader.seen == [["a", "b", "c"], ["c", "b", "a"]]
    assert order(result) == ["a", "b", "c"]
    # One letter and a separator of two: three tokens each.
    assert raw(result) == {"a": 12.0, "b": 7.5, "c": 3.0}
    assert scores(result) == pytest.approx({"a": 12 / 22.5, "b": 7.5 / 22.5, "c": 3 / 22.5})


@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
def test_rounds_bound_how_often_the_prompt_is_read(rounds):
    # The first passage always gets most: the order never settles.
    reader, sorting = reranker(lambda text, place: 1.0 if place == 0 else 0.1, rounds=rounds)
    sorting.compress_documents(documents("a", "b"), "why?")
    assert len(reader.seen) == rounds


@pytest.mark.parametrize("rounds", [0, 6])
def test_rounds_are_one_to_five(rounds):
    with pytest.raises(ConfigError, match="rounds"):
        AttentionSortingReranker(generator=ScriptedReader(), rounds=rounds)


def test_attention_is_summed_over_tokens_or_taken_per_token():
    # Per token a gets more; b has 12 tokens against 3.
    values = {"a": 0.2, "b" * 10: 0.1}
    for normalize, best in ((False, "b" * 10), (True, "a")):
        _, sorting = reranker(lambda text, place: values[text], normalize=normalize)
        assert order(sorting.compress_documents(documents(*values), "why?"))[0] == best


def test_ties_keep_the_order_given():
    reader, sorting = reranker(lambda text, place: 1.0)
    assert order(sorting.compress_documents(documents("b", "a", "c"), "why?")) == ["b", "a", "c"]
    assert reader.seen == [["b", "a", "c"]]  # nothing moves: it is not read again
