"""Chat routes of all dialects: the question of a conversation, its answer whole or as a stream, and its sources.

Tools of requests, which may be called, and the messages of calls and of their results, for all API formats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Annotated, Any, Literal, Protocol, TypeVar, get_type_hints

from fastapi import APIRouter
from langchain_core.documents import Document
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Tag
from starlette.responses import Response

from rag_posfix.contracts.answer import Answer, AnswerChunk, FormFault, Question, SupportVerdict
from rag_posfix.contracts.generator import ChatMessage
from rag_posfix.contracts.request import MAX_TOP_LOGPROBS, Sampling
from rag_posfix.contracts.tools import ToolCall, ToolUse
from rag_posfix.errors import ConfigError
from rag_posfix.parameters import shown
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix_api.dialects.requests import (
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    AnswerRequest,
    Forms,
    Message,
    ModelRequest,
    PosfixInput,
    RequestModel,
    chat_message,
    chosen_methods,
    prompt_template,
)
from rag_posfix_api.http.errors import ANSWERING, ErrorForm, RequestError
from rag_posfix_api.http.middleware import SafeJSONResponse
from rag_posfix_api.runtime.jobs import SERVER_SENT_EVENTS, AnswerStream, EventRenderer
from rag_posfix_api.runtime.service import Call, ReadyCall, Service

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "object", "description": "A server-sent event."}}}}
}
"""The entry for ``responses=`` of a route that streams."""


class AnswerRenderer(EventRenderer, Protocol):
    """Renders one answer in one dialect, as events or as one object."""

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        ...


Prepare = TypeVar("Prepare", bound=Callable[..., tuple[Question, AnswerRenderer] | Response])


def chat_route(
    router: APIRouter,
    path: str,
    form: ErrorForm,
    operation_id: str,
    response_model: type[BaseModel],
    *,
    lines: str | None = None,
) -> Callable[[Prepare], Prepare]:
    """Add a route that answers the question of a conversation.

    The decorated function takes the body and the service, and returns the question and its renderer, or a response to
    a body without a question. Its name and its docstring describe the route. The work stops when the client leaves.
    ``lines`` is the media type of a format that streams lines unless ``stream`` is false; other formats stream events
    if ``stream`` is true.
    """
    streamed = STREAMED if lines is None else {200: {"content": {lines: {"schema": {"type": "string"}}}}}

    def decorate(prepare: Prepare) -> Prepare:
        async def endpoint(body: AnswerRequest, call: ReadyCall) -> Response:
            service = call.service
            check_request(service, body)
            prepared = prepare(body, service)
            if isinstance(prepared, Response):
                return prepared
            question, renderer = prepared
            call.fields.documents = None if question.documents is None else len(question.documents)
            pipeline = pipeline_of(service, question, None if body.posfix is None else body.posfix.collection)
            has_text = _has_text(service, question, body.posfix)
            if body.stream if lines is None else body.stream is not False:

                def chunks() -> Iterator[AnswerChunk]:
                    return _chunks(pipeline().stream(question), has_text)

                return await respond_with_stream(call, chunks, renderer, lines or SERVER_SENT_EVENTS)
            answer = await call.compute(lambda: pipeline().ask(question))
            call.record(answer)
            return SafeJSONResponse(renderer.whole(answer if has_text else _without_text(answer)))

        endpoint.__name__, endpoint.__doc__ = prepare.__name__, prepare.__doc__
        endpoint.__annotations__["body"] = get_type_hints(prepare)["body"]
        responses = form.responses(*ANSWERING) | streamed
        router.post(
            path, tags=["chat"], operation_id=operation_id, response_model=response_model, responses=responses
        )(endpoint)
        return prepare

    return decorate


def _has_text(service: Service, question: Question, posfix: PosfixInput | None) -> bool:
    """Return whether the documents of the response have their text."""
    wanted = None if posfix is None else posfix.source_text
    if question.documents is not None:
        return wanted is True  # the client sent them
    return wanted is not False and service.limits.source_text


def _without_text(answer: Answer) -> Answer:
    return replace(answer, documents=tuple(replace(document, text="") for document in answer.documents))


def _chunks(chunks: Generator[AnswerChunk, None, None], has_text: bool) -> Iterator[AnswerChunk]:
    """Yield the chunks of an answer, whose documents have no text unless ``has_text``; closing closes ``chunks``."""
    with closing(chunks):
        for chunk in chunks:
            if chunk.answer is not None and not has_text:
                chunk = replace(chunk, answer=_without_text(chunk.answer))
            yield chunk


def pipeline_of(service: Service, question: Question, name: str | None) -> Callable[[], Pipeline]:
    """Return a function that returns the pipeline of the request; it may read a collection, so it is for a thread."""
    if name is None:
        pipeline = service.pipeline
        return lambda: pipeline
    if question.documents is not None:
        raise RequestError("documents and a collection are given; give one of them", param="posfix.collection")
    if question.index is not None:  # its passages need the tenant's filter, which those of a collection do not have
        raise RequestError("an index and a collection are given; give one of them", param="posfix.index")
    tenant_pipeline, collection = service.collection_pipeline, service.collection(name)
    k = question.k or tenant_pipeline.defaults.k
    return lambda: tenant_pipeline.with_retriever(collection.retriever(k))


async def respond_with_stream(
    call: Call,
    start: Callable[[], Iterator[AnswerChunk]],
    renderer: EventRenderer,
    media_type: str = SERVER_SENT_EVENTS,
) -> Response:
    """Return the response that streams what ``start`` returns, which is called in a worker thread.

    Wrong input raises here, before the response begins.
    """
    on_close = ExitStack()
    job = on_close.enter_context(call.service.chat.open())
    stream = AnswerStream(job, on_close, renderer, call.fields, call.record, media_type)
    await stream.open(start, call.receive)
    return stream


ANY_OBJECT = '{"type":"object"}'
"""The JSON schema of any object."""


def build_question(
    service: Service,
    body: AnswerRequest,
    messages: Sequence[ChatMessage],
    documents: Sequence[Document] | None,
    *,
    role: str,
    posfix: PosfixInput | None = None,
    system: str | None = None,
    use_cache: bool = True,
    param: str = "messages",
    tools: ToolUse | None = None,
    **sampling: Any,
) -> Question:
    """Return the question that the last message asks, or the last of the user before results of tools.

    Args:
        body: Has the sampling parameters by name, as ``sampling_fields``.
        documents: The passages; None retrieves them.
        role: The role of the last message as the request has it, for the error.
        posfix: In place of that of ``body``.
        system: Instructions before the conversation.
        use_cache: Whether the answer cache may be used.
        param: The field of the messages in this dialect.
        tools: The tools that may be called.
        sampling: In place of the sampling parameters of ``body``.

    Raises:
        RequestError: the last message is not the user's or is empty, fields of ``posfix`` contradict each other, or
            it asks for an answer without passages, and the operator does not allow that.
        ConfigError: a sampling parameter is out of range.
    """
    sampling = sampling_fields(body) | sampling
    parameters = chosen_sampling(service.pipeline.defaults.sampling, sampling)
    (*history, last), turns = _split_tool_turns(messages)
    if last["role"] != "user":
        raise RequestError(
            f"the last message has the role {shown(role)}; it must be 'user': the question", param=param
        )
    if not last["content"].strip():
        raise RequestError("the last message is empty; it must hold the question", param=param)
    if system is not None:
        history.insert(0, {"role": "system", "content": system})
    posfix = posfix or body.posfix or PosfixInput()
    if tools is None and any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        tools = ToolUse(choice="none")
    if tools is not None and not service.pipeline.generator.encoder.takes_tools:
        raise RequestError(
            f"tools is not supported by the served model {service.model_id}, which is remote or has no chat template; "
            "leave out tools, calls and their results, or set tool_choice to 'none'",
            param="tools" if tools.definitions else param,
            code="unsupported",
        )
    return Question(
        text=last["content"],
        documents=documents,
        history=history,
        seed=sampling.get("seed") or 0,
        sampling=parameters,
        use_cache=use_cache,
        allow_ungrounded=_allow_ungrounded(service, documents, posfix),
        template=prompt_template(posfix.template, service.limits.request_templates),
        tools=None if tools is None else replace(tools, turns=turns),
        **chosen_methods(posfix),
    )


_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")


def sampling_fields(fields: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Return the sampling parameters that the model of a request has by these names; None takes the default.

    ``seed`` also seeds the order ``random``. ``prefix`` is that of the field with stop strings, for errors.
    """
    declared = type(fields).model_fields
    chosen = {name: getattr(fields, name) for name in _SAMPLING if name in declared}
    if "stop" in chosen:
        chosen["stop"] = stop_strings(chosen["stop"], f"{prefix}{declared['stop'].alias or 'stop'}")
    return chosen


