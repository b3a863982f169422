"""A question through the whole pipeline: documents, input, answers."""

from inspect import signature

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.runnables import RunnableLambda

from rag_posfix.adapters.langchain.retriever import PosfixRetriever
from rag_posfix.assembly.assembler import Assembler
from rag_posfix.caching.answers.tiered import tenant_salt
from rag_posfix.contracts.answer import AnswerDocument, Citation
from rag_posfix.contracts.request import MitigationChoice, Usage, current_salt
from rag_posfix.errors import ConfigError, PromptTooLongError, UnknownNameError
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.pipeline.pipeline import Defaults, Pipeline, Question
from rag_posfix.reranking import GuardedReranker
from tests.support.pipelines import BREAD, PARIS, QUESTION, ROME, ByLength, Shelf, ids, memory_cache, pipeline
from tests.support.texts import NASTY, texts
from tests.support.toy_encoder import ToyEncoder


class TestDocuments:
    def test_given_documents_are_answered_from_in_their_order(self):
        answer = pipeline().ask(Question(QUESTION, [BREAD, ROME]))
        assert answer.text == "Rome lies on the Tiber"
        # Common with the question: none of the words of the first, "rome", "the", "tiber" of the second.
        assert answer.documents == (
            AnswerDocument("bread", None, 0, 0.0, text=BREAD.page_content),
            AnswerDocument("rome", None, 1, 1.0, text=ROME.page_content),
        )
        assert answer.citations == (Citation(0, 22, "Rome lies on the Tiber", ("rome",), pages=(None,)),)
        assert (answer.mitigation, answer.order, answer.finish_reason) == ("context_experts", "relevance", "stop")
        assert (answer.cached, answer.dropped) == (False, ())
        assert answer.usage.completion_tokens == 5

    def test_retrieved_documents_without_a_score_are_scored_in_their_order(self):
        class Unscored:
            def retrieve(self, question, k):
                return [BREAD, ROME]

        reranker = ByLength()
        made = pipeline(retriever=Unscored(), reranker=reranker, defaults=Defaults(order="original"))
        answer = made.ask(QUESTION)
        assert [(d.id, d.score) for d in answer.documents] == [("bread", 10 / 24), ("rome", 10 / 34)]
        assert reranker.calls == 1

    def test_a_pipeline_with_another_retriever_leaves_the_first_as_it_is(self):
        first = pipeline(retriever=Shelf())
        second = first.with_retriever(PosfixRetriever(base_retriever=RunnableLambda(lambda _: [BREAD])))
        assert ids(second.ask(QUESTION)) == ["bread"]
        assert ids(first.ask(QUESTION)) == ["rome", "paris", "bread"]
        assert second.generator is first.generator

    def test_without_documents_they_are_retrieved(self):
        shelf = Shelf()
        answer = pipeline(retriever=shelf).ask(QUESTION)
        assert shelf.asked == [(QUESTION, 10)]
        assert ids(answer) == ["rome", "paris", "bread"]
        assert [document.score for document in answer.documents] == pytest.approx([0.9, 0.7, 0.5])

    def test_a_question_says_how_many_are_retrieved(self):
        shelf = Shelf()
        made = pipeline(retriever=shelf, defaults=Defaults(k=3))
        assert len(made.ask(Question(QUESTION)).documents) == 3
        assert len(made.ask(Question(QUESTION, k=1)).documents) == 1
        assert [k for _, k in shelf.asked] == [3, 1]

    def test_given_documents_are_not_retrieved_even_if_there_are_none(self):
        shelf = Shelf()
        assert pipeline(retriever=shelf).ask(Question(QUESTION, [])).documents == ()
        assert shelf.asked == []

    @pytest.mark.parametrize(
        ("made", "question"),
        [
            (pipeline(), Question("Why?")),
            (pipeline(), Question("Why?", documents=[])),
            (pipeline(), Question("Why?", documents=[Document(page_content=" ", id="blank")])),
            (pipeline(retriever=PosfixRetriever(base_retriever=RunnableLambda(lambda _: []))), Question("Why?")),
        ],
        ids=["no retriever", "no documents", "documents without text", "nothing retrieved"],
    )
    def test_without_a_passage_the_answer_is_that_none_was_found(self, made, question):
        made.generator.computed = 0
        answer = made.ask(question)
        (chunk,) = made.stream(question)
        assert answer.text == chunk.text == "No passage was found that answers this question."
        assert (answer.grounded, chunk.answer.grounded, answer.to_dict()["grounded"]) == (False, False, False)
        assert (answer.documents, answer.citations, answer.usage) == ((), (), Usage(0, 0))
        assert (made.generator.computed, answer.finish_reason) == (0, "stop")
        assert answer.dropped == ((("blank", "empty"),) if question.documents else ())

    def test_an_answer_from_memory_must_be_allowed_by_the_question_or_the_defaults(self):
        open_to_memory = pipeline(defaults=Defaults(allow_ungrounded=True, no_passage_text="Nothing here."))
        for answer in (pipeline().ask(Question("Why?", allow_ungrounded=True)), open_to_memory.ask("Why?")):
            assert (answer.text, answer.grounded) == ("No passages for: Why?", False)
        answer = open_to_memory.ask(Question("Why?", allow_ungrounded=False))
        assert (answer.text, answer.grounded) == ("Nothing here.", False)
        assert pipeline().ask(Question(QUESTION, [ROME])).grounded

    def test_passages_that_are_cut_or_left_out_are_named_in_the_answer_and_counted_in_the_log(self, caplog):
        long = Document(page_content="Rome " * 1000, id="long", metadata={"relevance_score": 0.9})
        other = Document(page_content="Secret. " * 1000, id="other", metadata={"relevance_score": 0.1})
        answer = pipeline(window=600).ask(Question(QUESTION, [other, long]))
        assert (answer.truncated, answer.dropped) == (("long",), (("other", "budget"),))
        assert answer.to_dict()["truncated"] == ("long",)
        (record,) = [record for record in caplog.records if record.name.startswith("rag_posfix.assembly")]
        assert record.levelname == "WARNING"
        assert "1 of 1 passages in the prompt were cut to fit, 1 were left out" in record.getMessage()
        assert "Secret" not in caplog.text
        assert "other" not in caplog.text

    def test_an_order_can_be_chosen(self):
        scored = [
            Document(page_content=d.page_content, id=d.id, metadata={"relevance_score": score})
            for d, score in ((ROME, 0.2), (PARIS, 0.9), (BREAD, 0.5))
        ]
        made = pipeline()
        assert ids(made.ask(Question(QUESTION, scored))) == ["paris", "bread", "rome"]
        assert ids(made.ask(Question(QUESTION, scored, order="original"))) == ["rome", "paris", "bread"]
        assert ids(made.ask(Question(QUESTION, scored, order="reverse"))) == ["rome", "bread", "paris"]

    def test_a_question_that_leaves_no_room_is_refused(self):
        with pytest.raises(PromptTooLongError):
            pipeline(window=600).ask("x" * 600)

    def test_what_is_no_document_is_refused_with_or_without_a_reranker(self):
        for reranker in (None, ByLength()):
            with pytest.raises(ConfigError, match=r"documents\[1\] is str, must be one of langchain_core Documents"):
                pipeline(reranker=reranker).ask(Question(QUESTION, [ROME, "Rome"]))


