import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document

from rag_posfix.reranking import ListwiseReranker
from rag_posfix.reranking.listwise import parse_ranking
from tests.support.reader import ScriptedReader, order, raw, scores


def documents(*texts):
    return [Document(page_content=text, metadata={"title": text.upper()}) for text in texts]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[2] > [3] > [1]", [1, 2, 0]),
        ("3, 1, 2", [2, 0, 1]),
        ("[2] > [2] > [9] > [0]", [1, 0, 2]),  # repeated, and numbers that no passage has
        ("The best one is [3].", [2, 0, 1]),
        ("I cannot rank these.", [0, 1, 2]),
        ("", [0, 1, 2]),
        ("[" + "9" * 5000 + "] > [2]", [1, 0, 2]),
    ],
)
def test_a_generated_ranking_is_parsed_and_completed(text, expected):
    assert parse_ranking(text, 3) == expected


@given(st.text(max_size=60), st.integers(1, 30))
def test_a_parsed_ranking_is_complete(text, count):
    assert sorted(parse_ranking(text, count)) == list(range(count))


def test_one_generation_ranks_the_numbered_passages():
    prompts = []

    class Keeping(ScriptedReader):
        def stream(self, request):
            prompts.append(self.encoder.decode(request.layout.token_ids))
            return super().stream(request)

    reranker = ListwiseReranker(generator=Keeping(written="[3] > [1] > [2]"))
    result = reranker.compress_documents(documents("a", "b", "c"), "why?")
    assert order(result) == ["c", "a", "b"]
    assert raw(result) == {"c": 3.0, "a": 2.0, "b": 1.0}
    assert scores(result) == pytest.approx({"c": 1.0, "a": 2 / 3, "b": 1 / 3})
    assert reranker.generations == 1
    assert "[1] A\na\n\n[2] B\nb\n\n[3] C\nc\n\nQuery: why?" in prompts[0]


def test_any_generator_will_do():
    from rag_posfix.generation.fake import FakeGenerator
    from tests.support.toy_encoder import ToyEncoder

    result = ListwiseReranker(generator=FakeGenerator(ToyEncoder())).compress_documents(documents("a", "b"), "b?")
    assert order(result) == ["a", "b"], "what it writes is no ranking"
