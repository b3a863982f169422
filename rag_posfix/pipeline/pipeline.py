"""The path of one question: retrieve, rerank, assemble, look up the answer cache, generate. Knows no concrete part."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rag_posfix.assembly.assembler import Assembled, Assembler
from rag_posfix.assembly.documents import content_key
from rag_posfix.assembly.orders.cache_aware import RecentPrompts
from rag_posfix.caching.answers.keys import AnswerKey, tenant_salt
from rag_posfix.contracts.answer import Answer, AnswerChunk, Question, collected_warnings
from rag_posfix.contracts.cache_salt import own_tags, salted
from rag_posfix.contracts.generator import Generator, gives_scores, shown_model
from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.contracts.request import Chunk, GenerationRequest, MitigationChoice, MitigationInfo, Sampling
from rag_posfix.contracts.retrieval import Reranker, Retriever, rerank_indexed
from rag_posfix.errors import ConfigError, UnknownNameError, UnsupportedModelError
from rag_posfix.parameters import accept_old_names, shown
from rag_posfix.pipeline.stored_answer import answer_from, readable, to_store
from rag_posfix.pipeline.stores import AnswerCache, PassageKVStore, invalidate
from rag_posfix.pipeline.tracing import UNTRACED, QuestionTrace, QuestionTracer, Stage, StageWatcher, watched_by
from rag_posfix.text import content_hash

__all__ = ["Answer", "Defaults", "Pipeline", "Question"]


@accept_old_names
@dataclass(frozen=True, slots=True)
class Defaults:
    """Default values for questions.

    Attributes:
        mitigation: The mitigation and its parameters.
        order: Name of the order of the passages.
        k: Number of passages to retrieve.
        sampling: Sampling parameters.
        tenant: Part of every cache key, besides the tenant of the question.
        attribution: Whether answers have citations by attention, which need the attention of four layers at each step
            and make decoding a few per cent slower.
    """

    mitigation: MitigationChoice = field(default_factory=lambda: MitigationChoice("default"))
    order: str = "relevance"
    k: int = 10
    sampling: Sampling = field(default_factory=Sampling)
    tenant: str = ""
    attribution: bool = True
    renamed: ClassVar[Mapping[str, str]] = MappingProxyType({"traced": "attribution"})


@dataclass(frozen=True, slots=True)
class _Run:
    """One question on its way through the stages; ``timings`` are seconds by stage."""

    question: Question
    salt: str
    trace: QuestionTrace
    watcher: StageWatcher
    timings: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - started

    @contextmanager
    def stage(self, timing: str, name: str, documents: Sequence[Document] = ()) -> Iterator[Stage]:
        watcher = self.trace if name == "assembler" else self.watcher
        with self.timed(timing), watcher.stage(name, self.question.text, documents) as stage:
            yield stage


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A question before the generator runs. ``key`` is None if the answer is not cached."""

    run: _Run
    assembled: Assembled
    request: GenerationRequest
    info: MitigationInfo
    key: str | None
    scope: str
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
        assembler: Assembler,
        *,
        retriever: Retriever | None = None,
        reranker: Reranker | None = None,
        cache: AnswerCache | None = None,
        defaults: Defaults | None = None,
        passages: PassageKVStore | None = None,
        recent: RecentPrompts | None = None,
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
        """Return a pipeline with the same parts and another retriever; this pipeline does not change."""
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

    def _with(self, **changes: Any) -> Pipeline:
        pipeline = copy.copy(self)
        vars(pipeline).update(changes)
        return pipeline

    def close(self) -> None:
        """Close the caches and end the processes of a split model. Later questions are answered without caches."""
        for store in (self.cache, self.passages):
            if store is not None:
                store.close()
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
        question = Question(question) if isinstance(question, str) else question
        with self.tracer.question(question, self.generator.model_id, stream=False) as trace:
            return self._answer(self._prepare(question, watcher, trace))

    def _answer(self, prepared: _Prepared) -> Answer:
        cache, key, run = self.cache, prepared.key, prepared.run
        stored = self._look_up(prepared)
        if stored is not None:  # without waiting for an equal question
            return self._finish(prepared, stored, cached=True)
        with cache.single_flight(key) if cache is not None and key is not None else nullcontext() as again:
            stored = self._look_up(prepared) if again else None
            if stored is not None:
                return self._finish(prepared, stored, cached=True)
            self.recent.add(prepared.scope, prepared.assembled.layout.keys)
            with run.watcher.stage("generator", run.question.text) as stage:
                generation = self.generator.generate(prepared.request)
                stage.done(generation)
            run.timings.update(generation.timings)
            return self._store(prepared, to_store(prepared.assembled, generation))

    def stream(self, question: Question | str, watcher: StageWatcher | None = None) -> Iterator[AnswerChunk]:
        """Yield the answer in pieces; the last chunk has the complete answer.

        Wrong input raises in this call, before the first piece is requested. A cached answer is one piece. Closing the
        iterator stops the computation.
        """
        question = Question(question) if isinstance(question, str) else question
        with ExitStack() as stack:
            trace = stack.enter_context(self.tracer.question(question, self.generator.model_id, stream=True))
            prepared = self._prepare(question, watcher, trace)
            stored = self._look_up(prepared)
            if stored is not None:
                answer = self._finish(prepared, stored, cached=True)
                return iter([AnswerChunk(answer.text, answer, answer.log_probs)])
            self.recent.add(prepared.scope, prepared.assembled.layout.keys)
            return self._stream(prepared, self.generator.stream(prepared.request), stack.pop_all())

    def _stream(self, prepared: _Prepared, chunks: Iterator[Chunk], stack: ExitStack) -> Iterator[AnswerChunk]:
        run = prepared.run
        with stack, run.watcher.stage("generator", run.question.text) as stage:
            for chunk in chunks:
                if chunk.text:
                    stage.piece(chunk.text)
                if chunk.generation is None:
                    yield AnswerChunk(chunk.text, log_probs=chunk.log_probs)
                    continue
                stage.done(chunk.generation)
                run.timings.update(chunk.generation.timings)
                stored = to_store(prepared.assembled, chunk.generation)
                yield AnswerChunk(chunk.text, self._store(prepared, stored), chunk.log_probs)

    def _prepare(self, question: Question, watcher: StageWatcher | None, trace: QuestionTrace) -> _Prepared:
        if not question.text.strip():
            raise ConfigError("the question is empty; ask something")
        mitigation = question.mitigation or self.defaults.mitigation
        sampling = question.sampling or self.defaults.sampling
        if sampling.top_logprobs is not None and not gives_scores(self.generator):
            raise UnsupportedModelError(
                f"{shown_model(self.generator.model_id)} returns no log-probabilities here; ask without logprobs"
            )
        info = self.generator.describe(mitigation)
        salt = tenant_salt(self.defaults.tenant, question.tenant)
        run = _Run(question, salt, trace, watched_by(trace, watcher))
        with collected_warnings() as warnings:
            documents = self._documents(run)
        scope = content_hash(salt, info.fingerprint, _conversation_text(question))
        with run.stage("assemble", "assembler") as stage:
            assembled = self.assembler.assemble(
                question.text,
                documents,
                order=question.order or self.defaults.order,
                seed=question.seed,
                max_new_tokens=sampling.max_tokens,
                history=question.history,
                recent=self.recent.recent(scope),
                order_free=info.order_invariant,
            )
            stage.done(assembled.documents)
        key = None
        if self.cache is not None and question.use_cache and sampling.deterministic:
            key = self._key(run, assembled, info, sampling)
        request = GenerationRequest(assembled.layout, mitigation, sampling, salt, self.defaults.attribution)
        return _Prepared(run, assembled, request, info, key, scope, tuple(warnings))

    def _documents(self, run: _Run) -> Sequence[Document]:
        """Return the documents of the question, or those retrieved for it; scored or chosen by the reranker."""
        question = run.question
        retriever, reranker = self._retriever_of(question), self._reranker_of(question)
        k = self.defaults.k if question.k is None else question.k
        if question.documents is not None:
            documents = list(question.documents)
            if not all(isinstance(document, Document) for document in documents):
                return documents  # assembly says which one is not
        elif retriever is None:
            return ()
        else:
            with run.stage("retrieve", "retriever") as stage:
                documents = retriever.retrieve(question.text, max(k, self.candidates))
                stage.done(documents)
        chooses = question.documents is None and self.candidates > 0
        scored = question.reranker is None and all("relevance_score" in document.metadata for document in documents)
        if reranker is None or (scored and not chooses):
            return documents
        with run.stage("rerank", "reranker", documents) as stage, salted(run.salt):
            if chooses:  # the first k if the reranker kept the given order
                ranked = list(reranker.compress_documents(documents, question.text))[:k]
            else:  # in the given order: the order of the prompt is chosen later
                entries = sorted(rerank_indexed(reranker, question.text, documents), key=lambda entry: entry.index)
                ranked = [entry.document for entry in entries]
            stage.done(ranked)
        return ranked

    def _retriever_of(self, question: Question) -> Retriever | None:
        if question.index is None:
            return self.retriever
        if question.index not in self.indexes:
            raise UnknownNameError(
                f"unknown index {shown(question.index)}. Available: {', '.join(sorted(self.indexes)) or 'none'}; "
                "without a name the default one is used"
            )
        return self.indexes[question.index]

    def _reranker_of(self, question: Question) -> Reranker | None:
        if question.reranker is None:
            return self.reranker
        if self.choose_reranker is None:
            raise ConfigError(
                f"the reranker {shown(question.reranker.name)} cannot be chosen here; leave it to the pipeline"
            )
        return self.choose_reranker(question.reranker)

    def _key(self, run: _Run, assembled: Assembled, info: MitigationInfo, sampling: Sampling) -> str:
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
            question=run.question.text,
            history=_conversation_text(run.question),
            documents=passages,
            order_invariant=info.order_invariant,
            tenant=run.salt,
        ).digest()

    def _look_up(self, prepared: _Prepared) -> Mapping[str, Any] | None:
        if self.cache is None or prepared.key is None:
            return None
        with prepared.run.timed("cache"):
            stored = self.cache.get(prepared.key)
        return stored if stored is not None and readable(stored) else None

    def _store(self, prepared: _Prepared, stored: Mapping[str, Any]) -> Answer:
        if self.cache is not None and prepared.key is not None:
            with prepared.run.timed("cache"):
                ids = prepared.assembled.ids
                self.cache.put(prepared.key, stored, (*ids, *own_tags(prepared.run.salt, ids)))
        return self._finish(prepared, stored, cached=False)

    def _finish(self, prepared: _Prepared, stored: Mapping[str, Any], *, cached: bool) -> Answer:
        answer = answer_from(stored, prepared.assembled, prepared.info.name, prepared.run.timings, cached=cached)
        answer = replace(answer, warnings=prepared.warnings)
        prepared.run.trace.answered(answer)
        return answer


def _conversation_text(question: Question) -> str:
    """Return the conversation so far as text that is different for different conversations."""
    return repr([(message.get("role"), message.get("content")) for message in question.history])
