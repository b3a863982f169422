"""The query of a follow-up: the last messages with falling weight, or a question that a model writes."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage

from rag_posfix import BM25Retriever, PosfixRAG
from rag_posfix.contracts.request import Generation, Usage
from rag_posfix.contracts.retrieval import SearchQuery, retrieve_query
from rag_posfix.demo_data import load_passages
from rag_posfix.errors import ConfigError, GenerationCancelled, UpstreamError
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.pipeline.language import same_language
from rag_posfix.pipeline.pipeline import Defaults, Question
from rag_posfix.pipeline.query import search_query
from rag_posfix.retrieval.base import QuestionRetriever
from tests.support.pipelines import Shelf, pipeline
from tests.support.toy_encoder import ToyEncoder

HISTORY = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "When was the Maravel lighthouse lit?"},
    {"role": "assistant", "content": "In 1868."},
]


class Writer(FakeGenerator):
    """Writes one text, or raises, and keeps the prompt and its salt."""

    def __init__(self, outcome, finish_reason="stop"):
        super().__init__(ToyEncoder(), 4096)
        self.outcome, self.finish_reason, self.prompt, self.salt = outcome, finish_reason, "", ""

    def generate(self, request):
        self.prompt, self.salt = self.encoder.decode(request.layout.token_ids), request.salt
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return Generation(self.outcome, (), self.finish_reason, Usage(1, 1))


class Scores(QuestionRetriever):
    """Has a score for each document and text."""

    table: dict

    def _search(self, question, k, metadata_filter):
        scores = self.table[question]
        best = sorted(scores, key=lambda name: -scores[name])[:k]
        return [Document(id=n, page_content=n, metadata={"relevance_score": scores[n]}) for n in best]


class Stages:
    """Keeps the text that each stage gets."""

    def __init__(self):
        self.texts = {}

    def stage(self, name, question, documents=()):
        self.texts[name] = question

        class Ignoring:
            def on_delta(self, text):
                pass

            def on_result(self, outcome):
                pass

        return nullcontext(Ignoring())


def query(choice, question="Who designed it?", history=HISTORY, outcome="unused", **options):
    return search_query(choice, question, history, Writer(outcome, **options))


def test_the_history_joins_the_last_three_messages_of_the_user_with_falling_weight():
    history = [{"role": "user", "content": text} for text in ("zero", "one " * 300, "two")]
    made = query("history", "three", history)
    one = ("one " * 300)[:500]
    assert made == SearchQuery(f"{one}\ntwo\nthree", (("three", 1.0), ("two", 0.7), (one, pytest.approx(0.49))))


@pytest.mark.parametrize("choice", ["last", "history", "rewrite"])
def test_without_a_message_of_the_user_before_it_the_question_is_the_query(choice):
    assert query(choice, history=HISTORY[:1], outcome=ValueError()) == SearchQuery("Who designed it?")


def test_last_is_the_question():
    assert query("last") == SearchQuery("Who designed it?")


def test_the_score_of_a_passage_is_the_weighted_mean_of_its_scores():
    table = {"now": {"a": 0.9, "b": 0.5, "c": 0.2}, "before": {"b": 0.8, "a": 0.1}}
    made = retrieve_query(Scores(table=table), SearchQuery("x", (("now", 1.0), ("before", 0.5))), 2, None)
    assert [d.id for d in made] == ["a", "b"]  # (0.9 + 0.05) / 1.5 and (0.5 + 0.4) / 1.5
    assert [d.metadata["relevance_score"] for d in made] == pytest.approx([0.95 / 1.5, 0.6])


def test_a_passage_beyond_the_candidates_of_a_message_has_the_score_of_its_last_candidate():
    now = {f"n{i:03}": 0.9 - i / 1000 for i in range(120)}
    before = {f"b{i:03}": 0.5 for i in range(100)}
    made = retrieve_query(
        Scores(table={"now": now, "before": before}), SearchQuery("x", (("now", 1), ("before", 1))), 1, None
    )
    assert made[0].metadata["relevance_score"] == pytest.approx((0.9 + 0.5) / 2)


def test_retrievers_of_others_get_the_joined_text():
    shelf = Shelf()
    retrieve_query(shelf, SearchQuery("a\nb", (("b", 1.0), ("a", 0.7))), 2, None)
    assert shelf.asked == [("a\nb", 2)]


def test_a_model_writes_the_query_from_the_conversation():
    writer = Writer(" Who designed the Maravel lighthouse?\n")
    made = search_query("rewrite", "Who designed it?", HISTORY, writer)
    assert made == SearchQuery("Who designed the Maravel lighthouse?")
    assert (
        "user: When was the Maravel lighthouse lit?\nassistant: In 1868.\n\nLast question: Who designed it?"
        in writer.prompt
    )
    assert "Be kind." not in writer.prompt


@pytest.mark.parametrize(
    ("outcome", "finish_reason"),
    [
        ("", "stop"),
        ("Who designed it?\nThe Maravel lighthouse.", "stop"),
        ("Who designed the Maravel lighthouse which was", "length"),
        ("The Maravel lighthouse was designed by its keeper.", "stop"),
        ("Wer hat den Leuchtturm entworfen?", "stop"),
        ("谁设计了灯塔?", "stop"),
        (UpstreamError("down"), "stop"),
    ],
)
def test_what_is_no_question_of_one_line_in_the_language_falls_back_to_the_history(outcome, finish_reason):
    assert query("rewrite", outcome=outcome, finish_reason=finish_reason) == query("history")


def test_a_request_without_a_question_mark_is_rewritten_without_one():
    rewritten = query("rewrite", "Name its designer", outcome="Name the designer of the Maravel lighthouse")
    assert rewritten == SearchQuery("Name the designer of the Maravel lighthouse")


def test_a_request_that_ended_is_not_answered_by_the_history():
    with pytest.raises(GenerationCancelled):
        query("rewrite", outcome=GenerationCancelled("gone"))


def test_a_conversation_longer_than_the_window_is_not_rewritten():
    history = [{"role": "user", "content": "😀" * 500}] * 9
    assert query("rewrite", history=history, outcome=ValueError()).weighted


@pytest.mark.parametrize(
    ("text", "context", "same"),
    [
        ("Qui a conçu le phare ?", "Quand le phare a-t-il été allumé ? Et qui l'a conçu ?", True),
        ("Who designed it?", "Wann wurde der Leuchtturm gebaut? Wer hat ihn entworfen?", False),
        ("灯塔是谁设计的?", "马拉维尔灯塔是什么时候点亮的? 谁设计的?", True),
        ("Maravel Leuchtturm", "Maravel?", True),
        ("등대는 누가 설계했나요?", "Who designed it?", False),
    ],
)
def test_the_language_of_a_query_is_that_of_the_conversation(text, context, same):
    assert same_language(text, context) is same


def test_follow_ups_find_their_passage_by_words():
    retriever = BM25Retriever.from_documents(load_passages())
    history = [{"role": "user", "content": "Where did the ferry Ostrilla sail?"}]
    ranks = {}
    for choice in ("last", "history"):
        hits = retrieve_query(retriever, query(choice, "When did she sink?", history), 52, None)
        ranks[choice] = [hit.id for hit in hits].index("ferry-ostrilla")
    assert ranks["history"] == 0 < ranks["last"]


def test_the_query_is_in_the_answer_in_the_trace_and_in_the_log(caplog):
    shelf, stages = Shelf(), Stages()
    questions = pipeline(retriever=shelf)
    with caplog.at_level(logging.DEBUG, "rag_posfix.pipeline.query"):
        answer = questions.ask(Question("Who designed it?", history=HISTORY, second_step=False), watcher=stages)
    joined = "When was the Maravel lighthouse lit?\nWho designed it?"
    assert answer.query == answer.to_dict()["query"] == stages.texts["retriever"] == shelf.asked[0][0] == joined
    assert stages.texts["generator"] == "Who designed it?"
    assert joined in caplog.text
    with caplog.at_level(logging.INFO):
        caplog.clear()
        questions.ask(Question("Who designed it?", history=HISTORY))
    assert joined not in caplog.text


def test_the_query_of_the_question_precedes_that_of_the_pipeline():
    shelf = Shelf()
    questions = pipeline(retriever=shelf, defaults=Defaults(query="rewrite"), writer=Writer("Who designed Maravel?"))
    assert questions.ask(Question("Who designed it?", history=HISTORY)).query == "Who designed Maravel?"
    assert questions.ask(Question("Who designed it?", history=HISTORY, query="last")).query == "Who designed it?"
    with pytest.raises(ConfigError, match="query='first' must be one of last, history, rewrite"):
        questions.ask(Question("Who?", query="first"))


def test_a_query_is_written_with_the_keys_and_values_of_its_tenant_alone():
    writer = Writer("Who designed Maravel?")
    questions = pipeline(retriever=Shelf(), defaults=Defaults(query="rewrite", tenant="p"), writer=writer)
    for tenant in ("acme", "bolt"):
        questions.ask(Question("Who designed it?", history=HISTORY, tenant=tenant))
        assert writer.salt == f"('p', '{tenant}')"


def test_chat_history_of_langchain_is_part_of_the_query():
    shelf = Shelf()
    rag = PosfixRAG(pipeline=pipeline(retriever=shelf))
    turns = [HumanMessage("Is Rome old?"), AIMessage("Yes.")]
    assert rag.invoke({"input": "Where is it?", "chat_history": turns})["query"] == "Is Rome old?\nWhere is it?"
    assert rag.invoke({"input": "Where is it?", "chat_history": turns, "query": "last"})["query"] == "Where is it?"
    streamed = [turns[0], AIMessageChunk("Ye") + AIMessageChunk("s.")]  # the sum of the chunks of a stream
    assert rag.invoke({"input": "Where is it?", "chat_history": streamed})["query"] == "Is Rome old?\nWhere is it?"
    config = {"configurable": {"query": "last"}}
    assert rag.invoke({"input": "Where is it?", "chat_history": turns}, config)["query"] == "Where is it?"
