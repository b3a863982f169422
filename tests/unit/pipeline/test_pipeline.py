import time
from contextlib import nullcontext
from dataclasses import replace
from inspect import signature

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.runnables import RunnableLambda

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.caching.answers.keys import tenant_salt
from rag_posfix.caching.answers.memory import MemoryCache
from rag_posfix.caching.answers.tiered import TieredAnswerCache
from rag_posfix.contracts.answer import AnswerDocument, Citation
from rag_posfix.contracts.cache_salt import current_salt
from rag_posfix.contracts.request import MitigationChoice, Sampling, TokenSource
from rag_posfix.errors import ConfigError, PromptTooLongError, UnknownNameError
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.integrations.langchain.retriever import PosfixRetriever
from rag_posfix.pipeline.pipeline import Defaults, Pipeline, Question
from rag_posfix.reranking import GuardedReranker
from tests.support.texts import NASTY, texts
from tests.support.threads import in_threads
from tests.support.toy_encoder import ToyEncoder

ROME = Document(page_content="Rome lies on the Tiber. It is old.", id="rome")
PARIS = Document(page_content="Paris lies on the Seine. It is big.", id="paris")
BREAD = Document(page_content="Bread is baked in ovens.", id="bread")
SOUND = {
    "text": "stored",
    "finish_reason": "stop",
    "prompt_tokens": 5,
    "completion_tokens": 1,
    "cached_tokens": 0,
    "attention": {},
}
QUESTION = "Which river does Rome have, the Tiber?"


class Counting(FakeGenerator):
    """Counts the answers that it computes."""

    def __init__(self, *arguments, seconds=0.0, **options):
        super().__init__(*arguments, **options)
        self.seconds = seconds
        self.computed = 0
        self.closed_after = None

    def generate(self, request):
        self.computed += 1
        time.sleep(self.seconds)
        return super().generate(request)

    def stream(self, request):
        given = 0
        try:
            for chunk in super().stream(request):
                given += 1
                yield chunk
        finally:
            self.closed_after = given


class Shelf:
    """A retriever that has three documents."""

    def __init__(self):
        self.asked = []

    def retrieve(self, question, k):
        self.asked.append((question, k))
        found = [ROME, PARIS, BREAD][:k]
        return [
            Document(page_content=d.page_content, id=d.id, metadata={"relevance_score": 0.9 - 0.2 * i})
            for i, d in enumerate(found)
        ]


class ByLength:
    """A reranker that likes short documents: best first, as rerankers answer."""

    def __init__(self):
        self.calls = 0

    def compress_documents(self, documents, query, callbacks=None):
        self.calls += 1
        scored = [
            Document(
                page_content=d.page_content,
                id=d.id,
                metadata={**d.metadata, "relevance_score": 10 / len(d.page_content)},
            )
            for d in documents
        ]
        return sorted(scored, key=lambda d: -d.metadata["relevance_score"])


def pipeline(*, window=8192, order_invariant=True, seconds=0.0, **options):
    generator = Counting(ToyEncoder(), window, order_invariant=order_invariant, seconds=seconds)
    return Pipeline(generator, Assembler(generator.encoder, window), **options)


def memory_cache():
    return TieredAnswerCache([MemoryCache()])


def ids(answer):
    return [document.id for document in answer.documents]


