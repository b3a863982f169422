import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.errors import ConfigError, UnknownNameError
from rag_posfix.reranking import RERANKERS
from rag_posfix.reranking.build import RerankerModels, build_reranker, parse_reranker

EMBEDDINGS = DeterministicFakeEmbedding(size=4)


def never():
    raise LookupError("loaded a model that no reranker uses")


MODELS = RerankerModels(embeddings=lambda: EMBEDDINGS, generator=never)


def test_models_are_loaded_only_for_rerankers_that_use_them():
    reranker = build_reranker(MethodSpec("embedding", {"top_n": 3}), MODELS)
    assert (reranker.embeddings, reranker.top_n) == (EMBEDDINGS, 3)


def test_models_are_no_parameters():
    assert tuple(RERANKERS.parameters("embedding")) == ("top_n",)
    with pytest.raises(ConfigError, match="has no parameter 'embeddings'"):
        build_reranker(MethodSpec("embedding", {"embeddings": EMBEDDINGS}), MODELS)


@pytest.mark.parametrize(
    ("name", "parameters", "error", "message"),
    [
        ("embeding", {}, UnknownNameError, "Did you mean 'embedding'"),
        ("embedding", {"topn": 3}, ConfigError, "Did you mean 'top_n'"),
        ("embedding", {"top_n": 0}, ConfigError, "top_n=0 must be a whole number >= 1, or None"),
    ],
)
def test_what_is_wrong_is_named(name, parameters, error, message):
    with pytest.raises(error, match=message):
        build_reranker(MethodSpec(name, parameters), MODELS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("embeding", "Did you mean 'embedding'"),
        ("embedding:topn=3", "Did you mean 'top_n'"),
        ("embedding:top_n=0", "top_n=0 must be a whole number >= 1, or None"),
        ("likelihood:batch_size=many", "batch_size='many'"),
        ("cross_encoder:max_length=3", "max_length=3"),
    ],
)
def test_text_is_checked_without_making_the_reranker(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_reranker(text)


def test_a_paper_s_name_finds_its_reranker():
    assert parse_reranker("rankgpt:window=10").parameters == {"window": 10}
    assert RERANKERS.get("rankgpt") is RERANKERS.get("listwise")