class TestReranking:
    def test_relevance_is_filled_in_and_the_given_order_stays(self):
        answer = pipeline(reranker=ByLength()).ask(Question(QUESTION, [PARIS, BREAD, ROME], order="original"))
        assert [(d.id, d.score) for d in answer.documents] == [
            ("paris", pytest.approx(10 / 35)),
            ("bread", pytest.approx(10 / 24)),
            ("rome", pytest.approx(10 / 34)),
        ]

    def test_documents_that_carry_relevance_keep_it(self):
        reranker = ByLength()
        scored = Document(page_content="x", id="x", metadata={"relevance_score": 0.3})
        answer = pipeline(reranker=reranker).ask(Question(QUESTION, [scored]))
        assert (answer.documents[0].score, reranker.calls) == (0.3, 0)

    def test_retrieved_documents_keep_their_relevance(self):
        reranker = ByLength()
        pipeline(reranker=reranker, retriever=Shelf()).ask(QUESTION)
        assert reranker.calls == 0

    def test_with_candidates_the_reranker_chooses_among_more_than_are_asked_for(self):
        shelf = Shelf()
        answer = pipeline(reranker=ByLength(), retriever=shelf, candidates=3).ask(Question(QUESTION, k=1))
        assert shelf.asked == [(QUESTION, 3)]
        assert ids(answer) == ["bread"], "the shortest of three"
        assert set(answer.timings) >= {"retrieve", "rerank"}
        pipeline(reranker=ByLength(), retriever=shelf, candidates=1).ask(Question(QUESTION, k=2))
        assert shelf.asked[1] == (QUESTION, 2)

    @pytest.mark.parametrize("documents", [None, [ROME, BREAD]])
    def test_a_reranker_that_fails_leaves_the_documents_as_they_came(self, documents):
        class Broken(ByLength, BaseDocumentCompressor):
            def compress_documents(self, documents, query, callbacks=None):
                raise RuntimeError

            def __init__(self):
                BaseDocumentCompressor.__init__(self)

        guarded = GuardedReranker(reranker=Broken(), deadline_seconds=60)
        made = pipeline(reranker=guarded, retriever=Shelf(), candidates=3)
        answer = made.ask(Question(QUESTION, documents, k=2, order="original"))
        assert ids(answer) == (["rome", "paris"] if documents is None else ["rome", "bread"])
        assert guarded.failures == 1
        assert answer.warnings == ("reranker Broken failed (RuntimeError); the documents keep their order",)
        [*_, last] = made.stream(Question(QUESTION, documents, k=2))
        assert last.answer.warnings == answer.warnings

    def test_what_a_reranker_keeps_is_kept_for_the_tenant(self):
        salts = []

        class Telling(ByLength):
            def compress_documents(self, documents, query, callbacks=None):
                salts.append(current_salt())
                return super().compress_documents(documents, query)

        made = pipeline(reranker=Telling(), retriever=Shelf(), candidates=3, defaults=Defaults(tenant="process"))
        made.ask(Question(QUESTION, tenant="a"))
        made.ask(Question(QUESTION, [ROME], tenant="b"))
        assert salts == [tenant_salt("process", "a"), tenant_salt("process", "b")]

    def test_the_documents_given_are_not_changed(self):
        given_document = Document(page_content="Rome.", id="r", metadata={"page": 1})
        pipeline(reranker=ByLength()).ask(Question(QUESTION, [given_document]))
        assert given_document.metadata == {"page": 1}


