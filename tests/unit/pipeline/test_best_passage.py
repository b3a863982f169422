"""The passage that is read alone: far ahead of the others by similarity, and about the question beside its copy."""

from __future__ import annotations

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.contracts.retrieval import SimilarityRange
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.pipeline.best_passage import BestPassage
from rag_posfix.pipeline.pipeline import Defaults, Pipeline, Question
from rag_posfix.reranking.language_model import without_copies
from tests.support.toy_encoder import ToyEncoder

QUESTION = "How do I cancel a booking?"
RANGE = SimilarityRange(low=0.2, clear=0.6)


class Directions(Embeddings):
    """A text with the word "link" has cosine .6 to the question, every other one .1."""

    def embed_query(self, text):
        return [1.0, 0.0]

    def embed_documents(self, texts):
        return [[3.0, 4.0] if "link" in text else [0.1, 0.99**0.5] for text in texts]


BEST = BestPassage(without_copies, Directions())


def documents(*scored):
    return [Document(text, id=text, metadata={"relevance_score": score}) for text, score in scored]


@pytest.mark.parametrize(
    ("first", "score", "alone"),
    [
        ("Press the link.", 0.7, True),
        ("Press the link.", 0.59, False),  # .19 ahead
        (f"{QUESTION} Press the link.", 0.7, True),  # an entry of an FAQ
        (f"{QUESTION} Please help, I look for it since May.", 0.9, False),  # an echo: the rest is about something else
        (QUESTION, 0.9, False),
    ],
)
def test_the_first_passage_is_read_alone_if_it_is_far_ahead_by_what_it_says(first, score, alone):
    assert BEST.alone(QUESTION, documents((first, score), ("b", 0.4)), RANGE) is alone


@pytest.mark.parametrize(
    ("question", "copy"), [("Who opens it?", "who opens it"), ("Opening hours", "OPENING - hours:")]
)
def test_a_short_question_is_copied_word_by_word(question, copy):
    for rest, alone in (("Press the link.", True), ("Please help.", False)):
        assert BEST.alone(question, documents((f"{copy} {rest}", 0.9), ("b", 0.4)), RANGE) is alone


def test_a_title_that_copies_the_question_is_judged_by_the_text():
    for text, alone in (("Press the link.", True), ("Please help.", False)):
        titled = Document(text, metadata={"relevance_score": 0.9, "title": QUESTION})
        assert BEST.alone(QUESTION, [titled, *documents(("b", 0.4))], RANGE) is alone


def test_scores_without_a_scale_have_no_lead():
    hits = documents(("Press the link.", 0.9), ("b", 0.1))
    for similarity in (None, SimilarityRange(low=0.0, clear=1.0)):
        assert not BEST.alone(QUESTION, hits, similarity)
    assert not BEST.alone(QUESTION, hits[:1], RANGE)
    assert not BEST.alone(QUESTION, documents(("Press the link.", 0.19), ("b", -0.1)), RANGE)  # not about the question


class Shelf:
    def similarity_range(self):
        return RANGE

    def retrieve(self, question, k):
        return documents(("Press the link.", 0.9), ("b", 0.4), ("c", 0.3))


def read(question, best=BEST):
    pipeline = Pipeline(
        FakeGenerator(ToyEncoder(), 8192), Assembler(ToyEncoder(), 8192), retriever=Shelf(),
        defaults=Defaults(best_passage=best),
    )  # fmt: skip
    answer = pipeline.ask(question)
    return [document.id for document in answer.documents], answer.dropped


def test_the_others_are_left_out_with_the_reason():
    assert read(QUESTION) == (["Press the link."], (("b", "margin"), ("c", "margin")))


@pytest.mark.parametrize("chosen", [{"mitigation": "none"}, {"order": "reverse"}])
def test_whoever_names_a_method_or_an_order_gets_all_passages(chosen):
    assert len(read(Question(QUESTION, **chosen))[0]) == 3
    assert len(read(QUESTION, None)[0]) == 3


def test_all_passages_are_read_with_min_relevance_off():
    assert len(read(Question(QUESTION, min_relevance="off"))[0]) == 3


@pytest.mark.parametrize("question", ["List all links.", "Which links are blue?"])
def test_a_list_is_not_made_from_one_passage(question):
    assert len(read(question)[0]) == 3
