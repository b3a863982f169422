"""Any langchain retriever, with its documents compressed, cut to the best and put in order."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import BaseDocumentCompressor, BaseDocumentTransformer, Document
from langchain_core.retrievers import BaseRetriever, RetrieverLike
from langchain_core.runnables import RunnableConfig
from pydantic import ConfigDict, Field, field_validator

from rag_posfix.integrations.arranging import arranged, checked_count, checked_order
from rag_posfix.integrations.langchain.chain import acompress, compress
from rag_posfix.text import clean_text

__all__ = ["PosfixRetriever"]


class PosfixRetriever(BaseRetriever):
    """Retrieves, passes the documents through a chain of compressors, keeps the best and puts them in order.

    In the place of ``ContextualCompressionRetriever`` and ``LongContextReorder``, whose packages are no longer
    maintained. In a trace the base retriever and every compressor are runs under this one.

    Example:
        .. code-block:: python

            retriever = PosfixRetriever(base_retriever=store.as_retriever(), order="ends_first", k=5)
            retriever.invoke("Who designed the lighthouse?")

    Attributes:
        base_retriever: Finds the candidates: any retriever, or any runnable from a question to documents. Arguments of
            ``invoke`` that are not ``k`` are passed on to it.
        compressors: Rerankers, filters, text compressors and transformers, in the order they are applied. Not asked
            where nothing was found.
        order: The order of what is returned: a name (``rag-posfix methods``), or ``name:parameter=value``.
        k: How many documents are returned, the best by ``metadata["relevance_score"]``, or the first where nothing
            scored them; all if None. ``invoke(question, k=...)`` overrides it.
        seed: For the order ``random``.
        distinct: Whether documents without text are left out, and all but the best of those with the same text.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    base_retriever: RetrieverLike
    compressors: list[BaseDocumentCompressor | BaseDocumentTransformer] = Field(default_factory=list)
    order: str = "relevance"
    k: int | None = Field(default=None, ge=1)
    seed: int = 0
    distinct: bool = True

    @field_validator("order")
    @classmethod
    def _known_order(cls, order: str) -> str:
        return checked_order(order)

    def retrieve(self, question: str, k: int) -> list[Document]:
        """Return the ``k`` best documents, best first, whatever the order: the pipeline's side of a retriever.

        Args:
            question: What is asked.
            k: How many at most.
        """
        found = self.base_retriever.invoke(clean_text(question))
        return arranged(compress(self.compressors, found, question), "relevance", k=k, distinct=self.distinct)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        callbacks = run_manager.get_child()
        found = self.base_retriever.invoke(query, RunnableConfig(callbacks=callbacks), **kwargs)
        return self._arranged(compress(self.compressors, found, query, callbacks), k)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        callbacks = run_manager.get_child()
        found = await self.base_retriever.ainvoke(query, RunnableConfig(callbacks=callbacks), **kwargs)
        return self._arranged(await acompress(self.compressors, found, query, callbacks), k)

    def _arranged(self, documents: list[Document], k: int | None) -> list[Document]:
        checked_count("k", k)
        count = self.k if k is None else k
        return arranged(documents, self.order, k=count, seed=self.seed, distinct=self.distinct)
