"""The patched generator as a langchain chat model that takes documents in the human message."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import ConfigDict, Field, PrivateAttr

from rag_posfix.assembly.assembler import Assembled, Assembler
from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import Generation, GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import ConfigError, GenerationError
from rag_posfix.integrations.langchain.content_blocks import read_conversation

__all__ = ["RagPosfixChatModel"]


class RagPosfixChatModel(BaseChatModel):
    """A chat model whose answer does not depend on the order of the documents in the message.

    Example:
        .. code-block:: python

            model = RagPosfixChatModel()
            message = HumanMessage([*(document_block(d) for d in documents), {"type": "text", "text": "Who ...?"}])
            model.invoke([message]).content

    Documents that carry ``relevance_score`` in their metadata are weighted by it. Nothing is loaded before the first
    answer.

    Attributes:
        model_name: ``smollm2``, ``gemma3-270m``, a model id or a folder; alias ``model``.
        mitigation: Name of the mitigation.
        mitigation_parameters: Its parameters.
        order: The order of the documents in the prompt: a name, or ``name:parameter=value``.
        temperature: 0 is greedy.
        max_tokens: New tokens per answer.
        top_p: Keep the most likely tokens up to this probability.
        seed: Seeds sampling.
        stop: Strings that end the answer.
        timeout: Seconds after which an answer is given up; None never.
        max_retries: Accepted for compatibility; a local model has nothing to retry.
        passage_bytes: Keys and values of documents that are kept in memory, so that a document that comes again is not
            read again (``usage_metadata`` counts what was found as ``cache_read``); 0 keeps none. A generator that is
            given has its own.
        generator: Used in place of loading ``model_name``.
    """

    model_name: str = Field(default="smollm2", alias="model")
    mitigation: str = "context_experts"
    mitigation_parameters: Mapping[str, Any] = Field(default_factory=dict)
    order: str = "relevance"
    temperature: float = 0.0
    max_tokens: int = 128
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    timeout: float | None = None
    max_retries: int = 0
    passage_bytes: int = Field(default=256 * 1024**2, ge=0)
    generator: Any = Field(default=None, exclude=True, repr=False)

    model_config = ConfigDict(populate_by_name=True)

    _lock: Lock = PrivateAttr(default_factory=Lock)

    @property
    def _llm_type(self) -> str:
        return "rag_posfix"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {
            "model": self.model_name,
            "mitigation": self.mitigation,
            "mitigation_parameters": dict(self.mitigation_parameters),
            "order": self.order,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "top_p": self.top_p,
            "seed": self.seed,
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = LangSmithParams(
            ls_provider="rag_posfix",
            ls_model_name=kwargs.get("model", self.model_name),
            ls_model_type="chat",
            ls_temperature=kwargs.get("temperature", self.temperature),
            ls_max_tokens=kwargs.get("max_tokens", self.max_tokens),
        )
        if stops := self._stops(stop):
            params["ls_stop"] = list(stops)
        return params

    def _load(self) -> Generator:
        with self._lock:
            if self.generator is None:
                from rag_posfix.pipeline.build import build_engine
                from rag_posfix.settings import Settings

                engine = build_engine(Settings(model=self.model_name))
                if self.passage_bytes:
                    from rag_posfix.caching.kv.memory import MemoryPassages
                    from rag_posfix.caching.kv.store import PassageStore

                    store = PassageStore([MemoryPassages(self.passage_bytes)], device=engine.loaded.device)
                    engine = engine.with_passages(store)
                self.generator = engine
            loaded: Generator = self.generator
            return loaded

    def _stops(self, stop: Sequence[str] | None) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*(self.stop or ()), *(stop or ())]))

    def _prepare(
        self, messages: Sequence[BaseMessage], stop: Sequence[str] | None, options: Mapping[str, Any]
    ) -> tuple[Generator, Assembled, GenerationRequest]:
        generator = self._load()
        if options.get("model", self.model_name) not in (self.model_name, generator.model_id):
            raise ConfigError(
                f"this chat model serves {self.model_name!r}, not {options['model']!r}; make another for that model"
            )
        conversation = read_conversation(messages)
        sampling = Sampling(
            max_tokens=options.get("max_tokens", self.max_tokens),
            temperature=options.get("temperature", self.temperature),
            top_p=options.get("top_p", self.top_p),
            seed=options.get("seed", self.seed),
            stop=self._stops(stop),
        )
        choice = MitigationChoice(
            options.get("mitigation", self.mitigation),
            options.get("mitigation_parameters", self.mitigation_parameters),
        )
        assembled = Assembler(generator.encoder, generator.context_window).assemble(
            conversation.question,
            conversation.documents,
            order=options.get("order", self.order),
            max_new_tokens=sampling.max_tokens,
            history=conversation.history,
            order_free=generator.describe(choice).order_invariant,
        )
        return generator, assembled, GenerationRequest(assembled.layout, choice, sampling)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        message: AIMessageChunk | None = None
        for chunk in self._stream(messages, stop, None, **kwargs):
            piece = chunk.message
            if isinstance(piece, AIMessageChunk):
                message = piece if message is None else message + piece
        if message is None:
            raise GenerationError("the stream ended without an answer; please report this")
        whole = AIMessage(
            content=message.content,
            response_metadata=message.response_metadata,
            usage_metadata=message.usage_metadata,
        )
        return ChatResult(generations=[ChatGeneration(message=whole, generation_info=dict(message.response_metadata))])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        started = time.monotonic()
        generator, assembled, request = self._prepare(messages, stop, kwargs)
        for piece in generator.stream(request):
            if self.timeout is not None and time.monotonic() - started > self.timeout:
                raise GenerationError(f"the answer took longer than timeout={self.timeout} s; raise it or max_tokens")
            message = AIMessageChunk(content=piece.text)
            if piece.generation is not None:
                message.usage_metadata = _usage(piece.generation)
                message.response_metadata = self._metadata(generator, assembled, request, piece.generation)
                message.chunk_position = "last"
            chunk = ChatGenerationChunk(message=message)
            if run_manager is not None:
                run_manager.on_llm_new_token(piece.text, chunk=chunk)
            yield chunk

    def _metadata(
        self, generator: Generator, assembled: Assembled, request: GenerationRequest, generation: Generation
    ) -> dict[str, Any]:
        attention = generation.attention or (0.0,) * len(assembled.ids)
        return {
            "model_name": generator.model_id,
            "model_provider": "rag_posfix",
            "finish_reason": generation.finish_reason,
            "mitigation": request.mitigation.name,
            "documents": [
                {"id": identity, "position": place, "attention": share}
                for place, (identity, share) in enumerate(zip(assembled.ids, attention, strict=True))
            ],
        }


def _usage(generation: Generation) -> UsageMetadata:
    usage = generation.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
    )
