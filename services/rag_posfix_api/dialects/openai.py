"""OpenAI chat completions and models."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from rag_posfix.contracts.answer import Answer, AnswerChunk, Question
from rag_posfix.contracts.request import MAX_TOP_LOGPROBS, MIN_LOGPROB, ScoredToken, TokenScore, Usage
from rag_posfix_api.dialects.answering import (
    ANY_OBJECT,
    AnswerRenderer,
    Provenance,
    ToolCallOutput,
    ToolChoice,
    ToolInput,
    build_question,
    chat_route,
    check_free_answer,
    check_top_logprobs,
    choice_name,
    conversation,
    provenance,
    tool_call_output,
    tool_use,
)
from rag_posfix_api.dialects.requests import (
    AnswerRequest,
    GivenDocuments,
    Integer,
    MaxTokens,
    Messages,
    Mitigation,
    Passages,
    PosfixInput,
    RequestModel,
    Seed,
    StopStrings,
    Temperature,
    TopK,
    TopP,
    Unsupported,
    to_documents,
    within,
)
from rag_posfix_api.http.errors import OPENAI, Problem, RequestError
from rag_posfix_api.http.middleware import CleanRoute, event
from rag_posfix_api.runtime.jobs import EventRenderer
from rag_posfix_api.runtime.service import ReadyService, Service


class JsonSchemaInput(RequestModel):
    """A schema that the answer follows. ``strict`` changes nothing: every schema is enforced."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """The form of the answer: text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaInput | None = None


class StreamOptions(RequestModel):
    """Options of streaming."""

    include_usage: bool | None = None


_ALTERNATIVES_NEED_LOGPROBS: dict[str, Any] = {
    "anyOf": [
        {"required": ["logprobs"], "properties": {"logprobs": {"const": True}}},
        {"properties": {"top_logprobs": {"anyOf": [{"const": 0}, {"type": "null"}]}}},
    ]
}


class ChatRequest(AnswerRequest):
    """A request. Fields of OpenAI's API without effect here are ignored; unsupported ones are refused."""

    model_config = ConfigDict(json_schema_extra=_ALTERNATIVES_NEED_LOGPROBS)
    unsupported: ClassVar[Unsupported] = {
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "logit_bias": (None, {}),
        "frequency_penalty": (None, 0),
        "presence_penalty": (None, 0),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "web_search_options": (None,),
    }

    messages: Messages
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    max_tokens: MaxTokens = None
    max_completion_tokens: MaxTokens = None
    stop: StopStrings | None = None
    seed: Seed | None = Field(default=None, description="Seeds sampling and the order 'random'.")
    n: Integer | None = Field(default=None, json_schema_extra=within(enum=[1]))
    logprobs: bool | None = Field(default=None, description="Whether the tokens come with their log-probabilities.")
    top_logprobs: Integer | None = Field(
        default=None,
        json_schema_extra=within(minimum=0, maximum=MAX_TOP_LOGPROBS),
        description="Likeliest tokens in the place of each token; needs ``logprobs``.",
    )
    response_format: ResponseFormat | None = None
    tools: list[ToolInput] | None = Field(
        default=None, description="Functions that may be called, where the chat template of the model takes tools."
    )
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    stream_options: StreamOptions | None = None
    documents: GivenDocuments = None
    mitigation: Mitigation | None = Field(default=None, description="A method by name, or with its parameters.")
    order: str | None = Field(default=None, min_length=1, description="The order that the passages stand in.")
    k: Passages | None = Field(default=None, description="How many passages to retrieve.")
    cache: bool | None = Field(default=None, description="False neither reads nor writes the answer cache.")


class MessageOutput(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCallOutput] | None = Field(default=None, exclude_if=lambda calls: calls is None)


class TokenLogProb(BaseModel):
    """A token and its log-probability, at least -9999."""

    token: str = Field(description=r"Bytes that are no complete characters are written as \xNN.")
    logprob: float
    bytes: list[int]


class AnswerTokenLogProb(TokenLogProb):
    """A token of the answer, and the likeliest tokens in its place."""

    top_logprobs: list[TokenLogProb]


class ChoiceLogProbs(BaseModel):
    """The tokens of the answer, or of a piece of it."""

    content: list[AnswerTokenLogProb]
    refusal: None = None


class Choice(BaseModel):
    """The one answer."""

    index: int = 0
    message: MessageOutput
    logprobs: ChoiceLogProbs | None = None
    finish_reason: str