class TestInput:
    @pytest.mark.parametrize("text", ["", " ", "\n\t", "\u3000"])
    def test_an_empty_question_is_refused(self, text):
        made = pipeline(retriever=Shelf(), cache=memory_cache())
        for ask in (made.ask, made.stream):
            with pytest.raises(ConfigError, match="question"):
                ask(text)
        assert made.generator.computed == 0

    def test_unknown_names_are_refused_before_anything_is_retrieved(self):
        shelf = Shelf()
        made = pipeline(retriever=shelf)
        with pytest.raises(UnknownNameError, match="Did you mean 'context_experts'"):
            made.ask(Question(QUESTION, mitigation=MitigationChoice("context_expert")))
        with pytest.raises(ConfigError, match="has no parameter 'x'"):
            made.ask(Question(QUESTION, mitigation=MitigationChoice("none", {"x": 1})))
        assert shelf.asked == []

    @pytest.mark.parametrize("nasty", NASTY)
    def test_control_tokens_nul_and_lone_surrogates_are_text(self, nasty):
        made = pipeline(cache=memory_cache(), reranker=ByLength())
        document = Document(page_content=f"Rome {nasty} Tiber", id=f"id {nasty}", metadata={"title": nasty})
        asked = Question(f"Rome {nasty}?", [document, PARIS], tenant=nasty)
        first, second = made.ask(asked), made.ask(asked)
        assert (first.cached, second.cached) == (False, True)
        assert second.text == first.text
        orjson.dumps(first.to_dict())

    @given(texts(), st.lists(texts(), max_size=3))
    @example("\x00", ["\x00"])
    @example("\ud800", ["\udfff", "\ud83d", "\ude00"])
    def test_any_text_is_answered_or_refused(self, question, contents):
        made = pipeline()
        try:
            answer = made.ask(Question(question, [Document(page_content=content) for content in contents]))
        except ConfigError:
            assert not question.strip()
            return
        assert len(answer.documents) + len(answer.dropped) == len(contents)
        assert all(answer.text[c.start : c.end] == c.text for c in answer.citations)
        orjson.dumps(answer.to_dict())