def chosen_sampling(defaults: Sampling, fields: Mapping[str, Any]) -> Sampling:
    """Return the sampling parameters of a request. ``top_p`` of 0 keeps the likeliest token alone.

    Args:
        fields: Those of the request; None takes the default.
    """
    chosen = {name: value for name, value in fields.items() if value is not None}
    if chosen.get("top_p") == 0:
        return replace(replace(defaults, **{**chosen, "top_p": 1.0}), temperature=0.0)  # temperature is checked, too
    return replace(defaults, **chosen)


def _split_tool_turns(messages: Sequence[ChatMessage]) -> tuple[Sequence[ChatMessage], list[ChatMessage]]:
    """Return the messages up to the user's last one, and what follows it if that ends with results of tools.

    Instructions among what follows are moved before the user's message: chat templates take none behind it.
    """
    stop = len(messages)
    if messages[-1]["role"] == "tool":
        stop = max((n for n, message in enumerate(messages, 1) if message["role"] == "user"), default=stop)
    system = [message for message in messages[stop:] if message["role"] == "system"]
    turns = [message for message in messages[stop:] if message["role"] != "system"]
    return [*messages[: stop - 1], *system, messages[stop - 1]], turns


def _allow_ungrounded(service: Service, documents: Sequence[Document] | None, posfix: PosfixInput) -> bool | None:
    """Return whether the model may answer this request without a passage; None takes the default of the pipeline.

    A request without documents to a service without an index is a conversation: its passages, if any, are text of its
    messages.
    """
    allowed, always = service.limits.ungrounded, service.pipeline.defaults.allow_ungrounded
    if posfix.allow_ungrounded and allowed != "request" and not always:
        raise RequestError(
            "this service does not let requests have answers without passages; leave it out (operators: "
            "RAG_POSFIX_SERVICE_UNGROUNDED=request)",
            param="posfix.allow_ungrounded",
            code="not_allowed",
        )
    if posfix.allow_ungrounded is not None:
        return posfix.allow_ungrounded
    searches = service.pipeline.retriever is not None or posfix.index is not None or posfix.collection is not None
    return True if documents is None and not searches and allowed != "never" else None


