"""Cached answers and streams of a pipeline."""

from contextlib import nullcontext

import pytest
from langchain_core.documents import Document

from rag_posfix.caching.answers.tiered import TieredAnswerCache
from rag_posfix.contracts.answer import AnswerDocument
from rag_posfix.contracts.request import MitigationChoice, Sampling
from rag_posfix.errors import ConfigError, PromptTooLongError, UnknownNameError
from rag_posfix.pipeline.pipeline import Defaults, Question
from tests.support.pipelines import (
    BREAD,
    PARIS,
    QUESTION,
    ROME,
    SOUND,
    ByLength,
    Shelf,
    ids,
    memory_cache,
    pipeline,
)
from tests.support.threads import in_threads
from tests.support.waiting import wait_until

COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens")


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
            {"mitigation": MitigationChoice("context_experts", {"answer_weight": 0.5})},
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

    def test_answers_by_another_json_schema_are_a_miss(self, monkeypatch):
        made = pipeline(cache=memory_cache())
        monkeypatch.setattr(made.generator, "check_json_schema", lambda schema: None, raising=False)
        samplings = [Sampling(), *(Sampling(json_schema={"type": kind}) for kind in ("object", "string"))]
        answers = [made.ask(Question(QUESTION, [ROME], sampling=each)).cached for each in [*samplings, *samplings]]
        assert answers == [False] * 3 + [True] * 3

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

    @pytest.mark.parametrize("stage", ["retrieve", "compress_documents"])
    def test_an_answer_about_a_document_that_is_deleted_while_it_is_found_is_not_stored(self, stage):
        class Deleting(Shelf, ByLength):
            calls = 0

            def retrieve(self, question, k):
                return self.noted("retrieve", super().retrieve(question, k))

            def compress_documents(self, documents, query, callbacks=None):
                return self.noted("compress_documents", super().compress_documents(documents, query))

            def noted(self, name, documents):
                if name == stage and made.generator.computed == 0:
                    made.invalidate([ROME])
                return documents

        cache, deleting = memory_cache(), Deleting()
        made = pipeline(cache=cache, retriever=deleting, reranker=deleting, candidates=3)
        assert made.ask(QUESTION).cached is False
        assert cache.tier_stats()[0]["entries"] == 0
        assert [made.ask(QUESTION).cached for _ in range(2)] == [False, True], "the document was added again"

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
            [],
            *({key: value for key, value in SOUND.items() if key != missing} for missing in SOUND),
            {**SOUND, "text": None},
            {**SOUND, "finish_reason": "tired"},
            {**SOUND, "prompt_tokens": "5"},
            {**SOUND, "attention": [0.5]},
            {**SOUND, "attention": {"a": True}},
            {**SOUND, "attention": {"a": -0.5}},
            {**SOUND, "attention": {"a": float("nan")}},
            *({**SOUND, name: -1} for name in COUNTS),
            *({**SOUND, name: True} for name in COUNTS),
            {**SOUND, "claims": [[True, 3, {}]]},
            {**SOUND, "log_probs": [[-1, ["61", -0.5], []]]},
            {**SOUND, "log_probs": [[0, ["6x", -0.5], []]]},
            {**SOUND, "log_probs": [[0, ["61", False], []]]},
        ],
    )
    def test_a_stored_object_that_is_no_answer_is_a_miss(self, stored):
        class Garbage:
            def begin(self):
                return None

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

    def test_equal_questions_at_the_same_time_compute_once(self, monkeypatch):
        made, arrived = pipeline(cache=memory_cache()), []
        generate = made.generator.generate

        def generate_when_all_have_asked(request):
            wait_until(lambda: len(arrived) == 8)
            return generate(request)

        monkeypatch.setattr(made.generator, "generate", generate_when_all_have_asked)

        def ask(number):
            arrived.append(number)
            documents = [ROME, BREAD] if number % 2 else [BREAD, ROME]
            return made.ask(Question(QUESTION, documents))

        answers = in_threads(ask, range(8))
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
        (answer,) = in_threads(made.ask, [Question(QUESTION, [ROME])])
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
        made, open_streams = pipeline(cache=memory_cache()), []
        begin = made.generator.stream

        def referenced(request):
            open_streams.append(begin(request))  # so that no count of references falls to 0
            return open_streams[-1]

        made.generator.stream = referenced
        stream = made.stream(Question(QUESTION, [ROME]))
        assert next(stream).text == "Rome "
        stream.close()
        assert made.generator.closed_after == 1
        assert made.ask(Question(QUESTION, [ROME])).cached is False

    def test_bad_input_raises_before_the_first_piece_is_asked_for(self):
        made = pipeline()
        for question, error in (
            (" ", ConfigError),
            (Question("x", index="nope"), UnknownNameError),
            (Question("x" * 9000), PromptTooLongError),
        ):
            with pytest.raises(error):
                made.stream(question)
