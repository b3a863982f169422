"""Builds pipelines, and the parts that commands and experiments share, from settings.

All concrete classes are chosen here.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.assembly.orders import ORDERS, create_order
from rag_posfix.assembly.templates import read_template, templates_by_language
from rag_posfix.assembly.tokenization import PassageBudget
from rag_posfix.caching.answers.tiered import TieredAnswerCache, build_answer_cache, tenant_salt
from rag_posfix.caching.kv.store import PassageStore, build_passage_store
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.checked import check_type, checked_min_relevance
from rag_posfix.checkpoints import reader_notice
from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.method_spec import MethodSpec, parse_method, read_reranker
from rag_posfix.contracts.request import MitigationChoice, PromptTemplate, Sampling
from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.generation.batching.scheduler import BatchingGenerator, batched, unbatched
from rag_posfix.generation.deferred import DeferredGenerator, deferred_generator
from rag_posfix.generation.engine import Engine, TextEncoder
from rag_posfix.generation.load import load_engine, read_metadata, usable_device
from rag_posfix.generation.model.tokenizer import Tokenizer
from rag_posfix.generation.remote.connection import is_remote, parse_remote
from rag_posfix.generation.remote.generator import RemoteGenerator, check_remote_mitigation
from rag_posfix.generation.tensor_parallel.launch import LaunchEnvironment, load_parallel
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.pipeline.best_passage import BestPassage
from rag_posfix.pipeline.defaults import (
    AUTO,
    LARGE_HIDDEN_SIZE,
    MIDDLE_HIDDEN_SIZE,
    MIDDLE_MIN_GAIN,
    MIN_GAIN,
    SMALL_HIDDEN_SIZE,
    Defaults,
    MeasuredProfile,
    RelevanceTest,
    large_model_profile,
    read_measured,
    server_profile,
)
from rag_posfix.pipeline.file_parameters import order_with_values, with_file_parameters
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.pipeline.precompute import invalidate, precompute
from rag_posfix.pipeline.retrievers_and_servers import (
    connect_with,
    open_remote_generator,
    open_retrievers,
    remote_settings_of,
)
from rag_posfix.pipeline.support import JUDGING_HIDDEN_SIZE, SupportTest
from rag_posfix.pipeline.tracing import QuestionTracer
from rag_posfix.process import environment_with
from rag_posfix.reranking import RERANKERS
from rag_posfix.reranking.build import RerankerModels, build_reranker, chooser
from rag_posfix.reranking.deadline import GuardedReranker
from rag_posfix.reranking.language_model import without_copies
from rag_posfix.reranking.likelihood import PassageJudge
from rag_posfix.reranking.yes_no import YesNoReranker
from rag_posfix.retrieval.embeddings import SentenceEmbeddings, embedding_identity
from rag_posfix.settings import Settings, TorchrunSettings

__all__ = ["build_pipeline"]

_log = logging.getLogger(__name__)

DEFAULT_RERANKER = "embedding"
_FLUSH_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ResolvedMethods:
    """The methods that settings name, checked, with the values of files, and how passages are made to fit."""

    mitigation: MitigationChoice
    order: str
    reranker: MethodSpec
    budget: PassageBudget
    order_parameters: Mapping[str, Mapping[str, Any]]
    measured: MeasuredProfile | None = None


def resolve_methods(settings: Settings, *, loads_model: bool = True) -> ResolvedMethods:
    """Read and check mitigation, order and reranker of ``settings``: errors are raised before a model is loaded.

    Args:
        loads_model: Whether ``settings.model`` answers: if it is on a server, the mitigation must be one for servers.

    Raises:
        ConfigError: an unknown name or parameter, a value out of range, or a file that cannot be read.
        UnsupportedModelError: the model is on a server, and the method needs the weights in this process.
    """
    budget = PassageBudget(settings.passage_tokens, settings.passage_shrink, settings.overflow)
    reranker = with_file_parameters(read_reranker(settings.reranker or DEFAULT_RERANKER), RERANKERS)
    RERANKERS.check(reranker)
    order = order_with_values(settings.order)
    measured = read_measured(settings.profile)
    order_parameters: Mapping[str, Mapping[str, Any]] = {}  # of orders that are named without any
    if settings.profile is not None and measured is None:
        profile = with_file_parameters(MethodSpec("profile", {"file": str(settings.profile)}), ORDERS)
        order_parameters = {"profile": profile.parameters}
    create_order(order, order_parameters)
    on_server = loads_model and is_remote(settings.model)
    is_chosen = "mitigation" in settings.model_fields_set
    named = (
        settings.mitigation
        if is_chosen or (measured is None and not on_server)
        else "none"
        if measured is None
        else AUTO
    )
    spec = parse_method(named, "mitigation", "experts=5")
    mitigation = with_file_parameters(spec, MITIGATIONS)
    MITIGATIONS.check(mitigation)
    if on_server:
        used = measured.mitigation if measured is not None and spec.name == AUTO else mitigation
        check_remote_mitigation(parse_remote(settings.model).name, used)
    return ResolvedMethods(
        mitigation if spec.parameters else spec, order, reranker, budget, order_parameters, measured
    )


def build_pipeline(
    settings: Settings | None = None,
    *,
    index: str | Path | None = None,
    retriever: object = None,
    generator: Generator | None = None,
    deferred: bool = False,
    tracer: QuestionTracer | None = None,
    methods: ResolvedMethods | None = None,
    template: object = None,
    follows_index: bool = False,
) -> Pipeline:
    """Return a pipeline with the model, embeddings, index, reranker and caches of ``settings``.

    Args:
        settings: The settings; read from the environment if None.
        index: Folder of an index, instead of ``settings.index``. Without an index and a retriever, documents must be
            in the question.
        retriever: Finds the passages, instead of an index: a langchain retriever, a runnable or function from a
            question to documents, or an object with ``retrieve(question, k)``. Documents without a
            ``relevance_score`` are scored by the reranker.
        generator: The generator, instead of loading ``settings.model``.
        deferred: Load the model when the first answer is generated, so that a cached answer needs none. Ignored for a
            model on several devices.
        tracer: Traces every question, for example ``rag_posfix.telemetry.build.question_tracer()``.
        methods: What ``resolve_methods(settings)`` returned; it is called here if None.
        template: The prompt, instead of ``settings.template``: a ``PromptTemplate``, a mapping of its fields, the name
            of a shipped one, a file in TOML or Jinja2, or a prompt of langchain (``ChatPromptTemplate``).
        follows_index: Memory-map the indexes, and make each a ``FollowedIndex``, whose ``reload`` serves a new
            version of its folder; as the service does.

    Raises:
        ConfigError: the model or a setting is wrong, or both an index and a retriever are given.
        RetrievalError: the index is damaged, is of another program, or was built with other embeddings.
        UnsupportedModelError: the model cannot take the attention hook, or is remote and ``mitigation`` needs the
            weights.
    """
    check_type("settings", settings, Settings | None, "Settings, or None for those of the environment")
    check_type("index", index, str | Path | None, "the path of an index folder, or None")
    settings = Settings() if settings is None else settings
    chosen = methods or resolve_methods(settings, loads_model=generator is None)  # before the model, as the indexes
    prompt = read_template(settings.template if template is None else template, history_first=settings.history_first)
    embeddings = build_embeddings(settings)
    served, extra, stores = open_retrievers(settings, index, retriever, embeddings, follows=follows_index)
    cache = build_answer_cache(settings.cache, settings.cache_dir) if settings.cache.enabled else None
    with ExitStack() as cleanup:  # closes the opened stores if a later step fails
        engine = generator if generator is not None else _load(settings, cleanup, deferred, cache)
        engine, passages = _with_passages(engine, settings, cleanup)
        own = _OwnModels(settings, cleanup, cache, passages)
        writer = None if settings.writer is None else own.load(settings.writer)
        models = RerankerModels(lambda: embeddings, lambda: _load_generator(engine), connect_with(settings), own.load)
        reranker = GuardedReranker(
            reranker=build_reranker(chosen.reranker, models), deadline_seconds=settings.reranker_deadline_seconds
        )
        cleanup.callback(reranker.close)
        pipeline = Pipeline(
            batched(engine),
            Assembler(
                engine.encoder, engine.context_window, prompt, order_parameters=chosen.order_parameters,
                budget=chosen.budget,
            ),
            retriever=served,
            reranker=reranker,
            cache=cache,
            defaults=_defaults(settings, chosen, template, engine, embeddings),
            passages=own.passages,
            on_close=cleanup.pop_all().close,
            candidates=settings.candidates if settings.reranker is not None else 0,
            embeddings=embeddings,
            tracer=tracer,
            indexes=extra,
            choose_reranker=chooser(chosen.reranker, reranker, models),
            writer=writer,
            relevance=_relevance_test(engine, prompt, settings),
            support=_support_test(engine, settings),
        )  # fmt: skip
    for store in stores:
        store.add_delete_listener(pipeline.invalidate)
    return pipeline


class _OwnModels:
    """Loads models beside the served one, each once. They share its passage KV store, or one that is made for them.

    Keys of entries hold the model, and a document that is removed is dropped from the one store.
    """

    def __init__(
        self, settings: Settings, cleanup: ExitStack, cache: TieredAnswerCache | None, passages: PassageStore | None
    ) -> None:
        self._settings, self._cleanup, self._cache = settings, cleanup, cache
        self._loaded: dict[str, Generator] = {}
        self.passages = passages

    def load(self, model: str) -> Generator:
        """Return the generator of ``model``, which is loaded by its first answer."""
        settings = self._settings
        if model not in self._loaded:
            if self.passages is None and not is_remote(model):
                device = usable_device(settings.device)
                self.passages = build_passage_store(settings.passages, settings.cache_dir, device)
                if self.passages is not None:
                    self._cleanup.callback(self.passages.close)
            beside = settings_with_model(settings, model)
            self._loaded[model] = _load(beside, self._cleanup, True, self._cache, self.passages)
        return self._loaded[model]


def settings_with_model(settings: Settings, model: str) -> Settings:
    """Return the settings of a model beside the served one: on one device, without adapter and passage KV store."""
    passages = settings.passages.model_copy(update={"enabled": False})
    changes = {"model": model, "adapter": None, "tp": 1, "device_map": None, "passages": passages}
    return settings.model_copy(update={**changes, "remote": remote_settings_of(settings, model)})


def _has_channels(engine: Generator, count: int) -> bool:
    reader = unbatched(engine)
    return isinstance(reader, Engine | DeferredGenerator) and reader.hidden_size >= count


def _support_test(engine: Generator, settings: Settings) -> SupportTest:
    """Return what says whether passages support an answer; of a server's model nobody knows how it judges."""

    @functools.cache
    def judge() -> GuardedReranker | None:
        generator = _load_generator(engine)
        if "first_token" not in generator.capabilities:
            return None
        return GuardedReranker(
            reranker=YesNoReranker(generator=generator), deadline_seconds=settings.reranker_deadline_seconds
        )

    return SupportTest(judge, _has_channels(engine, JUDGING_HIDDEN_SIZE))


