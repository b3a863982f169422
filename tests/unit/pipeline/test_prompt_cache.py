"""Prompts of repeated questions are remembered: what they save, and that no other question gets them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from langchain_core.documents import Document

from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.contracts.answer import Answer
from rag_posfix.contracts.request import Sampling
from rag_posfix.pipeline.pipeline import Defaults, Pipeline, Question
from rag_posfix.pipeline.run import REMEMBERED_CHARACTERS, REMEMBERED_SECONDS, CachedPrompt, PromptCache
from rag_posfix.pipeline.tracing import NoopTracer
from tests.support.pipelines import BREAD, QUESTION, ROME, memory_cache, pipeline
from tests.support.serving import DictCache
from tests.support.threads import in_threads


def encoded(made: Pipeline, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets every text that the tokenizer of a pipeline encodes from now on."""
    texts: list[str] = []
    encode = made.assembler.encoder.encode_text

    def note(text: str) -> list[int]:
        texts.append(text)
        return encode(text)

    monkeypatch.setattr(made.assembler.encoder, "encode_text", note)
    return texts


def content(answer: Answer) -> Answer:
    """The answer without what is measured, and without whether it was cached."""
    return replace(answer, timings={}, cached=False, usage=replace(answer.usage, cached_tokens=0))


def test_a_repeated_question_is_not_tokenised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pipeline(cache=memory_cache())
    made.ask(Question(QUESTION, [BREAD, ROME]))
    texts = encoded(made, monkeypatch)
    assert made.ask(Question(QUESTION, [BREAD, ROME])).cached is True
    assert ROME.page_content not in texts
    made.ask(Question(QUESTION, [ROME, BREAD]))
    assert ROME.page_content in texts


def test_hits_have_their_own_timings_and_equal_content() -> None:
    made = pipeline(cache=memory_cache())
    first, *hits = (made.ask(Question(QUESTION, [BREAD, ROME])) for _ in range(4))
    assert [hit.cached for hit in hits] == [True] * 3
    assert {content(first).text} == {hit.text for hit in hits}
    assert len({id(hit.timings) for hit in hits}) == 3
    assert all(content(hit) == content(first) for hit in hits)


def _renamed(document: Document, **metadata: Any) -> Document:
    return Document(page_content=document.page_content, id=document.id, metadata=metadata)


CHANGES: list[dict[str, Any]] = [
    {"documents": [BREAD, Document(page_content=ROME.page_content, id="another id")]},
    {"documents": [BREAD, _renamed(ROME, page=1)]},
    {"documents": [BREAD, _renamed(ROME, page=True)]},
    {"documents": [BREAD, _renamed(ROME, source="a.txt")]},
    {"documents": [BREAD, _renamed(ROME, title="Rome")]},
    {"documents": [BREAD, _renamed(ROME, relevance_score=0.5)]},
    {"documents": [BREAD, _renamed(ROME, source=["a.txt"])]},
    {"documents": [ROME, BREAD]},
    {"documents": [ROME]},
    {"history": [{"role": "user", "content": "Hello"}]},
    {"order": "reverse"},
    {"order": "random", "seed": 3},
    {"mitigation": "none"},
    {"sampling": Sampling(max_tokens=3)},
    {"template": PromptTemplate(question_prefix="Q: ")},
    {"tenant": "other"},
    {"use_cache": False},
    {"text": QUESTION + " Please."},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(change)[:60])
def test_no_other_question_gets_a_remembered_prompt(change: dict[str, Any]) -> None:
    made = pipeline(cache=memory_cache())
    question = {"text": QUESTION, "documents": [BREAD, ROME]}
    for _ in range(2):
        made.ask(Question(**question))
    for _ in range(2):
        alone = pipeline(cache=memory_cache()).ask(Question(**{**question, **change}))
        assert content(made.ask(Question(**{**question, **change}))) == content(alone)


class _Retriever:
    def retrieve(self, question: str, k: int) -> Sequence[Document]:
        return [_renamed(ROME, relevance_score=1.0, kind="city")]

    def retrieve_filtered(self, question: str, k: int, condition: object) -> Sequence[Document]:
        return self.retrieve(question, k)


def test_answers_under_a_filter_stay_apart_from_those_about_the_same_documents() -> None:
    defaults = Defaults(filter={"kind": "city"}, min_relevance="off")
    cache = DictCache()
    made = pipeline(cache=cache, retriever=_Retriever(), defaults=defaults)
    given = Question(QUESTION, _Retriever().retrieve(QUESTION, 1))
    for question in (given, Question(QUESTION), given, Question(QUESTION)):
        made.ask(question)
    assert len(cache.entries) == 2


