"""Minimum relevance: which retrieved passages are read, by similarity and by a judge."""

from __future__ import annotations

import numpy as np
import pytest
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.contracts.retrieval import SimilarityRange
from rag_posfix.errors import ConfigError
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.pipeline.defaults import RelevanceTest
from rag_posfix.pipeline.pipeline import Defaults, Pipeline, Question
from rag_posfix.reranking.deadline import GuardedReranker
from rag_posfix.reranking.likelihood import PassageJudge
from rag_posfix.settings import Settings
from rag_posfix.text import NO_PASSAGE_TEXT
from tests.support.reader import ScriptedReader
from tests.support.toy_encoder import ToyEncoder

RANGE = SimilarityRange(low=0.2, clear=0.6)
RANKED = (("a", 0.7), ("b", 0.1))


class Shelf:
    """A retriever whose passages have the scores that it is made with."""

    def __init__(self, similarity=RANGE, **scores):
        self.similarity, self.scores = similarity, scores

    def similarity_range(self):
        return self.similarity

    def retrieve(self, question, k):
        best = sorted(self.scores.items(), key=lambda item: -item[1])[:k]
        return [Document(page_content=name, id=name, metadata={"relevance_score": score}) for name, score in best]


def ask(shelf, gains=None, min_relevance=None, **parts):
    reader = None if gains is None else ScriptedReader({"": 0.0, **gains})
    judge = None if reader is None else GuardedReranker(reranker=PassageJudge(generator=reader))
    pipeline = Pipeline(
        FakeGenerator(ToyEncoder(), 8192),
        Assembler(ToyEncoder(), 8192),
        retriever=shelf,
        relevance=RelevanceTest(lambda: judge),
        **parts,
    )
    answer = pipeline.ask(Question("why?", min_relevance=min_relevance))
    return {document.id for document in answer.documents}, answer, reader


def test_a_passage_below_the_lowest_similarity_is_not_read_and_is_named():
    read, answer, _ = ask(Shelf(a=0.7, b=0.19))
    assert (read, answer.grounded, answer.dropped) == ({"a"}, True, (("b", "min_relevance"),))


def test_a_passage_with_exactly_the_lowest_similarity_or_gain_is_read():
    assert ask(Shelf(a=0.7, b=0.2))[0] == {"a", "b"}
    assert ask(Shelf(a=0.5), min_relevance=0.5)[0] == {"a"}
    assert ask(Shelf(a=0.5), {"a": 0.8})[0] == {"a"}  # gain 0.8 - 0.0


def test_the_judge_decides_where_no_passage_is_clearly_similar():
    gains = {"a": 0.79, "b": 0.81, "c": 5.0}
    read, answer, reader = ask(Shelf(a=0.3, b=0.25, c=0.1), gains)
    assert (read, answer.dropped) == ({"b"}, (("c", "min_relevance"), ("a", "min_relevance")))
    assert reader.seen == [["a", "b"]], "a passage below the similarity is not judged"
    assert answer.timings["judge"] >= 0
    read, answer, reader = ask(Shelf(a=0.6, b=0.4), gains)
    assert (read, reader.seen) == ({"a", "b"}, []), "one clearly similar passage needs no judge"


@pytest.mark.parametrize(
    ("similarity", "least"), [(0.3, 0.8), (0.4, 0.8 * 2 / 3), (0.45, 0.4), (0.5, 0.8 / 3), (0.57, 0.08)]
)
def test_the_more_similar_a_passage_the_less_it_has_to_gain(similarity, least):
    assert ask(Shelf(a=similarity), {"a": least + 1e-6})[0] == {"a"}
    assert ask(Shelf(a=similarity), {"a": least - 1e-6})[0] == set()


def test_a_reranker_does_not_change_what_a_passage_has_to_gain():
    class Reversed:
        def compress_documents(self, documents, query, callbacks=None):
            return [
                one.model_copy(update={"metadata": {**one.metadata, "relevance_score": 0.01}}) for one in documents
            ]

    assert ask(Shelf(a=0.5), {"a": 0.3}, reranker=Reversed(), candidates=10)[0] == {"a"}