def _defaults(
    settings: Settings, methods: ResolvedMethods, template: object, engine: Generator, embeddings: Embeddings
) -> Defaults:
    measured, mitigation = methods.measured, methods.mitigation
    if measured is not None:
        measured.check_model(engine)
    elif not {"reranker", "order"} & settings.model_fields_set and settings.tp == 1:
        if isinstance(engine, RemoteGenerator):
            measured = server_profile(engine, engine.gives_log_probs, settings.k)
        elif _has_channels(engine, LARGE_HIDDEN_SIZE):
            measured = large_model_profile(engine)
        if measured is not None and "mitigation" not in settings.model_fields_set:
            mitigation = MitigationChoice(AUTO)
    is_chosen = measured is not None or {"mitigation", "reranker", "order"} & settings.model_fields_set
    followed = settings.template if settings.follow_language else ""
    templates = templates_by_language(followed, settings.language_templates, history_first=settings.history_first)
    return Defaults(
        mitigation=mitigation,
        measured=measured,
        best_passage=None if is_chosen else BestPassage(without_copies, embeddings),
        is_small_reader=_has_channels(engine, SMALL_HIDDEN_SIZE) and not _has_channels(engine, LARGE_HIDDEN_SIZE),
        order=methods.order,
        k=settings.k,
        sampling=Sampling(max_tokens=settings.max_tokens),
        tenant=settings.tenant,
        allow_ungrounded=settings.allow_ungrounded,
        allow_unsupported=settings.allow_unsupported,
        second_step=settings.second_step,
        no_passage_text=settings.no_passage_text,
        templates=templates if template is None else {},
        query=settings.query,
        min_relevance=checked_min_relevance(settings.min_relevance),
    )


