import itertools

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding

from rag_posfix.errors import ConfigError, RetrievalError
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from tests.support.threads import in_threads


def test_the_score_is_the_cosine_whatever_the_length_of_the_vectors(store):
    (first, score), (_, second_score), (_, third_score) = store.similarity_search_with_score("aaaaaa", k=3)
    assert (first.id, score) == ("one", 1.0)
    # "aab" is (2, 1): cosine with (1, 0) = 2 / sqrt(5) = 0.894427
    assert second_score == pytest.approx(0.894427, abs=1e-6)
    assert third_score == 0.0


def test_a_negative_cosine_is_relevance_zero(embeddings):
    class Signed(type(embeddings)):
        def embed_query(self, text):
            return [-1.0, 0.0] if text == "no" else [1.0, 0.0]

    store = FaissVectorStore.from_texts(["no", "yes"], Signed(), ids=["n", "y"])
    assert [score for _, score in store.similarity_search_with_score("yes")] == [1.0, -1.0]
    assert [score for _, score in store.similarity_search_with_relevance_scores("yes")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda store: store.similarity_search("a", k=0), "k=0 must be an integer >= 1"),
        (lambda store: store.similarity_search("a", k=1.5), "k=1.5 must be an integer >= 1"),
        (lambda store: store.similarity_search("a", fetch_k=1, filter={"year": 1}), "not supported .*: fetch_k"),
        (lambda store: store.add_documents([Document("a"), Document("b")], ids=["x"]), "1 ids for 2 documents"),
        (lambda store: FaissVectorStore(store.embeddings, kind="ivf"), "'ivf'.* auto, flat, hnsw"),
    ],
)
def test_what_makes_no_sense_is_refused(store, call, message):
    with pytest.raises(ConfigError, match=message):
        call(store)


def test_an_empty_store_finds_nothing_without_embedding(embeddings):
    assert FaissVectorStore(embeddings).similarity_search("a") == []


def test_ties_are_broken_by_id_also_at_the_cut(embeddings):
    ids = [f"{number:03}" for number in range(50)]
    backwards = FaissVectorStore.from_texts(["abc"] * 50, embeddings, ids=ids[::-1])
    assert [document.id for document in backwards.similarity_search("abc", k=3)] == ["000", "001", "002"]


def test_scores_and_order_do_not_depend_on_the_order_of_adding():
    documents = [Document(id=str(number), page_content=f"text {number % 5}") for number in range(7)]
    results = set()
    for order in itertools.islice(itertools.permutations(documents), 0, 5040, 500):
        store = FaissVectorStore(DeterministicFakeEmbedding(size=37))
        store.add_documents(list(order))
        results.add(tuple((found.id, score) for found, score in store.similarity_search_with_score("text 3", k=4)))
    assert len(results) == 1


def test_equal_texts_are_embedded_once(embeddings):
    FaissVectorStore.from_texts(["same", "same", "other"], embeddings, ids=["a", "b", "c"])
    assert embeddings.texts == ["same", "other"]


def test_two_equal_documents_without_ids_are_one_and_with_other_metadata_two(embeddings):
    store = FaissVectorStore(embeddings)
    store.add_texts(["x", "x"])
    assert len(store) == 1
    store.add_texts(["x"], [{"page": 2}])
    assert len(store) == 2


def test_of_two_documents_with_one_id_in_a_call_the_later_stays(embeddings):
    store = FaissVectorStore(embeddings)
    assert store.add_texts(["x", "y"], ids=["a", "a"]) == ["a", "a"]
    assert [document.page_content for document in store.get_by_ids(["a"])] == ["y"]


def test_neither_the_caller_nor_the_reader_can_change_what_is_stored(embeddings):
    given = Document(id="a", page_content="abc", metadata={"tags": ["x"]})
    store = FaissVectorStore(embeddings)
    store.add_documents([given])
    given.metadata["tags"].append("y")
    store.similarity_search("abc")[0].metadata["tags"].append("z")
    store.get_by_ids(["a"])[0].page_content = "changed"
    assert store.get_by_ids(["a"]) == [Document(id="a", page_content="abc", metadata={"tags": ["x"]})]


def test_delete_without_ids_empties_the_store(store):
    store.delete(["nobody", "one", "one"])
    assert len(store) == 2
    store.delete()
    assert len(store) == 0
    store.add_texts(["abc"])
    assert len(store.similarity_search("abc")) == 1


