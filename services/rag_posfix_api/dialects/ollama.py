"""Ollama: chat and generate, in lines of JSON or whole, and what is served."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import AliasChoices, BaseModel, ConfigDict, Field
from starlette.responses import Response

from rag_posfix.contracts.answer import Answer, AnswerChunk, Question
from rag_posfix.contracts.generator import ChatMessage
from rag_posfix_api.dialects.answering import (
    ANY_OBJECT,
    AnswerRenderer,
    Provenance,
    ToolInput,
    build_question,
    chat_route,
    check_free_answer,
    conversation,
    provenance,
    reject_fields,
    sampling_fields,
    tool_use,
)
from rag_posfix_api.dialects.embeddings import TextInput, respond_with_vectors
from rag_posfix_api.dialects.requests import (
    EXAMPLE,
    AnswerRequest,
    Count,
    GivenDocuments,
    Integer,
    Message,
    RequestModel,
    Seed,
    StopStrings,
    Temperature,
    TopK,
    TopP,
    Unsupported,
    to_documents,
)
from rag_posfix_api.http.errors import OLLAMA, Problem
from rag_posfix_api.http.middleware import CleanRoute, encode_json
from rag_posfix_api.runtime.service import ReadyCall, ReadyService, Service, package_version


class OllamaOptions(RequestModel):
    """Sampling parameters. Options that would change the answer otherwise are refused; others have no effect here."""

    model_config = ConfigDict(extra="allow")

    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    seed: Seed | None = None
    num_predict: Integer | None = Field(
        default=None, description="Most tokens of the answer; 0 and less give the service's default."
    )
    stop: StopStrings | None = None


def _untagged(name: str) -> str:
    return name.removesuffix(":latest")


KeepAlive = int | float | str | None
"""How long the model stays loaded. This service's stays; 0 without a question is answered as Ollama answers it."""


class _OllamaRequest(AnswerRequest):
    unsupported: ClassVar[Unsupported] = {
        "think": (None, False),
        "logprobs": (None, False),
        "images": (None, []),
        "suffix": (None, ""),
        "template": (None, ""),
        "context": (None, []),
        "raw": (None, False),
    }

    model: str = Field(examples=["default"], description="The served model, or 'default'; ':latest' may follow.")
    stream: bool | None = Field(default=None, description="False gives one object; otherwise lines of JSON.")
    options: OllamaOptions | None = None
    format: Literal["", "json"] | dict[str, Any] | None = Field(
        default=None, description="``json`` for any JSON object, or the JSON schema that the answer follows."
    )
    documents: GivenDocuments = None

    @property
    def served_name(self) -> str:
        """The name without Ollama's usual tag."""
        return _untagged(self.model)


class OllamaChatRequest(_OllamaRequest):
    """A conversation. Fields of Ollama's API without effect here are ignored; unsupported ones are refused."""

    messages: Annotated[list[Message], Field(fail_fast=True, examples=[EXAMPLE])] = Field(
        default=[], description="The last one must be the user's: it is the question. Empty: the model is loaded."
    )
    tools: list[ToolInput] | None = Field(
        default=None, description="Functions that may be called, where the chat template of the model takes tools."
    )
    keep_alive: KeepAlive = None


class OllamaGenerateRequest(_OllamaRequest):
    """A question. Fields of Ollama's API without effect here are ignored; unsupported ones are refused."""

    prompt: str = Field(default="", description="Empty: the model is loaded.", examples=["When was the bridge built?"])
    system: str | None = None
    keep_alive: KeepAlive = None


class OllamaCalledFunction(BaseModel):
    """A function that the model calls."""

    name: str
    arguments: dict[str, Any]


class OllamaToolCall(BaseModel):
    """A call that the model wrote."""

    function: OllamaCalledFunction


class OllamaMessage(BaseModel):
    """The answer, or a piece of it."""

    role: Literal["assistant"] = "assistant"
    content: str
    tool_calls: list[OllamaToolCall] | None = Field(default=None, exclude_if=lambda calls: calls is None)


class OllamaChatResponse(BaseModel):
    """A piece of an answer; the last one is done, and has the counts and times (in nanoseconds)."""

    model: str
    created_at: str
    message: OllamaMessage | None = Field(default=None, description="The text, for a chat.")
    response: str | None = Field(default=None, description="The text, for a prompt to generate from.")
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    posfix: Provenance | None = Field(default=None, description="What this service adds to Ollama's API.")


class OllamaVersion(BaseModel):
    """The version of this service."""

    version: str


class OllamaShowRequest(RequestModel):
    """The model to describe: ``model``, or ``name`` of older clients."""

    model_config = ConfigDict(extra="ignore")

    model: str = Field(validation_alias=AliasChoices("model", "name"), examples=["default"])


