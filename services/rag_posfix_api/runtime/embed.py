"""Embeds the texts of a request with the embedding model of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix_api.http.errors import UnsupportedFeatureError


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vectors of a request's texts.

    Attributes:
        vectors: One per text, in order.
        tokens: Tokens of all texts, counted with the served model's tokenizer.
    """

    vectors: Sequence[Sequence[float]]
    tokens: int


def embed_texts(pipeline: Pipeline, texts: Sequence[str]) -> Embedded:
    """Return the vector of each text.

    Raises:
        UnsupportedFeatureError: the pipeline has no embedding model.
    """
    if pipeline.embeddings is None:
        raise UnsupportedFeatureError("this server has no embedding model; serve a pipeline with one to embed texts")
    vectors = pipeline.embeddings.embed_documents(list(texts))
    encoder = pipeline.generator.encoder
    return Embedded(vectors, sum(len(encoder.encode_text(text)) for text in texts))