class TestDocuments:
    def test_given_documents_are_answered_from_in_their_order(self):
        answer = pipeline().ask(Question(QUESTION, [BREAD, ROME]))
        assert answer.text == "Rome lies on the Tiber"
        # Common with the question: none of the words of the first, "rome", "the", "tiber" of the second.
        assert answer.documents == (
            AnswerDocument("bread", None, 0, 0.0, text=BREAD.page_content),
            AnswerDocument("rome", None, 1, 1.0, text=ROME.page_content),
        )
        assert answer.citations == (Citation(0, 22, "Rome lies on the Tiber", ("rome",)),)
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

    def test_without_documents_and_retriever_the_question_is_asked_alone(self):
        answer = pipeline().ask("Why?")
        assert answer.text == "No passages for: Why?"
        assert (answer.documents, answer.citations) == ((), ())

    def test_one_document_is_enough(self):
        answer = pipeline().ask(Question(QUESTION, [ROME]))
        assert (answer.text, ids(answer)) == ("Rome lies on the Tiber", ["rome"])

    def test_of_two_identical_documents_one_is_read(self):
        twin = Document(page_content=ROME.page_content, id="twin")
        answer = pipeline().ask(Question(QUESTION, [ROME, twin]))
        assert ids(answer) == ["rome"]
        assert answer.dropped == (("twin", "duplicate"),)

    def test_an_order_can_be_chosen(self):
        scored = [
            Document(page_content=d.page_content, id=d.id, metadata={"relevance_score": score})
            for d, score in ((ROME, 0.2), (PARIS, 0.9), (BREAD, 0.5))
        ]
        made = pipeline()
        assert ids(made.ask(Question(QUESTION, scored))) == ["paris", "bread", "rome"]
        assert ids(made.ask(Question(QUESTION, scored, order="original"))) == ["rome", "paris", "bread"]
        assert ids(made.ask(Question(QUESTION, scored, order="reverse"))) == ["rome", "bread", "paris"]

    def test_a_document_longer_than_the_window_is_cut(self):
        answer = pipeline(window=600).ask(Question(QUESTION, [Document(page_content="Rome " * 1000, id="long")]))
        assert ids(answer) == ["long"]
        assert answer.usage.prompt_tokens == 600 - 128

    def test_documents_beyond_the_window_are_left_out(self):
        filler = [Document(page_content=f"{i} " * 40, id=str(i)) for i in range(10, 20)]
        answer = pipeline(window=700).ask(Question(QUESTION, filler))
        assert ids(answer)[0] == "10"
        assert 0 < len(answer.documents) < 10
        assert len(answer.documents) + len(answer.dropped) == 10
        assert {reason for _, reason in answer.dropped} == {"budget"}

    def test_a_question_that_leaves_no_room_is_refused(self):
        with pytest.raises(PromptTooLongError):
            pipeline(window=600).ask("x" * 600)

    def test_what_is_no_document_is_refused_with_or_without_a_reranker(self):
        for reranker in (None, ByLength()):
            with pytest.raises(ConfigError, match=r"documents\[1\] is str, must be a langchain_core Document"):
                pipeline(reranker=reranker).ask(Question(QUESTION, [ROME, "Rome"]))

    def test_history_is_part_of_the_prompt(self):
        made = pipeline()
        history = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
        longer = made.ask(Question(QUESTION, [ROME], history=history)).usage.prompt_tokens
        assert longer > made.ask(Question(QUESTION, [ROME])).usage.prompt_tokens


