"""One question on its way through the stages of a pipeline, and the prompts of questions that were asked before."""

from __future__ import annotations

import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembled
from rag_posfix.assembly.documents import document_id
from rag_posfix.assembly.templates import BoundTools
from rag_posfix.contracts.answer import Answer, Question
from rag_posfix.contracts.request import GenerationRequest, MitigationInfo, Usage
from rag_posfix.contracts.retrieval import SearchQuery
from rag_posfix.contracts.tools import ToolCall
from rag_posfix.pipeline.tracing import QuestionTrace, Stage, StageWatcher

REMEMBERED_CHARACTERS = 1_000_000
"""Of all texts that are remembered, metadata included; with tokens and objects this takes about 15 MB."""

_TEXT_CHARACTERS = 50
"""What a text takes beside its characters, as characters: its share of the objects of prompt and answer."""

REMEMBERED_SECONDS = 300.0
"""How long a prompt is remembered."""

_PLAIN = frozenset({str, int, float, bool, type(None)})
"""Types whose values ``repr`` tells apart."""


@dataclass(slots=True, eq=False)
class CachedPrompt:
    """A prompt, and what follows from it alone.

    Attributes:
        key: The key of its answer in the cache; None if the answer is not cached.
        scope: The scope of its recent prompts.
        last_hit: The last cache entry that was read for it, and the answer that was made of the entry.
        texts: Its texts, while it is remembered.
        expires_at: When it is forgotten.
    """

    assembled: Assembled
    key: str | None
    scope: str
    last_hit: tuple[Mapping[str, Any], Answer] | None = None
    texts: tuple[str, ...] = ()
    expires_at: float = 0.0

    def answer(self, stored: Mapping[str, Any], make: Callable[[], Answer]) -> Answer:
        """Return the answer of a cache entry: that of the last one if it is equal, else what ``make`` returns."""
        hit = self.last_hit
        if hit is not None and hit[0] == stored:
            return hit[1]
        answer = make()
        if self.texts and not answer.log_probs:  # these take far more memory than the prompt
            self.last_hit = stored, answer
        return answer


