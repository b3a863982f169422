"""OpenAI responses: text, whole and as numbered events. Responses are not stored."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Tag

from rag_posfix.contracts.answer import Answer, AnswerChunk, Question
from rag_posfix.contracts.generator import ChatMessage
from rag_posfix.contracts.request import Sampling
from rag_posfix.contracts.tools import ToolCall
from rag_posfix.parameters import shown
from rag_posfix_api.dialects.answering import (
    ANY_OBJECT,
    AnswerRenderer,
    AnyTool,
    NamedTool,
    Provenance,
    ToolChoice,
    ToolTurns,
    build_question,
    chat_route,
    check_free_answer,
    choice_name,
    definition,
    provenance,
    tool_use,
)
from rag_posfix_api.dialects.requests import (
    VISIBLE,
    AnswerRequest,
    Forms,
    GivenDocuments,
    MaxTokens,
    Message,
    Part,
    RequestModel,
    Temperature,
    TextOr,
    TopP,
    Unsupported,
    chat_message,
    to_documents,
)
from rag_posfix_api.http.errors import OPENAI, Problem, RequestError
from rag_posfix_api.http.middleware import CleanRoute, event
from rag_posfix_api.runtime.service import Service

_TEXTS = ("input_text", "output_text", "text")


class InputPart(Part):
    """A part of a message; only text is supported."""

    type: Annotated[str, AfterValidator(lambda kind: "text" if kind in _TEXTS else kind)] = Field(
        default="input_text", json_schema_extra={"enum": list(_TEXTS)}, validate_default=True
    )


_ROLE = {"type": "string", "enum": ["system", "developer", "user", "assistant"]}
_MESSAGE_OR_CALL: dict[str, Any] = {
    "anyOf": [{"required": ["role"], "properties": {"role": _ROLE}}, {"required": ["type", "call_id"]}]
}


class InputItem(RequestModel):
    """A message of the conversation, a call of a tool, or its result."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_MESSAGE_OR_CALL)

    type: str = Field(
        default="message", json_schema_extra={"enum": ["message", "function_call", "function_call_output"]}
    )
    role: str | None = None
    content: TextOr[InputPart] | None = None
    call_id: str | None = None
    name: str | None = Field(default=None, description="The tool that is called.")
    arguments: str | None = Field(default=None, description="The arguments of a call, as JSON.")
    output: TextOr[InputPart] | None = Field(default=None, description="The result of a call.")


class FunctionTool(AnyTool):
    """A function that may be called; other tools are refused."""

    model_config = ConfigDict(json_schema_extra={"required": ["type", "name"]})

    type: str = Field(default="function", json_schema_extra={"enum": ["function"]})
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="A JSON schema of type object.")
    strict: bool | None = None

    def definition(self) -> dict[str, Any] | None:
        return definition(self.name, self.description, self.parameters) if self.type == "function" else None


class TextFormat(RequestModel):
    """The form of the answer: text, any JSON object, or JSON by a schema. Every schema is enforced."""

    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def json_schema(self) -> str | None:
        """Return the schema of the answer; None for free text."""
        if self.type == "json_schema" and self.schema_ is None:
            raise RequestError('text.format of type json_schema needs {"schema": ...}', param="text")
        schemas = {"text": None, "json_object": ANY_OBJECT, "json_schema": json.dumps(self.schema_)}
        return schemas[self.type]


class TextOptions(RequestModel):
    """Options of the answer's text."""

    format: TextFormat = Field(default_factory=TextFormat)


class ResponsesRequest(AnswerRequest):
    """A request. Fields of OpenAI's API without effect here are ignored; unsupported ones are refused."""

    unsupported: ClassVar[Unsupported] = {
        "previous_response_id": (None,),
        "conversation": (None,),
        "prompt": (None,),
        "background": (None, False),
        "top_logprobs": (None, 0),
    }

    input: Annotated[
        Annotated[str, Tag("string"), Field(json_schema_extra=VISIBLE)]
        | Annotated[list[InputItem], Field(min_length=1, fail_fast=True), Tag("array")],
        Forms("string", "array"),
    ] = Field(description="The question, or a conversation that ends with it.")
    instructions: str | None = None
    max_tokens: Annotated[MaxTokens, Field(alias="max_output_tokens")] = None
    temperature: Temperature = None
    top_p: TopP = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = Field(
        default=None, description="Functions that may be called, where the chat template of the model takes tools."
    )
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    documents: GivenDocuments = None


