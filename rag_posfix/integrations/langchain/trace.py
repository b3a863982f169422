"""Reports the stages of a pipeline as runs of a langchain trace: retriever, reranker, generator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from langchain_core.callbacks import CallbackManager
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, LLMResult

from rag_posfix.contracts.request import Generation
from rag_posfix.integrations.langchain.chat_model import usage_metadata
from rag_posfix.pipeline.tracing import Stage


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

    def piece(self, text: str) -> None:
        """Ignore it."""

    def done(self, outcome: Any) -> None:
        self._run.on_chain_end({"documents": list(outcome)})

    def stopped(self) -> None:
        self._run.on_chain_end({})

    def failed(self, error: BaseException) -> None:
        self._run.on_chain_error(error)


class _RetrieverRun:
    def __init__(self, callbacks: CallbackManager, question: str) -> None:
        self._run = callbacks.on_retriever_start(None, question, name="retriever")

    def piece(self, text: str) -> None:
        """Ignore it."""

    def done(self, outcome: Any) -> None:
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

    def piece(self, text: str) -> None:
        self._text += text
        self._run.on_llm_new_token(text, chunk=ChatGenerationChunk(message=AIMessageChunk(content=text)))

    def done(self, outcome: Any) -> None:
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
