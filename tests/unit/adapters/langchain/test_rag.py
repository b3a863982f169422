import asyncio
import copy
import pickle
import threading
from types import SimpleNamespace

import pytest
from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from rag_posfix import PosfixRAG, PosfixRetriever, document_block
from rag_posfix.assembly.assembler import Assembler
from rag_posfix.caching.answers.tiered import TieredAnswerCache
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.cancellation import check_cancelled
from rag_posfix.contracts.answer import Answer, AnswerChunk, Question
from rag_posfix.contracts.request import Sampling
from rag_posfix.errors import ConfigError, GenerationCancelled, GenerationError
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.pipeline.pipeline import Defaults, Pipeline
from rag_posfix.retrieval.bm25 import BM25Retriever
from rag_posfix.text import NO_PASSAGE_TEXT
from tests.support.toy_encoder import ToyEncoder
from tests.support.waiting import wait_until
from tests.unit.adapters.langchain.runs import Runs

ROME = Document(page_content="Rome lies on the Tiber. It is old.", id="rome")
PARIS = Document(page_content="Paris lies on the Seine. It is big.", id="paris")
BREAD = Document(page_content="Bread is baked in ovens.", id="bread")
QUESTION = "Which river does Rome have, the Tiber?"
TEXT = "Rome lies on the Tiber"


class Slow(FakeGenerator):
    """Counts the words that were asked for; ``before_word`` is called before each."""

    given, closed, broken = 0, False, False
    before_word = staticmethod(lambda: None)

    def stream(self, request):
        try:
            for chunk in super().stream(request):
                self.before_word()
                self.given += 1
                yield chunk
                if self.broken:
                    raise GenerationError("no words today")
        finally:
            self.closed = True


class Shelf:
    def retrieve(self, question, k):
        found = [ROME, PARIS, BREAD][:k]
        return [d.model_copy(update={"metadata": {"relevance_score": 0.9 - i / 5}}) for i, d in enumerate(found)]


class Even:
    def compress_documents(self, documents, query, callbacks=None):
        return [d.model_copy(update={"metadata": {**d.metadata, "relevance_score": 0.5}}) for d in documents]


def made_pipeline(**options):
    generator = Slow(ToyEncoder(), order_invariant=False)
    defaults = {"reranker": Even(), "defaults": Defaults(k=3, sampling=Sampling(max_tokens=16))}
    return Pipeline(generator, Assembler(generator.encoder, generator.context_window), **(defaults | options))


def rag(*, cache=None, **options):
    return PosfixRAG(pipeline=made_pipeline(retriever=Shelf(), cache=cache), **options)


def ids(answer):
    return [document["id"] for document in answer["documents"]]


def without_time(answer):
    return {name: value for name, value in answer.items() if name != "timings"}


