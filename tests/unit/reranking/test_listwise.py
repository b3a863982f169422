import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document

from rag_posfix.assembly.tokenization import label_passage, tokenize_passage
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.contracts.request import MitigationChoice, PromptTemplate
from rag_posfix.errors import ConfigError
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.reranking import RERANKERS, ListwiseReranker
from rag_posfix.reranking.listwise import parse_ranking
from tests.support.reader import ScriptedReader, order, raw, scores
from tests.support.tiny import loaded_model
from tests.support.tiny_evaluation import CountedForwards
from tests.support.toy_encoder import ToyEncoder


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
    result = ListwiseReranker(generator=FakeGenerator(ToyEncoder())).compress_documents(documents("a", "b"), "b?")
    assert order(result) == ["a", "b"], "what it writes is no ranking"


class FirstLetters(ScriptedReader):
    """Begins every ranking with [A], also over empty passages, and less so with B where there are passages."""

    def first_token_log_probs(self, layout, tokens, salt=""):
        self.prompts = [*getattr(self, "prompts", []), self.encoder.decode(layout.token_ids)]
        is_empty = "[A] \n\n[B] \n\n" in self.prompts[-1]
        shares = dict(zip("ABC", (0.8, 0.1, 0.1) if is_empty else (0.6, 0.3, 0.1), strict=True))
        return [tuple(math.log(shares[chr(token)]) for token in tokens)]


def test_calibrated_scores_are_the_odds_of_the_first_letter_against_empty_passages():
    # .6 / .8 = 3/4, .3 / .1 = 3 and .1 / .1 = 1, which sum to 19/4.
    reader = FirstLetters()
    reranker = ListwiseReranker(generator=reader, calibrate=True)
    result = reranker.compress_documents(documents("a", "b", "c"), "why?")
    assert order(result) == ["b", "c", "a"]
    assert raw(result) == pytest.approx({"a": math.log(3 / 4), "b": math.log(3), "c": 0.0})
    assert scores(result) == pytest.approx({"a": 3 / 19, "b": 12 / 19, "c": 4 / 19})
    assert reranker.generations == 0
    read, empty = reader.prompts
    assert "[A] A\na\n\n[B] B\nb\n\n[C] C\nc\n\nQuery: why?" in read
    assert empty == read.replace("A\na", "").replace("B\nb", "").replace("C\nc", "")


def test_windows_are_calibrated_one_by_one():
    # Windows of two, from the last: over (b, c) the odds are 3/4 and 3, so c goes first; then the same of (a, c).
    reader = FirstLetters()
    reranker = ListwiseReranker(generator=reader, calibrate=True, window=2, stride=1)
    result = reranker.compress_documents(documents("a", "b", "c"), "why?")
    assert order(result) == ["c", "a", "b"]
    assert len(reader.prompts) == 4


def test_a_models_calibrated_scores_are_those_of_its_two_prompts_and_nothing_of_passages_is_stored():
    loaded = loaded_model(vocab_size=ToyEncoder.vocab_size, num_hidden_layers=2, max_position_embeddings=4096)
    store, encoder = PassageStore([MemoryTier()]), ToyEncoder()
    engine = Engine(loaded, encoder, "tiny", "print", store)
    prompts = []

    class Kept(ListwiseReranker):
        def _prompts(self, question, count):
            prompts.extend(super()._prompts(question, count))
            return prompts

    reranker = Kept(generator=engine, calibrate=True)
    with CountedForwards(engine) as counted:
        result = reranker.compress_documents([Document(page_content=text) for text in ("xx", "yyy")], "why?")
    assert [shape[0] for shape in counted.shapes] == [1] * len(counted.shapes)
    assert store.memory_tags() == frozenset()

    def first(*texts):
        passages = [
            label_passage(encoder, tokenize_passage(encoder, PromptTemplate(), text), f"[{letter}] ")
            for letter, text in zip("AB", texts, strict=True)
        ]
        log_probs = engine.next_log_probs(prompts[0].with_passages(passages), MitigationChoice("none"))
        return [float(log_probs[ord(letter)]) for letter in "AB"]

    measured, prior = first("xx", "yyy"), first("", "")
    expected = [value - bias for value, bias in zip(measured, prior, strict=True)]
    assert [raw(result)[text] for text in ("xx", "yyy")] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("generator", "parameters", "message"),
    [
        (FakeGenerator(ToyEncoder()), {}, "calibrate=true reads log-probabilities, which FakeGenerator"),
        (ScriptedReader(), {"window": 27}, "window=27 must be at most 26 with calibrate"),
    ],
)
def test_what_cannot_be_calibrated_is_an_error_when_the_reranker_is_made(generator, parameters, message):
    with pytest.raises(ConfigError, match=message):
        RERANKERS.create(MethodSpec("listwise", {"calibrate": True, **parameters}), {"generator": lambda: generator})