def _relevance_test(engine: Generator, template: PromptTemplate, settings: Settings) -> RelevanceTest:
    is_middle = _has_channels(engine, MIDDLE_HIDDEN_SIZE) and not _has_channels(engine, LARGE_HIDDEN_SIZE)
    judge = functools.cache(lambda: _judge(engine, template, settings))
    return RelevanceTest(judge, MIDDLE_MIN_GAIN if is_middle else MIN_GAIN)


def _judge(engine: Generator, template: PromptTemplate, settings: Settings) -> GuardedReranker | None:
    """Return the judge of retrieved passages, which loads a deferred model; None for a generator that cannot."""
    generator = _load_generator(engine)
    if "attention" not in generator.capabilities:
        return None
    judge = PassageJudge(generator=generator, template=template)
    return GuardedReranker(reranker=judge, deadline_seconds=settings.reranker_deadline_seconds)


def _with_passages(
    generator: Generator, settings: Settings, cleanup: ExitStack
) -> tuple[Generator, PassageStore | None]:
    """Return a generator with the passage KV store of the settings, and that store.

    A generator that already has a store is returned unchanged, with None: the caller owns that store.
    """
    batching = generator if isinstance(generator, BatchingGenerator) else None
    engine = generator if batching is None else batching.engine
    if isinstance(engine, DeferredGenerator):
        return generator, engine.passages
    if not isinstance(engine, Engine) or engine.passages is not None:
        return generator, None
    passages = build_passage_store(settings.passages, settings.cache_dir, engine.loaded.device)
    if passages is None:
        return generator, None
    cleanup.callback(passages.close)
    engine = engine.with_passages(passages)
    if batching is None:
        return engine, passages
    batching = batching.with_engine(engine)
    cleanup.callback(batching.close)
    return batching, passages


