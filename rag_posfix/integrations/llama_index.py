"""A LlamaIndex node postprocessor: nodes reranked, cut to the best, put in order. Needs the extra ``llama-index``."""

from __future__ import annotations

from typing import Any

from langchain_core.documents import BaseDocumentCompressor

from rag_posfix.errors import missing_extra
from rag_posfix.integrations.arranging import checked_order
from rag_posfix.integrations.items import Item, ItemArranger, Placed, make_reranker

try:
    from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, field_validator
    from llama_index.core.instrumentation import get_dispatcher
    from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
except ImportError as error:
    raise missing_extra("llama_index", "llama-index") from error

__all__ = ["PosfixNodePostprocessor"]

_dispatcher = get_dispatcher(__name__)


class PosfixNodePostprocessor(BaseNodePostprocessor):
    """Puts nodes in the order that the generator reads best, after reranking them if asked to.

    In the place of ``LongContextReorder``, which puts the best node last where their number is even: with
    ``order="ends_first"`` it is first for every number. Nodes without text are left out, and all but the best of those
    with the same text.

    Example:
        .. code-block:: python

            engine = index.as_query_engine(node_postprocessors=[PosfixNodePostprocessor(order="ends_first", top_n=5)])

    Attributes:
        order: A name (``rag-posfix methods``), or ``name:parameter=value``.
        reranker: A reranker by name, or ``name:parameter=value``; any langchain compressor that scores; None leaves
            the scores as they are.
        top_n: How many nodes are kept, the best; all if None.
        seed: For the order ``random``.
        embedding_model: For rerankers that embed.
        model: For rerankers that ask a language model.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    order: str = "ends_first"
    reranker: str | BaseDocumentCompressor | None = None
    top_n: int | None = Field(default=None, ge=1)
    seed: int = 0
    embedding_model: str = "minilm"
    model: str = "smollm2"

    _made: BaseDocumentCompressor | None = PrivateAttr(default=None)

    @field_validator("order")
    @classmethod
    def _known_order(cls, order: str) -> str:
        return checked_order(order)

    @classmethod
    def class_name(cls) -> str:
        """Return the name of the class, as LlamaIndex serialises it."""
        return "PosfixNodePostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        self._started(nodes, query_bundle)
        return self._ended(nodes, self._arranger().run([_item(one) for one in nodes], _question(query_bundle)))

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        self._started(nodes, query_bundle)
        placed = await self._arranger().arun([_item(one) for one in nodes], _question(query_bundle))
        return self._ended(nodes, placed)

    def _arranger(self) -> ItemArranger:
        if self._made is None:
            self._made = make_reranker(self.reranker, self.embedding_model, self.model)
        return ItemArranger(self.order, self._made, self.top_n, self.seed)

    def _started(self, nodes: list[NodeWithScore], query: QueryBundle | None) -> None:
        name = self.reranker if isinstance(self.reranker, str) else type(self.reranker).__name__
        self._tell(
            ReRankStartEvent(
                query=query,
                nodes=nodes,
                top_n=len(nodes) if self.top_n is None else self.top_n,
                model_name=self.order if self.reranker is None else f"{name}, {self.order}",
            )
        )

    def _ended(self, nodes: list[NodeWithScore], placed: list[Placed]) -> list[NodeWithScore]:
        arranged = [NodeWithScore(node=nodes[one.place].node, score=one.score) for one in placed]
        self._tell(ReRankEndEvent(nodes=arranged))
        return arranged

    @staticmethod
    def _tell(event: Any) -> None:
        _dispatcher.event(event)


def _item(node: NodeWithScore) -> Item:
    text = node.node.get_content(metadata_mode=MetadataMode.NONE)
    return Item(node.node.node_id, text, node.node.metadata.get("title"), node.score)


def _question(query: QueryBundle | None) -> str | None:
    return None if query is None else query.query_str
