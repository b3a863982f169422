"""A pipeline as a langchain runnable: a question in, an answer with its sources out.

Reports the stages of a pipeline as runs of a langchain trace: retriever, reranker, generator.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from typing import Any, ClassVar, Literal, Self, TypeVar, cast

from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManager, CallbackManagerForChainRun
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, LLMResult
from langchain_core.runnables import AddableDict, ConfigurableFieldSpec, RunnableConfig, RunnableSerializable
from langchain_core.runnables.config import get_config_list
from langchain_core.tools import BaseTool, StructuredTool, ToolException
from pydantic import ConfigDict, Field, PrivateAttr, field_validator, model_validator

from rag_posfix.adapters.document_ordering import FilterField, checked_method
from rag_posfix.adapters.langchain.chat_model import usage_metadata
from rag_posfix.adapters.langchain.content_blocks import (
    RAGInput,
    TemplateField,
    ToolInput,
    joined_input,
    question_fields,
    tool_argument_errors,
)
from rag_posfix.assembly.orders import ORDERS
from rag_posfix.cancellation import run_until_cancelled
from rag_posfix.checked import Checked, Portable, check_type
from rag_posfix.contracts.answer import Answer, AnswerChunk, Question
from rag_posfix.contracts.method_spec import MethodSpec, parse_method
from rag_posfix.contracts.request import Generation
from rag_posfix.contracts.retrieval import combine_filters
from rag_posfix.errors import ConfigError, RagPosfixError
from rag_posfix.pipeline.batch import checked_concurrency
from rag_posfix.pipeline.pipeline import Defaults, Pipeline
from rag_posfix.pipeline.tracing import Stage
from rag_posfix.retrieval.base import as_retriever

__all__ = ["PosfixRAG", "RAGInput"]


class TracedStages:
    """Reports the stages of a pipeline to callbacks. Implements ``pipeline.tracing.StageWatcher``.

    The generator is reported as a chat model whose input is the question, without the passages.
    """

    def __init__(self, callbacks: CallbackManager, model_name: str) -> None:
        self._callbacks = callbacks
        self._model_name = model_name  # for callbacks that count tokens by model

    @contextmanager
    def stage(self, name: str, question: str, documents: Sequence[Document] = ()) -> Iterator[Stage]:
        """Return a context manager for ``retriever``, ``reranker`` or ``generator``; an exception is reported."""
        if name == "generator":
            run: _ChatModelRun | _RetrieverRun | _ChainRun = _ChatModelRun(self._callbacks, question, self._model_name)
        elif name == "retriever":
            run = _RetrieverRun(self._callbacks, question)
        else:
            run = _ChainRun(self._callbacks, name, question, documents)
        try:
            yield run
        except GeneratorExit:  # the consumer closed the stream
            run.stopped()
            raise
        except BaseException as error:
            run.failed(error)
            raise


class _ChainRun:
    def __init__(self, callbacks: CallbackManager, name: str, question: str, documents: Sequence[Document]) -> None:
        inputs = {"query": question, "documents": list(documents)}
        self._run = callbacks.on_chain_start(None, inputs, name=name)

    def on_delta(self, text: str) -> None:
        """Ignore it."""

    def on_result(self, outcome: Any) -> None:
        self._run.on_chain_end({"documents": list(outcome)})

    def stopped(self) -> None:
        self._run.on_chain_end({})

    def failed(self, error: BaseException) -> None:
        self._run.on_chain_error(error)


class _RetrieverRun:
    def __init__(self, callbacks: CallbackManager, question: str) -> None:
        self._run = callbacks.on_retriever_start(None, question, name="retriever")

    def on_delta(self, text: str) -> None:
        """Ignore it."""

    def on_result(self, outcome: Any) -> None:
        self._run.on_retriever_end(list(outcome))

    def stopped(self) -> None:
        self._run.on_retriever_end([])

    def failed(self, error: BaseException) -> None:
        self._run.on_retriever_error(error)


class _ChatModelRun:
    def __init__(self, callbacks: CallbackManager, question: str, model_name: str) -> None:
        self._model_name = model_name
        self._text = ""
        self._ended = False
        messages: list[list[BaseMessage]] = [[HumanMessage(question)]]
        (self._run,) = callbacks.on_chat_model_start({"name": "generator"}, messages, name="generator")

    def on_delta(self, text: str) -> None:
        self._text += text
        self._run.on_llm_new_token(text, chunk=ChatGenerationChunk(message=AIMessageChunk(content=text)))

    def on_result(self, outcome: Any) -> None:
        self._end(_message(outcome, self._model_name))

    def stopped(self) -> None:
        self._end(AIMessage(self._text))

    def failed(self, error: BaseException) -> None:
        if not self._ended:
            self._run.on_llm_error(error)

    def _end(self, message: AIMessage) -> None:
        if not self._ended:  # the stage may still fail or be stopped after its last chunk
            self._ended = True
            self._run.on_llm_end(LLMResult(generations=[[ChatGeneration(message=message)]]))


def _message(generation: Generation, model_name: str) -> AIMessage:
    return AIMessage(
        content=generation.text,
        response_metadata={"model_name": model_name, "finish_reason": generation.finish_reason},
        usage_metadata=usage_metadata(generation),
    )


_log = logging.getLogger(__name__)

T = TypeVar("T")

_CONFIGURABLE = {"k": int, "order": str, "mitigation": str, "tenant": str, "filter": dict, "query": str}


class PosfixRAG(Portable, Checked, RunnableSerializable[RAGInput, Any]):
    """Answers questions from documents: ``invoke``, ``stream``, ``batch``, their asynchronous versions, and ``|``.

    In a trace, a run named ``PosfixRAG`` (or ``name``) has the child runs ``retriever``, ``reranker`` and
    ``generator`` for the stages that took place: an answer from the cache has no generator. The generator's run
    streams and counts its tokens.

    Example:
        .. code-block:: python

            rag = PosfixRAG(retriever=store.as_retriever())
            rag.invoke("Who designed the lighthouse?")["answer"]
            with_documents = {"question": "Who designed it?", "documents": documents}
            rag.invoke(with_documents, {"configurable": {"order": "reverse"}})
            chain = {"context": retriever, "question": RunnablePassthrough()} | PosfixRAG(output="text")

    ``k``, ``order``, ``mitigation``, ``tenant`` and ``filter`` are taken from the first of these that gives them: the
    input, bound arguments (``rag.bind(k=3)``), the call (``{"configurable": {"k": 3}}``), the object. Filters are
    joined instead: a passage must match those of the call, of bound arguments and of the object.

    Copies share the pipeline. A pickle holds the other fields, and the pipeline is built from the settings of the
    environment where it is read; an object with ``pipeline=`` cannot be pickled.

    Attributes:
        pipeline: The pipeline; by default one from the settings of the environment, which loads the model. It is not
            closed by this object: ``rag.pipeline.close()``.
        retriever: Finds the passages of questions without documents, instead of the pipeline's index: a langchain
            retriever, a runnable or function from a question to documents, or an object with
            ``retrieve(question, k)``.
        k: Number of passages to retrieve; the pipeline's default if None.
        order: The order of the passages, a name or ``name:parameter=value``. None keeps the order of documents that
            come with the question or from ``retriever``, unless the pipeline has an order other than ``relevance``;
            for passages from an index it is the pipeline's default.
        mitigation: The mitigation, a name or ``name:parameter=value``; the pipeline's default if None.
        filter: A filter by metadata (docs/retrieval.md) of the retrieved passages, which the input cannot widen.
        output: ``dict``: the object of ``rag-posfix ask --json``; streamed, chunks ``{"answer": text}`` and then the
            other fields, whose sum is that object. ``text``: the text of the answer. ``answer``: an ``Answer``;
            streamed, ``AnswerChunk``.
        answer_from_memory: Whether a question without a passage is answered from the model's memory, which logs a
            warning. If False, a search that finds nothing has the pipeline's answer for that (``grounded`` is False),
            and a question is refused if there are neither documents nor an index nor a retriever.
        query: What is searched for in a conversation (``Question.query``); the pipeline's default if None.
        template: The prompt, instead of the pipeline's, in any form that ``build_pipeline`` takes: a
            ``ChatPromptTemplate`` with one place for the passages and one for the question, a file, a name, ...
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")
    engine_fields: ClassVar[tuple[str, ...]] = ("pipeline",)

    pipeline: Pipeline = Field(default=cast(Pipeline, None), exclude=True, repr=False)
    retriever: Any = Field(default=None, exclude=True, repr=False)
    k: int | None = Field(default=None, ge=1)
    order: str | None = None
    mitigation: str | None = None
    filter: FilterField = None
    output: Literal["dict", "text", "answer"] = "dict"
    answer_from_memory: bool = False
    template: TemplateField = Field(default=None, exclude=True, repr=False)
    query: Literal["last", "history", "rewrite"] | None = None

    _is_from_settings: bool = PrivateAttr(default=False)

    @field_validator("order")
    @classmethod
    def _known_order(cls, order: str | None) -> str | None:
        if order is not None:  # its parameters may come from the pipeline's settings
            ORDERS.get(parse_method(order, "order", "base=reverse").name)
        return order

    @field_validator("mitigation")
    @classmethod
    def _known_mitigation(cls, mitigation: str | None) -> str | None:
        if mitigation is not None:
            checked_method(_method(mitigation))
        return mitigation

    @model_validator(mode="after")
    def _validate_pipeline(self) -> Self:
        self._complete()
        return self

    def _complete(self) -> None:
        """Build the pipeline if none was passed, after the checks of the fields: loading a model takes long."""
        if self.pipeline is None:
            from rag_posfix.pipeline.build import build_pipeline

            self.pipeline = build_pipeline(retriever=self.retriever)
            self._is_from_settings = True
        elif self.retriever is not None:
            self.pipeline = self.pipeline.with_retriever(as_retriever(self.retriever))
        if self.template is not None:
            self.pipeline = self.pipeline.with_template(self.template)

    def __getstate__(self) -> dict[Any, Any]:
        if not self._is_from_settings:
            raise ConfigError(
                "a PosfixRAG with pipeline= cannot be pickled; leave pipeline out: it is then built from the "
                "settings of the environment where the pickle is read"
            )
        return super().__getstate__()

    def __setstate__(self, state: dict[Any, Any]) -> None:
        super().__setstate__(state)
        self._complete()

    @property
    def config_specs(self) -> list[ConfigurableFieldSpec]:
        """The keys of ``{"configurable": ...}``."""
        return [
            ConfigurableFieldSpec(id=name, annotation=kind, default=getattr(self, name, None))
            for name, kind in _CONFIGURABLE.items()
        ]

    def invoke(self, input: RAGInput, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Return the answer.

        Args:
            config: Callbacks, tags, configurable values.
            **kwargs: ``k``, ``order``, ``mitigation``, ``tenant``, ``filter``.

        Raises:
            RagPosfixError: the question, its parameters or its documents are malformed, or generation failed.
        """
        _check_config(config)
        return self._call_with_config(self._ask, input, config, **kwargs)

    async def ainvoke(self, input: RAGInput, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Do what ``invoke`` does in another thread, without blocking the event loop."""
        _check_config(config)
        return await self._acall_with_config(self._aask, input, config, **kwargs)

    def as_tool(
        self, args_schema: Any = None, *, name: str | None = None, description: str | None = None, **kwargs: Any
    ) -> BaseTool:
        """Return the pipeline as a tool of agents, with the arguments ``question`` and, optionally, ``filter``.

        The tool returns the text of the answer; ``artifact`` of its message is the object of ``rag-posfix ask --json``
        with the sources. A question that fails is a message with the error.

        Args:
            args_schema: Must be None: the arguments are fixed.
            name: Its name, ``search_documents`` without it.
            description: When to use it; say what the documents are about.

        Raises:
            ConfigError: another argument.
        """
        if args_schema is not None or kwargs:
            raise ConfigError("as_tool takes name and description; its arguments are question and filter")

        def answer(question: str, filter: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
            chosen = {"question": question} if filter is None else {"question": question, "filter": filter}
            try:
                result: Answer = self.model_copy(update={"output": "answer"}).invoke(chosen)  # the tool's context
            except RagPosfixError as error:
                raise ToolException(str(error)) from error
            return result.text, result.to_dict()

        return StructuredTool.from_function(
            answer,
            name=name or "search_documents",
            description=description or "Answers a question from the documents, with sources.",
            args_schema=ToolInput,
            response_format="content_and_artifact",
            handle_tool_error=True,
            handle_validation_error=tool_argument_errors,
        )

    def batch(
        self,
        inputs: list[RAGInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Return the answers to several questions, in their order; they share the steps of the model.

        ``max_concurrency`` of the configuration bounds how many are open at the same time, 16 without it.
        """
        configs = _concurrent(config, len(inputs))
        return super().batch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self,
        inputs: list[RAGInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Do what ``batch`` does in other threads, without blocking the event loop; cancelled, it stops."""
        return await run_until_cancelled(
            functools.partial(self.batch, inputs, config, return_exceptions=return_exceptions, **kwargs)
        )

    def stream(self, input: RAGInput, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        """Yield the answer in chunks. Closing the iterator stops the computation."""
        yield from self.transform(iter([input]), config, **kwargs)

    async def astream(
        self, input: RAGInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Do what ``stream`` does; each step runs in another thread."""

        async def only() -> AsyncIterator[RAGInput]:
            yield input

        async with _closing(self.atransform(only(), config, **kwargs)) as chunks:
            async for chunk in chunks:
                yield chunk

    def transform(
        self, input: Iterator[RAGInput], config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[Any]:
        """Do what ``stream`` does for a question that is streamed; it is asked when it is complete."""
        _check_config(config)
        yield from self._transform_stream_with_config(input, self._stream_chunks, config, **kwargs)

    async def atransform(
        self, input: AsyncIterator[RAGInput], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Do what ``transform`` does; each step runs in another thread."""
        _check_config(config)
        stream = self._atransform_stream_with_config(input, self._astream_chunks, config, **kwargs)
        async with _closing(stream) as chunks:
            async for chunk in chunks:
                yield chunk

    def _ask(
        self, input: RAGInput, run_manager: CallbackManagerForChainRun, config: RunnableConfig, **kwargs: Any
    ) -> Any:
        answer = self.pipeline.ask(self._question(input, config, kwargs), watcher=self._watcher(run_manager))
        _warn_without_passages(answer)
        return answer.text if self.output == "text" else answer.to_dict() if self.output == "dict" else answer

    async def _aask(
        self, input: RAGInput, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig, **kwargs: Any
    ) -> Any:
        return await run_until_cancelled(functools.partial(self._ask, input, run_manager.get_sync(), config, **kwargs))

    def _stream_chunks(
        self, input: Iterator[RAGInput], run_manager: CallbackManagerForChainRun, config: RunnableConfig, **kwargs: Any
    ) -> Iterator[Any]:
        yield from self._chunks(joined_input(list(input)), run_manager, config, kwargs)

    async def _astream_chunks(
        self,
        input: AsyncIterator[RAGInput],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        question = joined_input([chunk async for chunk in input])
        stream = _iterate_in_thread(self._chunks(question, run_manager.get_sync(), config, kwargs))
        async with _closing(stream) as chunks:
            async for chunk in chunks:
                yield chunk

    def _chunks(
        self, input: RAGInput, run_manager: CallbackManagerForChainRun, config: RunnableConfig, bound: dict[str, Any]
    ) -> Any:
        stream = self.pipeline.stream(self._question(input, config, bound), watcher=self._watcher(run_manager))
        with closing(stream) as chunks:
            for chunk in chunks:
                if chunk.answer is not None:
                    _warn_without_passages(chunk.answer)
                if self.output == "answer":
                    yield chunk
                elif self.output == "dict":
                    yield _addable(chunk)
                elif chunk.text:
                    yield chunk.text

    def _watcher(self, run_manager: CallbackManagerForChainRun) -> TracedStages:
        return TracedStages(run_manager.get_child(), self.pipeline.generator.model_id)

    def _question(self, input: RAGInput, config: RunnableConfig, bound: Mapping[str, Any]) -> Question:
        """Return the question with its parameters, from the first source that gives them."""
        unknown = sorted(set(bound) - set(_CONFIGURABLE))
        if unknown:
            raise ConfigError(f"PosfixRAG takes no argument {unknown[0]!r}; it takes {', '.join(_CONFIGURABLE)}")
        configured = config.get("configurable") or {}
        attributes = {"k": self.k, "order": self.order, "mitigation": self.mitigation, "query": self.query}
        fields = question_fields(input)
        fields["filter"] = combine_filters(
            self.filter, bound.get("filter"), configured.get("filter"), fields.get("filter")
        )
        for source in (bound, configured, attributes):
            for name in set(_CONFIGURABLE) - {"filter"}:
                if fields.get(name) in (None, "") and source.get(name) is not None:
                    fields[name] = source[name]
        mitigation = fields.get("mitigation")
        if isinstance(mitigation, str):
            fields["mitigation"] = _method(mitigation)
        has_documents = fields.get("documents") is not None
        names_index = fields.get("index") is not None
        searches = names_index or self.pipeline.retriever is not None
        if not has_documents and not searches and not self.answer_from_memory:
            raise ConfigError(
                "there are neither documents nor an index, so the answer would come from the model's memory; give "
                '{"question": ..., "documents": [...]}, PosfixRAG(retriever=...) or build_pipeline(index=...), or set '
                "answer_from_memory=True"
            )
        keeps_order = has_documents or (self.retriever is not None and not names_index)
        if keeps_order and not fields.get("order") and self.pipeline.defaults.order == Defaults().order:
            fields["order"] = "original"
        if self.answer_from_memory:
            fields["allow_ungrounded"] = True
        return Question(**fields)


async def _iterate_in_thread(iterator: Generator[T, None, None]) -> AsyncIterator[T]:
    """Yield the items of a blocking generator. It runs in another thread, one step at a time, on demand.

    If the consumer stops early, the generator is closed as soon as its current step has ended.
    """
    lock = threading.Lock()
    exhausted = object()

    def step() -> T | object:
        with lock:
            return next(iterator, exhausted)

    def close() -> None:
        with lock:  # a cancelled step runs to its end
            iterator.close()

    try:
        while (item := await asyncio.to_thread(step)) is not exhausted:
            yield item  # type: ignore[misc]  # not ``exhausted``
    finally:
        await asyncio.shield(asyncio.to_thread(close))


def _closing(chunks: AsyncIterator[Any]) -> aclosing[Any]:
    """Close the inner generator with the outer one: ``async for`` alone leaves that to the garbage collector."""
    return aclosing(chunks)


def _check_config(config: object) -> None:
    check_type("config", config, Mapping | None, 'a mapping such as {"configurable": {"k": 3}}, or None')


def _concurrent(config: RunnableConfig | list[RunnableConfig] | None, count: int) -> list[RunnableConfig]:
    """Return the configuration of each question of a batch, with a limit of open questions."""
    for entry in config if isinstance(config, list) else [config]:
        _check_config(entry)
    configs = get_config_list(config, count)
    return [{**entry, "max_concurrency": checked_concurrency(entry.get("max_concurrency"))} for entry in configs]


def _method(text: str) -> MethodSpec:
    return parse_method(text, "mitigation", "experts=5")


def _warn_without_passages(answer: Answer) -> None:
    if not answer.grounded and answer.usage.prompt_tokens:
        _log.warning("the prompt holds no passages: the answer comes from the model's memory")


def _addable(chunk: AnswerChunk) -> AddableDict:
    fields = {} if chunk.answer is None else chunk.answer.to_dict()
    return AddableDict(fields | {"answer": chunk.text})
