"""Every reranker with its models on the device: the scores of the CPU."""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from langchain_core.documents import Document

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.generation.engine import Engine
from rag_posfix.reranking import RERANKERS, InContextReranker
from rag_posfix.reranking.build import RerankerModels, build_reranker
from rag_posfix.retrieval.embeddings import SentenceEmbeddings
from tests.support.cross_encoder import tiny_cross_encoder, tiny_sentence_encoder
from tests.support.twin_engines import TOLERANCE, tiny_engine_on

pytestmark = pytest.mark.slow

TEXTS = ["Rome lies on the Tiber.", "Paris lies on the Seine.", "Bread is baked.", "Ovens are hot."]
QUESTION = "Which river?"


@functools.cache
def folder(kind: str) -> Path:
    """Return a folder with a small random cross-encoder or sentence encoder."""
    path = Path(tempfile.mkdtemp())
    return tiny_cross_encoder(path) if kind == "cross_encoder" else tiny_sentence_encoder(path)


def scores(reranker) -> dict[str, float]:
    documents = reranker.compress_documents([Document(page_content=text) for text in TEXTS], QUESTION)
    return {document.page_content: document.metadata["relevance_score"] for document in sorted(documents, key=str)}


def reranked(device: str, name: str) -> dict[str, float]:
    models = RerankerModels(
        embeddings=lambda: SentenceEmbeddings(folder("embedding"), device=device),
        generator=lambda: tiny_engine_on(device),
    )
    parameters = {"cross_encoder": {"model": str(folder("cross_encoder")), "device": device}}
    return scores(build_reranker(MethodSpec(name, parameters.get(name, {})), models))


def in_context(device: str, parameters: dict[str, object]) -> dict[str, float]:
    return scores(InContextReranker(generator=tiny_engine_on(device), **parameters))


def embedded(device: str) -> list[list[float]]:
    embeddings = SentenceEmbeddings(folder("embedding"), device=device)
    return [*embeddings.embed_documents(TEXTS), embeddings.embed_query(QUESTION)]


def identity(device: str) -> str:
    return SentenceEmbeddings(folder("embedding"), device=device).identity


def projected(device: str) -> list[tuple[float, ...]]:
    engine, drawn = tiny_engine_on(device), torch.Generator().manual_seed(3)
    sizes = ((32, engine.loaded.model.config.hidden_size), (8, 32))
    matrices = tuple((torch.randn(size, generator=drawn) / 8).to(device) for size in sizes)
    loaded = replace(engine.loaded, projector=matrices)
    return Engine(loaded, engine.encoder, "tiny", "print").projected_states(range(40, 60), (3, 11, 19))


# A server scores for one, and one reads a model with a projector.
@pytest.mark.parametrize("name", sorted({*RERANKERS.names()} - {"endpoint", "last_but_not_late"}))
def test_a_reranker_scores_on_the_device_as_on_the_cpu(on_both, name):
    assert on_both(reranked, name).difference <= TOLERANCE


@pytest.mark.parametrize("parameters", [{"layers": (1,)}, {"heads": ((0, 1), (2, 5))}])
def test_in_context_reads_some_layers_and_heads_on_the_device_as_on_the_cpu(on_both, parameters):
    assert on_both(in_context, parameters).difference <= TOLERANCE


def test_projected_states_are_those_of_the_cpu(on_both):
    assert on_both(projected).difference <= TOLERANCE


def test_texts_have_the_vectors_of_the_cpu(on_both):
    assert on_both(embedded).difference <= TOLERANCE


def test_an_embedding_model_has_one_identity_on_all_devices(on_both):
    assert on_both(identity).difference == 0.0