class TestAnswer:
    def test_timings_are_seconds_by_stage(self):
        made = pipeline(retriever=Shelf(), cache=memory_cache())
        stages = {"retrieve", "assemble", "cache", "prefill", "decode"}
        first = made.ask(QUESTION).timings
        assert set(first) == stages
        assert all(seconds >= 0 for seconds in first.values())
        assert set(made.ask(QUESTION).timings) == {"retrieve", "assemble", "cache"}
        assert set(pipeline(reranker=ByLength()).ask(Question(QUESTION, [ROME])).timings) == {
            "rerank",
            "assemble",
            "prefill",
            "decode",
        }

    def test_documents_say_which_file_and_title_they_come_from(self):
        metadata = {"title": "The capital", "source": "italy.md"}
        document = Document(id="rome", page_content=ROME.page_content, metadata=metadata)
        found = pipeline().ask(Question(QUESTION, [document])).documents[0]
        assert (found.title, found.source) == ("The capital", "italy.md")

    def test_as_json_it_has_the_fields_of_the_command_line(self):
        data = pipeline().ask(Question(QUESTION, [ROME, ROME])).to_dict()
        assert set(data) == {
            "answer", "documents", "citations", "usage", "cached", "mitigation", "order", "finish_reason", "dropped",
            "timings", "warnings", "grounded", "support", "supported_by", "disagreements", "truncated", "well_formed",
            "form_fault", "stop_string", "query", "second_query",
        }  # fmt: skip
        assert data["answer"] == "Rome lies on the Tiber"
        assert data["documents"] == (
            {
                "id": "rome",
                "score": None,
                "position": 0,
                "attention": 1.0,
                "title": None,
                "source": None,
                "text": ROME.page_content,
                "page": None,
                "weight": None,
                "pages": (),
                "page_starts": (),
            },
        )
        assert set(data["usage"]) == {"prompt_tokens", "completion_tokens", "cached_tokens"}
        assert data["dropped"] == [{"id": "rome", "reason": "duplicate"}]


def test_another_generator_gets_every_other_part_of_the_pipeline():
    parts = set(signature(Pipeline).parameters) - {"generator", "on_close"}
    first = Pipeline(
        FakeGenerator(ToyEncoder()), Assembler(ToyEncoder(), 512), retriever=object(), reranker=object(),
        cache=object(), defaults=Defaults(k=3), passages=object(), candidates=7,
    )  # fmt: skip
    generator = FakeGenerator(ToyEncoder())
    second = first.with_generator(generator)
    assert (second.generator, first.generator is generator) == (generator, False)
    assert {name: getattr(second, name) for name in parts} == {name: getattr(first, name) for name in parts}