class TestInvoke:
    def test_a_question_is_answered_with_its_sources(self):
        answer = rag().invoke(QUESTION)
        assert (answer["answer"], ids(answer)) == (TEXT, ["rome", "paris", "bread"])
        assert list(answer["citations"][0]["document_ids"]) == ["rome"]

    def test_a_question_may_bring_documents_and_history(self):
        asked = {"question": QUESTION, "documents": [BREAD, ROME]}
        answer = rag().invoke(asked)
        assert (answer["answer"], sorted(ids(answer))) == (TEXT, ["bread", "rome"])
        assert [document["text"] for document in answer["documents"]] == [BREAD.page_content, ROME.page_content]
        history = [HumanMessage("Hello"), AIMessage("Hi"), {"role": "user", "content": "Well?"}]
        longer = rag().invoke({**asked, "history": history})
        assert longer["usage"]["prompt_tokens"] > answer["usage"]["prompt_tokens"]

    def test_a_question_object_is_asked_as_it_is(self):
        answer = rag().invoke(Question(QUESTION, [BREAD, ROME], order="reverse"))
        assert ids(answer) == ids(rag().invoke(Question(QUESTION, [BREAD, ROME], order="relevance")))[::-1]
        backwards = SimpleNamespace(retrieve=lambda question, k: Shelf().retrieve(question, k)[::-1])
        pipeline = made_pipeline(reranker=None, indexes={"archive": backwards})
        for made in (PosfixRAG(pipeline=pipeline), PosfixRAG(pipeline=pipeline, retriever=lambda question: [BREAD])):
            assert ids(made.invoke(Question(QUESTION, index="archive"))) == ["rome", "paris", "bread"]

    def test_documents_keep_the_order_they_are_given_in_unless_told_otherwise(self):
        for documents in ([BREAD, ROME, PARIS], [PARIS, BREAD, ROME]):
            assert ids(rag().invoke({"question": QUESTION, "documents": documents})) == [d.id for d in documents]
        told = rag(order="relevance")
        assert ids(told.invoke({"question": QUESTION, "documents": [BREAD, ROME]})) == ids(
            told.invoke({"question": QUESTION, "documents": [ROME, BREAD]})
        )
        by_settings = PosfixRAG(pipeline=made_pipeline(defaults=Defaults(k=3, order="ends_first")))
        scored = Shelf().retrieve(QUESTION, 3)
        assert ids(by_settings.invoke({"question": QUESTION, "documents": scored})) == ["rome", "bread", "paris"]

    def test_the_output_may_be_text_or_an_answer(self):
        assert rag(output="text").invoke(QUESTION) == TEXT
        assert isinstance(rag(output="answer").invoke(QUESTION), Answer)

    def test_what_is_chosen_nearest_to_the_question_counts(self):
        made = rag(k=2, order="reverse", mitigation="none")
        answer = made.invoke(QUESTION)
        assert (ids(answer), answer["mitigation"]) == (["paris", "rome"], "none")
        chosen = {"configurable": {"k": 3, "order": "relevance"}}
        assert ids(made.invoke(QUESTION, chosen)) == ["rome", "paris", "bread"]
        assert ids(made.bind(k=1).invoke(QUESTION, chosen)) == ["rome"]
        asked = {"question": QUESTION, "k": 2, "mitigation": "context_experts:experts=2"}
        answer = made.bind(k=1).invoke(asked, chosen)
        assert (ids(answer), answer["mitigation"]) == (["rome", "paris"], "context_experts")

    def test_filters_of_call_arguments_and_object_are_joined(self):
        documents = [
            document.model_copy(update={"metadata": {"old": document is ROME, "big": document is not BREAD}})
            for document in (ROME, PARIS, BREAD)
        ]
        made = rag(retriever=BM25Retriever.from_documents(documents), filter={"big": True})
        question = "Rome, Paris, bread"
        assert sorted(ids(made.invoke(question))) == ["paris", "rome"]
        assert ids(made.invoke({"question": question, "filter": {"old": True}})) == ["rome"]
        assert ids(made.bind(filter={"old": False}).invoke(question)) == ["paris"]
        assert ids(made.invoke(question, {"configurable": {"filter": {"big": False}}})) == []
        with pytest.raises(ValueError, match="'\\$nor' is not understood"):
            rag(filter={"$nor": []})

    def test_it_says_what_can_be_configured(self):
        assert [spec.id for spec in rag().config_specs] == ["k", "order", "mitigation", "tenant", "filter", "query"]

    @pytest.mark.parametrize(
        ("asked", "message"),
        [
            (5, "was asked with int; give the question as text"),
            ({"query": "x"}, "was asked with a dict of 'query' without a question; give the question as text"),
            ([ROME, BREAD], 'was asked with 2 documents and no question; .*"context": retriever'),
            ({"question": "x", "input": "y"}, "was asked with 'question' under two names"),
            ({"question": "x", "documents": 3}, "documents is int; give a list of Documents or texts"),
            ({"question": "x", "top_k": 3}, "was asked with 'top_k'; a question may hold question, documents"),
        ],
    )
    def test_what_cannot_be_asked_is_refused(self, asked, message):
        with pytest.raises(ConfigError, match=message):
            rag().invoke(asked)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mitigation": "context_expert"}, "Did you mean 'context_experts'"),
            ({"order": "revers"}, "Did you mean 'reverse'"),
            ({"retriever": 5}, "retriever=5 must be a langchain retriever"),
        ],
    )
    def test_a_misspelt_part_is_told_when_it_is_made(self, options, message):
        with pytest.raises(ValueError, match=message):
            rag(**options)

    def test_without_documents_and_index_it_does_not_answer_from_memory(self):
        with pytest.raises(ConfigError, match="neither documents nor an index"):
            PosfixRAG(pipeline=made_pipeline()).invoke(QUESTION)
        with pytest.raises(ConfigError, match="neither documents nor an index"):
            list(PosfixRAG(pipeline=made_pipeline()).stream(QUESTION))
        assert PosfixRAG(pipeline=made_pipeline(), answer_from_memory=True).invoke(QUESTION)["documents"] == ()

    def test_a_search_that_finds_nothing_is_told(self, caplog):
        made = PosfixRAG(pipeline=made_pipeline(), retriever=lambda question: [])
        for answer in (made.invoke(QUESTION), sum_of(list(made.stream(QUESTION)))):
            assert (answer["answer"], answer["grounded"]) == (NO_PASSAGE_TEXT, False)
        assert caplog.text == ""

    @pytest.mark.parametrize("ask", ["invoke", "stream"])
    def test_an_answer_from_memory_is_told(self, caplog, ask):
        made = PosfixRAG(pipeline=made_pipeline(), retriever=lambda question: [], answer_from_memory=True)
        assert list(getattr(made, ask)(QUESTION))
        assert "the answer comes from the model's memory" in caplog.text

    def test_an_argument_that_it_does_not_know_is_refused(self):
        with pytest.raises(ConfigError, match="takes no argument 'top_k'; it takes k, order"):
            rag().bind(top_k=3).invoke(QUESTION)