def test_a_judge_that_fails_leaves_the_passages():
    read, answer, _ = ask(Shelf(a=0.5), {})  # the reader knows no passage
    assert (read, answer.grounded) == ({"a"}, True)
    assert "judge failed" in answer.warnings[0]


def test_the_scores_of_a_reranker_are_no_verdict_of_a_judge_that_fails():
    class Scored:
        def compress_documents(self, documents, query, callbacks=None):
            details = {"reranking": {"raw_score": 0.5}}
            return [each.model_copy(update={"metadata": {**each.metadata, **details}}) for each in documents]

    read, answer, _ = ask(Shelf(a=0.5), {}, reranker=Scored(), candidates=10)
    assert (read, answer.dropped) == ({"a"}, ())
    assert "judge failed" in answer.warnings[0]


def test_candidates_without_a_reranker_are_the_first_of_them():
    assert ask(Shelf(a=0.9, b=0.8, c=0.7), candidates=3, defaults=Defaults(k=2))[0] == {"a", "b"}


def test_passages_that_were_left_out_have_their_ids_in_previews_too():
    documents = [Document(name, metadata={"id": name, "relevance_score": score}) for name, score in RANKED]
    shelf = Shelf()
    shelf.retrieve = lambda question, k: documents
    asked = Pipeline(FakeGenerator(ToyEncoder(), 8192), Assembler(ToyEncoder(), 8192), retriever=shelf)
    assert asked.ask("why?").dropped == asked.preview("why?").dropped == (("b", "min_relevance"),)


@pytest.mark.parametrize(("choice", "expected"), [("off", {"a", "b"}), (0.3, {"a"}), ("auto", {"a"}), (0, {"a", "b"})])
def test_a_question_or_the_defaults_choose_the_minimum_relevance(choice, expected):
    shelf = Shelf(a=0.7, b=0.1)
    assert ask(shelf, min_relevance=choice)[0] == expected
    assert ask(shelf, defaults=Defaults(min_relevance=choice))[0] == expected


def test_scores_that_nobody_knows_are_left_alone_unless_a_similarity_is_given():
    shelf = Shelf(similarity=None, a=0.1)
    assert ask(shelf, {"a": 0.0})[0] == {"a"}
    assert ask(shelf, {"a": 9.0}, min_relevance=0.2)[0] == set()
    assert ask(shelf, {"a": 0.0}, min_relevance=0.05)[0] == set(), "the judge decides about what is left"


@pytest.mark.parametrize("kind", [float, np.float32, np.float64])
def test_scores_of_numpy_are_scores(kind):
    assert ask(Shelf(a=kind(0.7), b=kind(0.1)))[0] == {"a"}


def test_documents_of_a_question_are_read_whatever_their_scores():
    pipeline = Pipeline(FakeGenerator(ToyEncoder(), 8192), Assembler(ToyEncoder(), 8192), retriever=Shelf())
    document = Document(page_content="a", id="a", metadata={"relevance_score": 0.0})
    assert pipeline.ask(Question("why?", [document])).grounded


@pytest.mark.parametrize("wrong", ["on", 1.1, -0.1, True, "nan"])
def test_a_wrong_minimum_relevance_is_refused(wrong):
    with pytest.raises(ConfigError, match="must be auto, off, or a similarity from 0 to 1"):
        Question("why?", min_relevance=wrong)
    with pytest.raises(ConfigError, match="must be auto, off, or a similarity from 0 to 1"):
        Settings(min_relevance=wrong)


