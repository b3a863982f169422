"""The second search: with a name that the best passage tells and the question only describes."""

from __future__ import annotations

import pytest
from langchain_core.documents import Document
from pydantic import Field

from rag_posfix.contracts.answer import Question
from rag_posfix.contracts.retrieval import SearchQuery, SimilarityRange
from rag_posfix.errors import ConfigError, RetrievalError
from rag_posfix.pipeline.best_passage import BestPassage
from rag_posfix.pipeline.defaults import RelevanceTest
from rag_posfix.pipeline.pipeline import Defaults
from rag_posfix.pipeline.second_step import second_step, told_names
from rag_posfix.reranking.language_model import without_copies
from rag_posfix.retrieval.bm25 import BM25Retriever
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.pipelines import ids, memory_cache, pipeline

KEEPER = Document("The key of the archive is kept by Hanne Lorvik.", id="keeper", metadata={"source": "minutes"})
STAFF = Document("Hanne Lorvik, extension 4417.", id="staff", metadata={"source": "staff", "acl": "staff"})
OTHER = Document("Pietro Salvani, extension 4420.", id="other", metadata={"source": "staff"})
DINNER = Document("Hanne Lorvik had dinner.", id="dinner", metadata={"source": "diary"})
SAME = Document("Hanne Lorvik, no extension known.", id="same", metadata={"source": "minutes"})
WANTED = "What is the extension of the keeper of the archive key?"
PHONE = f"{WANTED} Hanne Lorvik"


class Counting(BM25Retriever):
    """Counts words, best first, and remembers what was searched for."""

    asked: list[str] = Field(default_factory=list)

    def similarity_range(self):
        return SimilarityRange(low=0.0, clear=0.01)

    def _search(self, question, k, metadata_filter):
        self.asked.append(question)
        return super()._search(question, k, metadata_filter)


def shelf(*documents):
    return Counting.from_documents(documents or [KEEPER, STAFF, OTHER, DINNER, SAME]).model_copy(update={"asked": []})


def step(question=WANTED, best=KEEPER):
    return second_step(question, SearchQuery(question), best)


def test_the_second_query_has_the_names_that_the_question_lacks():
    made = step()
    assert made is not None
    assert made.query == SearchQuery(PHONE)
    assert made.missing == {"extension", "keeper"}


@pytest.mark.parametrize(
    "question",
    [
        "By whom is the key of the archive kept?",  # the passage has all of its words
        "Which extension does Hanne Lorvik have, who keeps the key of the archive?",  # no name is new
    ],
)
def test_without_a_missing_word_or_a_new_name_there_is_no_second_search(question):
    assert step(question) is None


def test_a_follow_up_keeps_its_weights_and_names_of_earlier_messages_are_not_new():
    query = SearchQuery("Who rows?\nWhich extension?", (("Which extension?", 1.0), ("Who rows?", 0.7)))
    made = second_step("Which extension?", query, KEEPER)
    assert made is not None
    assert made.query.weighted == (("Which extension? Hanne Lorvik", 1.0), ("Who rows?", 0.7))
    assert second_step("Which extension?", SearchQuery("Is it Hanne Lorvik?\nWhich extension?"), KEEPER) is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("It is taught in the Heron Room on Mondays.", ["Heron Room"]),
        ("Pellets come from Fjordbrand, since March 2020.", ["Fjordbrand"]),
        ("Dogs are allowed. Cats are not.", []),
        ("The Brave Annika left.\nShe is late.", ["Brave Annika"]),
        ("name: Silberdistel, berth: C14", ["Silberdistel", "C14"]),
        ("Der Schlüssel ist bei Hanne Lorvik und die Tür ist zu.", ["Hanne Lorvik"]),
        ("钥匙由汉娜保管。", []),
    ],
)
def test_names_are_capitalised_words_in_a_row(text, names):
    assert list(told_names(text, "")) == names


def test_a_name_with_few_new_words_is_the_one_that_was_asked_for():
    assert not told_names("It went to Malcolm Xavier Smith.", "Which game did Malcolm Smith win?")


def test_linked_passages_have_the_name_and_a_missing_word_and_another_source():
    made = step()
    assert made is not None
    assert made.linked([KEEPER, SAME, DINNER, OTHER, STAFF]) == [STAFF]