class TestTwins:
    async def test_every_way_to_ask_gives_the_same_answer(self):
        made = rag()
        expected = without_time(made.invoke(QUESTION))
        assert without_time(await made.ainvoke(QUESTION)) == expected
        assert [without_time(one) for one in made.batch([QUESTION, QUESTION])] == [expected] * 2
        assert [without_time(one) for one in await made.abatch([QUESTION] * 2)] == [expected] * 2
        assert without_time(sum_of(list(made.stream(QUESTION)))) == expected
        assert without_time(sum_of([piece async for piece in made.astream(QUESTION)])) == expected

    def test_pieces_come_as_they_are_written(self):
        pieces = list(rag().stream(QUESTION))
        assert [piece["answer"] for piece in pieces[:-1]] == ["Rome ", "lies ", "on ", "the ", "Tiber"]
        assert [set(piece) for piece in pieces[:2]] == [{"answer"}, {"answer"}]
        assert list(rag(output="text").stream(QUESTION)) == ["Rome ", "lies ", "on ", "the ", "Tiber"]
        chunks = list(rag(output="answer").stream(QUESTION))
        assert isinstance(chunks[0], AnswerChunk)
        assert chunks[-1].answer.text == TEXT

    async def test_the_event_loop_runs_on_while_words_are_written(self):
        made, ticks = rag(), 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.002)
                ticks += 1

        def wait_for_a_tick():
            before = ticks
            wait_until(lambda: ticks > before)

        generator = made.pipeline.generator
        generate, generator.before_word = generator.generate, wait_for_a_tick
        generator.generate = lambda request: wait_for_a_tick() or generate(request)
        ticking = asyncio.create_task(tick())
        async for _ in made.astream(QUESTION):
            pass
        await made.ainvoke(QUESTION)
        ticking.cancel()
        assert ticks > generator.given >= 5, "each word waited for the event loop"

    async def test_a_reader_that_is_cancelled_stops_the_words(self):
        made, word_read, was_cancelled = rag(), asyncio.Event(), threading.Event()
        generator = made.pipeline.generator
        generator.before_word = lambda: generator.given == 0 or was_cancelled.wait(60)

        async def read():
            async for _ in made.astream(QUESTION):
                word_read.set()

        reading = asyncio.create_task(read())
        await asyncio.wait({reading, asyncio.create_task(word_read.wait())}, return_when=asyncio.FIRST_COMPLETED)
        reading.cancel()
        was_cancelled.set()  # a word that is under way is written to its end
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert (generator.closed, generator.given <= 2) == (True, True), "the second word was under way"

    async def test_the_words_stop_while_others_refer_to_the_stream(self, monkeypatch):
        """A debugger, a collector of garbage and a traceback hold references to iterators."""
        made, held = rag(), []
        stream = made.pipeline.stream
        monkeypatch.setattr(
            made.pipeline, "stream", lambda *args, **options: held.append(stream(*args, **options)) or held[0]
        )
        pieces = made.stream(QUESTION)
        next(pieces)
        pieces.close()
        assert made.pipeline.generator.closed
        made.pipeline.generator.closed = False
        held.clear()
        asynchronous = made.astream(QUESTION)
        await anext(asynchronous)
        await asynchronous.aclose()
        assert made.pipeline.generator.closed

    async def test_a_question_that_is_cancelled_tells_its_thread(self):
        made, begun, told = rag(), asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def generate(request):
            loop.call_soon_threadsafe(begun.set)
            while not told.wait(0.01):
                try:
                    check_cancelled()
                except GenerationCancelled:
                    told.set()
            raise GenerationCancelled("ended")

        made.pipeline.generator.generate = generate
        asking = asyncio.create_task(made.ainvoke(QUESTION))
        await begun.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await asyncio.to_thread(told.wait, 60)


