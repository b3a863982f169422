import pytest
from langchain_core.documents import BaseDocumentCompressor, BaseDocumentTransformer, Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from pydantic import Field

from rag_posfix import FaissVectorStore, PosfixRetriever
from rag_posfix.contracts.retrieval import Retriever
from rag_posfix.errors import ConfigError
from rag_posfix.reranking.base import ranked_copies
from tests.support.letter_embeddings import LetterEmbeddings
from tests.unit.adapters.langchain.runs import Runs


def doc(text, score=None, **more):
    return Document(page_content=text, **({} if score is None else {"metadata": {"relevance_score": score}}) | more)


FOUND = [doc("beta bbb", 0.4, id="b"), doc("alpha", 0.9, id="a"), doc("gamma ggg", 0.1, id="c"), doc("delta d", 0.6)]


class Shelf(BaseRetriever):
    found: list
    asked: list = Field(default_factory=list)

    def _get_relevant_documents(self, query, *, run_manager, only=None):
        self.asked.append(("sync", query, only))
        return self.found

    async def _aget_relevant_documents(self, query, *, run_manager, only=None):
        self.asked.append(("async", query, only))
        return self.found


class ByLength(BaseDocumentCompressor):
    calls: list = Field(default_factory=list)

    def compress_documents(self, documents, query, callbacks=None):
        self.calls.append(("sync", query, callbacks is not None))
        return ranked_copies(documents, [len(d.page_content) / 10 for d in documents])

    async def acompress_documents(self, documents, query, callbacks=None):
        self.calls.append(("async", query, callbacks is not None))
        return ranked_copies(documents, [len(d.page_content) / 10 for d in documents])


class Older(BaseDocumentCompressor):
    """As compressors were written before callbacks were part of the interface."""

    def compress_documents(self, documents, query):
        return [d for d in documents if query in d.page_content]


class Shout(BaseDocumentTransformer):
    def transform_documents(self, documents, **kwargs):
        return [d.model_copy(update={"page_content": d.page_content.upper()}) for d in documents]

    async def atransform_documents(self, documents, **kwargs):
        return [d.model_copy(update={"page_content": d.page_content.upper() + "!"}) for d in documents]


def over(found=None, **options):
    return PosfixRetriever(base_retriever=Shelf(found=FOUND if found is None else found, asked=[]), **options)


def texts(documents):
    return [d.page_content for d in documents]


def test_the_best_come_back_in_the_order_asked_for():
    assert texts(over().invoke("q")) == ["alpha", "delta d", "beta bbb", "gamma ggg"]
    assert texts(over(order="ends_first").invoke("q")) == ["alpha", "beta bbb", "gamma ggg", "delta d"]
    assert texts(over(order="original", k=2).invoke("q")) == ["alpha", "delta d"]
    assert texts(over(order="profile:slots=[0.1,0.2,0.9]", k=3).invoke("q")) == ["beta bbb", "delta d", "alpha"]


def test_a_call_overrides_k_and_passes_the_rest_on():
    retriever = over(k=3)
    assert len(retriever.invoke("q")) == 3
    assert len(retriever.invoke("q", k=1, only="new")) == 1
    assert retriever.base_retriever.asked == [("sync", "q", None), ("sync", "q", "new")]


async def test_the_asynchronous_methods_of_all_parts_are_used():
    reranker = ByLength(calls=[])
    retriever = over(compressors=[reranker, Shout()], k=2)
    assert texts(await retriever.ainvoke("q")) == ["GAMMA GGG!", "BETA BBB!"]
    assert [how for how, *_ in retriever.base_retriever.asked + reranker.calls] == ["async", "async"]


def test_compressors_are_applied_one_after_another_with_the_question_and_callbacks():
    reranker = ByLength(calls=[])
    found = over(compressors=[Older(), reranker, Shout()], order="relevance").invoke("a")
    assert texts(found) == ["GAMMA GGG", "BETA BBB", "DELTA D", "ALPHA"]
    assert [d.metadata["relevance_score"] for d in found] == [0.9, 0.8, 0.7, 0.5]
    assert reranker.calls == [("sync", "a", True)]


