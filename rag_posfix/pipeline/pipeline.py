"""The path of one question: retrieve, rerank, assemble, look up the answer cache, generate. Knows protocols only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rag_posfix.assembly.documents import content_key
from rag_posfix.assembly.orders.cache_aware import RecentPrompts
from rag_posfix.caching.answers.keys import AnswerKey, tenant_salt
from rag_posfix.contracts.answer import Answer, AnswerChunk, Question, collected_warnings
from rag_posfix.contracts.cache_salt import own_tags
from rag_posfix.contracts.generator import Generator, gives_scores, shown_model
from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.contracts.request import Chunk, GenerationRequest, MitigationChoice, MitigationInfo, Sampling
from rag_posfix.contracts.retrieval import Reranker, Retriever
from rag_posfix.errors import ConfigError, UnknownNameError, UnsupportedModelError
from rag_posfix.parameters import shown
from rag_posfix.pipeline.invalidation import invalidate
from rag_posfix.pipeline.protocols import (
    AnswerCache,
    DroppablePassages,
    PromptAssembler,
    PromptMemory,
    QuestionTrace,
    QuestionTracer,
    StageWatcher,
)
from rag_posfix.pipeline.rerank_step import best_of, score_in_place
from rag_posfix.pipeline.stored_answer import answer_from, readable, to_store
from rag_posfix.pipeline.watching import UNTRACED, watched_by
from rag_posfix.text import content_hash

if TYPE_CHECKING:
    from rag_posfix.assembly.assembler import Assembled

__all__ = ["Answer", "Defaults", "Pipeline", "Question"]


@dataclass(frozen=True, slots=True)
class Defaults:
    """Default values for questions.

    Attributes:
        mitigation: The mitigation and its parameters.
        order: Name of the order of the passages.
        k: Number of passages to retrieve.
        sampling: Sampling parameters.
        tenant: Part of every cache key, besides the tenant of the question.
        traced: Whether answers have citations by attention, which need the attention of four layers at each step and
            make decoding a few per cent slower.
    """

    mitigation: MitigationChoice = field(default_factory=lambda: MitigationChoice("default"))
    order: str = "relevance"
    k: int = 10
    sampling: Sampling = field(default_factory=Sampling)
    tenant: str = ""
    traced: bool = True


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Everything that is known about a question before the generator runs."""

    text: str
    assembled: Assembled
    request: GenerationRequest
    info: MitigationInfo
    key: str | None
    scope: str
    timings: dict[str, float]
    watcher: StageWatcher
    trace: QuestionTrace
    warnings: tuple[str, ...]