class TestComposition:
    def test_it_is_a_step_of_a_chain(self):
        chain = RunnablePassthrough() | rag() | RunnableLambda(lambda answer: answer["answer"].upper())
        assert isinstance(chain, Runnable)
        assert chain.invoke(QUESTION) == TEXT.upper()
        ask = {"question": RunnablePassthrough(), "documents": lambda _: [BREAD, ROME]} | rag(output="text")
        assert ask.invoke(QUESTION) == TEXT

    @pytest.mark.parametrize(
        "asked",
        [
            {"context": [BREAD, ROME], "question": QUESTION},
            {"context": [BREAD, ROME], "input": QUESTION, "chat_history": []},
            {"context": [BREAD.page_content, ROME.page_content], "question": HumanMessage(QUESTION)},
            {"documents": [BREAD, ROME], "question": QUESTION, "history": None},
            [HumanMessage([document_block(BREAD), document_block(ROME), {"type": "text", "text": QUESTION}])],
            HumanMessage([document_block(BREAD), document_block(ROME), {"type": "text", "text": QUESTION}]),
        ],
    )
    def test_it_takes_what_chains_of_langchain_give(self, asked):
        answer = rag().invoke(asked)
        assert [d["text"] for d in answer["documents"]] == [BREAD.page_content, ROME.page_content]
        assert answer["answer"] == TEXT

    def test_the_usual_dict_of_a_chain_is_asked_and_streamed(self):
        retriever = RunnableLambda(lambda question: [BREAD, ROME] if question == QUESTION else [])
        chain = {"context": retriever, "question": RunnablePassthrough()} | rag(output="text")
        assert chain.invoke(QUESTION) == TEXT
        assert "".join(chain.stream(QUESTION)) == TEXT
        formatted = retriever | (lambda found: "\n\n".join(document.page_content for document in found))
        chain = {"context": formatted, "question": RunnablePassthrough()} | rag()
        assert len(chain.invoke(QUESTION)["documents"]) == 1
        prompt = ChatPromptTemplate.from_messages([("system", "Be short."), ("human", "{question}")])
        assert ids((prompt | rag()).invoke({"question": QUESTION})) == ["rome", "paris", "bread"]

    @pytest.mark.parametrize(
        "retriever",
        [
            RunnableLambda(lambda question: [BREAD, ROME]),
            lambda question: [BREAD, ROME],
            PosfixRetriever(base_retriever=RunnableLambda(lambda question: [BREAD, ROME]), order="original"),
        ],
    )
    def test_any_retriever_finds_the_documents_and_their_order_is_kept(self, retriever):
        made = PosfixRAG(pipeline=made_pipeline(), retriever=retriever)
        assert ids(made.invoke(QUESTION)) == ["bread", "rome"]
        assert ids(made.invoke(QUESTION, {"configurable": {"order": "relevance"}})) == ["rome", "bread"]

    def test_without_a_pipeline_one_is_built_with_the_retriever(self, monkeypatch):
        built = []
        monkeypatch.setattr(
            "rag_posfix.pipeline.build.build_pipeline", lambda **given: built.append(given) or made_pipeline(**given)
        )
        shelf = Shelf()
        assert ids(PosfixRAG(retriever=shelf, k=2).invoke(QUESTION)) == ["rome", "paris"]
        assert built == [{"retriever": shelf}]

    def test_it_waits_for_a_question_that_comes_in_pieces(self):
        whole = list(rag(output="text").transform(iter([QUESTION[:10], QUESTION[10:]])))
        assert "".join(whole) == TEXT
        with pytest.raises(ConfigError, match="was asked nothing"):
            list(rag().transform(iter([])))


EXPECTED = [
    ("PosfixRAG", "chain", None),
    ("retriever", "retriever", "PosfixRAG"),
    ("generator", "chat_model", "PosfixRAG"),
]


