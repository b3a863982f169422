import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding

from rag_posfix.errors import ConfigError, UnknownNameError
from rag_posfix.reranking import RERANKERS
from rag_posfix.reranking.build import RerankerModels, build_reranker, parameters_of

EMBEDDINGS = DeterministicFakeEmbedding(size=4)


def never():
    raise LookupError("loaded a model that no reranker uses")


MODELS = RerankerModels(embeddings=lambda: EMBEDDINGS, generator=never)


def test_models_are_loaded_only_for_rerankers_that_use_them():
    reranker = build_reranker("embedding", {"top_n": 3}, MODELS)
    assert (reranker.embeddings, reranker.top_n) == (EMBEDDINGS, 3)


def test_models_are_no_parameters():
    assert parameters_of(RERANKERS.get("embedding")) == ("top_n",)
    with pytest.raises(ConfigError, match="has no parameter 'embeddings'"):
        build_reranker("embedding", {"embeddings": EMBEDDINGS}, MODELS)


@pytest.mark.parametrize(
    ("name", "parameters", "error", "message"),
    [
        ("embeding", {}, UnknownNameError, "Did you mean 'embedding'"),
        ("embedding", {"topn": 3}, ConfigError, "Did you mean 'top_n'"),
        ("embedding", {"top_n": 0}, ConfigError, r"top_n=0: .*greater than or equal to 1"),
    ],
)
def test_what_is_wrong_is_named(name, parameters, error, message):
    with pytest.raises(error, match=message):
        build_reranker(name, parameters, MODELS)
