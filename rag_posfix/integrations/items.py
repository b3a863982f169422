"""Documents of other frameworks, reranked and put in order by their places: nothing is copied back but scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from langchain_core.documents import BaseDocumentCompressor, Document

from rag_posfix.errors import ConfigError
from rag_posfix.integrations.arranging import arranged

__all__ = ["Item", "ItemArranger", "Placed", "make_reranker"]

_PLACE = "_place"


class Item(NamedTuple):
    """A document as an adapter reads it from its framework."""

    id: str
    text: str
    title: object = None
    score: float | None = None


class Placed(NamedTuple):
    """Which item stands here, and its score: the reranker's where there is one."""

    place: int
    score: float | None


@dataclass(frozen=True, slots=True)
class ItemArranger:
    """Reranks items, keeps the best and puts them in order.

    Attributes:
        order: A name in ``ORDERS``, or ``name:parameter=value``.
        reranker: Scores the items for the question; None leaves the scores they come with.
        k: How many are kept, all if None.
        seed: For orders that draw.
        distinct: Whether items without text are left out, and all but the best of those with the same text.
    """

    order: str = "relevance"
    reranker: BaseDocumentCompressor | None = None
    k: int | None = None
    seed: int = 0
    distinct: bool = True

    def run(self, items: Sequence[Item], query: str | None = None) -> list[Placed]:
        """Return which items stand where.

        Args:
            items: The items, in any order.
            query: The question; needed by a reranker.

        Raises:
            ConfigError: an item, the order, or a missing question.
        """
        documents = self._documents(items, query)
        if self.reranker is not None and documents:
            documents = list(self.reranker.compress_documents(documents, query or ""))
        return self._placed(documents)

    async def arun(self, items: Sequence[Item], query: str | None = None) -> list[Placed]:
        """Do what ``run`` does with the reranker's asynchronous method.

        Args:
            items: The items, in any order.
            query: The question; needed by a reranker.
        """
        documents = self._documents(items, query)
        if self.reranker is not None and documents:
            documents = list(await self.reranker.acompress_documents(documents, query or ""))
        return self._placed(documents)

    def _documents(self, items: Sequence[Item], query: str | None) -> list[Document]:
        if self.reranker is not None and items and not (query and query.strip()):
            raise ConfigError("a reranker needs the question; pass it as the query, or leave the reranker out")
        return [_document(item, place) for place, item in enumerate(items)]

    def _placed(self, documents: Sequence[Document]) -> list[Placed]:
        # In the order they came in: ties and missing scores go by it.
        given = sorted(documents, key=lambda document: int(document.metadata[_PLACE]))
        kept = arranged(given, self.order, k=self.k, seed=self.seed, distinct=self.distinct)
        return [Placed(one.metadata[_PLACE], one.metadata.get("relevance_score")) for one in kept]


def make_reranker(
    reranker: str | BaseDocumentCompressor | None, embedding_model: str, model: str
) -> BaseDocumentCompressor | None:
    """Return the reranker that is given, or the one of this name. Models are loaded here.

    Args:
        reranker: A reranker; a name (``rag-posfix methods``), or ``name:parameter=value``; or None.
        embedding_model: For rerankers that embed.
        model: For rerankers that ask a language model.

    Raises:
        ConfigError: no reranker has this name or such parameters.
    """
    if not isinstance(reranker, str):
        return reranker
    from rag_posfix.reranking.build import build_reranker, parse_reranker

    spec = parse_reranker(reranker)  # before the model libraries: a typing error is told at once
    from rag_posfix.pipeline.build import build_reranker_parts
    from rag_posfix.settings import Settings

    return build_reranker(spec, build_reranker_parts(Settings(embedding_model=embedding_model, model=model)))


def _document(item: Item, place: int) -> Document:
    if not isinstance(item.text, str):
        kind = "no text" if item.text is None else f"{type(item.text).__name__}, must be text"
        raise ConfigError(f"document {item.id!r} has {kind}; convert it or leave it out")
    metadata = {_PLACE: place, "title": item.title, "relevance_score": item.score}
    known = {name: value for name, value in metadata.items() if value is not None}
    return Document(page_content=item.text, metadata=known, id=item.id or None)