class TestTraces:
    async def test_stages_are_runs_under_the_run_of_the_question(self):
        for ask in (rag().invoke, lambda *given: list(rag().stream(*given))):
            runs = Runs()
            ask(QUESTION, {"callbacks": [runs]})
            assert runs.tree() == EXPECTED
            assert [d.id for d in runs.named("retriever").outcome] == ["rome", "paris", "bread"]
            message = runs.named("generator").outcome.generations[0][0].message
            assert (message.content, message.response_metadata["model_name"]) == (TEXT, "fake")
            assert message.usage_metadata["output_tokens"] == 5
        runs = Runs()
        await rag().ainvoke(QUESTION, {"callbacks": [runs]})
        assert runs.tree() == EXPECTED
        runs = Runs()
        assert [piece async for piece in rag().astream(QUESTION, {"callbacks": [runs]})]
        assert runs.tree() == EXPECTED

    def test_documents_that_come_along_are_reranked_in_a_run(self):
        runs = Runs()
        rag(name="My RAG").invoke({"question": QUESTION, "documents": [BREAD, ROME]}, {"callbacks": [runs]})
        assert runs.tree() == [
            ("My RAG", "chain", None), ("reranker", "chain", "My RAG"), ("generator", "chat_model", "My RAG"),
        ]  # fmt: skip
        assert [d.metadata["relevance_score"] for d in runs.named("reranker").outcome["documents"]] == [0.5, 0.5]

    def test_tokens_are_counted_by_langchain(self):
        with get_usage_metadata_callback() as usage:
            rag().invoke(QUESTION)
        assert usage.usage_metadata["fake"]["output_tokens"] == 5

    async def test_events_of_the_generator_are_streamed(self):
        events = [event async for event in rag().astream_events(QUESTION, version="v2")]
        words = [event["data"]["chunk"].content for event in events if event["event"] == "on_chat_model_stream"]
        assert words == ["Rome ", "lies ", "on ", "the ", "Tiber"]

    def test_an_answer_from_the_cache_has_no_generator(self):
        made = rag(cache=TieredAnswerCache([MemoryTier()]))
        made.invoke(QUESTION)
        runs = Runs()
        made.invoke(QUESTION, {"callbacks": [runs]})
        assert runs.tree() == EXPECTED[:2]

    def test_a_failure_is_that_of_its_stage_and_of_the_whole(self):
        made = rag()
        made.pipeline.generator.broken = True
        runs = Runs()
        with pytest.raises(GenerationError, match="no words today"):
            list(made.stream(QUESTION, {"callbacks": [runs]}))
        assert [str(runs.named(name).error) for name in ("generator", "PosfixRAG")] == ["no words today"] * 2

    def test_a_stream_that_is_closed_ends_its_runs_with_what_was_written(self):
        runs, made = Runs(), rag()
        pieces = made.stream(QUESTION, {"callbacks": [runs]})
        next(pieces)
        pieces.close()
        del pieces
        run = runs.named("generator")
        assert (run.error, run.outcome.generations[0][0].message.content) == (None, "Rome ")


def sum_of(pieces):
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    return total


def test_a_copy_shares_the_pipeline_and_has_fields_of_its_own():
    original = rag(filter={"a": {"$in": [1]}}, k=2)
    copied = copy.deepcopy(original)
    assert copied.pipeline is original.pipeline
    copied.filter["a"]["$in"].append(2)
    assert (original.filter, copied.k) == ({"a": {"$in": [1]}}, 2)
    asked = {"question": QUESTION, "documents": [ROME]}
    assert copy.deepcopy(rag()).invoke(asked)["answer"] == TEXT


def test_a_pickle_builds_the_pipeline_of_the_settings_where_it_is_read(monkeypatch):
    built = []

    def build(retriever=None):
        built.append(made_pipeline(retriever=Shelf()))
        return built[-1]

    monkeypatch.setattr("rag_posfix.pipeline.build.build_pipeline", build)
    read = pickle.loads(pickle.dumps(PosfixRAG(k=2, order="reverse")))
    assert (read.k, read.order, read.pipeline is built[1]) == (2, "reverse", True)
    assert ids(read.invoke(QUESTION)) == ["paris", "rome"]
    again = pickle.loads(pickle.dumps(copy.deepcopy(read)))
    assert again.pipeline is built[2]
    with pytest.raises(ConfigError, match="with pipeline= cannot be pickled"):
        pickle.dumps(rag())


def test_history_and_messages_may_be_pairs_of_role_and_text():
    pairs = [("human", "What lies there?"), ["ai", "A river."]]
    messages = [{"role": "user", "content": "What lies there?"}, {"role": "assistant", "content": "A river."}]
    asked = {"question": QUESTION, "documents": [BREAD, ROME]}
    with_pairs, with_dicts = (rag().invoke({**asked, "chat_history": history}) for history in (pairs, messages))
    assert without_time(with_pairs) == without_time(with_dicts)
    assert with_pairs["usage"]["prompt_tokens"] > rag().invoke(asked)["usage"]["prompt_tokens"]
    with pytest.raises(ConfigError, match="'Who built it'; a pair of role and text has the role human, ai, or system"):
        rag().invoke({**asked, "chat_history": [("Who built it", "Rome did.")]})
    assert rag().invoke([*pairs, ("human", QUESTION)])["answer"] == TEXT
