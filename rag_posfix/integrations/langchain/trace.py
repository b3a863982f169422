"""The stages of a pipeline as runs in a langchain trace: retriever, reranker, generator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from langchain_core.callbacks import CallbackManager
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, LLMResult

from rag_posfix.contracts.request import Generation
from rag_posfix.pipeline.protocols import Stage

__all__ = ["TracedStages"]


class TracedStages:
    """Tells callbacks what a pipeline does. Implements ``pipeline.protocols.StageWatcher``.

    The generator is told as a chat model that was asked the question; the prompt with its passages is not repeated.

    Args:
        callbacks: The children of the run that asks the pipeline.
        model_name: The generator's, for whoever counts tokens by model.
    """

    def __init__(self, callbacks: CallbackManager, model_name: str) -> None:
        self._callbacks = callbacks
        self._model_name = model_name

    @contextmanager
    def stage(self, name: str, given: str, documents: Sequence[Document] = ()) -> Iterator[Stage]:
        """Return what holds while a stage runs; an exception that passes through it is the stage's failure.

        Args:
            name: ``retriever``, ``reranker`` or ``generator``.
            given: The question.
            documents: What a reranker scores.
        """
        if name == "generator":
            run: _Generator | _Retriever | _Other = _Generator(self._callbacks, given, self._model_name)
        elif name == "retriever":
            run = _Retriever(self._callbacks, given)
        else:
            run = _Other(self._callbacks, name, given, documents)
        try:
            yield run
        except GeneratorExit:  # whoever reads the answer has enough
            run.stopped()
            raise
        except BaseException as error:
            run.failed(error)
            raise


class _Other:
    def __init__(self, callbacks: CallbackManager, name: str, given: str, documents: Sequence[Document]) -> None:
        inputs = {"query": given, "documents": list(documents)}
        self._run = callbacks.on_chain_start(None, inputs, name=name)

    def piece(self, text: str) -> None:
        """Ignore it."""

    def done(self, outcome: Any) -> None:
        self._run.on_chain_end({"documents": list(outcome)})

    def stopped(self) -> None:
        self._run.on_chain_end({})

    def failed(self, error: BaseException) -> None:
        self._run.on_chain_error(error)


class _Retriever:
    def __init__(self, callbacks: CallbackManager, given: str) -> None:
        self._run = callbacks.on_retriever_start(None, given, name="retriever")

    def piece(self, text: str) -> None:
        """Ignore it."""

    def done(self, outcome: Any) -> None:
        self._run.on_retriever_end(list(outcome))

    def stopped(self) -> None:
        self._run.on_retriever_end([])

    def failed(self, error: BaseException) -> None:
        self._run.on_retriever_error(error)


class _Generator:
    def __init__(self, callbacks: CallbackManager, given: str, model_name: str) -> None:
        self._model_name = model_name
        self._text = ""
        self._ended = False
        asked: list[list[BaseMessage]] = [[HumanMessage(given)]]
        (self._run,) = callbacks.on_chat_model_start({"name": "generator"}, asked, name="generator")

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
        if not self._ended:  # what is read after the last piece may still fail or stop
            self._ended = True
            self._run.on_llm_end(LLMResult(generations=[[ChatGeneration(message=message)]]))


def _message(generation: Generation, model_name: str) -> AIMessage:
    usage = generation.usage
    return AIMessage(
        content=generation.text,
        response_metadata={"model_name": model_name, "finish_reason": generation.finish_reason},
        usage_metadata=UsageMetadata(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
        ),
    )
