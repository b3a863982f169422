"""The LlamaIndex postprocessor in the real LlamaIndex."""

import pytest
from langchain_core.documents import BaseDocumentCompressor
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms.mock import MockLLM
from llama_index.core.postprocessor import LongContextReorder
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import Field

from rag_posfix.adapters.llama_index import PosfixNodePostprocessor
from rag_posfix.errors import ConfigError
from rag_posfix.reranking.base import ranked_copies


class ByLength(BaseDocumentCompressor):
    """Likes long documents."""

    calls: list = Field(default_factory=list)

    def compress_documents(self, documents, query, callbacks=None):
        self.calls.append(query)
        return ranked_copies(documents, [len(d.page_content) / 100 for d in documents])


def ranked(n):
    """Nodes called 1 to n, the best first."""
    return [NodeWithScore(node=TextNode(id_=str(i), text=f"text {i}"), score=1 - i / 100) for i in range(1, n + 1)]


def ids(nodes):
    return [one.node.node_id for one in nodes]


def test_the_parity_flip_of_long_context_reorder():
    """Theirs puts the best node last where the number is even; ends_first puts it first for every number."""
    theirs = {n: "".join(ids(LongContextReorder().postprocess_nodes(ranked(n)))) for n in (3, 4, 5, 6)}
    assert theirs == {3: "132", 4: "2431", 5: "13542", 6: "246531"}
    ours = {n: "".join(ids(PosfixNodePostprocessor().postprocess_nodes(ranked(n)))) for n in (3, 4, 5, 6)}
    assert ours == {3: "132", 4: "1342", 5: "13542", 6: "135642"}


async def test_a_reranker_scores_first_by_both_ways_to_ask():
    nodes = [NodeWithScore(node=TextNode(id_=text, text=text), score=0.5) for text in ("a", "ccc", "bb")]
    reranker = ByLength()
    made = PosfixNodePostprocessor(order="relevance", reranker=reranker)
    found = made.postprocess_nodes(nodes, query_str="Which?")
    assert [(one.node.node_id, one.score) for one in found] == [("ccc", 0.03), ("bb", 0.02), ("a", 0.01)]
    assert ids(await made.apostprocess_nodes(nodes, query_str="And which?")) == ["ccc", "bb", "a"]
    assert reranker.calls == ["Which?", "And which?"]
    assert [one.score for one in nodes] == [0.5] * 3


def test_events_tell_when_it_starts_and_ends():
    class Listener(BaseEventHandler):
        seen: list = Field(default_factory=list)

        def handle(self, event, **_):
            self.seen.append(event)

    listener, root = Listener(), get_dispatcher()
    root.add_event_handler(listener)
    try:
        PosfixNodePostprocessor(order="reverse", top_n=2).postprocess_nodes(ranked(3), query_str="Which?")
    finally:
        root.event_handlers.remove(listener)
    start, end = listener.seen
    assert (start.class_name(), start.query.query_str, start.top_n, len(start.nodes)) == (
        "ReRankStartEvent", "Which?", 2, 3,
    )  # fmt: skip
    assert (start.model_name, end.class_name(), ids(end.nodes)) == ("reverse", "ReRankEndEvent", ["2", "1"])


def test_it_works_in_a_query_engine():
    class Shelf(BaseRetriever):
        def _retrieve(self, query_bundle):
            texts = {"1": "a long text", "2": "a text", "3": "text", "4": "t"}
            return [NodeWithScore(node=TextNode(id_=name, text=text), score=0.5) for name, text in texts.items()]

    synthesizer = get_response_synthesizer(response_mode="simple_summarize", llm=MockLLM())
    made = PosfixNodePostprocessor(order="ends_first", reranker=ByLength())
    engine = RetrieverQueryEngine(Shelf(), response_synthesizer=synthesizer, node_postprocessors=[made])
    assert ids(engine.query("Which?").source_nodes) == ["1", "3", "4", "2"]


def test_it_goes_through_a_dictionary_and_back():
    made = PosfixNodePostprocessor(order="cache_aware:bound=0.5", reranker="embedding", top_n=3)
    again = PosfixNodePostprocessor.from_dict(made.to_dict())
    assert (again.order, again.reranker, again.top_n) == ("cache_aware:bound=0.5", "embedding", 3)
    assert made.to_dict()["class_name"] == "PosfixNodePostprocessor"


class TestBadInput:
    def test_no_nodes_are_no_nodes(self):
        assert PosfixNodePostprocessor(reranker=ByLength()).postprocess_nodes([]) == []

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"order": "best"}, "unknown order"),
            ({"top_n": 0}, "greater than or equal"),
            ({"top_k": 1}, "PosfixNodePostprocessor has no parameter 'top_k'"),
        ],
    )
    def test_options_that_make_no_sense_are_refused(self, options, message):
        with pytest.raises(ConfigError, match=message):
            PosfixNodePostprocessor(**options)