class OllamaShown(BaseModel):
    """The served model. It has no Modelfile."""

    modelfile: str = ""
    parameters: str = ""
    template: str = ""
    details: dict[str, str]
    model_info: dict[str, str | int]
    capabilities: list[str] = ["completion"]
    modified_at: str


class OllamaModel(BaseModel):
    """A served model."""

    name: str
    model: str
    modified_at: str
    size: int = 0
    digest: str
    details: dict[str, str]


class OllamaModels(BaseModel):
    """The served models."""

    models: list[OllamaModel]


class OllamaRunningModel(OllamaModel):
    """The served model, which stays in memory. Sizes are not told."""

    modified_at: str = Field(exclude=True)
    size_vram: int = 0
    expires_at: str = "9999-12-31T23:59:59Z"
    context_length: int


class OllamaRunningModels(BaseModel):
    """The models in memory."""

    models: list[OllamaRunningModel]


class OllamaEmbedRequest(RequestModel):
    """The texts to embed. ``keep_alive`` and ``options`` have no effect here."""

    model: str = Field(description="The embedding model, or 'default'; ':latest' may follow.", examples=["default"])
    input: TextInput
    truncate: bool | None = Field(
        default=None, description="If false, a text of more than 8,192 tokens is an error; else its first are read."
    )
    dimensions: Count | None = Field(default=None, description="The length of the model's vectors; no other one.")