class PromptTokensDetails(BaseModel):
    """Details of prompt tokens."""

    cached_tokens: int


class UsageOutput(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatCompletion(Provenance):
    """A complete answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: UsageOutput
    system_fingerprint: str
    posfix: Provenance = Field(description="The sources again, where the other formats have them.")


class ModelObject(BaseModel):
    """A served model, with the fields of OpenAI's and of Anthropic's API."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "rag-posfix"
    max_model_len: int
    type: Literal["model"] = "model"
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int


class ModelList(BaseModel):
    """The served models, all on one page."""

    object: Literal["list"] = "list"
    data: list[ModelObject]
    has_more: bool = False
    first_id: str
    last_id: str


def _check(body: ChatRequest) -> None:
    if body.n not in (None, 1):
        raise RequestError(
            f"n={body.n} is not supported; one answer is given, so n must be 1", param="n", code="unsupported"
        )
    check_top_logprobs(body.top_logprobs, "top_logprobs")
    if body.max_tokens is not None and body.max_tokens < 1:  # also where max_completion_tokens replaces it
        raise RequestError(f"max_tokens={body.max_tokens} must be >= 1", param="max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise RequestError(
            f"top_logprobs={body.top_logprobs} needs logprobs, which is false; set logprobs to true",
            param="top_logprobs",
        )


def _json_schema(form: ResponseFormat | None) -> str | None:
    """Return the schema of a request's answer; None for free text."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ANY_OBJECT
    if form.json_schema is None:
        raise RequestError(
            'response_format of type json_schema needs {"json_schema": {"schema": ...}}', param="response_format"
        )
    return json.dumps(form.json_schema.schema_)


def _posfix(body: ChatRequest) -> PosfixInput:
    """Return the fields of this service, which may be next to ``messages`` or in ``posfix``."""
    posfix = body.posfix or PosfixInput()
    fields = {name: value for name in ("mitigation", "order", "k") if (value := getattr(body, name)) is not None}
    for name, value in fields.items():
        if getattr(posfix, name) not in (None, value):
            raise RequestError(f"{name} is given twice, next to messages and in posfix; give it once", param=name)
    return posfix.model_copy(update=fields)


class CompletionParts(EventRenderer):
    """The common fields of all parts of one response of OpenAI's.

    Args:
        include_usage: Whether a stream ends with a chunk that has the usage.
    """

    def __init__(self, service: Service, prefix: str, options: StreamOptions | None) -> None:
        self._include_usage = bool(options and options.include_usage)
        self._shared: dict[str, Any] = {
            "id": f"{prefix}-{service.identifiers.new()}",
            "created": int(time.time()),
            "model": service.model_id,
            "system_fingerprint": f"fp_{service.pipeline.generator.fingerprint[:12]}",
        }

    def closing(self) -> Iterator[bytes]:
        yield b"data: [DONE]\n\n"

    def failure(self, problem: Problem) -> Iterator[bytes]:
        yield event(OPENAI(problem))


class Completion(CompletionParts, AnswerRenderer):
    """Renders one answer; with ``body.logprobs`` its tokens have their log-probabilities."""

    def __init__(self, service: Service, body: ChatRequest) -> None:
        super().__init__(service, "chatcmpl", body.stream_options)
        self._log_probs = bool(body.logprobs)

    def whole(self, answer: Answer) -> dict[str, Any]:
        sources = provenance(answer)
        completion = ChatCompletion.model_construct(
            **self._shared,
            choices=[
                Choice(
                    message=_message(answer),
                    logprobs=chat_log_probs(answer.log_probs, len(answer.text)) if self._log_probs else None,
                    finish_reason=_finish_reason(answer),
                )
            ],
            usage=usage_output(answer.usage),
            posfix=sources,
            **dict(sources),
        )
        return completion.model_dump()

    def opening(self, first: AnswerChunk | None) -> Iterator[bytes]:
        yield event(self._chunk({"role": "assistant", "content": "", "refusal": None}))

    def piece(self, chunk: AnswerChunk) -> Iterator[bytes]:
        tokens = self._tokens(chunk)
        if chunk.text or (tokens and tokens["content"]):
            yield event(self._chunk({"content": chunk.text}, log_probs=tokens))
        if chunk.answer is None:
            return
        if chunk.answer.tool_calls:
            calls = enumerate(map(tool_call_output, chunk.answer.tool_calls))
            yield event(self._chunk({"tool_calls": [{"index": index} | call.model_dump() for index, call in calls]}))
        sources = provenance(chunk.answer).model_dump()
        yield event(self._chunk({}, _finish_reason(chunk.answer)) | sources | {"posfix": sources})
        if self._include_usage:
            yield event(self._head() | {"choices": [], "usage": usage_output(chunk.answer.usage).model_dump()})

    def _head(self) -> dict[str, Any]:
        return {**self._shared, "object": "chat.completion.chunk"}

    def _tokens(self, chunk: AnswerChunk) -> dict[str, Any] | None:
        if not self._log_probs:
            return None
        end = None if chunk.answer is None else len(chunk.answer.text)
        return chat_log_probs(chunk.log_probs, end).model_dump()

    def _chunk(
        self, delta: dict[str, Any], finish_reason: str | None = None, log_probs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": log_probs, "finish_reason": finish_reason}
        # OpenAI's clients expect the field in every chunk where they asked for it.
        usage = {"usage": None} if self._include_usage else {}
        return self._head() | {"choices": [choice]} | usage


def _message(answer: Answer) -> MessageOutput:
    calls = [tool_call_output(call) for call in answer.tool_calls]
    return MessageOutput(content=answer.text or None if calls else answer.text, tool_calls=calls or None)


def _finish_reason(answer: Answer) -> str:
    return "tool_calls" if answer.tool_calls else answer.finish_reason


def chat_log_probs(scored: Sequence[ScoredToken], end: int | None = None) -> ChoiceLogProbs:
    """Return the tokens of an answer's text, without those that end the answer.

    ``end`` is the length of the answer, or None while it is being written.
    """
    return ChoiceLogProbs(
        content=[
            AnswerTokenLogProb(
                **_fields(token.token), top_logprobs=[TokenLogProb(**_fields(other)) for other in token.top]
            )
            for token in scored
            if end is None or token.start < end
        ]
    )


def _fields(score: TokenScore) -> dict[str, object]:
    return {"token": text_of(score), "logprob": log_prob_of(score), "bytes": list(score.data)}


def log_prob_of(score: TokenScore) -> float:
    """Return the log-probability of a token, at least -9999."""
    return MIN_LOGPROB if score.log_prob is None else score.log_prob


def text_of(score: TokenScore, mark: str = "") -> str:
    r"""Return the text of a token; bytes that are no complete characters as ``\xNN``, after ``mark``."""
    return mark + "".join(f"\\x{byte:02x}" for byte in score.data) if score.text is None else score.text


def usage_output(usage: Usage) -> UsageOutput:
    return UsageOutput(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
    )


router = APIRouter(route_class=CleanRoute)


@chat_route(router, "/v1/chat/completions", OPENAI, "create_chat_completion", ChatCompletion)
def create_chat_completion(body: ChatRequest, service: Service) -> tuple[Question, AnswerRenderer]:
    """Answer the last message from documents: those of the request, or retrieved ones.

    With ``stream`` the answer is sent as server-sent events; the last chunk before the usage has the sources.
    """
    _check(body)
    tools = tool_use(body.tools, choice_name(body.tool_choice), parallel=body.parallel_tool_calls)
    json_schema = _json_schema(body.response_format)
    check_free_answer(tools, {"response_format": json_schema is not None, "logprobs": bool(body.logprobs)})
    question = build_question(
        service,
        body,
        conversation(body.messages),
        None if body.documents is None else to_documents(body.documents, service.limits.max_documents),
        role=body.messages[-1].role,
        posfix=_posfix(body),
        use_cache=body.cache is not False,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        json_schema=json_schema,
        tools=tools,
    )
    return question, Completion(service, body)


@router.get("/v1/models", tags=["models"], responses=OPENAI.responses(401, 403, 500, 503))
async def list_models(service: ReadyService) -> ModelList:
    """List the served model."""
    model = _model(service)
    return ModelList(data=[model], first_id=model.id, last_id=model.id)


@router.get(
    "/v1/models/{model:path}",  # ids of the form owner/name hold a slash
    tags=["models"],
    responses=OPENAI.responses(401, 403, 404, 422, 500, 503),
)
async def retrieve_model(model: str, service: ReadyService) -> ModelObject:
    """Describe the served model."""
    service.check_model(model)
    return _model(service)


def _model(service: Service) -> ModelObject:
    name, window = service.model_id, service.pipeline.generator.context_window
    return ModelObject(
        id=name,
        created=service.started,
        max_model_len=window,
        display_name=name,
        created_at=datetime.fromtimestamp(service.started, UTC),
        max_input_tokens=window,
    )
