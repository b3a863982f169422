import gzip
import json
import math
import subprocess
import sys

import bm25s
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document

from rag_posfix.retrieval.bm25 import BM25Index, BM25Retriever, split_words
from rag_posfix.retrieval.ingest.ingest import read_documents
from rag_posfix.retrieval.ingest.passages import PassageSize
from tests.support.outside_data import outside_data
from tests.support.threads import in_threads

CATS = ["the cat sat", "the cat and the dog", "a bird"]


def retriever_of(*texts, **options):
    documents = [Document(id=f"{n:02}", page_content=text) for n, text in enumerate(texts)]
    return BM25Retriever.from_documents(documents, **options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("BM25's k1=0.9, snake_case!", ["bm25", "s", "k1", "0", "9", "snake", "case"]),
        ("Über die BRÜCKE", ["uber", "die", "brucke"]),
        ("STRASSE Straße ΣΊΣΥΦΟΣ", ["strasse", "strasse", "σισυφοσ"]),
        ("Łódź Øresund Ærø Đà Nẵng", ["lodz", "oresund", "aero", "da", "nang"]),
        ("мой ёлка за\u0301мок їжак", ["мой", "елка", "замок", "їжак"]),  # noqa: RUF001
        ("C++, C# C/C++17", ["c++", "c#", "c", "c++", "17"]),
        ("10² m² fee¹ 2½ CO₂", ["10", "2", "m", "2", "m2", "fee", "1", "fee1", "2", "1", "2", "co2"]),
        ("T-5 AX-900/B", ["t", "5", "t5", "ax", "900", "b", "ax900", "900b", "ax900b"]),
        ("2024-05-01 3-5 well-known", ["2024", "05", "01", "20240501", "3", "5", "well", "known"]),
        ("978-3-16-148410-0", ["978", "3", "16", "148410", "0", "9783161484100"]),
        ("ភាសាខ្មែរ ១៩៨៣", ["ភាសា", "សាខ្មែ", "ខ្មែរ", "១៩៨៣"]),  # a consonant and what is stacked below it
        ("မြန်မာ", ["မြန်", "န်မာ"]),
        ("བོད་སྐད་ཡིག", ["བོད", "སྐད", "ཡིག"]),
        ("ދިވެހި", ["ދިވެހި"]),
        ("\ufb01le \u00b2 \uff21", ["file", "2", "a"]),  # a ligature, a superscript, a full-width letter
        ("数据 test カナ", ["数据", "test", "カナ"]),
        ("Москва 2024", ["москва", "2024"]),
        ("六个月 a六", ["六个", "个月", "a", "六"]),
        ("여섯 달은", ["여섯", "달은"]),
        ("เรือใหญ่", ["เรือ", "อให", "ใหญ่"]),  # a vowel before, and marks above, belong to their consonant
        ("भारत की राजधानी नई दिल्ली है।", ["भारत", "की", "राजधानी", "नई", "दिल्ली", "है"]),
        ("தமிழ் மொழி, ১২৩", ["தமிழ்", "மொழி", "১২৩"]),
        ("র\u200d্যাব হক্\u200cর", ["র্যাব", "হক্র"]),  # joiners and non-joiners of Bengali
        ("می\u200cخواهم", ["می", "خواهم"]),  # noqa: RUF001 - Persian: also written with a space
        ("مُحَمَّد محـــمد", ["محمد", "محمد"]),
        ("שָׁלוֹם", ["שלום"]),
        ("İstanbul Ver\u00adtrag x\u0304", ["istanbul", "vertrag", "x"]),
        (" .,;—\n", []),
    ],
)
def test_words_are_runs_of_letters_and_digits_in_lower_case(text, words):
    assert split_words(text) == words