def build_engine(settings: Settings, passage_bytes: int = 0) -> Engine:
    """Load ``settings.model`` into this process, on the device and in the dtype of ``settings``.

    ``passage_bytes`` is the size limit of a passage KV store in memory, on the device of the model; 0 for no store.

    Raises:
        ConfigError: the model cannot be found or read.
        UnsupportedModelError: the model cannot take the attention hook, or is on a server.
    """
    if is_remote(settings.model):
        raise UnsupportedModelError(
            f"model={settings.model!r} is on a server, and this needs the weights in this process; remote generators "
            "answer questions (ask, serve, build_pipeline, eval positions and permutations with mitigation none)"
        )
    if "model" not in settings.model_fields_set:
        _log.warning("%s", reader_notice(settings.model, settings.cache_dir))
    engine = load_engine(
        settings.model, dtype=settings.dtype, device=settings.device, device_map=settings.device_map,
        cache_dir=settings.cache_dir, adapter=settings.adapter, batch_invariant=settings.batch_invariant,
    )  # fmt: skip
    if not passage_bytes:
        return engine
    return engine.with_passages(PassageStore([MemoryTier(passage_bytes)], device=engine.loaded.device))


def build_generator(settings: Settings, passage_bytes: int = 0) -> Generator:
    """Return the generator of ``settings.model``: a connection to a server for ``openai:NAME@URL``, else an engine.

    ``passage_bytes`` is as for ``build_engine``; a remote generator has no passage KV store.
    """
    return open_remote_generator(settings) if is_remote(settings.model) else build_engine(settings, passage_bytes)


def build_tokenizer(settings: Settings) -> Tokenizer:
    """Return the tokenizer of ``settings.model``; its weights are not read into memory.

    Raises:
        ConfigError: the model cannot be found or read.
        UnsupportedModelError: its family is not supported.
    """
    facts = read_metadata(settings.model, dtype=settings.dtype, device=settings.device, cache_dir=settings.cache_dir)
    return facts.tokenizer


def launch_environment() -> LaunchEnvironment:
    """Return the variables of torchrun, and the environment that further ranks inherit."""
    torchrun = TorchrunSettings()
    return LaunchEnvironment(torchrun.rank, torchrun.world_size, environment_with())


def build_embeddings(settings: Settings, *, many: bool = False) -> SentenceEmbeddings:
    """Return the embedding model of ``settings``; its weights are loaded at the first use.

    For ``many`` texts it computes on all cores, in bfloat16 where the processor has it.
    """
    encoder = TextEncoder if many else None
    return SentenceEmbeddings(settings.embedding_model, cache_dir=settings.cache_dir, encoder=encoder)


def build_reranker_models(settings: Settings) -> RerankerModels:
    """Return the models for rerankers; each is loaded once, at the first use."""

    @functools.cache
    def embeddings() -> Embeddings:
        model = build_embeddings(settings)
        embedding_identity(model)  # loads the weights
        return model

    generator = functools.cache(lambda: build_generator(settings))
    return RerankerModels(embeddings, generator, connect_with(settings), model_loader(settings))


def model_loader(settings: Settings) -> Callable[[str], Generator]:
    """Return a function that loads a model beside that of ``settings`` by name, once."""
    return functools.cache(lambda model: build_generator(settings_with_model(settings, model)))


