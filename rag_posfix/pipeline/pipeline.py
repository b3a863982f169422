"""The path of one question: retrieve, rerank, assemble, look up the answer cache, generate. Knows no concrete part."""

from __future__ import annotations

import copy
import math
from collections import abc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import chain
from types import GeneratorType
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.assembly.documents import content_key, document_id
from rag_posfix.assembly.orders.cache_aware import RecentPrompts
from rag_posfix.assembly.templates import read_template, resolve_tools
from rag_posfix.caching.answers.tiered import tenant_salt
from rag_posfix.checked import check_type, checked_list
from rag_posfix.contracts.answer import Answer, AnswerChunk, Question, as_question, collected_warnings, warn
from rag_posfix.contracts.generator import Generator, PassageKVStore, collected_usage, display_name, sum_usage
from rag_posfix.contracts.method_spec import MethodSpec, named_method
from rag_posfix.contracts.request import (
    Chunk,
    Generation,
    GenerationRequest,
    MitigationInfo,
    Sampling,
    Usage,
    salted,
    tenant_tags,
)
from rag_posfix.contracts.retrieval import (
    Reranker,
    Retriever,
    combine_filters,
    current_of,
    filter_key,
    parse_filter,
    rerank_indexed,
    retrieve_query,
)
from rag_posfix.errors import ConfigError, RetrievalError, UnknownNameError, UnsupportedModelError
from rag_posfix.parameters import shown
from rag_posfix.pipeline.batch import AskedInBatches
from rag_posfix.pipeline.defaults import Defaults, RelevanceTest, similarity_of
from rag_posfix.pipeline.disagreement import RIVAL_TOKENS, disagreement_warning, rival_answers
from rag_posfix.pipeline.headings import CopiedHeading, both_readings, read_again
from rag_posfix.pipeline.language import asks_for_list
from rag_posfix.pipeline.precompute import AnswerCache, invalidate
from rag_posfix.pipeline.preview import PromptPreview, preview_prompt
from rag_posfix.pipeline.pronouns import with_names
from rag_posfix.pipeline.query import checked_query, search_query
from rag_posfix.pipeline.run import CachedPrompt, PreparedQuestion, PromptCache, RequestContext, document_values
from rag_posfix.pipeline.second_step import SEARCHED, second_step, with_linked
from rag_posfix.pipeline.stored_answer import (
    StoredAnswer,
    answer_from,
    answer_key,
    conversation_text,
    no_passage_answer,
    readable,
    refusal_to_store,
    stored_odds,
    to_store,
)
from rag_posfix.pipeline.support import (
    UNSUPPORTED,
    SupportTest,
    asks_for_fact,
    is_refused,
    odds_of,
    of_passages,
    read_texts,
    refusal_warning,
    silenced_warning,
)
from rag_posfix.pipeline.tracing import NOOP_TRACER, QuestionTrace, QuestionTracer, StageWatcher, combine_watchers
from rag_posfix.pipeline.versions import leave_out_older
from rag_posfix.pipeline.word_test import WordTest, failure_warning
from rag_posfix.text import NO_PASSAGE_TEXT, content_hash

__all__ = ["Answer", "Defaults", "Pipeline", "Question"]


UNKNOWN_END = "the server ended the answer for a reason that is not known: it may be incomplete, and is not cached"


