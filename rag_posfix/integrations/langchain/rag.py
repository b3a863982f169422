"""A pipeline as a langchain runnable: a question in, an answer with its sources out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Literal, TypeAlias, TypeVar

from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.messages import BaseMessage
from langchain_core.runnables import AddableDict, ConfigurableFieldSpec, RunnableConfig, RunnableSerializable
from pydantic import ConfigDict, Field

from rag_posfix.contracts.answer import Answer, AnswerChunk, Question
from rag_posfix.contracts.method_spec import parse_method
from rag_posfix.errors import ConfigError
from rag_posfix.integrations.langchain.trace import TracedStages
from rag_posfix.pipeline.pipeline import Pipeline

__all__ = ["PosfixRAG", "RAGInput"]

T = TypeVar("T")

RAGInput: TypeAlias = str | dict[str, Any] | Question
"""The question; or ``{"question", "documents", "history", ...}``, the fields of ``Question``."""

_CONFIGURABLE = {"k": int, "order": str, "mitigation": str, "tenant": str}
_FIELDS = ("documents", "history", "mitigation", "order", "seed", "k", "sampling", "tenant", "use_cache")
_ROLES = {"human": "user", "ai": "assistant", "system": "system"}


class PosfixRAG(RunnableSerializable[RAGInput, Any]):
    """Answers questions from documents: ``invoke``, ``stream``, ``batch``, their asynchronous versions, and ``|``.

    In a trace, a run named ``PosfixRAG`` (or ``name``) has the child runs ``retriever``, ``reranker`` and
    ``generator`` for the stages that took place: an answer from the cache has no generator. The generator's run
    streams and counts its tokens.

    Example:
        .. code-block:: python

            rag = PosfixRAG(pipeline=build_pipeline(index="my.index"))
            rag.invoke("Who designed the lighthouse?")["answer"]
            asked = {"question": "Who designed it?", "documents": documents}
            rag.invoke(asked, {"configurable": {"order": "reverse"}})

    ``k``, ``order``, ``mitigation`` and ``tenant`` are taken from the first of these that gives them: the input, bound
    arguments (``rag.bind(k=3)``), the call (``{"configurable": {"k": 3}}``), the object.

    Attributes:
        pipeline: The pipeline. It is not closed by this object.
        k: Number of passages to retrieve; the pipeline's default if None.
        order: The order of the passages, a name or ``name:parameter=value``; the pipeline's default if None.
        mitigation: The mitigation, a name or ``name:parameter=value``; the pipeline's default if None.
        output: ``dict``: the object of ``rag-posfix ask --json``; streamed, chunks ``{"answer": text}`` and then the
            other fields, whose sum is that object. ``text``: the text of the answer. ``answer``: an ``Answer``;
            streamed, ``AnswerChunk``.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    pipeline: Pipeline = Field(exclude=True, repr=False)
    k: int | None = Field(default=None, ge=1)
    order: str | None = None
    mitigation: str | None = None
    output: Literal["dict", "text", "answer"] = "dict"

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
            input: The question.
            config: Callbacks, tags, configurable values.
            **kwargs: ``k``, ``order``, ``mitigation``, ``tenant``.

        Raises:
            RagPosfixError: the question, its parameters or its documents are malformed, or generation failed.
        """
        return self._call_with_config(self._ask, input, config, **kwargs)

    async def ainvoke(self, input: RAGInput, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Do what ``invoke`` does in another thread, without blocking the event loop.

        Args:
            input: The question.
            config: Callbacks, tags, configurable values.
            **kwargs: As for ``invoke``.
        """
        return await self._acall_with_config(self._aask, input, config, **kwargs)

    def stream(self, input: RAGInput, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        """Yield the answer in chunks. Closing the iterator stops the computation.

        Args:
            input: The question.
            config: Callbacks, tags, configurable values.
            **kwargs: As for ``invoke``.
        """
        yield from self.transform(iter([input]), config, **kwargs)

    async def astream(
        self, input: RAGInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Do what ``stream`` does; each step runs in another thread.

        Args:
            input: The question.
            config: Callbacks, tags, configurable values.
            **kwargs: As for ``invoke``.
        """

        async def only() -> AsyncIterator[RAGInput]:
            yield input

        async with _closing(self.atransform(only(), config, **kwargs)) as chunks:
            async for chunk in chunks:
                yield chunk

    def transform(
        self, input: Iterator[RAGInput], config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[Any]:
        """Do what ``stream`` does for a question that is streamed; it is asked when it is complete.

        Args:
            input: Chunks of the question.
            config: Callbacks, tags, configurable values.
            **kwargs: As for ``invoke``.
        """
        yield from self._transform_stream_with_config(input, self._stream_chunks, config, **kwargs)

    async def atransform(
        self, input: AsyncIterator[RAGInput], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Do what ``transform`` does; each step runs in another thread.

        Args:
            input: Chunks of the question.
            config: Callbacks, tags, configurable values.
            **kwargs: As for ``invoke``.
        """
        stream = self._atransform_stream_with_config(input, self._astream_chunks, config, **kwargs)
        async with _closing(stream) as chunks:
            async for chunk in chunks:
                yield chunk

    def _ask(
        self, input: RAGInput, run_manager: CallbackManagerForChainRun, config: RunnableConfig, **kwargs: Any
    ) -> Any:
        answer = self.pipeline.ask(self._question(input, config, kwargs), self._watcher(run_manager))
        return answer.text if self.output == "text" else answer.to_dict() if self.output == "dict" else answer

    async def _aask(
        self, input: RAGInput, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig, **kwargs: Any
    ) -> Any:
        return await asyncio.to_thread(self._ask, input, run_manager.get_sync(), config, **kwargs)

    def _stream_chunks(
        self, input: Iterator[RAGInput], run_manager: CallbackManagerForChainRun, config: RunnableConfig, **kwargs: Any
    ) -> Iterator[Any]:
        yield from self._chunks(_joined(list(input)), run_manager, config, kwargs)

    async def _astream_chunks(
        self,
        input: AsyncIterator[RAGInput],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        asked = _joined([chunk async for chunk in input])
        stream = _iterate_in_thread(self._chunks(asked, run_manager.get_sync(), config, kwargs))
        async with _closing(stream) as chunks:
            async for chunk in chunks:
                yield chunk

    def _chunks(
        self, asked: RAGInput, run_manager: CallbackManagerForChainRun, config: RunnableConfig, bound: dict[str, Any]
    ) -> Any:
        chunks = self.pipeline.stream(self._question(asked, config, bound), self._watcher(run_manager))
        for chunk in chunks:
            if self.output == "answer":
                yield chunk
            elif self.output == "dict":
                yield _addable(chunk)
            elif chunk.text:
                yield chunk.text

    def _watcher(self, run_manager: CallbackManagerForChainRun) -> TracedStages:
        return TracedStages(run_manager.get_child(), self.pipeline.generator.model_id)

    def _question(self, asked: RAGInput, config: RunnableConfig, bound: Mapping[str, Any]) -> Question:
        """Return the question with its parameters, from the first source that gives them."""
        unknown = sorted(set(bound) - set(_CONFIGURABLE))
        if unknown:
            raise ConfigError(f"PosfixRAG takes no argument {unknown[0]!r}; it takes {', '.join(_CONFIGURABLE)}")
        configured = config.get("configurable") or {}
        own = {"k": self.k, "order": self.order, "mitigation": self.mitigation}
        fields = _read(asked)
        for source in (bound, configured, own):
            for name in _CONFIGURABLE:
                if fields.get(name) in (None, "") and source.get(name) is not None:
                    fields[name] = source[name]
        mitigation = fields.get("mitigation")
        if isinstance(mitigation, str):
            fields["mitigation"] = parse_method(mitigation, "mitigation", "experts=5")
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


def _read(asked: RAGInput) -> dict[str, Any]:
    """Return the given fields of the question."""
    if isinstance(asked, str):
        return {"text": asked}
    if isinstance(asked, Question):
        return {"text": asked.text, **{name: getattr(asked, name) for name in _FIELDS}}
    if not isinstance(asked, dict) or not isinstance(asked.get("question"), str):
        raise ConfigError(
            f"PosfixRAG was asked with {type(asked).__name__}; give the question as text, as "
            '{"question": text, "documents": [...]}, or as a Question'
        )
    unknown = sorted(set(asked) - {"question", *_FIELDS})
    if unknown:
        raise ConfigError(
            f"PosfixRAG was asked with {unknown[0]!r}; a question may hold question, {', '.join(_FIELDS)}"
        )
    fields = {name: asked[name] for name in _FIELDS if name in asked}
    if "history" in fields:
        fields["history"] = [_message(message) for message in fields["history"]]
    return {"text": asked["question"], **fields}


def _message(message: Any) -> Any:
    """Return a langchain message as ``{"role", "content"}``; any other object unchanged."""
    if not isinstance(message, BaseMessage):
        return message
    return {"role": _ROLES.get(message.type, message.type), "content": message.text}


def _addable(chunk: AnswerChunk) -> AddableDict:
    rest: dict[str, Any] = {}
    if isinstance(chunk.answer, Answer):
        rest = {name: value for name, value in chunk.answer.to_dict().items() if name != "answer"}
    return AddableDict(answer=chunk.text, **rest)


def _joined(chunks: list[RAGInput]) -> RAGInput:
    if not chunks:
        raise ConfigError("PosfixRAG was asked nothing; give a question")
    whole: Any = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    asked: RAGInput = whole
    return asked