class PromptCache:
    """Remembers prompts by everything that they were made of. Safe to share between threads.

    The oldest ones are forgotten first. ``clock`` returns monotonic seconds; ``characters`` is the size of all texts
    that are remembered.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prompts: OrderedDict[Hashable, CachedPrompt] = OrderedDict()
        self.characters = 0
        self._lock = threading.Lock()

    def get(self, origin: Hashable) -> CachedPrompt | None:
        """Return the prompt of ``origin``, or None."""
        with self._lock:
            self._forget_until(self._clock())
            return self._prompts.get(origin)

    def put(self, origin: Hashable, prompt: CachedPrompt, texts: Sequence[str]) -> None:
        """Remember a prompt that was made of ``origin``, with all of its texts."""
        size = _size(texts)
        if size > REMEMBERED_CHARACTERS // 4:
            return
        current_time = self._clock()
        with self._lock:
            self._forget(origin)
            prompt.texts, prompt.expires_at = tuple(texts), current_time + REMEMBERED_SECONDS
            self._prompts[origin] = prompt
            self.characters += size
            self._forget_until(current_time)

    def drop(self, texts: Collection[str]) -> None:
        """Forget the prompts that were made of a document with one of these texts."""
        removed = frozenset(texts)
        with self._lock:
            for origin in [each for each, prompt in self._prompts.items() if not removed.isdisjoint(prompt.texts)]:
                self._forget(origin)

    def _forget_until(self, current_time: float) -> None:
        while self._prompts:
            origin, prompt = next(iter(self._prompts.items()))
            if prompt.expires_at > current_time and self.characters <= REMEMBERED_CHARACTERS:
                return
            self._forget(origin)

    def _forget(self, origin: Hashable) -> None:
        prompt = self._prompts.pop(origin, None)
        if prompt is not None:
            self.characters -= _size(prompt.texts)


def _size(texts: Sequence[str]) -> int:
    return sum(map(len, texts)) + _TEXT_CHARACTERS * len(texts)


def document_values(documents: Sequence[Document]) -> tuple[tuple[str | None, str, str], ...] | None:
    """Return what is different for different documents; None if a value in their metadata is not a plain one."""
    values = []
    for document in documents:
        metadata = document.metadata
        if not all(type(value) in _PLAIN for value in metadata.values()):
            return None
        values.append((document.id, document.page_content, repr(metadata)))
    return tuple(values)


@dataclass(slots=True)
class SecondSearch:
    """What a second search of one question did.

    Attributes:
        query: The text that was searched for; empty if there was none.
        linked: Ids of the passages that it added to the first.
        together: Whether they and the best passage are read without others, in one plain prompt.
    """

    query: str = ""
    linked: frozenset[str] = frozenset()
    together: bool = False


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One question on its way through the stages; ``timings`` are seconds by stage.

    ``left_out`` are ids of retrieved passages that are not about the question, with the reason ``min_relevance``;
    ``best_left_out`` describes the best of them, by the test that left it out.

    ``filter`` is that of the question and of the defaults together, ``query`` what retriever and reranker get,
    ``computations`` those of the caches, open since before they were asked, ``read_as`` the question in the prompt.
    ``odds`` are the judge's log-odds that a passage has the answer, by content key.
    """

    question: Question
    salt: str
    filter: Mapping[str, Any] | None
    query: SearchQuery
    trace: QuestionTrace
    watcher: StageWatcher
    computations: Sequence[object] = ()
    read_as: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    best_left_out: list[str] = field(default_factory=list)
    odds: dict[str, float] = field(default_factory=dict)
    second: SecondSearch = field(default_factory=SecondSearch)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - started

    def leave_out(self, scored: Sequence[tuple[Document, float]], kept: Sequence[Document], test: str) -> None:
        """Note the documents that are not among ``kept``, and the best of them by their scores of the test."""
        remaining = {id(document) for document in kept}
        gone = [(document, score) for document, score in scored if id(document) not in remaining]
        self.left_out.extend((document_id(document), "min_relevance") for document, _ in gone)
        if gone:
            best, score = max(gone, key=lambda entry: entry[1])
            names = [value for name in ("source", "title") if (value := best.metadata.get(name))]
            name = ", ".join(map(str, names)) or repr(document_id(best))
            self.best_left_out[:] = [f"{name}, {test.format(score)}"]

    def refusal(self) -> str | None:
        """Return why no retrieved passage is read, and what turns the test off; None if the test left out none."""
        if not self.best_left_out:
            return None
        return (
            "no retrieved passage passed the test of relevance; "
            f"the best that was left out is {self.best_left_out[0]}; "
            "to read it all the same: --min-relevance off, the field "
            "min_relevance, or RAG_POSFIX_MIN_RELEVANCE=off"
        )

    @contextmanager
    def stage(self, timing: str, name: str, documents: Sequence[Document] = (), searched: str = "") -> Iterator[Stage]:
        watcher, text = (self.trace, self.question.text) if name == "assembler" else (self.watcher, self.query.text)
        text = searched or text
        with self.timed(timing), watcher.stage(name, text, documents) as stage:
            yield stage


@dataclass(frozen=True, slots=True)
class PreparedQuestion:
    """A question before the generator runs.

    ``spent`` are the tokens that a server read and wrote about passages.
    """

    run: RequestContext
    prompt: CachedPrompt
    request: GenerationRequest
    info: MitigationInfo
    warnings: tuple[str, ...]
    spent: Usage
    tools: BoundTools | None = None

    @property
    def needs_passage(self) -> bool:
        """Whether the model needs a passage: not for a call that must be made, nor where tools have answered."""
        use = self.run.question.tools
        return self.tools is None or use is None or (self.tools.schema is None and not use.turns)

    def with_calls(self, answer: Answer) -> Answer:
        """Return the answer with the calls of tools in its text; quotes of a text next to calls are no citations."""
        use = self.run.question.tools
        if self.tools is None or use is None:
            return answer
        text, calls = self.tools.read(answer.text)
        if not calls:
            return answer
        calls = calls if use.parallel else calls[:1]
        made = tuple(ToolCall(uuid.uuid4().hex[:9], name, arguments) for name, arguments in calls)
        return replace(answer, text=text, citations=(), tool_calls=made)
