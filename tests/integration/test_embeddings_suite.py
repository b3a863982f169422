"""The embeddings against langchain's own suites, on the real weights."""

from __future__ import annotations

import pytest
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests

from rag_posfix.retrieval.embeddings import SentenceEmbeddings


class TestSentenceEmbeddingsUnit(EmbeddingsUnitTests):
    @property
    def embeddings_class(self) -> type[SentenceEmbeddings]:
        return SentenceEmbeddings

    @property
    def embedding_model_params(self) -> dict:
        return {"model": "minilm"}


@pytest.mark.weights
class TestSentenceEmbeddingsOnRealWeights(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[SentenceEmbeddings]:
        return SentenceEmbeddings

    @property
    def embedding_model_params(self) -> dict:
        return {"model": "minilm"}