def test_a_score_worked_by_hand():
    # N = 3; "cat" in 2: idf = ln(1 + 1.5 / 2.5) = ln 1.6; "dog" in 1: idf = ln(1 + 2.5 / 1.5) = ln(8 / 3)
    # lengths 3, 5, 2, mean 10 / 3. Text 1: |d| / mean = 1.5, k1 * (1 - b + b * 1.5) = 0.9 * (0.6 + 0.6) = 1.08
    # cat, tf 1: ln 1.6 / 2.08; dog, tf 1: ln(8 / 3) / 2.08
    found = retriever_of(*CATS).retrieve("cat dog", 5)
    assert [document.id for document in found] == ["01", "00"]
    score = (math.log(1.6) + math.log(8 / 3)) / 2.08
    assert found[0].metadata["bm25_score"] == pytest.approx(score, rel=1e-6)
    # Relevance: of ln 1.6 + ln(8 / 3), which two endless repetitions of both words would come near to.
    assert found[0].metadata["relevance_score"] == pytest.approx(1 / 2.08, rel=1e-6)
    # Text 0: |d| / mean = 0.9, 0.9 * (0.6 + 0.36) = 0.864; cat, tf 1: ln 1.6 / 1.864
    assert found[1].metadata["bm25_score"] == pytest.approx(math.log(1.6) / 1.864, rel=1e-6)


def test_a_word_that_no_passage_has_lowers_the_relevance_and_not_the_score():
    known, unknown = (retriever_of(*CATS).retrieve(question, 1)[0].metadata for question in ("dog", "dog xylophone"))
    assert known["bm25_score"] == unknown["bm25_score"]
    # idf of a word in no text of 3: ln(1 + 3.5 / 0.5) = ln 8
    share = math.log(8 / 3) / (math.log(8 / 3) + math.log(8))
    assert unknown["relevance_score"] == pytest.approx(known["relevance_score"] * share, rel=1e-6)