def invalidate_stored(documents: Sequence[Document], settings: Settings) -> tuple[int, int, int]:
    """Drop the cached answers, keys and values of ``documents`` from the tiers on disk and in Redis.

    Processes that share a Redis drop their copies too; this waits up to 10 seconds until they have. Without Redis,
    running processes hold their copies in memory until these expire or are evicted.

    Returns:
        Number of dropped answers, of dropped passages, and of deletions that the processes may not have yet.
    """
    if not documents:
        return 0, 0, 0
    with open_caches(settings := settings.with_files()) as (answers, passages):
        persistent = settings.passages.is_persistent(settings.cache_dir)
        counts = invalidate(documents, answers, passages if persistent else None)
        caches = [cache for cache in (answers, passages) if cache is not None]
        for cache in caches:
            cache.flush_deletions(_FLUSH_SECONDS)
        return *counts, sum(cache.pending_deletions for cache in caches)


@contextmanager
def open_caches(settings: Settings) -> Iterator[tuple[TieredAnswerCache | None, PassageStore | None]]:
    """Open the answer cache and the passage KV store of ``settings``; None for one that is turned off."""
    with ExitStack() as stack:
        answers = build_answer_cache(settings.cache, settings.cache_dir)
        if answers is not None:
            stack.callback(answers.close)
        passages = build_passage_store(settings.passages, settings.cache_dir)
        if passages is not None:
            stack.callback(passages.close)
        yield answers, passages


def precompute_stored(
    engine: Engine,
    documents: Sequence[Document],
    mitigation: MitigationChoice,
    settings: Settings,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[int, int]:
    """Compute the keys and values of each document into the passage KV store of ``settings``.

    Args:
        mitigation: A method with independent passages.
        progress: Called with (number of documents done, number of documents).

    Returns:
        Number of computed tokens, and bytes of the tier on disk or in Redis.

    Raises:
        ConfigError: the method's passages are not independent, or the store has no tier or stores nothing.
        UnsupportedModelError: the method does not support the model.
    """
    store = build_passage_store(settings.passages, settings.cache_dir, engine.loaded.device)
    with ExitStack() as stack:
        if store is not None:
            stack.callback(store.close)
        engine = engine.with_passages(store)
        template, salt = read_template(settings.template), tenant_salt(settings.tenant, "")
        tokens = precompute(engine, documents, mitigation, template=template, salt=salt, progress=progress)
        stored_bytes = 0 if store is None else max(tier.get("bytes") or 0 for tier in store.persistent_stats())
    return tokens, stored_bytes


def _load_generator(engine: Generator) -> Generator:
    return engine.loaded() if isinstance(engine, DeferredGenerator) else engine


def _load(
    settings: Settings,
    cleanup: ExitStack,
    deferred: bool,
    cache: TieredAnswerCache | None = None,
    passages: PassageStore | None = None,
) -> Generator:
    """Return the generator of ``settings.model``: remote, deferred, in this process, or split over several.

    ``cache`` keeps the judgements of a remote generator; ``passages`` is for a deferred one, in place of a new store.
    """
    if is_remote(settings.model):
        remote = open_remote_generator(settings, cache)
        cleanup.callback(remote.close)
        return remote
    if settings.tp == 1 and deferred and settings.device_map is None:
        # Made before the model: what is deleted until then is dropped too.
        if passages is None:
            passages = build_passage_store(settings.passages, settings.cache_dir, usable_device(settings.device))
            if passages is not None:
                cleanup.callback(passages.close)
        return deferred_generator(
            settings.model, lambda: batched(build_engine(settings).with_passages(passages)), dtype=settings.dtype,
            device=settings.device, cache_dir=settings.cache_dir, adapter=settings.adapter, passages=passages,
        )  # fmt: skip
    if settings.tp == 1:
        return build_engine(settings)
    if settings.device_map is not None:
        raise ConfigError(
            f"device_map={settings.device_map!r} and tp={settings.tp} each split a model over several devices; give "
            "one of them"
        )
    if settings.adapter is not None:
        raise ConfigError(f"adapter={str(settings.adapter)!r} cannot be merged with tp={settings.tp}; use tp=1")
    split = load_parallel(
        settings.model, tp=settings.tp, environment=launch_environment(), dtype=settings.dtype,
        device=settings.device, cache_dir=settings.cache_dir,
    )  # fmt: skip
    cleanup.callback(split.close)
    return split