class TestReranking:
    def test_relevance_is_filled_in_and_the_given_order_stays(self):
        answer = pipeline(reranker=ByLength()).ask(Question(QUESTION, [PARIS, BREAD, ROME], order="original"))
        assert [(d.id, d.score) for d in answer.documents] == [
            ("paris", pytest.approx(10 / 35)),
            ("bread", pytest.approx(10 / 24)),
            ("rome", pytest.approx(10 / 34)),
        ]

    def test_the_default_order_puts_the_best_first(self):
        assert ids(pipeline(reranker=ByLength()).ask(Question(QUESTION, [PARIS, BREAD, ROME]))) == [
            "bread",
            "rome",
            "paris",
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

        guarded = GuardedReranker(reranker=Broken(), deadline_seconds=5)
        made = pipeline(reranker=guarded, retriever=Shelf(), candidates=3)
        answer = made.ask(Question(QUESTION, documents, k=2, order="original"))
        assert ids(answer) == (["rome", "paris"] if documents is None else ["rome", "bread"])
        assert guarded.failures == 1

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


class TestCache:
    def test_the_second_ask_is_answered_from_the_cache(self):
        made = pipeline(cache=memory_cache())
        first = made.ask(Question(QUESTION, [BREAD, ROME]))
        second = made.ask(Question(QUESTION, [BREAD, ROME]))
        assert (first.cached, second.cached, made.generator.computed) == (False, True, 1)
        assert (second.text, second.documents, second.citations) == (first.text, first.documents, first.citations)
        assert first.usage.cached_tokens == 0
        assert second.usage.cached_tokens == second.usage.prompt_tokens == first.usage.prompt_tokens

    def test_shuffled_documents_are_a_hit_where_order_does_not_matter(self):
        made = pipeline(cache=memory_cache())
        made.ask(Question(QUESTION, [BREAD, ROME, PARIS]))
        assert made.ask(Question(QUESTION, [PARIS, BREAD, ROME])).cached is True
        assert made.generator.computed == 1

    def test_shuffled_documents_are_a_miss_where_order_matters(self):
        made = pipeline(cache=memory_cache(), order_invariant=False)
        made.ask(Question(QUESTION, [BREAD, ROME]))
        assert made.ask(Question(QUESTION, [ROME, BREAD])).cached is False
        assert made.ask(Question(QUESTION, [BREAD, ROME])).cached is True

    def test_a_hit_has_the_ids_and_places_of_the_new_question(self):
        made = pipeline(cache=memory_cache())
        made.ask(Question(QUESTION, [BREAD, ROME]))
        renamed = Document(page_content=ROME.page_content, id="city of seven hills")
        answer = made.ask(Question(QUESTION, [renamed, BREAD]))
        assert answer.cached is True
        assert answer.documents == (
            AnswerDocument("city of seven hills", None, 0, 1.0, text=ROME.page_content),
            AnswerDocument("bread", None, 1, 0.0, text=BREAD.page_content),
        )
        assert answer.citations[0].document_ids == ("city of seven hills",)

    @pytest.mark.parametrize(
        "change",
        [
            {"text": QUESTION + " "},
            {"documents": [ROME]},
            {"documents": [BREAD, Document(page_content=ROME.page_content, metadata={"title": "Rome"})]},
            {"documents": [BREAD, Document(page_content=ROME.page_content, metadata={"relevance_score": 0.5})]},
            {"history": [{"role": "user", "content": "Hello"}]},
            {"mitigation": MitigationChoice("none")},
            {"mitigation": MitigationChoice("context_experts", {"hold": 0.5})},
            {"sampling": Sampling(max_tokens=3)},
            {"sampling": Sampling(stop=("x",))},
            {"tenant": "other"},
        ],
    )
    def test_whatever_changes_the_answer_is_a_miss(self, change):
        made = pipeline(cache=memory_cache())
        asked = {"text": QUESTION, "documents": [BREAD, ROME]}
        made.ask(Question(**asked))
        assert made.ask(Question(**{**asked, **change})).cached is False
        assert made.ask(Question(**asked)).cached is True

    def test_tenants_never_share_answers(self):
        cache = memory_cache()
        salts = [("", ""), ("a", ""), ("", "a"), ("a", "a"), ("a', 'b", ""), ("a", "b")]
        for process, asker in salts:
            made = pipeline(cache=cache, defaults=Defaults(tenant=process))
            assert made.ask(Question(QUESTION, [ROME], tenant=asker)).cached is False
            assert made.ask(Question(QUESTION, [ROME], tenant=asker)).cached is True

    @pytest.mark.parametrize(
        ("sampling", "cached"),
        [(Sampling(temperature=1.0), False), (Sampling(temperature=1.0, seed=3), True), (Sampling(), True)],
    )
    def test_only_answers_that_repeat_are_kept(self, sampling, cached):
        made = pipeline(cache=memory_cache())
        made.ask(Question(QUESTION, [ROME], sampling=sampling))
        assert made.ask(Question(QUESTION, [ROME], sampling=sampling)).cached is cached

    def test_a_question_may_pass_the_cache_by(self):
        made = pipeline(cache=memory_cache())
        made.ask(Question(QUESTION, [ROME]))
        assert made.ask(Question(QUESTION, [ROME], use_cache=False)).cached is False
        fresh = pipeline(cache=memory_cache())
        fresh.ask(Question(QUESTION, [ROME], use_cache=False))
        assert fresh.ask(Question(QUESTION, [ROME])).cached is False

    def test_dropping_a_document_drops_its_answers(self):
        cache = memory_cache()
        made = pipeline(cache=cache)
        made.ask(Question(QUESTION, [ROME, BREAD]))
        assert cache.drop_documents(["bread"]) == 1
        assert made.ask(Question(QUESTION, [ROME, BREAD])).cached is False

    def test_a_cache_whose_every_operation_fails_changes_nothing(self):
        class Broken:
            name = "broken"

            def __getattr__(self, operation):
                raise OSError(f"no {operation} today")

        made = pipeline(cache=TieredAnswerCache([Broken()]))
        for _ in range(2):
            answer = made.ask(Question(QUESTION, [ROME]))
            assert (answer.text, answer.cached) == ("Rome lies on the Tiber", False)
        assert list(made.stream(Question(QUESTION, [ROME])))[-1].answer.text == "Rome lies on the Tiber"

    @pytest.mark.parametrize(
        "stored",
        [
            {},
            [],
            "text",
            5,
            *({key: value for key, value in SOUND.items() if key != missing} for missing in SOUND),
            {**SOUND, "text": None},
            {**SOUND, "finish_reason": "tired"},
            {**SOUND, "prompt_tokens": "5"},
            {**SOUND, "attention": [0.5]},
            {**SOUND, "attention": {"a": "much"}},
            {**SOUND, "attention": {"a": None}},
        ],
    )
    def test_a_stored_object_that_is_no_answer_is_a_miss(self, stored):
        class Garbage:
            def get(self, key):
                return stored

            def put(self, key, value, document_ids=()):
                self.kept = value

            def single_flight(self, key):
                return nullcontext()

        made = pipeline(cache=Garbage())
        answer = made.ask(Question(QUESTION, [ROME]))
        assert (answer.text, answer.cached) == ("Rome lies on the Tiber", False)
        assert made.cache.kept["text"] == "Rome lies on the Tiber"

    def test_a_stored_answer_is_plain_json(self):
        kept = {}

        class Dictionary:
            def get(self, key):
                return kept.get(key)

            def put(self, key, value, document_ids=()):
                kept[key] = orjson.loads(orjson.dumps(value))

            def single_flight(self, key):
                return nullcontext()

        made = pipeline(cache=Dictionary())
        first = made.ask(Question(QUESTION, [ROME]))
        assert made.ask(Question(QUESTION, [ROME])).documents == first.documents
        (key,) = kept
        assert len(key) == 32

    def test_equal_questions_at_the_same_time_compute_once(self):
        made = pipeline(cache=memory_cache(), seconds=0.1)

        def ask(number):
            documents = [ROME, BREAD] if number % 2 else [BREAD, ROME]
            return made.ask(Question(QUESTION, documents))

        answers = in_threads(ask, range(8), seconds=20)
        assert made.generator.computed == 1
        assert {answer.text for answer in answers} == {"Rome lies on the Tiber"}
        assert sorted(answer.cached for answer in answers) == [False] + [True] * 7
        assert {tuple(ids(answer)) for answer in answers} == {("rome", "bread"), ("bread", "rome")}

    def test_a_closed_pipeline_answers_without_its_cache(self):
        made = pipeline(cache=memory_cache())
        made.ask(Question(QUESTION, [ROME]))
        made.close()
        assert made.ask(Question(QUESTION, [ROME])).cached is False
        pipeline().close()

    def test_closing_ends_what_belongs_to_nobody_else(self):
        ended = []
        pipeline(on_close=lambda: ended.append(True)).close()
        assert ended == [True]

    def test_a_failing_answer_is_not_kept_and_does_not_block_the_next(self, monkeypatch):
        made = pipeline(cache=memory_cache())
        with monkeypatch.context() as patched:
            patched.setattr(made.generator, "generate", lambda request: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                made.ask(Question(QUESTION, [ROME]))
        (answer,) = in_threads(made.ask, [Question(QUESTION, [ROME])], seconds=20)
        assert answer.cached is False


class TestStream:
    def test_the_pieces_are_the_answer_and_the_last_carries_it(self):
        made = pipeline()
        chunks = list(made.stream(Question(QUESTION, [BREAD, ROME])))
        assert [chunk.text for chunk in chunks] == ["Rome ", "lies ", "on ", "the ", "Tiber", ""]
        assert [chunk.answer for chunk in chunks[:-1]] == [None] * 5
        whole = made.ask(Question(QUESTION, [BREAD, ROME]))
        streamed = chunks[-1].answer
        assert (streamed.text, streamed.documents, streamed.usage) == (whole.text, whole.documents, whole.usage)

    def test_a_streamed_answer_is_kept(self):
        made = pipeline(cache=memory_cache())
        list(made.stream(Question(QUESTION, [ROME])))
        assert made.ask(Question(QUESTION, [ROME])).cached is True

    def test_a_kept_answer_streams_as_one_piece(self):
        made = pipeline(cache=memory_cache())
        made.ask(Question(QUESTION, [ROME]))
        (chunk,) = made.stream(Question(QUESTION, [ROME]))
        assert (chunk.text, chunk.answer.text) == ("Rome lies on the Tiber", "Rome lies on the Tiber")
        assert chunk.answer.cached is True

    def test_closing_the_stream_stops_the_generator_and_keeps_nothing(self):
        made = pipeline(cache=memory_cache())
        stream = made.stream(Question(QUESTION, [ROME]))
        assert next(stream).text == "Rome "
        stream.close()
        assert made.generator.closed_after == 1
        assert made.ask(Question(QUESTION, [ROME])).cached is False

    def test_bad_input_raises_before_the_first_piece_is_asked_for(self):
        made = pipeline()
        for question, error in (
            (Question(" "), ConfigError),
            (Question("x", mitigation=MitigationChoice("nope")), UnknownNameError),
            (Question("x", order="nope"), UnknownNameError),
            (Question("x" * 9000), PromptTooLongError),
        ):
            with pytest.raises(error):
                made.stream(question)

    def test_what_the_generator_objects_to_raises_before_the_first_piece_is_asked_for(self):
        made = pipeline()

        def refuse(request):
            raise ConfigError("no")

        made.generator.stream = refuse
        with pytest.raises(ConfigError, match="no"):
            made.stream(QUESTION)


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
            "timings",
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
            },
        )
        assert set(data["usage"]) == {"prompt_tokens", "completion_tokens", "cached_tokens"}
        assert data["dropped"] == [{"id": "rome", "reason": "duplicate"}]