def test_a_zero_vector_is_similar_to_nothing(embeddings):
    store = FaissVectorStore.from_texts(["", "123"], embeddings, ids=["a", "b"])
    assert [score for _, score in store.similarity_search_with_score("abc")] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("vectors", "problem"),
    [([[float("nan")]], "not finite"), ([[]], "shape"), ([[1.0], [1.0]], "2 vectors for 1"), ([["x"]], "unequal")],
)
def test_unusable_vectors_are_an_error_and_leave_the_store_as_it_was(embeddings, vectors, problem):
    store = FaissVectorStore(embeddings)
    embeddings.embed_documents = lambda texts: vectors
    with pytest.raises(RetrievalError, match=problem):
        store.add_texts(["x"])
    assert len(store) == 0


def test_a_model_of_another_dimension_is_refused(store, embeddings):
    embeddings.embed_query = lambda text: [1.0, 2.0]
    with pytest.raises(RetrievalError, match="dimension 2, the index holds 26"):
        store.similarity_search("x")
    with pytest.raises(RetrievalError, match="dimension 2"):
        store.add_texts(["x"], ids=["one"])
    assert len(store) == 3


def test_threads_may_add_search_and_delete_at_once(embeddings):
    store = FaissVectorStore.from_texts(["abc"], embeddings, ids=["stays"])

    def work(number):
        for step in range(30):
            store.add_texts([f"abc {step}"], ids=[f"{number}-{step}"])
            assert store.similarity_search("abc", k=3)
            store.delete([f"{number}-{step}"])

    in_threads(work, range(4))
    assert [document.id for document in store.similarity_search("abc", k=9)] == ["stays"]


def test_documents_may_come_with_their_vectors(embeddings):
    store = FaissVectorStore(embeddings)
    documents = [Document(id="a", page_content="x"), Document("y")]
    assert store.add_vectors(documents, [[2.0] + [0.0] * 25, embeddings.embed_query("b")])[0] == "a"
    assert embeddings.texts == []
    assert [(found.page_content, score) for found, score in store.similarity_search_with_score("aaa", k=2)] == [
        ("x", 1.0), ("y", 0.0),
    ]  # fmt: skip
    store.add_vectors([Document(id="a", page_content="z")], [embeddings.embed_query("z")])
    assert [document.page_content for document in store.similarity_search("z", k=1)] == ["z"]
    assert len(store) == 2
    assert store.vectors_of(["a"])[0].tolist() == embeddings.embed_query("z")


@pytest.mark.parametrize(
    ("documents", "vectors", "problem"),
    [
        ([Document(id="a", page_content="x")] * 2, [[1.0]] * 2, "2 documents have 1 different ids"),
        ([Document("x")], [[1.0]] * 2, "2 vectors for 1 documents"),
        ([Document("x")], [[float("inf")]], "not finite"),
        ([Document("x")], [1.0], "shape"),
    ],
)
def test_vectors_that_do_not_fit_are_refused(embeddings, documents, vectors, problem):
    store = FaissVectorStore(embeddings)
    with pytest.raises((ConfigError, RetrievalError), match=problem):
        store.add_vectors(documents, vectors)
    assert len(store) == 0


def test_listeners_are_told_which_documents_were_deleted_or_replaced(store):
    told, told_too = [], []
    store.add_delete_listener(lambda documents: told.append([document.page_content for document in documents]))
    store.add_delete_listener(lambda documents: told_too.append(len(documents)))
    store.add_texts(["new"], ids=["four"])
    store.delete(["nobody"])
    assert told == []
    store.add_texts(["other", "more"], ids=["one", "five"])
    store.add_vectors([Document(id="two", page_content="another")], [[1.0] + [0.0] * 25])
    store.delete(["three", "four"])
    assert told == [["aaa"], ["aab"], ["bbb", "new"]]
    assert told_too == [1, 1, 2]


def test_a_listener_may_use_the_store_and_its_failure_leaves_the_change(store):
    def refuse(documents):
        assert store.get_by_ids(["one"]) == []
        raise RuntimeError("no cache today")

    store.add_delete_listener(refuse)
    with pytest.raises(RuntimeError, match="no cache today"):
        store.delete(["one"])
    assert len(store) == 2
