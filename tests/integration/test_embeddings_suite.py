"""The embeddings against langchain's own suites, on the real weights."""

from __future__ import annotations

import pytest
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests

from rag_posfix.retrieval.embeddings import SentenceEmbeddings


class MiniLM:
    embeddings_class = SentenceEmbeddings

    @property
    def embedding_model_params(self) -> dict:
        return {"model": "minilm"}


class TestSentenceEmbeddingsUnit(MiniLM, EmbeddingsUnitTests):
    """Without weights."""


@pytest.mark.weights
class TestSentenceEmbeddingsOnRealWeights(MiniLM, EmbeddingsIntegrationTests):
    """With them."""
