"""The path of one question: retrieve, rerank, assemble, look in the cache, generate. Knows protocols only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document

from rag_posfix.answer import Answer, AnswerChunk, AnswerDocument, Citation, Question
from rag_posfix.assembly.documents import content_key, document_id
from rag_posfix.caching.keys import AnswerKey, tenant_salt
from rag_posfix.citations import find_quotes
from rag_posfix.errors import ConfigError
from rag_posfix.generation.request import Chunk, GenerationRequest, MitigationChoice, MitigationInfo, Sampling, Usage
from rag_posfix.protocols import AnswerCache, Generator, PassageKeeper, PromptAssembler, Reranker, Retriever
from rag_posfix.rescoring import best_of, score_in_place
from rag_posfix.text import clean_text, content_hash

if TYPE_CHECKING:
    from rag_posfix.assembly.assembler import Assembled

__all__ = ["Answer", "Defaults", "Pipeline", "Question"]


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a question that does not say gets.

    Attributes:
        mitigation: The mitigation and its parameters.
        order: Name of the order of the passages.
        k: Passages to retrieve.
        sampling: How tokens are chosen.
        tenant: Salt of the cache key, joined with the question's own.
    """

    mitigation: MitigationChoice = field(default_factory=lambda: MitigationChoice("context_experts"))
    order: str = "relevance"
    k: int = 10
    sampling: Sampling = field(default_factory=Sampling)
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A question on its way: everything that is known before the generator runs."""

    assembled: Assembled
    request: GenerationRequest
    info: MitigationInfo
    key: str | None
    timings: dict[str, float]


class Pipeline:
    """Answers questions from documents. Safe to share between threads.

    Args:
        generator: Answers prompts.
        assembler: Makes prompts for ``generator``.
        retriever: Finds passages; without one, questions bring their documents or are answered without.
        reranker: Scores documents that come without a ``relevance_score``; with ``candidates``, those that are
            retrieved too.
        cache: Keeps answers.
        defaults: What a question that does not say gets.
        passages: Keeps keys and values for ``generator``; closed with the pipeline.
        on_close: Called when the pipeline is closed; for a generator that belongs to nobody else.
        candidates: How many passages are retrieved for the reranker to choose from, at least as many as are asked
            for. 0: passages keep the scores that the retriever gave them.
    """

    def __init__(
        self,
        generator: Generator,
        assembler: PromptAssembler,
        *,
        retriever: Retriever | None = None,
        reranker: Reranker | None = None,
        cache: AnswerCache | None = None,
        defaults: Defaults | None = None,
        passages: PassageKeeper | None = None,
        on_close: Callable[[], None] | None = None,
        candidates: int = 0,
    ) -> None:
        self.generator = generator
        self.retriever = retriever
        self.reranker = reranker
        self.cache = cache
        self.assembler = assembler
        self.defaults = defaults or Defaults()
        self.passages = passages
        self._on_close = on_close
        self.candidates = candidates

    def close(self) -> None:
        """Close the caches; later questions are answered without them. Ends the processes of a model that is split."""
        for kept in (self.cache, self.passages):
            if kept is not None:
                kept.close()
        if self._on_close is not None:
            self._on_close()

    def forget(self, documents: Sequence[Document]) -> None:
        """Drop what was kept of documents that are gone: answers made from them, and their keys and values.

        Memory of other processes keeps its copies until they expire or are evicted.
        """
        if self.cache is not None:
            self.cache.drop_documents([document_id(document) for document in documents])
        if self.passages is not None:
            self.passages.drop([content_key(document) for document in documents])

    def ask(self, question: Question | str) -> Answer:
        """Return the answer. Equal questions at the same time compute once.

        Raises:
            RagPosfixError: the question, its parameters or its documents are at fault, or generation failed. A
                failing cache never raises.
        """
        prepared = self._prepare(question)
        cache, key = self.cache, prepared.key
        with cache.single_flight(key) if cache is not None and key is not None else nullcontext():
            stored = self._look_up(prepared)
            if stored is not None:
                return self._finish(prepared, stored, cached=True)
            generation = self.generator.generate(prepared.request)
            prepared.timings.update(generation.timings)
            return self._keep(prepared, _to_store(prepared, generation))

    def stream(self, question: Question | str) -> Iterator[AnswerChunk]:
        """Yield the answer piece by piece; the last chunk carries the whole answer.

        Bad input raises here, before the first piece is asked for. A stored answer comes as one piece. Closing the
        iterator stops the computation.
        """
        prepared = self._prepare(question)
        stored = self._look_up(prepared)
        if stored is not None:
            return iter([AnswerChunk(stored["text"], self._finish(prepared, stored, cached=True))])
        return self._stream(prepared, self.generator.stream(prepared.request))

    def _stream(self, prepared: _Prepared, chunks: Iterator[Chunk]) -> Iterator[AnswerChunk]:
        for chunk in chunks:
            if chunk.generation is None:
                yield AnswerChunk(chunk.text)
                continue
            prepared.timings.update(chunk.generation.timings)
            yield AnswerChunk(chunk.text, self._keep(prepared, _to_store(prepared, chunk.generation)))

    def _prepare(self, question: Question | str) -> _Prepared:
        asked = Question(question) if isinstance(question, str) else question
        if not asked.text.strip():
            raise ConfigError("the question is empty; ask something")
        mitigation = asked.mitigation or self.defaults.mitigation
        sampling = asked.sampling or self.defaults.sampling
        order = asked.order or self.defaults.order
        info = self.generator.describe(mitigation)
        timings: dict[str, float] = {}
        documents = self._documents(asked, timings)
        with _timed(timings, "assemble"):
            assembled = self.assembler.assemble(
                asked.text,
                documents,
                order=order,
                seed=asked.seed,
                max_new_tokens=sampling.max_tokens,
                history=asked.history,
            )
        key = None
        if self.cache is not None and asked.use_cache and sampling.deterministic:
            key = self._key(asked, assembled, info, sampling)
        salt = tenant_salt(self.defaults.tenant, asked.tenant)
        request = GenerationRequest(assembled.layout, mitigation, sampling, salt)
        return _Prepared(assembled, request, info, key, timings)

    def _documents(self, asked: Question, timings: dict[str, float]) -> Sequence[Document]:
        salt = tenant_salt(self.defaults.tenant, asked.tenant)
        if asked.documents is None:
            return self._retrieved(asked, timings, salt)
        documents = list(asked.documents)
        if not all(isinstance(d, Document) for d in documents):
            return documents  # assembly says which one is not
        if self.reranker is None or all("relevance_score" in d.metadata for d in documents):
            return documents
        with _timed(timings, "rerank"):
            return score_in_place(self.reranker, asked.text, documents, salt)

    def _retrieved(self, asked: Question, timings: dict[str, float], salt: str) -> Sequence[Document]:
        if self.retriever is None:
            return ()
        k = self.defaults.k if asked.k is None else asked.k
        with _timed(timings, "retrieve"):
            found = self.retriever.retrieve(asked.text, max(k, self.candidates))
        if self.reranker is None or not self.candidates:
            return found
        with _timed(timings, "rerank"):
            return best_of(self.reranker, asked.text, found, k, salt)

    def _key(self, asked: Question, assembled: Assembled, info: MitigationInfo, sampling: Sampling) -> str:
        layout = assembled.layout
        relevance = layout.relevance or (None,) * layout.n_passages
        passages = tuple(
            content_hash(str(layout.tokens(span)), repr(score))
            for span, score in zip(layout.passages, relevance, strict=True)
        )
        return AnswerKey(
            model=self.generator.fingerprint,
            template=self.assembler.template.fingerprint(),
            # The tokens around the passages: chat template, instructions and the conversation so far.
            assembly=content_hash(str(layout.tokens(layout.prefix)), str(layout.tokens(layout.suffix))),
            mitigation=info.fingerprint,
            sampling=repr(sampling),
            question=asked.text,
            history=repr([(m.get("role"), m.get("content")) for m in asked.history]),
            documents=passages,
            order_invariant=info.order_invariant,
            tenant=tenant_salt(self.defaults.tenant, asked.tenant),
        ).digest()

    def _look_up(self, prepared: _Prepared) -> Mapping[str, Any] | None:
        if self.cache is None or prepared.key is None:
            return None
        with _timed(prepared.timings, "cache"):
            stored = self.cache.get(prepared.key)
        return stored if stored is not None and _readable(stored) else None

    def _keep(self, prepared: _Prepared, stored: Mapping[str, Any]) -> Answer:
        if self.cache is not None and prepared.key is not None:
            with _timed(prepared.timings, "cache"):
                self.cache.put(prepared.key, stored, prepared.assembled.ids)
        return self._finish(prepared, stored, cached=False)

    def _finish(self, prepared: _Prepared, stored: Mapping[str, Any], *, cached: bool) -> Answer:
        """Return the answer for the documents as *this* question brought them: order and ids may differ."""
        assembled, layout = prepared.assembled, prepared.assembled.layout
        relevance = layout.relevance or (None,) * layout.n_passages
        attention = stored["attention"]
        documents = tuple(
            AnswerDocument(
                id=identity,
                score=score,
                position=position,
                attention=float(attention.get(key, 0.0)),
                title=_text_or_none(document.metadata.get("title")),
                source=_text_or_none(document.metadata.get("source")),
            )
            for position, (identity, score, key, document) in enumerate(
                zip(assembled.ids, relevance, layout.keys, assembled.documents, strict=True)
            )
        )
        text = stored["text"]
        quotes = find_quotes(text, [document.page_content for document in assembled.documents])
        return Answer(
            text=text,
            documents=documents,
            citations=tuple(
                Citation(q.start, q.end, text[q.start : q.end], tuple(assembled.ids[i] for i in q.passages))
                for q in quotes
            ),
            usage=Usage(
                prompt_tokens=stored["prompt_tokens"],
                completion_tokens=stored["completion_tokens"],
                cached_tokens=stored["prompt_tokens"] if cached else stored["cached_tokens"],
            ),
            cached=cached,
            mitigation=prepared.info.name,
            order=assembled.order,
            finish_reason=stored["finish_reason"],
            dropped=tuple((dropped.id, dropped.reason) for dropped in assembled.dropped),
            timings=dict(prepared.timings),
        )


def _to_store(prepared: _Prepared, generation: Any) -> dict[str, Any]:
    """Return what the cache keeps. Attention goes by content, because ids and order belong to one question only."""
    attention = generation.attention or (0.0,) * prepared.assembled.layout.n_passages
    return {
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": generation.usage.prompt_tokens,
        "completion_tokens": generation.usage.completion_tokens,
        "cached_tokens": generation.usage.cached_tokens,
        "attention": dict(zip(prepared.assembled.layout.keys, attention, strict=True)),
    }


def _readable(stored: Any) -> bool:
    """Return whether a stored answer has the fields and types of ``_to_store``; anything else is a miss."""
    numbers = ("prompt_tokens", "completion_tokens", "cached_tokens")
    return (
        isinstance(stored, Mapping)
        and isinstance(stored.get("text"), str)
        and stored.get("finish_reason") in ("stop", "length")
        and all(isinstance(stored.get(name), int) for name in numbers)
        and isinstance(stored.get("attention"), dict)
        and all(isinstance(share, int | float) for share in stored["attention"].values())
    )


def _text_or_none(value: object) -> str | None:
    return clean_text(value) if isinstance(value, str) and value else None


@contextmanager
def _timed(timings: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        timings[stage] = timings.get(stage, 0.0) + time.perf_counter() - started
