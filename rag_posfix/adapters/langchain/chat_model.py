"""A generator with a mitigation as a langchain chat model; documents are content blocks of the human message."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr, model_validator

from rag_posfix.adapters.document_ordering import OrderName, checked_method
from rag_posfix.adapters.langchain.content_blocks import (
    TemplateField,
    openai_tools,
    read_conversation,
    read_schema,
    tool_calls,
    typed_answers,
)
from rag_posfix.assembly.assembler import Assembled, Assembler
from rag_posfix.assembly.templates import BoundTools, resolve_tools
from rag_posfix.cancellation import check_cancelled, run_until_cancelled
from rag_posfix.checked import Checked, Portable
from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.method_spec import parse_method
from rag_posfix.contracts.request import Chunk, Generation, GenerationRequest, MitigationChoice, Sampling, Usage
from rag_posfix.errors import ConfigError, GenerationError, UnsupportedModelError
from rag_posfix.generation.model.json_grammar import compile_schema
from rag_posfix.generation.remote.connection import is_remote, parse_remote
from rag_posfix.pipeline.support import compare_words, read_texts, support_verdict
from rag_posfix.registry import check_names
from rag_posfix.text import NO_PASSAGE_TEXT

if TYPE_CHECKING:
    from rag_posfix.settings import Settings

__all__ = ["RagPosfixChatModel"]

_log = logging.getLogger(__name__)

_CALL_ARGUMENTS = (
    "documents", "model", "mitigation", "mitigation_parameters", "order", "temperature", "max_tokens", "top_p", "seed",
    "json_schema", "tools", "tool_choice",
)  # fmt: skip


class RagPosfixChatModel(Portable, Checked, BaseChatModel):
    """A chat model whose answer, by default, does not depend on the order of the documents.

    Example:
        .. code-block:: python

            model = RagPosfixChatModel()
            model.invoke("Who designed the lighthouse?", documents=documents).content
            message = HumanMessage([*map(document_block, documents), {"type": "text", "text": "Who ...?"}])
            model.invoke([message]).content

    Documents are given as ``documents=[...]`` to ``invoke``, ``stream``, ``batch`` or ``bind``, or as content blocks
    of the message. Documents with ``relevance_score`` in their metadata are weighted by it. Passages that are part of
    a prompt's text cannot be told apart from it and are read as they are; the first such prompt logs a warning. The
    model is loaded for the first answer. Unknown arguments are refused. Copies share the loaded model; a pickle holds
    the fields, ``api_key`` among them, and the model is loaded again where it is read.

    ``invoke`` and the other methods also take ``model``, ``mitigation``, ``mitigation_parameters``, ``order``,
    ``temperature``, ``max_tokens``, ``top_p`` and ``seed``, in place of the fields, ``stop`` in addition to the field,
    and ``json_schema``, which the answer then follows. ``tools`` and ``tool_choice`` are those of ``bind_tools``.

    Attributes:
        model_name: ``smollm2``, ``gemma3-270m``, a model id, a folder, or ``openai:NAME@URL`` for a model of an
            OpenAI-compatible server, which takes ``mitigation="none"`` only; alias ``model``.
        mitigation: Name of the mitigation, or ``name:parameter=value``; checked when the object is made.
        mitigation_parameters: Its parameters.
        order: The order of the documents in the prompt: a name, or ``name:parameter=value``.
        temperature: 0 is greedy.
        max_tokens: Maximum number of new tokens per answer.
        top_p: Sample from the most likely tokens up to this cumulative probability.
        seed: Seed of sampling.
        stop: Strings that end the answer.
        timeout: Time limit of an answer in seconds; None for no limit.
        max_retries: Further attempts of a remote model, instead of the setting; a local model does not retry.
        api_key: Key of a remote model, instead of the setting; a local model needs no key.
        allow_ungrounded: Whether ``documents=[]`` is answered from the model's memory. If False, such a call has the
            answer ``no_passage_text`` and ``response_metadata["grounded"]`` is False. A call without ``documents`` and
            without such content blocks is a conversation, which the model answers.
        no_passage_text: The answer to ``documents=[]``.
        passage_bytes: Memory for cached keys and values of documents, so that a document in a later message is not
            read again (``cache_read`` in ``usage_metadata`` counts its tokens); 0 for no cache. Not used if
            ``generator`` is given.
        streaming: Whether ``invoke`` streams to callbacks.
        template: The prompt of messages with documents: a ``ChatPromptTemplate`` with one place for the passages and
            one for the question, or any other form that ``build_pipeline`` takes.
        generator: Used instead of loading ``model_name``.
    """

    model_name: str = Field(default="smollm2", alias="model")
    mitigation: str = "default"
    mitigation_parameters: Mapping[str, Any] = Field(default_factory=dict)
    order: OrderName = "relevance"
    temperature: float = 0.0
    max_tokens: int = 128
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    timeout: float | None = None
    max_retries: int = 0
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    allow_ungrounded: bool = False
    no_passage_text: str = Field(default=NO_PASSAGE_TEXT, min_length=1)
    passage_bytes: int = Field(default=256 * 1024**2, ge=0)
    streaming: bool = False
    template: TemplateField = Field(default=None, exclude=True, repr=False)
    generator: Any = Field(default=None, exclude=True, repr=False)

    model_config = ConfigDict(populate_by_name=True, extra="forbid")
    engine_fields: ClassVar[tuple[str, ...]] = ("generator",)

    _lock: Lock = PrivateAttr(default_factory=Lock)
    _loaded: Any = PrivateAttr(default=None)
    _has_warned: bool = PrivateAttr(default=False)

    @model_validator(mode="after")
    def _known_mitigation(self) -> Self:
        choice = checked_method(self._choice({}))
        if is_remote(self.model_name):
            from rag_posfix.generation.remote.generator import check_remote_mitigation  # torch

            check_remote_mitigation(parse_remote(self.model_name).name, choice)
        return self

    def __getstate__(self) -> dict[Any, Any]:
        if self.generator is not None:
            raise ConfigError(
                f"a chat model with generator={type(self.generator).__name__} cannot be pickled; make it with model=, "
                "which is loaded where the pickle is read"
            )
        return super().__getstate__()

    @property
    def _llm_type(self) -> str:
        return "rag_posfix"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        template = {} if self.template is None else {"template": self.template.fingerprint()}
        return {
            **template,
            **self._weights(),
            "model": self.model_name,
            "mitigation": self.mitigation,
            "mitigation_parameters": dict(self.mitigation_parameters),
            "order": self.order,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop_sequences": self.stop,  # langchain overwrites "stop" with that of the call
            "allow_ungrounded": self.allow_ungrounded,
            "no_passage_text": self.no_passage_text,
        }

    def _weights(self) -> dict[str, Any]:
        """Return what tells the weights from others under the same ``model_name``, without loading them."""
        if self.generator is not None:
            return {"generator": self.generator.fingerprint}
        settings = self._settings()
        return {"adapter": None if settings.adapter is None else str(settings.adapter), "dtype": settings.dtype}

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

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: Any = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return a runnable that may call tools, as the chat template of the model writes them; loads the model.

        Calls are in ``tool_calls`` of the message. Where a call is required, it follows the schema of its tool, every
        token of it. Where the model decides, a malformed call stays in the text of the message. Messages may end with
        ``ToolMessage``, whose results the model then reads.

        Args:
            tools: Tools, functions, Pydantic classes or dicts in OpenAI's form.
            tool_choice: ``auto`` (the model decides; as None), ``none``, ``any``, or the name of the tool to call.
            **kwargs: Arguments of ``invoke`` that are bound too.

        Raises:
            ConfigError: a tool or ``tool_choice`` cannot be read, or llguidance is needed and not installed.
            UnsupportedModelError: the chat template takes no tools (SmolLM2), or the model is remote.
        """
        check_names("bind_tools", kwargs, dict.fromkeys(_CALL_ARGUMENTS))
        if self.generator is None and is_remote(self.model_name):
            raise UnsupportedModelError(f"{self.model_name} is remote and takes no tools here; use its own chat model")
        definitions = openai_tools(tools)
        resolve_tools(self._load(), definitions, tool_choice)
        return self.bind(tools=definitions, tool_choice=tool_choice, **kwargs)

    def with_structured_output(
        self, schema: Any, *, include_raw: bool = False, **kwargs: Any
    ) -> Runnable[LanguageModelInput, Any]:
        """Return a runnable whose answers follow a schema, every token of them.

        Args:
            schema: A Pydantic class, whose objects it then returns; or a JSON schema or a ``TypedDict``, for a dict.
            include_raw: Whether it returns ``{"raw", "parsed", "parsing_error"}``, and does not raise for an answer
                that ``max_tokens`` cut.
            **kwargs: ``method``, which may only be ``"json_schema"``; and ``strict``, which is always so.

        Raises:
            ConfigError: the schema has a part that cannot be enforced, or llguidance is not installed.
            UnsupportedModelError: another method, or a generator without schemas.
        """
        check_names("with_structured_output", kwargs, dict.fromkeys(("method", "strict")))
        if kwargs.get("method", "json_schema") != "json_schema":
            raise UnsupportedModelError(f"method={kwargs['method']!r} is not supported; leave it out (json_schema)")
        text, parser = read_schema(schema)
        if self.generator is not None:
            self.generator.check_json_schema(text)
        elif not is_remote(self.model_name):
            compile_schema(text)
        return typed_answers(self.bind(json_schema=text), parser, include_raw=include_raw)

    def _load(self) -> Generator:
        with self._lock:
            if self._loaded is None:
                self._loaded = self._build() if self.generator is None else self.generator
            loaded: Generator = self._loaded
            return loaded

    def _build(self) -> Generator:
        from rag_posfix.generation.batching.scheduler import batched
        from rag_posfix.pipeline.build import build_generator

        return batched(build_generator(self._settings(), self.passage_bytes))  # `batch` shares steps

    def _settings(self) -> Settings:
        from rag_posfix.settings import RemoteSettings, Settings

        remote: dict[str, Any] = {}
        if self.api_key is not None:
            remote["api_key"] = self.api_key
        if "max_retries" in self.model_fields_set:
            remote["retries"] = self.max_retries
        return Settings(model=self.model_name, remote=RemoteSettings(**remote))

    def _stops(self, stop: Sequence[str] | None) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*(self.stop or ()), *(stop or ())]))

    def _choice(self, options: Mapping[str, Any]) -> MitigationChoice:
        """Return the mitigation of a call. Parameters of the object belong to the object's mitigation."""
        parameters = {} if "mitigation" in options else self.mitigation_parameters
        parsed = parse_method(options.get("mitigation", self.mitigation), "mitigation", "experts=5")
        return MitigationChoice(
            parsed.name, {**parsed.parameters, **(options.get("mitigation_parameters", parameters) or {})}
        )

    def _warn_once(self, choice: MitigationChoice) -> None:
        if choice.name == "none" or self._has_warned:
            return
        self._has_warned = True
        _log.warning(
            "the prompt holds no documents, so the method %s corrects nothing: passages in the text of a prompt are "
            "read as they are; pass them as documents=[...] or as content blocks (rag_posfix.document_block), or set "
            "mitigation='none'",
            choice.name,
        )

    def _prepare(
        self, messages: Sequence[BaseMessage], stop: Sequence[str] | None, options: Mapping[str, Any]
    ) -> tuple[Generator, Assembled, GenerationRequest, BoundTools | None]:
        check_names("RagPosfixChatModel, called,", options, dict.fromkeys(_CALL_ARGUMENTS))
        choice = self._choice(options)
        generator = self._load()
        if options.get("model", self.model_name) not in (self.model_name, generator.model_id):
            raise ConfigError(
                f"this chat model serves {self.model_name!r}, not {options['model']!r}; make another for that model"
            )
        tools = None
        if options.get("tools"):
            tools = resolve_tools(generator, options["tools"], options.get("tool_choice"))
        conversation = read_conversation(messages, with_tools=tools is not None)
        sampling = Sampling(
            max_tokens=options.get("max_tokens", self.max_tokens),
            temperature=options.get("temperature", self.temperature),
            top_p=options.get("top_p", self.top_p),
            seed=options.get("seed", self.seed),
            stop=self._stops(stop),
            json_schema=options.get("json_schema") if tools is None or tools.schema is None else tools.schema,
        )
        if sampling.json_schema is not None:
            generator.check_json_schema(sampling.json_schema)
        documents = [*conversation.documents, *_check_documents(options.get("documents"))]
        if not documents and options.get("documents") is None:
            self._warn_once(choice)
        encoder = generator.encoder if tools is None else tools.encoder
        assembler = Assembler(encoder, generator.context_window, self.template)
        assembled = assembler.assemble(
            conversation.question,
            documents,
            order=options.get("order", self.order),
            max_new_tokens=sampling.max_tokens,
            history=conversation.history,
            tool_turns=conversation.tool_turns,
            order_free=generator.describe(choice).order_invariant,
        )
        assembled.log_omissions()
        cues = assembler.template.cues if assembled.documents and sampling.json_schema is None else ()
        return generator, assembled, GenerationRequest(assembled.layout, choice, sampling, cues=cues), tools

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        message: AIMessageChunk | None = None
        for chunk in self._stream(messages, stop, None, **kwargs):
            addition = chunk.message
            if isinstance(addition, AIMessageChunk):
                message = addition if message is None else message + addition
        if message is None:
            raise GenerationError("the stream ended without an answer; please report this")
        answer = AIMessage(
            content=message.content,
            tool_calls=message.tool_calls,
            response_metadata=message.response_metadata,
            usage_metadata=message.usage_metadata,
        )
        return ChatResult(
            generations=[ChatGeneration(message=answer, generation_info=dict(message.response_metadata))]
        )

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        """Do what ``_generate`` does in another thread; cancelled, the model stops at the next token."""

        def generate() -> ChatResult:
            return self._generate(messages, stop, None, **kwargs)

        return await run_until_cancelled(generate)

    def get_token_ids(self, text: str) -> list[int]:
        """Return the tokens of ``text`` by the model's own tokenizer; loads the model."""
        return list(self._load().encoder.encode_text(text))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        started = time.monotonic()
        generator, assembled, request, tools = self._prepare(messages, stop, kwargs)
        reader = None if tools is None else tools.reader()
        was_given = kwargs.get("documents") is not None or bool(assembled.dropped)
        refuses = was_given and not assembled.documents and not self.allow_ungrounded
        for chunk in self._without_passage() if refuses else generator.stream(request):
            check_cancelled()
            if self.timeout is not None and time.monotonic() - started > self.timeout:
                raise GenerationError(f"the answer took longer than timeout={self.timeout} s; raise it or max_tokens")
            text = chunk.text if reader is None else reader.feed(chunk.text)
            if chunk.generation is None:
                message = AIMessageChunk(content=text)
            else:
                rest, calls = ("", []) if reader is None else reader.finish()
                metadata = self._metadata(generator, assembled, request, chunk.generation)
                message = AIMessageChunk(
                    content=text + rest,
                    tool_calls=tool_calls(calls),
                    usage_metadata=usage_metadata(chunk.generation),
                    response_metadata=metadata | ({"finish_reason": "tool_calls"} if calls else {}),
                    chunk_position="last",
                )
            message_chunk = ChatGenerationChunk(message=message)
            if run_manager is not None:
                run_manager.on_llm_new_token(str(message.content), chunk=message_chunk)
            yield message_chunk

    def _without_passage(self) -> Iterator[Chunk]:
        """Yield the answer to an empty list of documents, without asking the model."""
        text = self.no_passage_text
        yield Chunk(text, Generation(text, (), "stop", Usage(prompt_tokens=0, completion_tokens=0)))

    def _metadata(
        self, generator: Generator, assembled: Assembled, request: GenerationRequest, generation: Generation
    ) -> dict[str, Any]:
        attention = generation.attention or (0.0,) * len(assembled.ids)
        names = ("attention", "weight") if generation.weighted else ("attention",)  # both until 1.0
        layout = assembled.layout
        question = generator.encoder.decode(layout.tokens(layout.question))
        words = compare_words(generation.text, read_texts(assembled.documents), question)
        support, supporting = support_verdict((), words) if assembled.documents else ("no", ())
        return {
            "model_name": generator.model_id,
            "model_provider": "rag_posfix",
            "finish_reason": generation.finish_reason,
            "mitigation": request.mitigation.name,
            "grounded": bool(assembled.documents),
            "support": support,
            "supported_by": [assembled.ids[index] for index in supporting],
            "truncated": list(assembled.truncated),
            "dropped": [{"id": dropped.id, "reason": dropped.reason} for dropped in assembled.dropped],
            "documents": [
                {"id": identity, "position": position, **dict.fromkeys(names, share)}
                for position, (identity, share) in enumerate(zip(assembled.ids, attention, strict=True))
            ],
        }


def _check_documents(value: object) -> Sequence[Document]:
    if value is None:
        return ()
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise ConfigError(f"documents is {type(value).__name__}; give a list of langchain_core Documents")
    return value


def usage_metadata(generation: Generation) -> UsageMetadata:
    """Return the token counts of an answer for langchain."""
    usage = generation.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
    )