def test_documents_are_not_changed():
    before = [d.model_copy(deep=True) for d in FOUND]
    over(compressors=[ByLength()]).invoke("q")
    assert before == FOUND


def test_nothing_found_asks_no_compressor():
    reranker = ByLength(calls=[])
    assert over([], compressors=[reranker]).invoke("q") == []
    assert over(compressors=[Older(), reranker]).invoke("no such text") == []
    assert reranker.calls == []


def test_a_trace_shows_the_base_and_every_compressor_under_the_retriever():
    runs = Runs()
    over(compressors=[ByLength(), Shout()]).invoke("q", {"callbacks": [runs]})
    assert runs.tree() == [
        ("PosfixRetriever", "retriever", None),
        ("Shelf", "retriever", "PosfixRetriever"),
        ("ByLength", "chain", "PosfixRetriever"),
        ("Shout", "chain", "PosfixRetriever"),
    ]


def test_a_failing_compressor_fails_its_run_and_the_retriever():
    class Broken(BaseDocumentCompressor):
        def compress_documents(self, documents, query, callbacks=None):
            raise RuntimeError("no model today")

    runs = Runs()
    with pytest.raises(RuntimeError, match="no model today"):
        over(compressors=[Broken()]).invoke("q", {"callbacks": [runs]})
    assert str(runs.named("Broken").error) == str(runs.named("PosfixRetriever").error) == "no model today"


def test_it_is_a_retriever_for_a_pipeline_which_puts_in_order_itself():
    retriever = over(order="reverse")
    assert isinstance(retriever, Retriever)
    assert texts(retriever.retrieve("q", 2)) == ["alpha", "delta d"]


GUARDED = [
    doc("abc", id="1", metadata={"acl": "all", "year": 1}),
    doc("abd", id="2", metadata={"acl": "board", "year": 1}),
    doc("xyz", id="3", metadata={"acl": "all", "year": 2}),
]


class Plain(BaseRetriever):
    """Its search takes no arguments, so langchain drops them."""

    def _get_relevant_documents(self, query, *, run_manager):
        return GUARDED


class Store(BaseRetriever):
    """Its search takes filters in a language of its own."""

    def _get_relevant_documents(self, query, *, run_manager, filter=None):
        return GUARDED if filter is None else [GUARDED[int(number)] for number in filter.split()]


def bases():
    faiss = FaissVectorStore.from_documents(GUARDED, LetterEmbeddings())
    memory = InMemoryVectorStore.from_documents(GUARDED, LetterEmbeddings())
    return {
        "retriever without arguments": Plain(),
        "function": RunnableLambda(lambda question: GUARDED),
        "retriever with filters of its own": Store(),
        "store with filters of its own": memory.as_retriever(),
        "store": faiss.as_retriever(),
        "another of this class": PosfixRetriever(base_retriever=faiss.as_retriever()),
    }


@pytest.mark.parametrize("base", bases().values(), ids=bases().keys())
class TestFilterOfACall:
    @pytest.mark.parametrize(
        ("own", "of_call", "expected"),
        [
            (None, {"acl": "all"}, ["1", "3"]),
            ({"acl": "all"}, {"year": 1}, ["1"]),
            ({"acl": ["all", "board"]}, {"acl": "all"}, ["1", "3"]),
            ({"acl": "all"}, {"acl": ["all", "board"]}, ["1", "3"]),
            ({"acl": "all"}, None, ["1", "3"]),
            ({"acl": "all"}, {}, ["1", "3"]),
            (None, lambda metadata: metadata["year"] > 1, ["3"]),
            ({"acl": "all"}, lambda metadata: metadata["year"] == 1, ["1"]),
        ],
    )
    async def test_it_is_joined_with_that_of_the_retriever_over_any_base(self, base, own, of_call, expected):
        retriever = PosfixRetriever(base_retriever=base, filter=own)
        for found in (retriever.invoke("ab", filter=of_call), await retriever.ainvoke("ab", filter=of_call)):
            assert sorted(document.id for document in found) == expected

    async def test_it_does_not_replace_that_of_the_base(self, base):
        inner = PosfixRetriever(base_retriever=base, filter={"acl": "all"})
        retriever = PosfixRetriever(base_retriever=inner)
        for found in (retriever.invoke("ab", filter={"year": 1}), await retriever.ainvoke("ab", filter={"year": 1})):
            assert [document.id for document in found] == ["1"]