def test_a_deleted_document_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pipeline(cache=memory_cache())
    for tenant in ("", "a"):
        made.with_tenant(tenant).ask(Question(QUESTION, [BREAD, ROME]))
    made.invalidate([ROME], "a")
    texts = encoded(made, monkeypatch)
    made.with_tenant("a").ask(Question(QUESTION, [BREAD, ROME]))
    assert ROME.page_content in texts


def test_another_entry_of_the_cache_makes_another_answer() -> None:
    cache = DictCache()
    made = pipeline(cache=cache)
    for _ in range(2):
        made.ask(Question(QUESTION, [BREAD, ROME]))
    ((key, entry),) = cache.entries.items()
    cache.put(key, {**entry, "text": "Another text"})
    assert made.ask(Question(QUESTION, [BREAD, ROME])).text == "Another text"


class _Changing(NoopTracer):
    """A trace that changes the documents of a prompt."""

    def on_result(self, outcome: Any) -> None:
        for document in outcome if isinstance(outcome, tuple) else ():
            document.page_content = "changed"
            document.metadata["title"] = "changed"


def test_documents_that_are_given_out_can_be_changed() -> None:
    question = Question(QUESTION, [_renamed(ROME, title="Rome")])
    expected = content(pipeline(cache=memory_cache()).ask(question))
    for give_out in (
        lambda made: made.with_tracer(_Changing()).ask(question),
        lambda made: _Changing().on_result(made.find_passages(question)),
    ):
        made = pipeline(cache=memory_cache())
        give_out(made)
        assert content(made.ask(question)) == expected


def test_an_order_that_follows_recent_prompts_is_found_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pipeline(cache=memory_cache())
    question = Question(QUESTION, [BREAD, ROME], order="cache_aware", mitigation="none")
    made.ask(question)
    texts = encoded(made, monkeypatch)
    made.ask(question)
    assert ROME.page_content in texts


def _prompt() -> CachedPrompt:
    made = pipeline()
    return CachedPrompt(made.assembler.assemble(QUESTION, [ROME]), "key", "scope")


def test_memory_is_bounded_by_characters_and_time() -> None:
    seconds = [0.0]
    memory = PromptCache(lambda: seconds[0])
    text = "x" * (REMEMBERED_CHARACTERS // 5 - 100)
    for number in range(12):
        memory.put(number, _prompt(), [text])
        assert memory.characters <= REMEMBERED_CHARACTERS
    assert [memory.get(number) is not None for number in range(12)] == [False] * 7 + [True] * 5
    memory.put("long", _prompt(), [text * 3])
    assert memory.get("long") is None
    seconds[0] = REMEMBERED_SECONDS - 1
    assert memory.get(11) is not None
    seconds[0] = REMEMBERED_SECONDS
    assert memory.get(11) is None
    assert memory.characters == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda text: {"documents": [_renamed(ROME, raw=text)]},
        lambda text: {"documents": [Document(page_content=ROME.page_content, id=text)]},
        lambda text: {"sampling": Sampling(stop=(text,))},
        lambda text: {"sampling": Sampling(json_schema={"type": "object", "description": text})},
    ],
    ids=["metadata", "id", "stop", "schema"],
)
def test_everything_that_is_remembered_counts(
    change: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pipeline(cache=memory_cache())
    monkeypatch.setattr(made.generator, "check_json_schema", lambda schema: None, raising=False)
    changes = [change(f"{number} {'x' * (REMEMBERED_CHARACTERS // 5)}") for number in range(6)]
    questions = [Question(**{"text": QUESTION, "documents": [ROME], **each}) for each in changes]
    for question in questions:
        made.ask(question)
    texts = encoded(made, monkeypatch)
    made.ask(questions[5])
    assert ROME.page_content not in texts
    made.ask(questions[0])
    assert ROME.page_content in texts, "later ones took its place"


def test_short_texts_take_more_than_their_characters() -> None:
    memory, prompt = PromptCache(), _prompt()
    for number in range(REMEMBERED_CHARACTERS // 50):
        memory.put(number, replace(prompt), ["x"])
    assert memory.get(0) is None


def test_threads_share_a_memory() -> None:
    made = pipeline(cache=memory_cache())
    questions = [Question(f"{QUESTION} {number % 5}", [BREAD, ROME]) for number in range(40)]
    answers = in_threads(lambda question: content(made.ask(question)), questions)
    alone = [content(pipeline(cache=memory_cache()).ask(question)) for question in questions[:5]]
    assert [answer.text for answer in answers] == [alone[number % 5].text for number in range(40)]