def ask(question=WANTED, retriever=None, **options):
    asked = question if isinstance(question, Question) else Question(question, k=2)
    return pipeline(retriever=retriever or shelf(), **options).ask(asked)


def test_the_linked_passage_takes_the_place_of_the_last_one():
    retriever = shelf(KEEPER, STAFF, OTHER, DINNER, *[Document(f"The key of {n}, the keeper.", id=n) for n in "abcd"])
    assert "staff" not in ids(ask(Question(WANTED, k=2, second_step=False), retriever))
    answer = ask(retriever=retriever)
    assert set(ids(answer)) == {"keeper", "staff"}
    assert (answer.query, answer.second_query) == (WANTED, PHONE)
    assert retriever.asked == [WANTED, WANTED, PHONE]


@pytest.mark.parametrize(
    ("question", "defaults"),
    [
        (Question(WANTED, k=2, second_step=False), Defaults()),
        (Question(WANTED, k=2), Defaults(second_step=False)),
        (Question(WANTED, k=2, min_relevance="off"), Defaults()),
        (Question(f"List all about it: {WANTED}", k=2), Defaults()),
        (Question("By whom is the archive key kept?", k=2), Defaults()),
    ],
)
def test_where_it_is_off_or_not_needed_nothing_more_is_searched(question, defaults):
    retriever = shelf()
    assert ask(question, retriever, defaults=defaults).second_query == ""
    assert len(retriever.asked) == 1


def test_the_second_search_has_the_filter_of_the_question():
    allowed = {"acl": {"$ne": "staff"}}
    answer = ask(Question(WANTED, k=2, filter=allowed))
    assert "staff" not in ids(answer)
    assert answer.second_query == PHONE


def test_a_second_search_that_fails_leaves_the_first_with_a_warning():
    class FailsAtTheName(Counting):
        def _search(self, question, k, metadata_filter):
            if question == PHONE:
                raise RetrievalError("the store is away")
            return super()._search(question, k, metadata_filter)

    answer = ask(retriever=FailsAtTheName.from_documents([KEEPER, STAFF, OTHER]))
    assert "keeper" in ids(answer)
    assert answer.warnings == ("the second search failed, what the first one found is read: the store is away",)


def test_a_cached_answer_names_its_second_query():
    cached = pipeline(retriever=shelf(), cache=memory_cache())
    first, second = cached.ask(Question(WANTED, k=2)), cached.ask(Question(WANTED, k=2))
    assert (first.cached, second.cached) == (False, True)
    assert first.second_query == second.second_query == PHONE
    assert ids(first) == ids(second)


def test_a_small_reader_reads_the_two_passages_together_in_one_plain_prompt():
    defaults = Defaults(best_passage=BestPassage(without_copies, LetterEmbeddings()))
    answer = ask(Question(WANTED, k=5), defaults=defaults)
    assert set(ids(answer)) == {"keeper", "staff"}
    assert answer.mitigation == "none"
    assert {reason for _, reason in answer.dropped} == {"margin"}
    assert ask(Question(WANTED, k=5, mitigation="default"), defaults=defaults).mitigation != "none"


class Unclear(Counting):
    def similarity_range(self):
        return SimilarityRange(low=0.0, clear=1.0)


class NothingGains:
    """A judge that finds no passage about the question."""

    def compress_documents(self, documents, query, callbacks=None):
        gain = {"reranking": {"raw_score": -1.0}}
        return [each.model_copy(update={"metadata": {**each.metadata, **gain}}) for each in documents]


def test_without_the_passage_that_tells_the_name_the_linked_one_is_not_read():
    retriever = Unclear.from_documents([KEEPER, STAFF, OTHER, DINNER, SAME])
    answer = ask(Question(WANTED, k=3), retriever, relevance=RelevanceTest(NothingGains))
    assert (ids(answer), answer.grounded, answer.second_query) == ([], False, PHONE)
    assert ("keeper", "min_relevance") in answer.dropped


def test_a_wrong_value_is_an_error():
    with pytest.raises(ConfigError, match="second_step='no' must be True, False or None"):
        Question(WANTED, second_step="no")