class FileCitation(BaseModel):
    """A file that a part of the answer is from."""

    type: Literal["file_citation"] = "file_citation"
    index: int = Field(description="Where that part ends in the answer.")
    file_id: str = Field(description="The id of the document.")
    filename: str = Field(description="Its file, its title, or its id.")


class OutputText(BaseModel):
    """The text of the answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[FileCitation] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)


class OutputMessage(BaseModel):
    """The answer."""

    id: str
    type: Literal["message"] = "message"
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class FunctionCall(BaseModel):
    """A call of a function."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: Literal["in_progress", "completed"]
    call_id: str
    name: str
    arguments: str


class InputTokensDetails(BaseModel):
    """Details of input tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """Details of output tokens."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = Field(default_factory=OutputTokensDetails)
    total_tokens: int


class ResponseError(BaseModel):
    """Why a stream failed."""

    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(BaseModel):
    """An answer, complete or not."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputMessage | FunctionCall]
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    store: Literal[False] = False
    temperature: float
    text: TextOptions = Field(default_factory=TextOptions)
    tool_choice: str | NamedTool = "auto"
    tools: list[FunctionTool] = Field(default_factory=list)
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    posfix: Provenance | None = Field(default=None, description="What this service adds to OpenAI's API.")


def _conversation(items: Sequence[InputItem]) -> list[ChatMessage]:
    """Return messages for the pipeline; calls in succession are those of one answer."""
    turns = ToolTurns()
    conversation: list[ChatMessage] = []
    for kind, group in itertools.groupby(enumerate(items), key=lambda entry: entry[1].type):
        entries = list(group)
        if kind == "function_call":
            calls = [(item.call_id, item.name or "", item.arguments or "{}") for _, item in entries]
            conversation.append(turns.called("", calls, f"input[{entries[0][0]}]"))
        elif kind == "function_call_output":
            for index, item in entries:
                text = _chat_message(InputItem(role="user", content=item.output), index)["content"]
                conversation.append(turns.result(text, item.call_id or "", f"input[{index}]"))
        else:
            conversation += [_chat_message(item, index) for index, item in entries]
    return conversation


def _chat_message(item: InputItem, index: int) -> ChatMessage:
    if item.type != "message" or item.role is None:
        raise RequestError(
            f"input[{index}]: an item of type {shown(item.type)} is not supported; use messages with a role",
            param="input",
            code="unsupported",
        )
    return chat_message(Message.model_validate({"role": item.role, "content": item.content}), index, "input")


class ResponseRenderer(AnswerRenderer):
    """Renders one response, which repeats the sampling parameters of the question."""

    def __init__(
        self, identity: str, model: str, sampling: Sampling, body: ResponsesRequest, text: TextOptions
    ) -> None:
        self._item_id = f"msg_{identity}"
        self._has_text = False
        self._numbers = itertools.count()
        self._shared: dict[str, Any] = {
            "id": f"resp_{identity}",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "text": text,
            "tools": body.tools or [],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
        }

    def whole(self, answer: Answer) -> dict[str, Any]:
        status = _status(answer)
        output: list[OutputMessage | FunctionCall] = [_function_call(call) for call in answer.tool_calls]
        if answer.text or not output:
            text = OutputText(text=answer.text, annotations=_annotations(answer))
            output.insert(0, OutputMessage(id=self._item_id, status=status, content=[text]))
        return ResponseObject(
            **self._shared,
            status=status,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            output=output,
            usage=_usage(answer),
            posfix=provenance(answer),
        ).model_dump()

    def opening(self, first: AnswerChunk | None) -> Iterator[bytes]:
        response = ResponseObject(**self._shared, status="in_progress", output=[]).model_dump()
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def piece(self, chunk: AnswerChunk) -> Iterator[bytes]:
        is_empty = chunk.answer is not None and not chunk.answer.tool_calls  # it has a message all the same
        if (chunk.text or is_empty) and not self._has_text:
            self._has_text = True
            message = OutputMessage(id=self._item_id, status="in_progress", content=[])
            yield self._event("response.output_item.added", output_index=0, item=message.model_dump())
            yield self._part_event("response.content_part.added", part=OutputText(text="").model_dump())
        if chunk.text:
            yield self._part_event("response.output_text.delta", delta=chunk.text, logprobs=[])
        if chunk.answer is None:
            return
        response = self.whole(chunk.answer)
        for index, item in enumerate(response["output"]):
            yield from self._message_end(item) if item["type"] == "message" else self._call_events(index, item)
        yield self._event(f"response.{response['status']}", response=response)

    def _message_end(self, item: dict[str, Any]) -> Iterator[bytes]:
        (content_part,) = item["content"]
        for index, annotation in enumerate(content_part["annotations"]):
            yield self._part_event(
                "response.output_text.annotation.added", annotation_index=index, annotation=annotation
            )
        yield self._part_event("response.output_text.done", text=content_part["text"], logprobs=[])
        yield self._part_event("response.content_part.done", part=content_part)
        yield self._event("response.output_item.done", output_index=0, item=item)

    def _call_events(self, index: int, item: dict[str, Any]) -> Iterator[bytes]:
        place, arguments = {"item_id": item["id"], "output_index": index}, item["arguments"]
        begun = item | {"status": "in_progress", "arguments": ""}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
        yield self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=arguments)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def failure(self, problem: Problem) -> Iterator[bytes]:
        error = ResponseError(code=problem.code, message=problem.message)
        failed = ResponseObject(**self._shared, status="failed", error=error, output=[])
        yield self._event("response.failed", response=failed.model_dump())

    def _event(self, name: str, /, **fields: Any) -> bytes:
        return event({"type": name, "sequence_number": next(self._numbers), **fields}, name)

    def _part_event(self, name: str, **fields: Any) -> bytes:
        return self._event(name, item_id=self._item_id, output_index=0, content_index=0, **fields)


def _annotations(answer: Answer) -> list[FileCitation]:
    documents = {document.id: document for document in answer.documents}
    cited = dict.fromkeys((citation.end, name) for citation in answer.citations for name in citation.document_ids)
    return [
        FileCitation(index=end, file_id=name, filename=documents[name].source or documents[name].title or name)
        for end, name in cited
        if name in documents
    ]


def _function_call(call: ToolCall) -> FunctionCall:
    return FunctionCall(
        id=f"fc_{call.id}", status="completed", call_id=call.id, name=call.name, arguments=call.arguments_text
    )


def _status(answer: Answer) -> Literal["completed", "incomplete"]:
    return "incomplete" if answer.finish_reason == "length" else "completed"


def _usage(answer: Answer) -> ResponseUsage:
    usage = answer.usage
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


router = APIRouter(route_class=CleanRoute)


@chat_route(router, "/v1/responses", OPENAI, "create_response", ResponseObject)
def create_response(body: ResponsesRequest, service: Service) -> tuple[Question, AnswerRenderer]:
    """Answer the input from documents: those of the request, or retrieved ones. Responses are not stored."""
    text = body.text or TextOptions()
    items = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    json_schema = text.format.json_schema()
    tools = tool_use(body.tools, choice_name(body.tool_choice), parallel=body.parallel_tool_calls)
    check_free_answer(tools, {"text.format": json_schema is not None})
    question = build_question(
        service,
        body,
        _conversation(items),
        None if body.documents is None else to_documents(body.documents, service.limits.max_documents),
        role=items[-1].role or items[-1].type,
        system=body.instructions,
        param="input",
        json_schema=json_schema,
        tools=tools,
    )
    sampling = question.sampling or service.pipeline.defaults.sampling
    return question, ResponseRenderer(service.identifiers.new(), service.model_id, sampling, body, text)