class Tracing(Counting):
    """Says of each word which passage it comes from: all from the one it answers with."""

    def generate(self, request):
        generation = super().generate(request)
        if not request.traced:
            return generation
        shares = generation.attention
        ends = [end for end in range(1, len(generation.text) + 1) if generation.text[end - 1 : end].isalnum()]
        return replace(generation, sources=tuple(TokenSource(end, shares) for end in ends))


class TestCitations:
    def asked(self, documents, **options):
        generator = Tracing(ToyEncoder())
        made = Pipeline(generator, Assembler(generator.encoder, 8192), cache=memory_cache(), **options)
        return made, made.ask(Question(QUESTION, documents))

    def test_a_sentence_is_cited_by_attention_beside_the_quote(self):
        _, answer = self.asked([BREAD, ROME])
        assert answer.citations == (
            Citation(0, 22, "Rome lies on the Tiber", ("rome",), "quote"),
            Citation(0, 22, "Rome lies on the Tiber", ("rome",), "attention"),
        )
        assert [one["from"] for one in answer.to_dict()["citations"]] == ["quote", "attention"]
        assert "origin" not in answer.to_dict()["citations"][0]

    def test_no_passage_is_cited_where_none_dominates(self):
        other = Document(page_content="The Tiber floods.", id="other")
        _, answer = self.asked([ROME, other])  # they share 3 and 2 words with the question
        assert {citation.origin for citation in answer.citations} == {"quote"}

    def test_tracing_can_be_turned_off(self):
        _, answer = self.asked([BREAD, ROME], defaults=Defaults(traced=False))
        assert {citation.origin for citation in answer.citations} == {"quote"}

    def test_a_hit_cites_the_ids_of_the_new_question(self):
        made, _ = self.asked([BREAD, ROME])
        renamed = Document(page_content=ROME.page_content, id="seven hills")
        answer = made.ask(Question(QUESTION, [renamed, BREAD]))
        assert answer.cached
        assert [(c.document_ids, c.origin) for c in answer.citations] == [
            (("seven hills",), "quote"), (("seven hills",), "attention"),
        ]  # fmt: skip

    def test_an_answer_that_was_kept_before_there_were_claims_is_read(self):
        made, _ = self.asked([BREAD, ROME])
        for old in ({}, {"claims": []}):
            made.cache.get = lambda key, old=old: {**SOUND, **old}
            answer = made.ask(Question(QUESTION, [BREAD, ROME]))
            assert (answer.text, answer.cached, answer.citations) == ("stored", True, ())

    @pytest.mark.parametrize(
        "claims",
        [None, {}, [[0, 3]], [[0, 3, []]], [[0, 3, {"k": "x"}]], [[3, 3, {}]], [[0, 7, {}]], [[-1, 3, {}]], ["abc"]],
    )
    def test_claims_that_are_damaged_are_a_miss(self, claims):
        made, _ = self.asked([BREAD, ROME])
        made.cache.get = lambda key: {**SOUND, "claims": claims}
        assert made.ask(Question(QUESTION, [BREAD, ROME])).cached is False


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