@pytest.mark.parametrize("of_call", [{"year": 1}, None, lambda metadata: metadata["year"] == 1])
async def test_a_filter_of_a_call_does_not_replace_that_of_a_vector_store_retriever(of_call):
    store = FaissVectorStore.from_documents(GUARDED, LetterEmbeddings())
    base = store.as_retriever(search_kwargs={"filter": {"acl": "all"}})
    retriever = PosfixRetriever(base_retriever=base)
    expected = ["1", "3"] if of_call is None else ["1"]
    for found in (retriever.invoke("ab", filter=of_call), await retriever.ainvoke("ab", filter=of_call)):
        assert sorted(document.id for document in found) == expected


def test_a_filter_in_the_language_of_the_base_goes_to_the_base():
    retriever = PosfixRetriever(base_retriever=Store(), filter={"acl": "all"})
    assert [document.id for document in retriever.invoke("ab", filter="1 2")] == ["3"]
    nested = PosfixRetriever(base_retriever=retriever)
    assert [document.id for document in nested.invoke("ab", filter="1 2")] == ["3"]


@pytest.mark.parametrize("of_call", ["1 2", {"$nor": []}, {"acl": {"term": "all"}}])
async def test_a_filter_that_nothing_evaluates_is_refused(of_call):
    retriever = PosfixRetriever(base_retriever=Plain())
    for asked in (retriever, PosfixRetriever(base_retriever=retriever)):
        with pytest.raises(ConfigError, match="filter"):
            asked.invoke("ab", filter=of_call)
        with pytest.raises(ConfigError, match="filter"):
            await asked.ainvoke("ab", filter=of_call)


class TestBadInput:
    def test_documents_without_ids_and_with_equal_ids_all_come_back(self):
        found = [doc("one", 0.1), doc("two", 0.9), doc("three", 0.5, id="x"), doc("four", 0.7, id="x")]
        assert texts(over(found).invoke("q")) == ["two", "four", "three", "one"]

    def test_of_equal_texts_the_best_stays_and_empty_ones_go_unless_asked_for(self):
        found = [doc("same  text", 0.1), doc("same text", 0.9), doc(" "), doc("other", 0.5)]
        assert texts(over(found).invoke("q")) == ["same text", "other"]
        assert len(over(found, distinct=False).invoke("q")) == 4

    def test_unscored_documents_keep_the_order_of_the_base(self):
        assert texts(over([doc("z"), doc("y"), doc("x")], k=2).invoke("q")) == ["z", "y"]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"order": "best"}, "unknown order 'best'"),
            ({"k": 0}, "greater than or equal to 1"),
            ({"top_n": 3}, "PosfixRetriever has no parameter 'top_n'"),
        ],
    )
    def test_options_that_make_no_sense_are_refused(self, options, message):
        with pytest.raises(ConfigError, match=message):
            over(**options)

    @pytest.mark.parametrize("k", [0, -1, 2.5, True])
    def test_a_call_with_a_k_that_makes_no_sense_is_refused(self, k):
        with pytest.raises(ConfigError, match="must be an integer >= 1"):
            over().invoke("q", k=k)