class OllamaEmbeddings(BaseModel):
    """The vectors, in the order of the texts, and times in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaRenderer(AnswerRenderer):
    """Renders one answer.

    Args:
        model: The name that the request gave the model: clients expect it back.
        chat: Whether the text is a message.
    """

    def __init__(self, model: str, *, chat: bool) -> None:
        self._model = model
        self._chat = chat

    def whole(self, answer: Answer) -> dict[str, Any]:
        return self._last(answer, answer.text)

    def piece(self, chunk: AnswerChunk) -> Iterator[bytes]:
        if chunk.answer is not None:
            yield encode_json(self._last(chunk.answer, chunk.text)) + b"\n"
        elif chunk.text:
            yield encode_json(self._body(chunk.text, done=False)) + b"\n"

    def failure(self, problem: Problem) -> Iterator[bytes]:
        yield encode_json(OLLAMA(problem)) + b"\n"

    def _last(self, answer: Answer, text: str) -> dict[str, Any]:
        times = {stage: int(seconds * 1e9) for stage, seconds in answer.timings.items()}
        calls = [
            OllamaToolCall(function=OllamaCalledFunction(name=call.name, arguments=dict(call.arguments)))
            for call in answer.tool_calls
        ]
        return self._body(
            text,
            calls or None,
            done=True,
            done_reason=answer.finish_reason,
            total_duration=sum(times.values()),
            load_duration=0,
            prompt_eval_count=answer.usage.prompt_tokens,
            prompt_eval_duration=times.get("prefill", 0),
            eval_count=answer.usage.completion_tokens,
            eval_duration=times.get("decode", 0),
            posfix=provenance(answer),
        )

    def _body(self, text: str, calls: list[OllamaToolCall] | None = None, **fields: Any) -> dict[str, Any]:
        time = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        piece: dict[str, Any] = {"response": text}
        if self._chat:
            piece = {"message": OllamaMessage(content=text, tool_calls=calls)}
        body = OllamaChatResponse(model=self._model, created_at=time, **piece, **fields)
        return {name: value for name, value in body.model_dump().items() if value is not None}


FOLDER = "/api/"
LINES = "application/x-ndjson"


class OllamaRoute(CleanRoute):
    """A route that reads every body as JSON, as Ollama does: litellm and curl send it as another type, or as none.

    A page of another site may send such a body without asking first. So a request of a browser, which names its
    origin, must say that its body is JSON.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler."""
        handler = super().get_route_handler()

        async def read_as_json(request: Request) -> Response:
            if not {"origin", "sec-fetch-site"} & set(request.headers.keys()):
                headers = [header for header in request.scope["headers"] if header[0] != b"content-type"]
                request.scope["headers"] = [*headers, (b"content-type", b"application/json")]
            return await handler(request)

        return read_as_json


router = APIRouter(route_class=OllamaRoute)


@chat_route(router, "/api/chat", OLLAMA, "ollama_chat", OllamaChatResponse, lines=LINES)
def chat(body: OllamaChatRequest, service: Service) -> tuple[Question, AnswerRenderer] | Response:
    """Answer the last message from documents: those of the request, or retrieved ones; in lines of JSON by default."""
    tools = tool_use(body.tools, "auto")
    if not body.messages:
        return _loaded(body, service, {"message": OllamaMessage(content="")})
    for message in body.messages:
        reject_fields(message.model_extra, {"images": (None, [])})
    check_free_answer(tools, {"format": bool(body.format)})
    question = _question(body, service, conversation(body.messages), role=body.messages[-1].role, tools=tools)
    return question, OllamaRenderer(body.model, chat=True)


@chat_route(router, "/api/generate", OLLAMA, "ollama_generate", OllamaChatResponse, lines=LINES)
def generate(body: OllamaGenerateRequest, service: Service) -> tuple[Question, AnswerRenderer] | Response:
    """Answer a prompt from documents: those of the request, or retrieved ones; in lines of JSON by default."""
    if not body.prompt:
        return _loaded(body, service, {"response": ""})
    message: ChatMessage = {"role": "user", "content": body.prompt}
    question = _question(body, service, [message], role="user", system=body.system or None, param="prompt")
    return question, OllamaRenderer(body.model, chat=False)


def _loaded(body: OllamaChatRequest | OllamaGenerateRequest, service: Service, piece: Mapping[str, Any]) -> Response:
    """Return the response to a request without a question: clients load the model with it, or unload it."""
    _question(body, service, [{"role": "user", "content": "load"}], role="user", param="prompt")  # checks its fields
    reason: Literal["load", "unload"] = "unload" if body.keep_alive in (0, "0", "0s", "0m") else "load"
    time = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    state = OllamaChatResponse(model=body.model, created_at=time, done=True, done_reason=reason, **piece)
    line = encode_json({name: value for name, value in state.model_dump().items() if value is not None})
    return Response(line + b"\n", media_type="application/json" if body.stream is False else LINES)


def _question(body: _OllamaRequest, service: Service, messages: Sequence[ChatMessage], **fields: Any) -> Question:
    options = body.options or OllamaOptions()
    reject_fields(options.model_extra, {"presence_penalty": (None, 0), "frequency_penalty": (None, 0)}, "options.")
    return build_question(
        service,
        body,
        messages,
        None if body.documents is None else to_documents(body.documents, service.limits.max_documents),
        **fields,
        **sampling_fields(options, "options.")
        | {"max_tokens": tokens if (tokens := options.num_predict or 0) > 0 else None},
        json_schema=ANY_OBJECT if body.format == "json" else body.format or None,
    )


@router.get("/api/version", tags=["info"], operation_id="ollama_version", responses=OLLAMA.responses(401, 403, 500))
async def show_version() -> OllamaVersion:
    """Return the version of this service."""
    return OllamaVersion(version=package_version())


@router.post(
    "/api/show",
    tags=["models"],
    operation_id="ollama_show",
    responses=OLLAMA.responses(400, 401, 403, 404, 413, 422, 429, 500, 503),
)
async def show(body: OllamaShowRequest, service: ReadyService) -> OllamaShown:
    """Describe the served model."""
    service.check_model(_untagged(body.model))
    window = service.pipeline.generator.context_window
    information: dict[str, str | int] = {"general.architecture": "rag_posfix", "rag_posfix.context_length": window}
    return OllamaShown(details=_DETAILS, model_info=information, modified_at=_started(service))


@router.get("/api/tags", tags=["models"], operation_id="ollama_tags", responses=OLLAMA.responses(401, 403, 500, 503))
async def tags(service: ReadyService) -> OllamaModels:
    """List the served model."""
    name, digest = service.model_id, service.pipeline.generator.fingerprint
    model = OllamaModel(name=name, model=name, modified_at=_started(service), digest=digest, details=_DETAILS)
    return OllamaModels(models=[model])


@router.get("/api/ps", tags=["models"], operation_id="ollama_ps", responses=OLLAMA.responses(401, 403, 500, 503))
async def running(service: ReadyService) -> OllamaRunningModels:
    """List the models in memory: the served one."""
    generator = service.pipeline.generator
    model = OllamaRunningModel(
        name=service.model_id, model=service.model_id, modified_at=_started(service), digest=generator.fingerprint,
        details=_DETAILS, context_length=generator.context_window,
    )  # fmt: skip
    return OllamaRunningModels(models=[model])


@router.post(
    "/api/embed",
    tags=["embeddings"],
    operation_id="ollama_embed",
    response_model=OllamaEmbeddings,
    responses=OLLAMA.responses(400, 401, 403, 404, 413, 422, 429, 500, 503),
)
async def embed(body: OllamaEmbedRequest, call: ReadyCall) -> Response:
    """Embed texts with the embedding model of the index."""

    def render(vectors: Sequence[Sequence[float]], tokens: int, seconds: float) -> dict[str, Any]:
        times = {"total_duration": int(seconds * 1e9), "load_duration": 0}
        return {"model": body.model, "embeddings": vectors, **times, "prompt_eval_count": tokens}

    truncate = body.truncate is not False
    return await respond_with_vectors(
        call, _untagged(body.model), body.input, body.dimensions, render, truncate=truncate
    )


_DETAILS = {"parent_model": "", "format": "", "family": "", "parameter_size": "", "quantization_level": ""}


def _started(service: Service) -> str:
    return datetime.fromtimestamp(service.started, UTC).isoformat().replace("+00:00", "Z")