class Pipeline:
    """Answers questions from documents. Safe to share between threads.

    Args:
        generator: Generates answers to prompts.
        assembler: Makes prompts for ``generator``.
        retriever: Finds passages. Without a retriever, questions have documents or are answered without.
        reranker: Scores documents without a ``relevance_score``; with ``candidates``, chooses among those retrieved.
        passages: The passage KV store of ``generator``; closed with the pipeline.
        recent: The memory of recent prompts for the order ``cache_aware``; a new one if None.
        on_close: Called when the pipeline is closed, to close a generator that only this pipeline uses.
        candidates: Number of passages that are retrieved for the reranker, at least ``k``. With 0, the reranker does
            not score retrieved passages.
        embeddings: The embedding model of the index, for those who ask for vectors; questions do not use it.
        tracer: Traces every question, for example ``rag_posfix.telemetry.build.question_tracer()``; None traces none.
        indexes: Retrievers of further indexes by name, for questions that name one.
        choose_reranker: Returns the reranker that a question names; without it questions cannot name one.
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
        passages: DroppablePassages | None = None,
        recent: PromptMemory | None = None,
        on_close: Callable[[], None] | None = None,
        candidates: int = 0,
        embeddings: Embeddings | None = None,
        tracer: QuestionTracer | None = None,
        indexes: Mapping[str, Retriever] | None = None,
        choose_reranker: Callable[[MethodSpec], Reranker] | None = None,
    ) -> None:
        self.generator = generator
        self.retriever = retriever
        self.reranker = reranker
        self.cache = cache
        self.assembler = assembler
        self.defaults = defaults or Defaults()
        self.passages = passages
        self.recent = recent or RecentPrompts()
        self._on_close = on_close
        self.candidates = candidates
        self.embeddings = embeddings
        self.tracer = tracer or UNTRACED
        self.indexes = dict(indexes or {})
        self.choose_reranker = choose_reranker

    def with_generator(self, generator: Generator, cache: AnswerCache | None = None) -> Pipeline:
        """Return a pipeline with the same parts and another generator; this pipeline does not change.

        Args:
            generator: A generator with the same tokenizer and context window.
            cache: An answer cache in place of this pipeline's, if it has one.
        """
        return self._with(generator=generator, cache=self.cache if cache is None else cache)

    def with_retriever(self, retriever: Retriever) -> Pipeline:
        """Return a pipeline with the same parts and another retriever; this pipeline does not change.

        Args:
            retriever: Finds the passages of questions without documents.
        """
        return self._with(retriever=retriever)

    def with_tracer(self, tracer: QuestionTracer) -> Pipeline:
        """Return a pipeline with the same parts whose questions are traced; this pipeline does not change."""
        return self._with(tracer=tracer)

    def with_tenant(self, tenant: str) -> Pipeline:
        """Return a pipeline with the same parts whose cache entries are the tenant's; this pipeline does not change.

        Args:
            tenant: Separates the entries, together with the tenant of this pipeline's defaults.
        """
        return self._with(defaults=replace(self.defaults, tenant=tenant_salt(self.defaults.tenant, tenant)))

    def _with(self, **changed: Any) -> Pipeline:
        parts: dict[str, Any] = {
            "generator": self.generator,
            "assembler": self.assembler,
            "retriever": self.retriever,
            "reranker": self.reranker,
            "cache": self.cache,
            "defaults": self.defaults,
            "passages": self.passages,
            "recent": self.recent,
            "on_close": self._on_close,
            "candidates": self.candidates,
            "embeddings": self.embeddings,
            "tracer": self.tracer,
            "indexes": self.indexes,
            "choose_reranker": self.choose_reranker,
        }
        return Pipeline(**(parts | changed))

    def close(self) -> None:
        """Close the caches and end the processes of a split model. Later questions are answered without caches."""
        for kept in (self.cache, self.passages):
            if kept is not None:
                kept.close()
        if self._on_close is not None:
            self._on_close()

    def invalidate(self, documents: Sequence[Document], tenant: str = "") -> None:
        """Drop the cached answers, keys and values of documents that were removed.

        Other processes hold their copies in memory until these expire or are evicted.

        Args:
            tenant: Drops the entries of ``with_tenant(tenant)`` alone, so that no other tenant notices; those of all
                tenants if empty.
        """
        if tenant:
            salt = tenant_salt(tenant_salt(self.defaults.tenant, tenant), "")
            invalidate(documents, self.cache, self.passages, salt)
            return
        invalidate(documents, self.cache, self.passages)
        self.recent.drop([content_key(document) for document in documents])

    def ask(self, question: Question | str, watcher: StageWatcher | None = None) -> Answer:
        """Return the answer. Equal concurrent questions are computed once.

        Raises:
            RagPosfixError: the question, its parameters or its documents are wrong, or generation failed. A failing
                cache never raises.
        """
        asked = Question(question) if isinstance(question, str) else question
        with self.tracer.question(asked, self.generator.model_id, stream=False) as trace:
            return self._answer(self._prepare(asked, watcher, trace))

    def _answer(self, prepared: _Prepared) -> Answer:
        cache, key = self.cache, prepared.key
        stored = self._look_up(prepared)
        if stored is not None:  # waits for nobody
            return self._finish(prepared, stored, cached=True)
        with cache.single_flight(key) if cache is not None and key is not None else nullcontext() as again:
            stored = self._look_up(prepared) if again else None
            if stored is not None:
                return self._finish(prepared, stored, cached=True)
            self.recent.add(prepared.scope, prepared.assembled.layout.keys)
            with prepared.watcher.stage("generator", prepared.text) as stage:
                generation = self.generator.generate(prepared.request)
                stage.done(generation)
            prepared.timings.update(generation.timings)
            return self._keep(prepared, to_store(prepared.assembled, generation))

    def stream(self, question: Question | str, watcher: StageWatcher | None = None) -> Iterator[AnswerChunk]:
        """Yield the answer in pieces; the last chunk has the complete answer.

        Wrong input raises in this call, before the first piece is requested. A cached answer is one piece. Closing the
        iterator stops the computation.
        """
        asked = Question(question) if isinstance(question, str) else question
        with ExitStack() as opened:
            trace = opened.enter_context(self.tracer.question(asked, self.generator.model_id, stream=True))
            prepared = self._prepare(asked, watcher, trace)
            stored = self._look_up(prepared)
            if stored is not None:
                answer = self._finish(prepared, stored, cached=True)
                return iter([AnswerChunk(answer.text, answer, answer.log_probs)])
            self.recent.add(prepared.scope, prepared.assembled.layout.keys)
            return self._stream(prepared, self.generator.stream(prepared.request), opened.pop_all())

    def _stream(self, prepared: _Prepared, chunks: Iterator[Chunk], opened: ExitStack) -> Iterator[AnswerChunk]:
        with opened, prepared.watcher.stage("generator", prepared.text) as stage:
            for chunk in chunks:
                if chunk.text:
                    stage.piece(chunk.text)
                if chunk.generation is None:
                    yield AnswerChunk(chunk.text, log_probs=chunk.log_probs)
                    continue
                stage.done(chunk.generation)
                prepared.timings.update(chunk.generation.timings)
                stored = to_store(prepared.assembled, chunk.generation)
                yield AnswerChunk(chunk.text, self._keep(prepared, stored), chunk.log_probs)

    def _prepare(self, asked: Question, watcher: StageWatcher | None, trace: QuestionTrace) -> _Prepared:
        watcher = watched_by(trace, watcher)
        if not asked.text.strip():
            raise ConfigError("the question is empty; ask something")
        mitigation = asked.mitigation or self.defaults.mitigation
        sampling = asked.sampling or self.defaults.sampling
        order = asked.order or self.defaults.order
        if sampling.top_logprobs is not None and not gives_scores(self.generator):
            raise UnsupportedModelError(
                f"{shown_model(self.generator.model_id)} returns no log-probabilities here; ask without logprobs"
            )
        info = self.generator.describe(mitigation)
        timings: dict[str, float] = {}
        salt = tenant_salt(self.defaults.tenant, asked.tenant)
        with collected_warnings() as warnings:
            documents = self._documents(asked, timings, watcher, salt)
        scope = content_hash(salt, info.fingerprint, _words(asked))
        with _timed(timings, "assemble"), trace.stage("assembler", asked.text) as stage:
            assembled = self.assembler.assemble(
                asked.text,
                documents,
                order=order,
                seed=asked.seed,
                max_new_tokens=sampling.max_tokens,
                history=asked.history,
                recent=self.recent.recent(scope),
                order_free=info.order_invariant,
            )
            stage.done(assembled.documents)
        key = None
        if self.cache is not None and asked.use_cache and sampling.deterministic:
            key = self._key(asked, assembled, info, sampling)
        request = GenerationRequest(assembled.layout, mitigation, sampling, salt, self.defaults.traced)
        return _Prepared(asked.text, assembled, request, info, key, scope, timings, watcher, trace, tuple(warnings))

    def _documents(
        self, asked: Question, timings: dict[str, float], watcher: StageWatcher, salt: str
    ) -> Sequence[Document]:
        retriever, reranker = self._retriever_of(asked), self._reranker_of(asked)
        if asked.documents is None:
            return self._retrieved(asked, retriever, reranker, timings, watcher, salt)
        documents = list(asked.documents)
        if not all(isinstance(d, Document) for d in documents):
            return documents  # assembly says which one is not
        return self._scored(asked, documents, reranker, timings, watcher, salt)

    def _retriever_of(self, asked: Question) -> Retriever | None:
        if asked.index is None:
            return self.retriever
        if asked.index not in self.indexes:
            raise UnknownNameError(
                f"unknown index {shown(asked.index)}. Available: {', '.join(sorted(self.indexes)) or 'none'}; without "
                "a name the default one is used"
            )
        return self.indexes[asked.index]

    def _reranker_of(self, asked: Question) -> Reranker | None:
        if asked.reranker is None:
            return self.reranker
        if self.choose_reranker is None:
            raise ConfigError(
                f"the reranker {shown(asked.reranker.name)} cannot be chosen here; leave it to the pipeline"
            )
        return self.choose_reranker(asked.reranker)

    def _scored(
        self,
        asked: Question,
        documents: Sequence[Document],
        reranker: Reranker | None,
        timings: dict[str, float],
        watcher: StageWatcher,
        salt: str,
    ) -> Sequence[Document]:
        """Return the documents in the given order, scored if one of them has no score or the question says by what."""
        scored = asked.reranker is None and all("relevance_score" in d.metadata for d in documents)
        if reranker is None or scored:
            return documents
        with _timed(timings, "rerank"), watcher.stage("reranker", asked.text, documents) as stage:
            ranked = score_in_place(reranker, asked.text, documents, salt)
            stage.done(ranked)
        return ranked

    def _retrieved(
        self,
        asked: Question,
        retriever: Retriever | None,
        reranker: Reranker | None,
        timings: dict[str, float],
        watcher: StageWatcher,
        salt: str,
    ) -> Sequence[Document]:
        if retriever is None:
            return ()
        k = self.defaults.k if asked.k is None else asked.k
        with _timed(timings, "retrieve"), watcher.stage("retriever", asked.text) as stage:
            found = retriever.retrieve(asked.text, max(k, self.candidates))
            stage.done(found)
        if reranker is None or not self.candidates:
            return self._scored(asked, found, reranker, timings, watcher, salt)
        with _timed(timings, "rerank"), watcher.stage("reranker", asked.text, found) as stage:
            best = best_of(reranker, asked.text, found, k, salt)
            stage.done(best)
        return best

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
            history=_words(asked),
            documents=passages,
            order_invariant=info.order_invariant,
            tenant=tenant_salt(self.defaults.tenant, asked.tenant),
        ).digest()

    def _look_up(self, prepared: _Prepared) -> Mapping[str, Any] | None:
        if self.cache is None or prepared.key is None:
            return None
        with _timed(prepared.timings, "cache"):
            stored = self.cache.get(prepared.key)
        return stored if stored is not None and readable(stored) else None

    def _keep(self, prepared: _Prepared, stored: Mapping[str, Any]) -> Answer:
        if self.cache is not None and prepared.key is not None:
            with _timed(prepared.timings, "cache"):
                ids = prepared.assembled.ids
                self.cache.put(prepared.key, stored, (*ids, *own_tags(prepared.request.salt, ids)))
        return self._finish(prepared, stored, cached=False)

    def _finish(self, prepared: _Prepared, stored: Mapping[str, Any], *, cached: bool) -> Answer:
        answer = answer_from(stored, prepared.assembled, prepared.info.name, prepared.timings, cached=cached)
        answer = replace(answer, warnings=prepared.warnings)
        prepared.trace.answered(answer)
        return answer


def _words(asked: Question) -> str:
    """Return the conversation so far as text that is different for different conversations."""
    return repr([(m.get("role"), m.get("content")) for m in asked.history])


@contextmanager
def _timed(timings: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        timings[stage] = timings.get(stage, 0.0) + time.perf_counter() - started
