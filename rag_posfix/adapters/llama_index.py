"""A LlamaIndex postprocessor that reranks nodes, keeps the best and orders them. Needs the extra ``llama-index``."""

from __future__ import annotations

from typing import Any

from langchain_core.documents import BaseDocumentCompressor

from rag_posfix.adapters.document_ordering import (
    DocumentOrderer,
    FrameworkDocument,
    OrderedDocument,
    checked_order,
    create_reranker,
)
from rag_posfix.checked import Checked
from rag_posfix.errors import missing_extra

try:
    from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, field_validator
    from llama_index.core.instrumentation import get_dispatcher
    from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
except ImportError as error:
    raise missing_extra("llama_index", "llama-index") from error

_dispatcher = get_dispatcher(__name__)


class PosfixNodePostprocessor(Checked, BaseNodePostprocessor):
    """Orders nodes for the generator, after reranking them if a reranker is given.

    Replaces ``LongContextReorder``, which puts the best node last if the number of nodes is even; with
    ``order="ends_first"`` the best node is always first. Nodes without text are left out, and all but the best of
    those with the same text.

    Example:
        .. code-block:: python

            engine = index.as_query_engine(node_postprocessors=[PosfixNodePostprocessor(order="ends_first", top_n=5)])

    Attributes:
        order: A name (``rag-posfix methods``), or ``name:parameter=value``.
        reranker: A reranker by name, or ``name:parameter=value``; or any langchain compressor that scores. None keeps
            the scores.
        top_n: Number of nodes to keep, the best; all if None.
        seed: For the order ``random``.
        embedding_model: For rerankers that use embeddings.
        model: For rerankers that use a language model.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    order: str = "ends_first"
    reranker: str | BaseDocumentCompressor | None = None
    top_n: int | None = Field(default=None, ge=1)
    seed: int = 0
    embedding_model: str = "minilm"
    model: str = "smollm2"

    _loaded: BaseDocumentCompressor | None = PrivateAttr(default=None)

    @field_validator("order")
    @classmethod
    def _known_order(cls, order: str) -> str:
        return checked_order(order)

    @classmethod
    def class_name(cls) -> str:
        """Return the name under which LlamaIndex serialises the class."""
        return "PosfixNodePostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        self._send_start(nodes, query_bundle)
        ordered = self._orderer().run([_fields(node) for node in nodes], _question(query_bundle))
        return self._send_end(nodes, ordered)

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        self._send_start(nodes, query_bundle)
        ordered = await self._orderer().arun([_fields(node) for node in nodes], _question(query_bundle))
        return self._send_end(nodes, ordered)

    def _orderer(self) -> DocumentOrderer:
        if self._loaded is None:
            self._loaded = create_reranker(self.reranker, self.embedding_model, self.model)
        return DocumentOrderer(self.order, self._loaded, self.top_n, self.seed)

    def _send_start(self, nodes: list[NodeWithScore], query: QueryBundle | None) -> None:
        name = self.reranker if isinstance(self.reranker, str) else type(self.reranker).__name__
        _send(
            ReRankStartEvent(
                query=query,
                nodes=nodes,
                top_n=len(nodes) if self.top_n is None else self.top_n,
                model_name=self.order if self.reranker is None else f"{name}, {self.order}",
            )
        )

    def _send_end(self, nodes: list[NodeWithScore], ordered: list[OrderedDocument]) -> list[NodeWithScore]:
        """Send the end event with the ordered nodes, and return them."""
        result = [NodeWithScore(node=nodes[entry.index].node, score=entry.score) for entry in ordered]
        _send(ReRankEndEvent(nodes=result))
        return result


def _send(event: Any) -> None:
    _dispatcher.event(event)


def _fields(node: NodeWithScore) -> FrameworkDocument:
    text = node.node.get_content(metadata_mode=MetadataMode.NONE)
    return FrameworkDocument(node.node.node_id, text, node.node.metadata.get("title"), node.score)


def _question(query: QueryBundle | None) -> str | None:
    return None if query is None else query.query_str