_ENGINE_FIELDS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("min_p", "top_a", "min_tokens", "mirostat", "dry_multiplier", "xtc_probability"), (None, 0)),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty", "length_penalty", "typical_p", "tfs_z"), (None, 1)),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar", "regex"), (None,)),
    **dict.fromkeys(("ebnf", "json_schema", "structural_tag", "structured_outputs", "chat_template"), (None,)),
    **dict.fromkeys(("truncate_prompt_tokens", "allowed_token_ids", "prompt_logprobs"), (None,)),
    **dict.fromkeys(("stop_token_ids", "bad_words", "logits_processors"), (None, [])),
    **dict.fromkeys(("ignore_eos", "use_beam_search", "include_stop_str_in_output"), (None, False)),
    **dict.fromkeys(("continue_final_message",), (None, False)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt"), (None, True)),
    "chat_template_kwargs": (None, {}),
}
"""Fields of vLLM, SGLang, llama.cpp and Ollama that would change the answer, with values that leave it unchanged."""
_IN_PLACE_OF: Mapping[str, str] = {
    "guided_json": "response_format", "structured_outputs": "response_format", "json_schema": "response_format",
}  # fmt: skip


def check_request(service: Service, body: ModelRequest) -> None:
    """Raise for a model that is not served, and for a field that would change the answer and is not supported."""
    service.check_model(body.served_name)
    reject_fields(body.model_extra, body.unsupported)


