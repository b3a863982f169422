"""Questions with a filter: what is retrieved, and that an answer is never given to another set of permissions."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from langchain_core.documents import Document

from rag_posfix.caching.answers.tiered import TieredAnswerCache
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.answer import Question
from rag_posfix.errors import ConfigError
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.pipeline.pipeline import Defaults
from rag_posfix.retrieval.bm25 import BM25Retriever
from tests.support.serving import BRIDGE, HARBOUR, QUESTION, make_pipeline
from tests.support.toy_encoder import ToyEncoder
from tests.support.waiting import wait_until

PUBLIC = Document(id="bridge", page_content=BRIDGE, metadata={"acl": ["staff", "guests"]})
SECRET = Document(id="harbour", page_content=HARBOUR, metadata={"acl": ["staff"]})
STAFF, GUESTS = {"acl": "staff"}, {"acl": "guests"}
BOTH = "When was the bridge of Arvo built, and when did the harbour of Arvo freeze?"


class WaitingGenerator(FakeGenerator):
    """Answers when the gate is open."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.gate = threading.Event()
        self.entered = []

    def generate(self, request):
        self.entered.append(request)
        assert self.gate.wait(60)
        return super().generate(request)


def retriever():
    return BM25Retriever.from_documents([PUBLIC, SECRET])


def pipeline(**parts):
    cache = TieredAnswerCache([MemoryTier(max_entries=100)])
    return make_pipeline(**{"retriever": retriever(), "cache": cache, **parts})


def ids(answer):
    return sorted(document.id for document in answer.documents)


def test_question_is_answered_from_matching_passages_alone():
    answers = pipeline()
    assert ids(answers.ask(Question(BOTH))) == ["bridge", "harbour"]
    assert ids(answers.ask(Question(BOTH, filter=GUESTS))) == ["bridge"]
    assert ids(answers.ask(Question(BOTH, filter={"acl": "nobody"}))) == []
    *_, last = answers.stream(Question(BOTH, filter=GUESTS, use_cache=False))
    assert ids(last.answer) == ["bridge"]


def test_filter_of_a_pipeline_cannot_be_widened_by_a_question():
    guests = pipeline().with_filter(GUESTS)
    for metadata_filter in (
        None, {}, STAFF, {"$or": [STAFF, GUESTS]}, {"acl": {"$exists": True}}, {"$not": {"acl": "x"}},
        {"$or": [{"$not": GUESTS}, {"id": {"$ne": 1}}]},
    ):  # fmt: skip
        assert ids(guests.ask(Question(BOTH, filter=metadata_filter))) in (["bridge"], []), metadata_filter
    assert ids(guests.with_filter(STAFF).ask(BOTH)) == ["bridge"]
    assert ids(guests.with_filter({"acl": {"$ne": "staff"}}).ask(BOTH)) == []
    assert ids(pipeline(defaults=Defaults(filter=GUESTS)).ask(BOTH)) == ["bridge"]
    assert ids(
        pipeline(retriever=None, indexes={"more": retriever()}).with_filter(GUESTS).ask(Question(BOTH, index="more"))
    ) == ["bridge"]


def test_answer_of_one_filter_is_no_hit_for_another():
    answers = pipeline()
    for metadata_filter in (STAFF, GUESTS, None, {"acl": {"$in": ["guests", "staff"]}}, {"$not": {"acl": "x"}}):
        # Each of them reads the same passages for this question, with the same words around them.
        first = answers.ask(Question(QUESTION, k=1, filter=metadata_filter))
        assert (ids(first), first.cached) == (["bridge"], False), metadata_filter
        assert answers.ask(Question(QUESTION, k=1, filter=metadata_filter)).cached is True
    assert answers.with_filter(GUESTS).ask(Question(QUESTION, k=1)).cached is True  # the same permissions
    assert answers.with_filter(GUESTS).ask(Question(QUESTION, k=1, filter=STAFF)).cached is False


def test_documents_of_the_question_are_cached_as_before_and_take_no_filter():
    answers = pipeline()
    assert answers.ask(Question(QUESTION, [PUBLIC])).cached is False
    assert answers.with_filter(GUESTS).ask(Question(QUESTION, [PUBLIC])).cached is True
    assert ids(answers.with_filter(GUESTS).ask(Question(QUESTION, [SECRET]))) == ["harbour"]  # the asker has it
    with pytest.raises(ConfigError, match="documents and a filter are given"):
        answers.ask(Question(QUESTION, [PUBLIC], filter=GUESTS))
    with pytest.raises(ConfigError, match="'\\$nor' is not understood"):
        answers.ask(Question(QUESTION, [PUBLIC], filter={"$nor": []}))


def test_equal_questions_at_the_same_time_share_an_answer_within_a_filter_only():
    generator = WaitingGenerator(ToyEncoder())
    answers = pipeline(generator=generator)
    questions = [Question(QUESTION, k=1, filter=filter_) for filter_ in (STAFF, STAFF, GUESTS, None)]
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(answers.ask, question) for question in questions]
        try:
            wait_until(lambda: len(generator.entered) == 3)  # one for each set of permissions
        finally:
            generator.gate.set()
        cached = [result.result(60).cached for result in results]
    assert len(generator.entered) == 3
    assert sorted(cached[:2]) == [False, True]
    assert cached[2:] == [False, False]


def test_recent_prompts_of_another_filter_do_not_choose_the_order():
    answers = pipeline(cache=None)
    answers.ask(Question(BOTH, order="cache_aware"))
    scopes = []
    answers.recent.recent = lambda scope: scopes.append(scope) or []
    for metadata_filter in (None, GUESTS, STAFF):
        answers.ask(Question(BOTH, order="cache_aware", filter=metadata_filter))
    assert len(set(scopes)) == 3


def test_every_thread_sees_its_own_filter_under_load():
    answers = pipeline()
    barrier = threading.Barrier(8)

    def ask(number):
        barrier.wait(60)
        asker = answers.with_filter(GUESTS) if number % 2 else answers.with_filter(STAFF)
        return [ids(asker.ask(Question(BOTH, seed=seed, order="random"))) for seed in range(10)]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(ask, range(8)))
    assert all(
        result == [["bridge"] if number % 2 else ["bridge", "harbour"]] * 10 for number, result in enumerate(results)
    )
