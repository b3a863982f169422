"""Ollama chat, in lines of JSON or whole, and its list of models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from rag_posfix.contracts.answer import Answer, AnswerChunk, Question
from rag_posfix_api.dialects.answering import (
    AnswerRenderer,
    Provenance,
    build_question,
    chat_route,
    provenance,
    reject_fields,
    stop_strings,
)
from rag_posfix_api.dialects.errors import OLLAMA
from rag_posfix_api.dialects.requests import (
    Documents,
    Integer,
    Messages,
    PosfixInput,
    RequestModel,
    Seed,
    StopStrings,
    Temperature,
    TopK,
    TopP,
    chat_message,
    to_documents,
)
from rag_posfix_api.http.errors import Problem
from rag_posfix_api.http.json_bodies import CleanRoute, encode_json
from rag_posfix_api.runtime.service import ReadyService, Service


class OllamaOptions(RequestModel):
    """Sampling parameters. Other options of Ollama have no effect here."""

    model_config = ConfigDict(extra="ignore")

    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    seed: Seed | None = None
    num_predict: Integer | None = Field(
        default=None, description="Most tokens of the answer; 0 and less give the service's default."
    )
    stop: StopStrings | None = None


class OllamaChatRequest(RequestModel):
    """A request. Fields of Ollama's API without effect here are ignored; ``parse`` refuses unsupported ones."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(examples=["default"], description="The served model, or 'default'; ':latest' may follow.")
    messages: Messages
    stream: bool | None = Field(default=None, description="False gives one object; otherwise lines of JSON.")
    options: OllamaOptions | None = None
    documents: Documents | None = Field(
        default=None, description="The passages to answer from. Without the field they are retrieved."
    )
    posfix: PosfixInput | None = Field(default=None, description="What this service adds to Ollama's API.")


class OllamaMessage(BaseModel):
    """The answer, or a piece of it."""

    role: Literal["assistant"] = "assistant"
    content: str


class OllamaChatResponse(BaseModel):
    """A piece of an answer; the last one is done, and has the counts and times (in nanoseconds)."""

    model: str
    created_at: str
    message: OllamaMessage
    done: bool
    done_reason: Literal["stop", "length"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    posfix: Provenance | None = Field(default=None, description="What this service adds to Ollama's API.")


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


class OllamaRenderer(AnswerRenderer):
    """Renders one answer; ``model`` is the name that the request gave the model: clients expect it back."""

    def __init__(self, model: str) -> None:
        self._model = model

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
        return self._body(
            text,
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

    def _body(self, text: str, **fields: Any) -> dict[str, Any]:
        time = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        body = OllamaChatResponse(model=self._model, created_at=time, message=OllamaMessage(content=text), **fields)
        return body.model_dump(exclude_none=True)


CHAT_PATH = "/api/chat"
TAGS_PATH = "/api/tags"
LINES = "application/x-ndjson"

router = APIRouter(route_class=CleanRoute)

# Unsupported fields that would change the answer, with the values that leave it unchanged.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "format": (None, ""),
    "think": (None, False),
    "logprobs": (None, False),
}


@chat_route(router, CHAT_PATH, OLLAMA, "ollama_chat", OllamaChatResponse, lines=LINES)
def chat(body: OllamaChatRequest, service: Service) -> tuple[Question, AnswerRenderer]:
    """Answer the last message from documents: those of the request, or retrieved ones; in lines of JSON by default."""
    service.check_model(body.model.removesuffix(":latest"))
    reject_fields(body.model_extra, _UNSUPPORTED)
    for message in body.messages:
        reject_fields(message.model_extra, {"images": (None, []), "tool_calls": (None, [])})
    options = body.options or OllamaOptions()
    question = build_question(
        service,
        [chat_message(message, index) for index, message in enumerate(body.messages)],
        None if body.documents is None else to_documents(body.documents, service.limits.max_documents),
        body.posfix,
        role=body.messages[-1].role,
        max_tokens=options.num_predict if (options.num_predict or 0) > 0 else None,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        stop=stop_strings(options.stop, "options.stop"),
    )
    return question, OllamaRenderer(body.model)


@router.get(TAGS_PATH, tags=["models"], operation_id="ollama_tags", responses=OLLAMA.responses(401, 403, 500, 503))
async def tags(service: ReadyService) -> OllamaModels:
    """List the served model."""
    started = datetime.fromtimestamp(service.started, UTC).isoformat().replace("+00:00", "Z")
    name, digest = service.model_id, service.pipeline.generator.fingerprint
    details = {"parent_model": "", "format": "", "family": "", "parameter_size": "", "quantization_level": ""}
    return OllamaModels(
        models=[OllamaModel(name=name, model=name, modified_at=started, digest=digest, details=details)]
    )
