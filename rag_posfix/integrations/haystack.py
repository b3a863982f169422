"""A Haystack component: documents reranked, cut to the best and put in order. Needs the extra ``haystack``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from langchain_core.documents import BaseDocumentCompressor

from rag_posfix.errors import ConfigError, missing_extra
from rag_posfix.integrations.arranging import checked_count, checked_order
from rag_posfix.integrations.items import Item, ItemArranger, Placed, make_reranker

try:
    from haystack import Document, component, default_from_dict, default_to_dict
except ImportError as error:
    raise missing_extra("haystack", "haystack") from error

__all__ = ["PosfixRanker"]


@component
class PosfixRanker:
    """Puts documents in the order that the generator reads best, after reranking them if asked to.

    With ``order="ends_first"`` and no reranker it does what ``LostInTheMiddleRanker`` does. Scores that documents
    come with count as relevance; where none has one, the given order is best first. Documents without text are
    left out, and all but the best of those with the same text.

    Example:
        .. code-block:: python

            ranker = PosfixRanker(order="ends_first", reranker="embedding", top_k=5)
            ranker.run(documents=found, query="Who designed the lighthouse?")["documents"]

    Args:
        order: A name (``rag-posfix methods``), or ``name:parameter=value``.
        reranker: A reranker by name, or ``name:parameter=value``; any langchain compressor that scores, which cannot
            be serialised; None leaves the scores as they are.
        top_k: How many documents are kept, the best; all if None.
        seed: For the order ``random``.
        embedding_model: For rerankers that embed.
        model: For rerankers that ask a language model.

    Raises:
        ConfigError: an unknown order, or a number out of range.
    """

    def __init__(
        self,
        order: str = "ends_first",
        reranker: str | BaseDocumentCompressor | None = None,
        top_k: int | None = None,
        seed: int = 0,
        embedding_model: str = "minilm",
        model: str = "smollm2",
    ) -> None:
        checked_count("top_k", top_k)
        self.order = checked_order(order)
        self.reranker = reranker
        self.top_k = top_k
        self.seed = seed
        self.embedding_model = embedding_model
        self.model = model
        self._made: BaseDocumentCompressor | None = None

    def warm_up(self) -> None:
        """Load what the reranker needs. ``run`` does it too, if it was not done."""
        if self._made is None:
            self._made = make_reranker(self.reranker, self.embedding_model, self.model)

    @component.output_types(documents=list[Document])
    def run(
        self, documents: list[Document], query: str | None = None, top_k: int | None = None
    ) -> dict[str, list[Document]]:
        """Return the documents in order, with their new scores; those given are left untouched.

        Args:
            documents: The candidates.
            query: The question; needed by a reranker.
            top_k: How many are kept, in the place of the component's own.

        Raises:
            ConfigError: a document without text, a score that is no finite number, or a missing question.
        """
        arranger = self._arranger(top_k)
        return _output(documents, arranger.run([_item(one) for one in documents], query))

    @component.output_types(documents=list[Document])
    async def run_async(
        self, documents: list[Document], query: str | None = None, top_k: int | None = None
    ) -> dict[str, list[Document]]:
        """Do what ``run`` does with the reranker's asynchronous method.

        Args:
            documents: The candidates.
            query: The question; needed by a reranker.
            top_k: How many are kept, in the place of the component's own.
        """
        arranger = self._arranger(top_k)
        return _output(documents, await arranger.arun([_item(one) for one in documents], query))

    def to_dict(self) -> dict[str, Any]:
        """Return the component as data.

        Raises:
            ConfigError: the reranker was given as an object.
        """
        if not (self.reranker is None or isinstance(self.reranker, str)):
            kind = type(self.reranker).__name__
            raise ConfigError(f"PosfixRanker: a {kind} object cannot be serialised; give the reranker by name")
        data: dict[str, Any] = default_to_dict(
            self,
            order=self.order,
            reranker=self.reranker,
            top_k=self.top_k,
            seed=self.seed,
            embedding_model=self.embedding_model,
            model=self.model,
        )
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PosfixRanker:
        """Return the component that ``to_dict`` described.

        Args:
            data: What it returned.
        """
        made: PosfixRanker = default_from_dict(cls, data)
        return made

    def _arranger(self, top_k: int | None) -> ItemArranger:
        checked_count("top_k", top_k)
        self.warm_up()
        return ItemArranger(self.order, self._made, self.top_k if top_k is None else top_k, self.seed)


def _item(document: Document) -> Item:
    return Item(document.id, document.content, document.meta.get("title"), document.score)


def _output(documents: list[Document], placed: list[Placed]) -> dict[str, list[Document]]:
    return {"documents": [replace(documents[one.place], score=one.score) for one in placed]}