@pytest.mark.slow
def test_the_library_below_does_not_turn_its_debug_messages_on():
    code = (
        "import logging; logging.basicConfig(level=logging.WARNING)\n"
        "from rag_posfix.retrieval.bm25 import BM25Index\n"
        "BM25Index.build(['a b'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


words = st.sampled_from(["alpha", "beta", "gamma", "Alpha", "delta9", "été", ","])
texts = st.lists(words, max_size=8).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(
    corpus=st.lists(texts, min_size=1, max_size=9),
    question=texts,
    k1=st.sampled_from([0.0, 0.9, 1.5]),
    b=st.sampled_from([0.0, 0.4, 1.0]),
)
def test_scores_are_those_of_bm25s_and_below_the_bound(corpus, question, k1, b):
    ours = BM25Index.build(corpus, k1=k1, b=b)
    scores = ours.scores(question)
    split = [split_words(text) for text in corpus]
    asked = [word for word in split_words(question) if any(word in text for text in split)]
    if asked:
        theirs = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy")
        theirs.index(split, show_progress=False)
        assert scores.tolist() == theirs.get_scores(asked).tolist()
    else:
        assert scores.tolist() == [0.0] * len(corpus)
    assert max(scores) <= ours.bound(question) * (1 + 1e-6)


@settings(max_examples=40, deadline=None)
@given(corpus=st.lists(texts, min_size=1, max_size=9), question=texts.filter(str.strip), k=st.integers(1, 5))
def test_the_best_are_found_in_order_and_ties_go_by_id_whatever_the_order_of_adding(corpus, question, k):
    documents = [Document(id=f"{n}", page_content=text) for n, text in enumerate(corpus)]
    scores = BM25Index.build(corpus).scores(question)
    expected = sorted((-float(score), f"{n}") for n, score in enumerate(scores) if score > 0)[:k]
    for order in (documents, documents[::-1]):
        found = BM25Retriever.from_documents(order).retrieve(question, k)
        assert [(-document.metadata["bm25_score"], document.id) for document in found] == expected
        assert all(0 < document.metadata["relevance_score"] <= 1 for document in found)


def test_passages_that_share_no_word_are_not_returned():
    assert retriever_of(*CATS).retrieve("xylophone", 3) == []
    assert retriever_of(*CATS).retrieve("...", 3) == []
    assert retriever_of().retrieve("cat", 3) == []
    assert retriever_of("", "!").retrieve("cat", 3) == []


def test_title_and_text_are_searched_together():
    documents = [Document(id="a", page_content="x", metadata={"title": "Whales"}), Document(id="b", page_content="y")]
    assert [found.id for found in BM25Retriever.from_documents(documents).retrieve("whales", 5)] == ["a"]


def test_a_filter_restricts_what_is_returned_and_not_the_statistics():
    documents = [Document(id=f"{n}", page_content=text, metadata={"n": n}) for n, text in enumerate(CATS)]
    free = BM25Retriever.from_documents(documents).retrieve("cat", 5)
    bound = BM25Retriever.from_documents(documents, filter={"n": [1, 2]}).retrieve("cat", 5)
    assert bound == [document for document in free if document.id == "1"] != []


def test_what_is_returned_is_a_copy():
    retriever = retriever_of("cat")
    retriever.retrieve("cat", 1)[0].metadata["bm25_score"] = -1
    assert "bm25_score" not in retriever.table.document(0).metadata


def test_statistics_follow_a_store_that_changes(embeddings):
    from rag_posfix.retrieval.faiss_store import FaissVectorStore

    store = FaissVectorStore.from_texts(CATS, embeddings, ids=["0", "1", "2"])
    retriever = BM25Retriever(table=store.table)
    assert [found.id for found in retriever.retrieve("bird", 5)] == ["2"]
    store.delete(["2"])
    store.add_texts(["bird bird"], ids=["3"])
    assert [found.id for found in retriever.retrieve("bird", 5)] == ["3"]
    alone = BM25Retriever.from_documents(store.documents())
    assert retriever.retrieve("cat bird", 5) == alone.retrieve("cat bird", 5)


@pytest.mark.parametrize("options", [{"k1": -1.0}, {"k1": math.nan}, {"b": 1.1}, {"filter": 3}])
def test_a_parameter_out_of_range_is_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        retriever_of(*CATS, **options)


def test_several_threads_may_search_while_documents_change(embeddings):
    from rag_posfix.retrieval.faiss_store import FaissVectorStore

    store = FaissVectorStore.from_texts(["cat stays"], embeddings, ids=["stays"])
    retriever = BM25Retriever(table=store.table)

    def work(number):
        for step in range(15):
            store.add_texts([f"cat {step}"], ids=[f"{number}-{step}"])
            assert "stays" in {document.id for document in retriever.retrieve("cat", 99)}
            store.delete([f"{number}-{step}"])

    in_threads(work, range(3))


def ndcg_at_10(found, relevant):
    gain = sum(1 / math.log2(place + 2) for place, name in enumerate(found) if name in relevant)
    return gain / sum(1 / math.log2(place + 2) for place in range(min(10, len(relevant))))


@pytest.mark.parametrize(
    ("name", "expected"),
    # Plain BM25 with these parameters over [a-z0-9]+ of title and text gives this, every judged row being relevant.
    [("scifact", 0.681), ("cranfield", 0.472)],
)
@pytest.mark.slow
def test_the_known_ndcg_of_a_collection_is_reached(name, expected):
    corpus = outside_data(f"beir/{name}/corpus.jsonl.gz")
    whole = PassageSize(words=100_000, characters=1_000_000)
    retriever = BM25Retriever.from_documents(read_documents([corpus.parent], size=whole))
    with (corpus.parent / "queries.jsonl").open(encoding="utf-8") as lines:
        questions = {row["_id"]: row["text"] for row in map(json.loads, lines)}
    relevant = {}
    for line in (corpus.parent / "qrels" / "test.tsv").read_text().splitlines()[1:]:
        question, document, _ = line.split("\t")
        relevant.setdefault(question, set()).add(document)
    reached = [
        ndcg_at_10([document.id for document in retriever.retrieve(questions[question], 10)], wanted)
        for question, wanted in relevant.items()
    ]
    assert sum(reached) / len(reached) == pytest.approx(expected, abs=0.0015)
    with gzip.open(corpus) as lines:
        assert sum(1 for _ in lines) >= len(retriever.table)
