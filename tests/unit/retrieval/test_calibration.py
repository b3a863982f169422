"""The similarities of an index to questions that have nothing to do with it."""

from __future__ import annotations

import json
import math

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rag_posfix.contracts.retrieval import SimilarityRange
from rag_posfix.errors import ConfigError, RetrievalError
from rag_posfix.retrieval.base import PACKAGED_SIMILARITY, PassageRetriever
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.indexing import FOREIGN_QUESTIONS, calibrate_index, update_index


class Angles(Embeddings):
    """Embeds a number as the vector whose cosine with any other text is that number in hundredths."""

    identity = "angles"

    def __init__(self, model="angles"):
        self.model = model

    def embed_documents(self, texts):
        return [[1.0, 0.0] for _ in texts]

    def embed_query(self, text):
        cosine = int(text) / 100
        return [cosine, math.sqrt(1 - cosine**2)]


QUESTIONS = [str(number) for number in range(21)]
# Best similarities 0, .01, ..., .20: 25 % quantile .05, median .10, 95 % quantile .19, so clear = 2 * .19 - .10.
EXPECTED = SimilarityRange(low=0.05, clear=0.28)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").write_text("The lamp is lit.", "utf-8")
    update_index([tmp_path / "files"], tmp_path / "index", Angles())
    return tmp_path


def test_the_range_is_that_of_the_quantiles_and_stays_with_the_index(folder):
    assert FaissVectorStore.load(folder / "index", Angles()).similarity is None
    assert calibrate_index(folder / "index", Angles(), QUESTIONS) == EXPECTED
    (folder / "files" / "b.txt").write_text("The lamp is out.", "utf-8")
    assert update_index([folder / "files"], folder / "index", Angles()).added == 1
    store = FaissVectorStore.load(folder / "index", Angles())
    assert PassageRetriever(store=store).similarity_range() == EXPECTED
    assert json.loads((folder / "index" / "manifest.json").read_text())["similarity"] == {"low": 0.05, "clear": 0.28}


def test_an_index_that_answers_the_questions_leaves_more_to_the_judge(folder):
    assert calibrate_index(folder / "index", Angles(), [*QUESTIONS[:10], *["90"] * 3]).clear == 1.0


def test_the_packaged_model_has_a_range_without_calibration():
    store = FaissVectorStore(Angles("minilm"))
    store.add_documents([Document(page_content="a")])
    assert PassageRetriever(store=store).similarity_range() == PACKAGED_SIMILARITY
    chosen = SimilarityRange(0.1, 0.2)
    assert PassageRetriever(store=store, similarity=chosen).similarity_range() == chosen


def test_few_questions_and_a_missing_index_are_errors(folder):
    assert len(set(FOREIGN_QUESTIONS)) == len(FOREIGN_QUESTIONS) >= 30
    with pytest.raises(ConfigError, match="3 foreign questions are given; at least 10 are needed"):
        calibrate_index(folder / "index", Angles(), QUESTIONS[:3])
    with pytest.raises(RetrievalError, match="there is no folder"):
        calibrate_index(folder / "other", Angles(), QUESTIONS)
