"""Reranks a list of documents and returns the index of each result in the list.

A reranker returns copies in another order, possibly fewer. Ids do not identify them: documents may have no ids, or
equal ones. So each document has its index in its metadata during reranking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from langchain_core.documents import BaseDocumentCompressor, Document

from rag_posfix.contracts.retrieval import Reranker
from rag_posfix.errors import RerankingError

_INDEX = "_rag_posfix_index"


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A reranked document.

    Attributes:
        index: Its index in the list that was reranked.
        document: The copy that the reranker returned, with its score.
    """

    index: int
    document: Document


def rerank_indexed(reranker: Reranker, question: str, documents: Sequence[Document]) -> list[RankedDocument]:
    """Return what a reranker returns, in its order, each document with its index in ``documents``.

    Args:
        reranker: The reranker; it is not called without documents.
        documents: The documents; left untouched.

    Raises:
        RerankingError: the reranker dropped the metadata of a document.
    """
    if not documents:
        return []
    return _ranked(reranker, reranker.compress_documents(_with_index(documents), question))


async def arerank_indexed(
    reranker: BaseDocumentCompressor, question: str, documents: Sequence[Document]
) -> list[RankedDocument]:
    """Do what ``rerank_indexed`` does with the reranker's asynchronous method.

    Args:
        reranker: The reranker; it is not called without documents.
        documents: The documents; left untouched.
    """
    if not documents:
        return []
    return _ranked(reranker, await reranker.acompress_documents(_with_index(documents), question))


def _with_index(documents: Sequence[Document]) -> list[Document]:
    return [
        document.model_copy(update={"metadata": {**(document.metadata or {}), _INDEX: index}})
        for index, document in enumerate(documents)
    ]


def _ranked(reranker: object, returned: Sequence[Document]) -> list[RankedDocument]:
    ranked = []
    for document in returned:
        metadata = dict(document.metadata or {})
        index = metadata.pop(_INDEX, None)
        if not isinstance(index, int):
            raise RerankingError(
                f"{type(reranker).__name__} returned a document without the metadata that it was given "
                f"({', '.join(sorted(metadata)) or 'none'} is left); a reranker must return copies with all metadata"
            )
        ranked.append(RankedDocument(index, document.model_copy(update={"metadata": metadata})))
    return ranked