def titled(question, title, text, gain, score=0.4):
    shelf = Shelf()
    shelf.retrieve = lambda query, k: [Document(text, id="a", metadata={"relevance_score": score, "title": title})]
    reader = ScriptedReader({"": 0.0, text: gain})
    judge = GuardedReranker(reranker=PassageJudge(generator=reader))
    pipeline = Pipeline(
        FakeGenerator(ToyEncoder(), 8192), Assembler(ToyEncoder(), 8192), retriever=shelf,
        relevance=RelevanceTest(lambda: judge),
    )  # fmt: skip
    return pipeline.ask(question).grounded


def test_a_passage_with_most_content_words_of_the_question_is_judged_whatever_its_similarity():
    question = "What does a late payment cost a day?"  # late, payment, cost, day
    assert titled(question, "Late payment", "It costs 2 euros a day.", 0.8, score=0.1)  # late, payment, day
    assert not titled(question, "Late payment", "It costs 2 euros a day.", 0.79, score=0.1)
    assert not titled(
        question, "Payment", "It is due after a day.", 9.0, score=0.1
    )  # payment, day: not more than half
    assert not titled("Where is it?", "Where", "It is here.", 9.0, score=0.1), "function words are no content"
    assert not titled("What is a chariot?", "Chariot", "A card.", 9.0, score=0.1), "one word is not enough"


def test_inflected_words_of_the_question_are_content_words_too():
    question = "What do late payments of members cost?"  # late, payments, members, cost
    assert titled(question, "Late payment", "A member pays 2 euros.", 0.8, score=0.1)  # late, payment, member


@pytest.mark.parametrize(
    "question",
    [
        "Summarise what is known about lighthouses.", "List all lighthouses!", "Compare the lighthouses.",
        "What do you know about lighthouses?", "Was weißt du über Leuchttürme?", "Vergleiche die Leuchttürme.",
        "Compare les phares.", "Que sais-tu des phares ?", "Compara los faros.", "¿Qué sabes de los faros?",
        "比较这些灯塔", "등대를 비교해 줘",
    ],
)  # fmt: skip
def test_a_broad_question_needs_no_judge(question):
    assert titled(question, "", "Hestnes", 0.0)
    assert not titled(question, "", "Hestnes", 0.0, 0.1), "a passage that is clearly about something else is not read"


@pytest.mark.parametrize("question", ["How long is the waiting list?", "Who bought the list?", "Wo liegt die Liste?"])
def test_a_list_that_is_asked_about_makes_no_question_broad(question):
    assert not titled(question, "", "Hestnes", 0.0)


def refusal_of(shelf, gains=None):
    return ask(shelf, gains)[1]


def test_a_refusal_names_the_best_passage_its_score_and_what_turns_the_test_off():
    shelf = Shelf(a=0.19, b=0.1)
    shelf.retrieve = lambda question, k: [
        Document("a", id="a", metadata={"relevance_score": 0.13, "source": "terms.md", "title": "Late fees"}),
        Document("b", id="b", metadata={"relevance_score": 0.1}),
    ]
    answer = refusal_of(shelf)
    assert answer.text == NO_PASSAGE_TEXT
    (warning,) = answer.to_dict()["warnings"]
    assert "terms.md, Late fees, with similarity 0.13, at least 0.20 is needed" in warning
    assert "--min-relevance off, the field min_relevance" in warning


def test_a_refusal_of_the_judge_names_the_passage_it_thinks_most_of():
    answer = refusal_of(Shelf(a=0.45, b=0.3, c=0.1), {"a": 0.3, "b": 0.7})
    (warning,) = answer.warnings
    assert "'b', which the judge gives 0.70 nats per token, at least 0.80 are needed" in warning
    (warning,) = refusal_of(Shelf(a=0.45, b=0.3), {"a": 0.3, "b": 0.2}).warnings
    assert "'a', which the judge gives 0.30 nats per token, at least 0.40 are needed" in warning


def test_nothing_is_said_of_relevance_where_a_passage_is_read_or_none_was_found():
    assert refusal_of(Shelf(a=0.7, b=0.1)).warnings == ()
    assert refusal_of(Shelf()).warnings == ()