class Pipeline(AskedInBatches):
    """Answers questions from documents. Safe to share between threads.

    Args:
        generator: Generates answers to prompts.
        assembler: Makes prompts for ``generator``.
        retriever: Finds passages. Without a retriever, questions have documents or are asked without a passage.
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
        writer: Writes the query of a follow-up with ``query="rewrite"``; ``generator`` if None.
        relevance: Leaves out retrieved passages that are not about the question; without a judge by similarity alone.
        support: Judges whether passages answer the question; without it ``Answer.support`` says what words can.
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
        writer: Generator | None = None,
        relevance: RelevanceTest | None = None,
        support: SupportTest | None = None,
    ) -> None:
        self.generator, self.retriever = generator, retriever
        self.reranker = reranker
        self.cache = cache
        self.assembler = assembler
        self.defaults = defaults or Defaults()
        self.passages = passages
        self.recent = recent or RecentPrompts()
        self._memory = PromptCache()
        self._on_close = on_close
        self.candidates = candidates
        self.embeddings = embeddings
        self.tracer = tracer or NOOP_TRACER
        self.indexes = dict(indexes or {})
        self.choose_reranker = choose_reranker
        self.writer = writer
        self.relevance = relevance or RelevanceTest()
        self.support = support or SupportTest()

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

    def with_template(self, template: object) -> Pipeline:
        """Return a pipeline with the same parts and another prompt template; this pipeline does not change.

        Args:
            template: A ``PromptTemplate``, or any other form that ``build_pipeline`` takes.
        """
        assembler = self.assembler.with_template(read_template(template))
        return self._with(assembler=assembler, defaults=replace(self.defaults, templates={}))

    def with_tracer(self, tracer: QuestionTracer) -> Pipeline:
        """Return a pipeline with the same parts whose questions are traced; this pipeline does not change."""
        return self._with(tracer=tracer)

    def with_tenant(self, tenant: str) -> Pipeline:
        """Return a pipeline with the same parts whose cache entries are the tenant's; this pipeline does not change.

        Args:
            tenant: Separates the entries, together with the tenant of this pipeline's defaults.
        """
        return self._with(defaults=replace(self.defaults, tenant=tenant_salt(self.defaults.tenant, tenant)))

    def with_filter(self, metadata_filter: Mapping[str, Any]) -> Pipeline:
        """Return a pipeline with the same parts that retrieves matching passages alone; this pipeline does not change.

        Args:
            metadata_filter: Joined with the filter of the defaults and with that of each question.

        Raises:
            ConfigError: it is no filter.
        """
        parse_filter(metadata_filter)
        combined = combine_filters(self.defaults.filter, metadata_filter)
        return self._with(defaults=replace(self.defaults, filter=combined))

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

    @property
    def pending_deletions(self) -> int:
        """Deleted documents whose cached answers other processes may still have; 0 once they were told."""
        return int(getattr(self.cache, "pending_deletions", 0))

    def invalidate(self, documents: Sequence[Document], tenant: str = "") -> None:
        """Drop the cached answers, keys and values of documents that were removed.

        Processes that share a Redis drop their copies too; ``pending_deletions`` says whether all have. Without Redis,
        other processes hold copies in memory until these expire or are evicted.

        Args:
            tenant: Drops the entries of ``with_tenant(tenant)`` alone, unnoticed by others; all entries if empty.
        """
        documents = checked_list("documents", documents, Document, "Document")
        check_type("tenant", tenant, str, "a text")
        self._memory.drop([document.page_content for document in documents])
        if tenant:
            salt = tenant_salt(tenant_salt(self.defaults.tenant, tenant), "")
            invalidate(documents, self.cache, self.passages, salt)
            return
        invalidate(documents, self.cache, self.passages)
        self.recent.drop([content_key(document) for document in documents])

    def ask(
        self,
        question: Question | str,
        documents: Sequence[Document] | None = None,
        *,
        watcher: StageWatcher | None = None,
    ) -> Answer:
        """Return the answer. Equal concurrent questions are computed once.

        Without a passage the model is not asked, unless the question or the defaults have ``allow_ungrounded``: the
        answer is ``defaults.no_passage_text``.

        Args:
            documents: The passages to answer from, if ``question`` is a text; None retrieves passages.

        Raises:
            RagPosfixError: the question, its parameters or its documents are wrong, or generation failed. A failing
                cache never raises.
        """
        question = as_question(question, documents)
        with self.tracer.question(question, self.generator.model_id, stream=False) as trace:
            return self._answer(self._prepare(question, watcher, trace))

    def preview(self, question: Question | str) -> PromptPreview:
        """Return what the model would read, without generating. Errors as those of ``ask``."""
        prepared, generator = self._prepare(as_question(question), None, NOOP_TRACER), self.generator
        cached = generator.cached_segments(prepared.request)
        return preview_prompt(
            prepared.prompt.assembled, generator.encoder, cached, prepared.info.name, prepared.run.left_out,
            answer_cached=self._look_up(prepared) is not None, warnings=prepared.warnings,
        )  # fmt: skip

    def find_passages(self, question: Question | str) -> tuple[Document, ...]:
        """Return the passages that the model would read, in the order of the prompt, without generating."""
        return self._prepare(as_question(question), None, NOOP_TRACER).prompt.assembled.copied_documents()

    def _answer(self, prepared: PreparedQuestion) -> Answer:
        cache, key, run = self.cache, prepared.prompt.key, prepared.run
        if self._lacks_passage(prepared):
            return self._finish_without_passage(prepared)
        stored = self._look_up(prepared)
        if stored is not None:  # without waiting for an equal question
            return self._finish(prepared, stored, cached=True)
        with cache.single_flight(key) if cache is not None and key is not None else nullcontext() as again:
            stored = self._look_up(prepared) if again else None
            if stored is not None:
                return self._finish(prepared, stored, cached=True)
            self.recent.add(prepared.prompt.scope, prepared.prompt.assembled.layout.keys)
            odds = self.support.odds(run, prepared.prompt.assembled)
            if self._is_refused(prepared, of_passages(odds, prepared.prompt.assembled)):
                return self._refuse(prepared, odds)
            with run.watcher.stage("generator", run.question.text) as stage:
                generation = self._generate(prepared)
                stage.on_result(generation)
            run.timings.update(generation.timings)
            return self._store(prepared, self._stored(prepared, generation, odds), generation.is_known_end)

    def stream(
        self,
        question: Question | str,
        documents: Sequence[Document] | None = None,
        *,
        watcher: StageWatcher | None = None,
    ) -> abc.Generator[AnswerChunk, None, None]:
        """Yield the answer in pieces; the last chunk has the complete answer. The arguments are those of ``ask``.

        Wrong input raises in this call. A cached answer is one piece. Closing the generator stops the computation.
        """
        question = as_question(question, documents)
        with ExitStack() as stack:
            trace = stack.enter_context(self.tracer.question(question, self.generator.model_id, stream=True))
            prepared = self._prepare(question, watcher, trace)
            if self._lacks_passage(prepared):
                answer = self._finish_without_passage(prepared)
                return _in_one_piece(AnswerChunk(answer.text, answer))
            stored = self._look_up(prepared)
            if stored is not None:
                answer = self._finish(prepared, stored, cached=True)
                return _in_one_piece(AnswerChunk(answer.text, answer, answer.log_probs, answer.usage.prompt_tokens))
            self.recent.add(prepared.prompt.scope, prepared.prompt.assembled.layout.keys)
            odds = self.support.odds(prepared.run, prepared.prompt.assembled)
            if self._is_refused(prepared, of_passages(odds, prepared.prompt.assembled)):
                answer = self._refuse(prepared, odds)
                return _in_one_piece(AnswerChunk(answer.text, answer))
            chunks = self.generator.stream(prepared.request)
            if isinstance(chunks, GeneratorType):
                stack.callback(chunks.close)  # at once, not when the last reference is gone
            if (headings := self._headings(prepared)) is not None:
                read = read_again(chunks, headings, lambda: self.generator.stream(self._without_headings(prepared)))
                stack.callback(read.close)
                chunks = read
            written = self._stream(prepared, chunks, odds, stack.pop_all())
            test = None if self._allows_unsupported(prepared) else self._word_test(prepared, odds)
            return written if test is None else test.hold_back(written)

    def _generate(self, prepared: PreparedQuestion) -> Generation:
        generation, headings = self.generator.generate(prepared.request), self._headings(prepared)
        if headings is None or not headings.is_copied(generation.text):
            return generation
        return both_readings(generation, self.generator.generate(self._without_headings(prepared)))

    def _headings(self, prepared: PreparedQuestion) -> CopiedHeading | None:
        """Return which answers are copies of headings in the prompt; None where there are none, or a form is asked."""
        question, sampling = prepared.run.question, prepared.request.sampling
        if sampling.json_schema is not None or question.tools is not None:
            return None
        titles = [document.metadata.get("title") for document in prepared.prompt.assembled.documents]
        has_headings = any(titles) and self._assembler_of(question).template.heading
        return CopiedHeading(titles, question.text, self.defaults.is_small_reader) if has_headings else None

    def _without_headings(self, prepared: PreparedQuestion) -> GenerationRequest:
        run, assembler = prepared.run, self._assembler_of(prepared.run.question)
        assembled = assembler.with_template(replace(assembler.template, heading="")).assemble(
            run.read_as, prepared.prompt.assembled.documents, order="original",
            max_new_tokens=prepared.request.sampling.max_tokens, history=run.question.history,
        )  # fmt: skip
        return replace(prepared.request, layout=assembled.layout)

    def _stream(
        self, prepared: PreparedQuestion, chunks: Iterator[Chunk], odds: Mapping[str, float], stack: ExitStack
    ) -> abc.Generator[AnswerChunk, None, None]:
        run, prompt_tokens = prepared.run, len(prepared.prompt.assembled.layout.token_ids)
        reader = None if prepared.tools is None else prepared.tools.reader()
        with stack, run.watcher.stage("generator", run.question.text) as stage:
            for chunk in chunks:
                text = chunk.text if reader is None else reader.feed(chunk.text)
                if text:
                    stage.on_delta(text)
                if chunk.generation is None:
                    yield AnswerChunk(text, log_probs=chunk.log_probs, prompt_tokens=prompt_tokens)
                    continue
                stage.on_result(chunk.generation)
                run.timings.update(chunk.generation.timings)
                stored = self._stored(prepared, chunk.generation, odds)
                answer = self._store(prepared, stored, chunk.generation.is_known_end)
                text += "" if reader is None else reader.finish()[0]
                yield AnswerChunk(text, answer, chunk.log_probs, prompt_tokens)

    def _prepare(self, question: Question, watcher: StageWatcher | None, trace: QuestionTrace) -> PreparedQuestion:
        if self.defaults.measured is not None:
            question = self.defaults.measured.resolve(question, self.defaults.mitigation)
        mitigation = named_method(question.mitigation or self.defaults.mitigation, "mitigation")
        sampling = question.sampling or self.defaults.sampling
        if sampling.top_logprobs is not None and "log_probs" not in self.generator.capabilities:
            raise UnsupportedModelError(
                f"{display_name(self.generator.model_id)} returns no log-probabilities here; ask without logprobs"
            )
        use = question.tools
        tools = None if use is None else resolve_tools(self.generator, use.definitions, use.choice)
        if tools is not None and tools.schema is not None:
            sampling = replace(sampling, json_schema=tools.schema)
        elif sampling.json_schema is not None:
            self.generator.check_json_schema(sampling.json_schema)
        info = self.generator.describe(mitigation)
        salt = tenant_salt(self.defaults.tenant, question.tenant)
        metadata_filter = combine_filters(self.defaults.filter, question.filter)
        choice = checked_query(question.query or self.defaults.query)
        if choice == "rewrite" and question.documents is not None:  # nothing is retrieved
            choice = "history"
        assembler = self._assembler_of(question)
        # Before it is embedded and searched for; tools are text of the prompt, too.
        of_tools = [] if use is None else [{"content": use.text}]
        assembler.check_length(question.text, [*question.history, *of_tools])
        if tools is not None:
            assembler = assembler.with_encoder(tools.encoder)
        query = search_query(choice, question.text, question.history, self.writer or self.generator, salt)
        computations = [cache.begin() for cache in (self.cache, self.passages) if cache is not None]
        read_as = with_names(question.text, question.history) if self.defaults.is_small_reader else question.text
        run = RequestContext(
            question,
            salt,
            metadata_filter,
            query,
            trace,
            combine_watchers(trace, watcher),
            computations,
            read_as=read_as,
        )
        with collected_warnings() as warnings, collected_usage() as spent:
            documents = self._documents(run)
        if run.second.together:  # a method that reads passages apart does not join them
            mitigation = named_method("none", "mitigation")
            info = self.generator.describe(mitigation)
        with run.stage("assemble", "assembler") as stage:
            prompt = self._prompt(run, assembler, documents, info, sampling)
            if trace is not NOOP_TRACER:  # copies would slow down cached answers
                stage.on_result(prompt.assembled.copied_documents())
        prompt.assembled.log_omissions()
        cues = assembler.template.cues if prompt.assembled.documents and sampling.json_schema is None else ()
        request = GenerationRequest(
            prompt.assembled.layout, mitigation, sampling, salt, self.defaults.attribution, cues=cues
        )
        if prompt.assembled.silenced:
            warnings.append(silenced_warning(prompt.assembled))
        if not prompt.assembled.documents and (refusal := run.refusal()):
            warnings.append(refusal)
        return PreparedQuestion(run, prompt, request, info, tuple(warnings), sum_usage(spent), tools)

    def _prompt(
        self, run: RequestContext, assembler: Assembler, documents: Sequence[Document], info: MitigationInfo,
        sampling: Sampling,
    ) -> CachedPrompt:  # fmt: skip
        """Return the prompt of a question; that of an equal question a short while ago, if its answer is cached."""
        question, conversation = run.question, conversation_text(run.question)
        before = conversation if assembler.template.history_first else ""
        template, attribution = assembler.template.fingerprint(), self.defaults.attribution
        scope = content_hash(run.salt, info.fingerprint, template, before, filter_key(run.filter))
        caches = self.cache is not None and question.use_cache and sampling.deterministic
        order, model = question.order or self.defaults.order, self.generator.fingerprint
        values = document_values(documents) if caches else None
        asked = (question.seed, question.text, conversation, question.documents is None)
        origin = (scope, model, attribution, sampling, order, *asked, values)
        if values is not None and (prompt := self._memory.get(origin)) is not None:
            return prompt
        assembled = assembler.assemble(
            run.read_as, documents, order=order, seed=question.seed, max_new_tokens=sampling.max_tokens,
            history=question.history, tool_turns=() if question.tools is None else question.tools.turns,
            recent=self.recent.recent(scope), order_free=info.order_invariant,
        )  # fmt: skip
        key = answer_key(run, assembled, info, sampling, model, template, attribution) if caches else None
        prompt = CachedPrompt(assembled, key, scope)
        if values is not None and not assembled.depends_on_recent:
            texts = [question.text, conversation, *sampling.stop, sampling.json_schema, *chain.from_iterable(values)]
            self._memory.put(origin, prompt, [text for text in texts if text])
        return prompt

    def _documents(self, run: RequestContext) -> Sequence[Document]:
        """Return the documents of the question, or those retrieved for it; scored or chosen by the reranker."""
        question = run.question
        retriever = self._retriever_of(question)
        k = self.defaults.k if question.k is None else question.k
        if question.documents is not None:
            documents = list(question.documents)
        elif retriever is None:
            return ()
        else:
            with run.stage("retrieve", "retriever") as stage:
                documents = retrieve_query(retriever, run.query, max(k, self.candidates), run.filter)
                stage.on_result(documents)
            choice = self.defaults.min_relevance if question.min_relevance is None else question.min_relevance
            similar, needed = self.relevance.similar(run, retriever, documents, choice)
            current = similar if choice == "off" else leave_out_older(run, similar)
            if choice == "off":
                return self._reranked(run, current)[:k]
            candidates = self._with_linked(run, retriever, current, max(k, self.candidates))
            ranked = self._reranked(run, candidates)[:k]
            needed = needed and {**needed, **dict.fromkeys(run.second.linked, -math.inf)}
            read = self.relevance.judged(run, ranked, needed)
            return self._read_alone(run, retriever, read, current[:1])
        return self._reranked(run, documents)

    def _with_linked(
        self, run: RequestContext, retriever: Retriever, documents: list[Document], width: int
    ) -> list[Document]:
        """Return at most ``width`` passages: ``documents``, and in place of the last those of a second search."""
        question = run.question
        is_allowed = self.defaults.second_step if question.second_step is None else question.second_step
        if not is_allowed or not documents or asks_for_list(question.text):
            return documents
        step = second_step(question.text, run.query, documents[0])
        if step is None:
            return documents
        run.second.query = step.query.text
        try:
            with run.stage("retrieve", "retriever", searched=step.query.text) as stage:
                hits = retrieve_query(retriever, step.query, max(width, SEARCHED), run.filter)
                stage.on_result(hits)
        except RetrievalError as error:
            warn(f"the second search failed, what the first one found is read: {error}")
            return documents
        older = {identity for identity, reason in run.left_out if reason == "older_version"}
        linked = step.linked([document for document in hits if document_id(document) not in older])
        if not linked:
            return documents
        joined = leave_out_older(run, with_linked(documents, linked, width))
        run.second.linked = frozenset(document_id(document) for document in joined if document in linked)
        run.left_out[:] = [entry for entry in run.left_out if entry[0] not in run.second.linked]
        return joined

    def _read_alone(
        self, run: RequestContext, retriever: Retriever, documents: Sequence[Document], first: Sequence[Document]
    ) -> Sequence[Document]:
        """Return the first passage if it is far ahead and nobody chose how passages are read, else all.

        With passages of a second search, it and these are returned; without it they are no answer.
        """
        question, best = run.question, self.defaults.best_passage
        names = {document_id(document) for document in first}
        if run.second.linked and not any(document_id(document) in names for document in documents):
            documents = [document for document in documents if document_id(document) not in run.second.linked]
            run.second.linked = frozenset()
        is_chosen = question.mitigation or question.reranker or question.order
        if best is None or is_chosen or asks_for_list(question.text):
            return documents
        if run.second.linked:
            names |= run.second.linked
            run.second.together = True
            run.left_out.extend((document_id(each), "margin") for each in documents if document_id(each) not in names)
            return [document for document in documents if document_id(document) in names]
        if not best.alone(run.query.text, documents, similarity_of(retriever)):
            return documents
        run.left_out.extend((document_id(document), "margin") for document in documents[1:])
        return documents[:1]

    def _reranked(self, run: RequestContext, documents: Sequence[Document]) -> Sequence[Document]:
        question, reranker = run.question, self._reranker_of(run.question)
        k = self.defaults.k if question.k is None else question.k
        chooses = question.documents is None and self.candidates > 0
        unscored = any(document.metadata.get("relevance_score") is None for document in documents)
        if reranker is None or not (chooses or unscored or question.reranker is not None):
            return documents
        with run.stage("rerank", "reranker", documents) as stage, salted(run.salt):
            if chooses:  # the first k if the reranker kept the given order
                ranked = list(reranker.compress_documents(documents, run.query.text))
            else:  # in the given order: the order of the prompt is chosen later
                entries = sorted(rerank_indexed(reranker, run.query.text, documents), key=lambda entry: entry.index)
                ranked = [entry.document for entry in entries]
            read = {document_id(document) for document in ranked}
            run.left_out.extend((name, "reranker") for name in map(document_id, documents) if name not in read)
            ranked = ranked[:k] if chooses else ranked
            run.odds.update(odds_of(reranker, ranked, documents))
            stage.on_result(ranked)
        return ranked

    def _assembler_of(self, question: Question) -> Assembler:
        template = question.template or self.defaults.template_of(question.text, question.history)
        return self.assembler if template is None else self.assembler.with_template(template)

    def _retriever_of(self, question: Question) -> Retriever | None:
        if question.index is not None and question.index not in self.indexes:
            raise UnknownNameError(
                f"unknown index {shown(question.index)}. Available: {', '.join(sorted(self.indexes)) or 'none'}; "
                "without a name the default one is used"
            )
        retriever = self.retriever if question.index is None else self.indexes[question.index]
        return None if retriever is None else current_of(retriever)

    def _reranker_of(self, question: Question) -> Reranker | None:
        if question.reranker is None:
            return self.reranker
        spec = named_method(question.reranker, "reranker")
        if self.choose_reranker is None:
            raise ConfigError(f"the reranker {shown(spec.name)} cannot be chosen here; leave it to the pipeline")
        return self.choose_reranker(spec)

    def _lacks_passage(self, prepared: PreparedQuestion) -> bool:
        asked = prepared.run.question.allow_ungrounded
        allowed = self.defaults.allow_ungrounded if asked is None else asked
        return prepared.needs_passage and not prepared.prompt.assembled.documents and not allowed

    def _finish_without_passage(
        self, prepared: PreparedQuestion, *, cached: bool = False, usage: Usage | None = None
    ) -> Answer:
        run, text = prepared.run, self.defaults.no_passage_text
        if text == NO_PASSAGE_TEXT:
            text = self._assembler_of(run.question).template.no_passage or text
        assembled = prepared.prompt.assembled
        answer = no_passage_answer(text, assembled, prepared.info.name, run.timings, cached=cached)
        return self._traced(prepared, answer if usage is None else replace(answer, usage=usage))

    def _is_refused(self, prepared: PreparedQuestion, odds: Sequence[float | None]) -> bool:
        return not self._allows_unsupported(prepared) and is_refused(odds)

    def _allows_unsupported(self, prepared: PreparedQuestion) -> bool:
        asked = prepared.run.question.allow_unsupported
        return self.defaults.allow_unsupported if asked is None else asked

    def _word_test(self, prepared: PreparedQuestion, odds: Collection[object]) -> WordTest | None:
        """Return the test of answers to questions for a fact; None for large readers that no judge was asked for."""
        question, documents = prepared.run.question, prepared.prompt.assembled.documents
        is_form = prepared.request.sampling.json_schema is not None or question.tools is not None
        if is_form or not (self.defaults.is_small_reader or odds):
            return None
        return WordTest(read_texts(documents), question.text) if documents and asks_for_fact(question.text) else None

    def _stored(self, prepared: PreparedQuestion, generation: Generation, odds: Mapping[str, float]) -> StoredAnswer:
        rivals = self._rivals(prepared, generation, odds)
        stored = to_store(prepared.prompt.assembled, generation, odds, rivals)
        test = (
            self._word_test(prepared, odds) if generation.finish_reason == "stop" else None
        )  # a cut answer may go on
        if test is not None and test.fails(generation.text):
            stored["foreign"] = True
        return stored

    def _refuse(self, prepared: PreparedQuestion, odds: Mapping[str, float]) -> Answer:
        return self._store(prepared, refusal_to_store(prepared.prompt.assembled, odds), is_known_end=True)

    def _rivals(
        self, prepared: PreparedQuestion, generation: Generation, odds: Mapping[str, float]
    ) -> list[tuple[str, int]]:
        """Return answers of passages that contradict the generated one; nobody is asked without the judge's odds."""
        run, assembled = prepared.run, prepared.prompt.assembled
        if len(odds) < 2 or prepared.request.sampling.json_schema is not None:
            return []

        def answer_alone(index: int) -> str:
            alone = self._assembler_of(run.question).assemble(
                run.read_as, [assembled.documents[index]], max_new_tokens=RIVAL_TOKENS,
                history=run.question.history,
            )  # fmt: skip
            request = replace(
                prepared.request, layout=alone.layout, mitigation=MethodSpec("none"), attribution=False,
                sampling=Sampling(max_tokens=RIVAL_TOKENS),
            )  # fmt: skip
            return self.generator.generate(request).text

        with run.timed("disagreement"):
            texts = read_texts(assembled.documents)
            judged = of_passages(odds, assembled)
            return rival_answers(generation.text, run.question.text, texts, judged, answer_alone)

    def _look_up(self, prepared: PreparedQuestion) -> Mapping[str, Any] | None:
        if self.cache is None or prepared.prompt.key is None:
            return None
        with prepared.run.timed("cache"):
            stored = self.cache.get(prepared.prompt.key)
        if stored is None or not readable(stored):
            return None
        is_valid = not stored.get("refused") or self._is_refused(
            prepared, stored_odds(stored, prepared.prompt.assembled)
        )
        return stored if is_valid else None

    def _store(self, prepared: PreparedQuestion, stored: Mapping[str, Any], is_known_end: bool) -> Answer:
        run, ids = prepared.run, prepared.prompt.assembled.ids
        if not is_known_end:
            prepared = replace(prepared, warnings=(*prepared.warnings, UNKNOWN_END))
        elif self.cache is not None and prepared.prompt.key is not None:
            with run.timed("cache"):
                self.cache.put(prepared.prompt.key, stored, (*ids, *tenant_tags(run.salt, ids)))
        return self._finish(prepared, stored, cached=False)

    def _finish(self, prepared: PreparedQuestion, stored: Mapping[str, Any], *, cached: bool) -> Answer:
        prompt, run = prepared.prompt, prepared.run
        odds = stored_odds(stored, prompt.assembled)
        if self._is_refused(prepared, odds):
            warning = refusal_warning(prompt.assembled.documents, odds)
            refused = replace(prepared, warnings=(*prepared.warnings, warning))
            return self._finish_without_passage(refused, cached=cached)

        def make() -> Answer:
            return answer_from(
                stored, prompt.assembled, prepared.info.name, run.timings, cached=cached, question=run.question.text
            )

        answer = prompt.answer(stored, make) if cached else make()
        if stored.get("foreign") and not self._allows_unsupported(prepared):
            warning = failure_warning(
                prompt.assembled.documents, [document.attention for document in answer.documents]
            )
            refused = replace(prepared, warnings=(*prepared.warnings, warning))
            return self._finish_without_passage(refused, cached=cached, usage=answer.usage)
        warnings = [UNSUPPORTED] if answer.support == "no" and odds else []
        if answer.disagreements:
            assembled = prompt.assembled
            warnings.append(disagreement_warning(answer.disagreements, assembled.documents, assembled.ids))
        prepared = replace(prepared, warnings=(*prepared.warnings, *warnings))
        return self._traced(prepared, prepared.with_calls(answer))

    def _traced(self, prepared: PreparedQuestion, answer: Answer) -> Answer:
        run, dropped = prepared.run, (*answer.dropped, *prepared.run.left_out)
        answer = replace(
            answer, warnings=prepared.warnings, query=run.query.text, second_query=run.second.query,
            dropped=dropped, timings=dict(run.timings), usage=sum_usage((answer.usage, prepared.spent)),
        )  # fmt: skip
        run.trace.answered(answer)
        return answer


def _in_one_piece(chunk: AnswerChunk) -> abc.Generator[AnswerChunk, None, None]:
    yield chunk
