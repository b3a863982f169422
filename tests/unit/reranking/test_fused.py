import math

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.errors import ConfigError
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.registry import Registry
from rag_posfix.reranking import RERANKERS, build, fused
from rag_posfix.reranking.base import DocumentScore, ScoringReranker
from rag_posfix.reranking.build import RerankerModels, build_reranker, parse_reranker, read_reranker
from rag_posfix.reranking.fused import FusedReranker
from tests.support.toy_encoder import ToyEncoder

TEXTS = ["alpha", "beta", "gamma"]


SCORES = {
    "first": {"alpha": (0.9, 3.0), "beta": (0.5, 1.0), "gamma": (0.1, 2.0)},
    "second": {"alpha": (0.2, 0.0), "beta": (0.8, 6.0), "gamma": (0.0, None)},
}
"""Score and raw score of each text; the second scorer does not read gamma."""


class Fixed(ScoringReranker):
    def _score(self, question, documents):
        return [DocumentScore(*SCORES[self.name][one.text]) for one in documents]


class First(Fixed):
    name = "first"


class Second(Fixed):
    name = "second"


@pytest.fixture
def fuse(monkeypatch):
    scorers = Registry("reranker", parts=RERANKERS.parts)
    for scorer in (First, Second):
        scorers.register(scorer.name)(scorer)
    for module in (fused, build):
        monkeypatch.setattr(module, "RERANKERS", scorers)

    def made(**parameters):
        return FusedReranker(
            embeddings=DeterministicFakeEmbedding(size=4), generator=FakeGenerator(ToyEncoder()),
            **{"scorers": ("first", "second"), **parameters},
        )  # fmt: skip

    return made


def raw_scores(reranker):
    found = reranker.compress_documents([Document(page_content=text) for text in TEXTS], "Which?")
    return {one.page_content: one.metadata["reranking"]["raw_score"] for one in found}


def test_z_scores_are_added(fuse):
    # first: mean 2, deviation sqrt(2/3) = .8165: z = 1.2247, -1.2247, 0. second reads two: z = -1, 1; gamma gets -1.
    assert raw_scores(fuse()) == pytest.approx({"alpha": 0.224745, "beta": -0.224745, "gamma": -1.0}, abs=1e-6)


def test_weights_count(fuse):
    # alpha: 1.2247 - 3; beta: -1.2247 + 3; gamma: 0 - 3
    found = raw_scores(fuse(weights=(1.0, 3.0)))
    assert found == pytest.approx({"alpha": -1.775255, "beta": 1.775255, "gamma": -3.0}, abs=1e-6)
    best = fuse(weights=(1.0, 3.0)).compress_documents(
        [Document(page_content="alpha"), Document(page_content="beta")], "?"
    )
    assert best[0].page_content == "beta"
    # Of two the z-scores are 1 and -1: (-1 + 3) / (1 + 3) = 1/2.
    assert best[0].metadata["relevance_score"] == pytest.approx(1 / (1 + math.exp(-0.5)))


def test_logarithms_are_added_and_bounded_from_below(fuse):
    expected = {"alpha": math.log(0.9 * 0.2), "beta": math.log(0.5 * 0.8), "gamma": math.log(0.1 * 1e-3)}
    reranker = fuse(normalization="log")
    assert raw_scores(reranker) == pytest.approx(expected)
    best = reranker.compress_documents([Document(page_content=text) for text in TEXTS], "Which?")[0]
    assert best.metadata["relevance_score"] == pytest.approx(math.sqrt(0.5 * 0.8))  # the geometric mean
    assert best.metadata["reranking"]["scores"] == {"first": 1.0, "second": 6.0}


@pytest.mark.parametrize("text", ["likelihood+embedding", "fused:likelihood+embedding"])
def test_a_sum_in_text_is_a_fusion(text):
    assert read_reranker(f"{text}:top_n=3") == MethodSpec(
        "fused", {"scorers": ["likelihood", "embedding"], "top_n": 3}
    )
    parse_reranker(text)
    assert read_reranker("embedding:top_n=3") == MethodSpec("embedding", {"top_n": 3})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"scorers": ["embedding"]}, "at least 2"),
        ({"scorers": ["embedding", "nothing"]}, "unknown reranker 'nothing'"),
        ({"scorers": ["embedding", "fused"]}, "nests fused"),
        ({"weights": [1.0, 2.0, 3.0]}, "weights has 3 numbers for 2 scorers"),
        ({"weights": [1.0, 0.0]}, r"fused: weights\[1\]=0.0 must be a number above 0 and at most 100"),
    ],
)
def test_what_cannot_be_fused_is_refused(parameters, message):
    models = RerankerModels(lambda: DeterministicFakeEmbedding(size=4), lambda: FakeGenerator(ToyEncoder()))
    parameters = {"scorers": ["embedding", "listwise"], **parameters}
    with pytest.raises(ConfigError, match=message):
        build_reranker(MethodSpec("fused", parameters), models)
