"""Retrieval-augmented generation whose answers do not depend on the order of the passages.

The public names, and nothing else: each is imported from its module when it is first used, so that importing
rag_posfix loads no model library, patches nothing and reads no environment. The first use prepares the process for
torch (``process.prepare_process``).
"""

from importlib import import_module
from typing import TYPE_CHECKING

from rag_posfix.errors import missing_package

if TYPE_CHECKING:
    from rag_posfix.adapters.langchain.cache import RagPosfixCache, RagPosfixStore
    from rag_posfix.adapters.langchain.chat_model import RagPosfixChatModel
    from rag_posfix.adapters.langchain.content_blocks import document_block
    from rag_posfix.adapters.langchain.rag import PosfixRAG
    from rag_posfix.adapters.langchain.retriever import PosfixRetriever
    from rag_posfix.assembly.assembler import Assembler
    from rag_posfix.contracts.request import MitigationChoice, Sampling
    from rag_posfix.errors import RagPosfixError
    from rag_posfix.generation.batching.scheduler import BatchingGenerator
    from rag_posfix.generation.load import load_engine
    from rag_posfix.pipeline.build import build_pipeline
    from rag_posfix.pipeline.pipeline import Answer, Pipeline, Question
    from rag_posfix.retrieval.base import PassageRetriever
    from rag_posfix.retrieval.bm25 import BM25Retriever
    from rag_posfix.retrieval.embeddings import SentenceEmbeddings
    from rag_posfix.retrieval.faiss_store import FaissVectorStore
    from rag_posfix.retrieval.hybrid import HybridRetriever
    from rag_posfix.retrieval.ingest.ingest import read_documents
    from rag_posfix.settings import Settings

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 - without regard to case, as people look names up
    "Answer",
    "Assembler",
    "BatchingGenerator",
    "BM25Retriever",
    "build_pipeline",
    "document_block",
    "FaissVectorStore",
    "HybridRetriever",
    "load_engine",
    "MitigationChoice",
    "PassageRetriever",
    "Pipeline",
    "PosfixRAG",
    "PosfixRetriever",
    "Question",
    "RagPosfixCache",
    "RagPosfixChatModel",
    "RagPosfixError",
    "RagPosfixStore",
    "read_documents",
    "Sampling",
    "SentenceEmbeddings",
    "Settings",
]

_EXPORTS = {
    "Answer": "rag_posfix.pipeline.pipeline",
    "Assembler": "rag_posfix.assembly.assembler",
    "BatchingGenerator": "rag_posfix.generation.batching.scheduler",
    "BM25Retriever": "rag_posfix.retrieval.bm25",
    "build_pipeline": "rag_posfix.pipeline.build",
    "document_block": "rag_posfix.adapters.langchain.content_blocks",
    "FaissVectorStore": "rag_posfix.retrieval.faiss_store",
    "HybridRetriever": "rag_posfix.retrieval.hybrid",
    "load_engine": "rag_posfix.generation.load",
    "MitigationChoice": "rag_posfix.contracts.request",
    "PassageRetriever": "rag_posfix.retrieval.base",
    "Pipeline": "rag_posfix.pipeline.pipeline",
    "PosfixRAG": "rag_posfix.adapters.langchain.rag",
    "PosfixRetriever": "rag_posfix.adapters.langchain.retriever",
    "Question": "rag_posfix.pipeline.pipeline",
    "RagPosfixCache": "rag_posfix.adapters.langchain.cache",
    "RagPosfixChatModel": "rag_posfix.adapters.langchain.chat_model",
    "RagPosfixError": "rag_posfix.errors",
    "RagPosfixStore": "rag_posfix.adapters.langchain.cache",
    "read_documents": "rag_posfix.retrieval.ingest.ingest",
    "Sampling": "rag_posfix.contracts.request",
    "SentenceEmbeddings": "rag_posfix.retrieval.embeddings",
    "Settings": "rag_posfix.settings",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from rag_posfix.process import prepare_process

        prepare_process()  # before the first of them imports torch
        value: object = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise missing_package(error) or error from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, those not used yet included."""
    return sorted({*globals(), *__all__})