def reject_fields(extra: Mapping[str, Any] | None, harmless: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    """Raise ``RequestError`` for a field that would change the answer and is not supported.

    Args:
        extra: The fields of the request that its schema does not have.
        harmless: Unsupported fields of the API format, with the values that leave the answer unchanged.
        prefix: Of the names of the fields in messages.
    """
    unused = {
        tools
        for tools, choice in (("tools", "tool_choice"), ("functions", "function_call"))
        if extra and extra.get(choice) in ("none", "NONE", {"type": "none"})  # no tool would be called
    }
    for name, allowed in {**_ENGINE_FIELDS, **harmless}.items():
        if name in unused:
            continue
        if extra and name in extra and extra[name] not in allowed:
            values = ", ".join(repr(value) for value in allowed if value is not None) or "null"
            instead = f", or use {_IN_PLACE_OF[name]} of OpenAI's chat API" if name in _IN_PLACE_OF else ""
            raise RequestError(
                f"{prefix}{name} is not supported here; leave it out{instead} (allowed: {values})",
                param=f"{prefix}{name}",
                code="unsupported",
            )


def stop_strings(stops: str | Sequence[str] | None, param: str) -> tuple[str, ...] | None:
    """Return the stop strings of a request, in its field ``param``; raise for too many and for a long one.

    Empty strings, which some clients send for none, stop nothing.
    """
    if stops is None:
        return None
    stops = tuple(filter(None, (stops,) if isinstance(stops, str) else stops))
    if len(stops) > MAX_STOPS:
        raise RequestError(f"{param} has {len(stops)} entries, at most {MAX_STOPS} are allowed", param=param)
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise RequestError(
            f"{param} holds a string of {longest} characters, at most {MAX_STOP_CHARACTERS} are allowed", param=param
        )
    return stops


def check_top_logprobs(count: int | None, param: str) -> None:
    """Raise for a number of alternatives, in the field ``param``, that is not between 0 and ``MAX_TOP_LOGPROBS``."""
    if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
        raise RequestError(f"{param}={count} must be between 0 and {MAX_TOP_LOGPROBS}", param=param)


class DocumentOutput(BaseModel):
    """A passage in the prompt."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    score: float | None
    position: int
    attention: float = Field(description="Its share of the attention to passages; until 1.0 also its weight.")
    weight: float | None = Field(
        description="Its weight in the mixture of experts that read one passage each; null for methods that attend."
    )
    title: str | None
    source: str | None = Field(description="Its file.")
    page: int | None = Field(description="The page of its file on which it begins.")
    text: Annotated[str | None, BeforeValidator(lambda text: text or None)] = Field(
        description="Its text; null where that is switched off (``source_text``)."
    )


class CitationOutput(BaseModel):
    """A span of the answer and its source documents."""

    model_config = ConfigDict(from_attributes=True, serialize_by_alias=True)

    start: int
    end: int
    text: str
    document_ids: list[str]
    origin: Literal["quote", "attention"] = Field(
        serialization_alias="from",
        description="'quote': they hold what the sentence adds to the question; 'attention': one of them dominated "
        "the attention or the experts' weights.",
    )
    pages: list[int | None] = Field(
        description="The page or slide of each document on which the words are; null for one without pages."
    )


class DroppedOutput(BaseModel):
    """A document that is not in the prompt, and the reason."""

    id: str
    reason: str


def _dropped(entries: Sequence[tuple[str, str]]) -> list[DroppedOutput]:
    return [DroppedOutput(id=identity, reason=reason) for identity, reason in entries]


class DisagreementOutput(BaseModel):
    """What some passages answer, where others answer something else."""

    model_config = ConfigDict(from_attributes=True)

    text: str
    document_ids: list[str]
    date: str = Field(description="The newest date of these passages: YYYY, YYYY-MM or YYYY-MM-DD; empty if unknown.")


class Provenance(BaseModel):
    """The sources of an answer: the fields that this service adds to the format of the dialect."""

    model_config = ConfigDict(from_attributes=True)

    query: str = Field(description="What was searched for: the question, or what was made of the conversation.")
    second_query: str = Field(description="What a second search searched for; empty if there was none.")
    documents: list[DocumentOutput]
    citations: list[CitationOutput]
    dropped: Annotated[list[DroppedOutput], BeforeValidator(_dropped)]
    truncated: list[str] = Field(description="Ids of documents whose text was cut to fit into the prompt.")
    grounded: bool = Field(description="Whether there were passages and the model wrote from them.")
    support: SupportVerdict = Field(
        description="Whether passages support the answer: 'yes', 'partly', 'no', or 'unknown' where nobody judged."
    )
    supported_by: list[str] = Field(
        description="Ids of the passages that support the answer, or have most of its words."
    )
    disagreements: list[DisagreementOutput] = Field(
        description="What passages answer that contradict each other, the newest first; empty if none was found."
    )
    warnings: list[str] = Field(
        description="What failed without failing the question, such as a reranker; the best passage, if all were left "
        "out."
    )
    well_formed: bool = Field(description="Whether the form of the text has no fault.")
    form_fault: FormFault | None = Field(
        None,
        description="The fault of the form: no word, a repeated run of words, a fragment, or a sentence without end.",
    )
    mitigation: str
    order: str
    cached: bool
    timings: dict[str, float]


def provenance(answer: Answer) -> Provenance:
    """Return the sources of ``answer``, whose attributes have the names of the fields."""
    return Provenance.model_validate(answer)


class FunctionInput(RequestModel):
    """A function that may be called. ``strict`` changes nothing: every call that must be made follows the schema."""

    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="A JSON schema of type object.")


class AnyTool(RequestModel):
    """A tool of a request."""

    model_config = ConfigDict(extra="allow")

    type: str | None = None

    def definition(self) -> dict[str, Any] | None:
        """Return the tool in OpenAI's form; None if it is no function of the client."""
        raise NotImplementedError


class ToolInput(AnyTool):
    """A tool in OpenAI's form; functions are supported."""

    model_config = ConfigDict(json_schema_extra={"required": ["function"]})

    type: str = Field(default="function", json_schema_extra={"enum": ["function"]})
    function: FunctionInput | None = None

    def definition(self) -> dict[str, Any] | None:
        function = self.function
        if self.type != "function" or function is None:
            return None
        return definition(function.name, function.description, function.parameters)


class NamedTool(RequestModel):
    """The tool that must be called: ``name``, or the function's ``name``."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(default="function", json_schema_extra={"enum": ["function"]})
    name: str | None = None
    function: dict[str, Any] | None = None


ToolChoice = Annotated[
    Annotated[str, Tag("string"), Field(json_schema_extra={"enum": ["none", "auto", "required"]})]
    | Annotated[NamedTool, Tag("object")],
    Forms("string", "object"),
]
"""``none``, ``auto``, ``required``, or the tool that must be called."""


class CalledFunction(BaseModel):
    """A function that the model calls, with its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallOutput(BaseModel):
    """A call that the model wrote."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


def tool_call_output(call: ToolCall) -> ToolCallOutput:
    """Return a call in OpenAI's form."""
    return ToolCallOutput(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments_text))


def definition(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the definition of a tool for a chat template, which needs all of its fields."""
    schema = {"type": "object", "properties": {}} | dict(parameters or {})
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": schema}}


def choice_name(choice: str | NamedTool | None) -> str:
    """Return ``auto``, ``none``, ``required``, or the name of a tool."""
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    name = choice.name or (choice.function or {}).get("name")
    if choice.type != "function" or not isinstance(name, str):
        raise RequestError(
            f"a tool_choice of type {shown(choice.type)} is not supported; use none, auto, required, or a function "
            "with its name",
            param="tool_choice",
            code="unsupported",
        )
    return name


def tool_use(tools: Sequence[AnyTool] | None, choice: str, *, parallel: bool | None = None) -> ToolUse | None:
    """Return the tools that may be called; None where there are none, or the choice is ``none``.

    Raises:
        RequestError: one is no function of the client, or as ``ToolUse``.
    """
    definitions = []
    for index, tool in enumerate(tools or () if choice != "none" else ()):  # tools that nobody may call are read over
        if (defined := tool.definition()) is None:
            raise RequestError(
                f"tools[{index}]: a tool of type {shown(tool.type)} is not supported; use functions with a name and "
                "parameters",
                param="tools",
                code="unsupported",
            )
        definitions.append(defined)
    if choice == "none" or (choice == "auto" and not definitions):
        return None
    try:
        return ToolUse(definitions, choice, parallel=parallel is not False)
    except ConfigError as error:
        param = "tool_choice" if str(error).startswith("tool_choice") else "tools"
        raise RequestError(str(error), param=param) from error


def check_free_answer(tools: ToolUse | None, fields: Mapping[str, bool]) -> None:
    """Raise for fields of a request, by their names, that cannot be honoured where the answer may be a call.

    Args:
        fields: Whether each of them is given.
    """
    for name, is_given in fields.items():
        if tools is not None and is_given and (tools.choice == "auto" or name == "logprobs"):
            raise RequestError(
                f"{name} is not supported next to tools that may be called; leave one of them out, or set tool_choice "
                "to 'none'",
                param=name,
                code="unsupported",
            )


class ToolTurns:
    """The calls and results of one conversation, in its order."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # of the tools, by the ids of their calls
        self._open: list[str] = []

    def called(self, text: str, calls: Sequence[tuple[str | None, str, Any]], field: str) -> ChatMessage:
        """Return an answer with calls.

        Args:
            calls: Their id (None for the next number), the name of the tool, and its arguments: an object or its JSON.
            field: The message, for errors.
        """
        written = []
        for identity, name, arguments in calls:
            identity = identity or f"{len(self._names):09d}"
            self._names[identity] = name
            self._open.append(identity)
            function = {"name": name, "arguments": _arguments_text(arguments, field)}
            written.append({"id": identity, "type": "function", "function": function})
        return {"role": "assistant", "content": text, "tool_calls": json.dumps(written)}

    def result(self, text: str, identity: str | None, field: str) -> ChatMessage:
        """Return the result of a call; without an id, of the first call that has none yet."""
        if identity is None and self._open:
            identity = self._open[0]
        if identity is None or identity not in self._names:
            raise RequestError(
                f"{field}: {shown(identity)} is the id of no call before it; send the message with the call, too",
                param=field.partition("[")[0],
            )
        if identity in self._open:
            self._open.remove(identity)
        return {"role": "tool", "content": text, "tool_call_id": identity, "name": self._names[identity]}


def _arguments_text(arguments: Any, field: str) -> str:
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise RequestError(f"{field}: the arguments of a call must be a JSON object", param=field.partition("[")[0])
    return json.dumps(parsed, ensure_ascii=False)


def conversation(messages: Sequence[Message], param: str = "messages") -> list[ChatMessage]:
    """Return messages for the pipeline; those of the role ``tool``, and ``tool_calls``, are in OpenAI's form."""
    turns, result = ToolTurns(), []
    for index, message in enumerate(messages):
        field = f"{param}[{index}]"
        reject_fields(message.model_extra, {"function_call": (None,)}, f"{field}.")
        if message.role == "tool":
            text = chat_message(message.model_copy(update={"role": "user"}), index, param)["content"]
            result.append(turns.result(text, message.tool_call_id, field))
        elif message.role == "assistant" and message.tool_calls:
            text = chat_message(message.model_copy(update={"tool_calls": None}), index, param)["content"]
            calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls]
            result.append(turns.called(text, calls, field))
        else:
            result.append(chat_message(message, index, param))
    return result
