"""OpenAI completions: prompts that the model continues as they are."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Discriminator, Field, FiniteFloat, Tag
from starlette.responses import Response

from rag_posfix.contracts.answer import Answer, AnswerChunk
from rag_posfix.contracts.request import MOST_ALTERNATIVES, Sampling, ScoredToken, Usage
from rag_posfix_api.dialects.answering import (
    STREAMED,
    check_top_logprobs,
    refuse_fields,
    respond_with_stream,
    sampling_with,
    stop_strings,
)
from rag_posfix_api.dialects.errors import ANSWERING, OPENAI
from rag_posfix_api.dialects.openai import DONE, StreamOptions, UsageOutput, log_prob_of, text_of, usage_output
from rag_posfix_api.dialects.requests import Integer, Natural, RequestModel, Seed, StopStrings, TopK, TopP, within
from rag_posfix_api.http.clean_json import CleanRoute
from rag_posfix_api.http.encoding import SafeJSONResponse, event
from rag_posfix_api.http.errors import Problem, UnsupportedFeatureError
from rag_posfix_api.http.facts import RequestFacts
from rag_posfix_api.http.streaming import EventRenderer
from rag_posfix_api.runtime.complete import PlainRequest, complete
from rag_posfix_api.runtime.service import ReadyService


def _form(value: Any) -> str:
    """Return the form of a prompt by its first entry, so that errors name one form only."""
    if isinstance(value, list | tuple) and value:
        first = value[0]
        return (
            "form:lists"
            if isinstance(first, list | tuple)
            else "form:ids"
            if isinstance(first, int | float)
            else "array"
        )
    return "array" if isinstance(value, list | tuple) else "string"


_Naturals = Annotated[list[Natural], Field(min_length=1, fail_fast=True)]

Prompt = Annotated[
    Annotated[str, Field(min_length=1), Tag("string")]
    | Annotated[
        list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=128, fail_fast=True), Tag("array")
    ]
    | Annotated[_Naturals, Tag("form:ids")]
    | Annotated[list[_Naturals], Field(min_length=1, max_length=128, fail_fast=True), Tag("form:lists")],
    Discriminator(_form),
]
"""A text, token ids, or a list of either."""


class CompletionRequest(RequestModel):
    """A request. Fields of OpenAI's API without effect here are ignored; unsupported ones are refused."""

    model_config = ConfigDict(extra="allow")

    prompt: Prompt = Field(description="One text or list of token ids, or several. No chat template is applied.")
    model: str | None = Field(default=None, description="The served model, or 'default'.")
    max_tokens: Integer | None = Field(
        default=None, json_schema_extra=within(minimum=0), description="16 without it. 0 generates nothing."
    )
    temperature: FiniteFloat | None = Field(
        default=None, json_schema_extra=within(minimum=0, maximum=5), description="0, greedy, without it."
    )
    top_p: TopP = None
    top_k: TopK = None
    stop: StopStrings | None = None
    seed: Seed | None = None
    n: Integer | None = Field(default=None, json_schema_extra=within(enum=[1]))
    best_of: Integer | None = Field(default=None, json_schema_extra=within(enum=[1]))
    echo: bool | None = Field(default=None, description="Whether the text begins with the prompt.")
    logprobs: Integer | None = Field(
        default=None,
        json_schema_extra=within(minimum=0, maximum=MOST_ALTERNATIVES),
        description="Log-probabilities of the tokens, and of so many likeliest tokens in their places; with ``echo``, "
        "of the tokens of the prompt too.",
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionLogProbs(BaseModel):
    """The tokens of a completion."""

    tokens: list[str] = Field(description=r"Bytes that are no complete characters are written as bytes:\xNN.")
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int] = Field(description="Characters of the text before each token.")


class CompletionChoice(BaseModel):
    """The completion of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str | None


class CompletionObject(BaseModel):
    """The completions of all prompts, or a piece of one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageOutput | None = None
    system_fingerprint: str


def completion_log_probs(scored: Sequence[ScoredToken], *, alternatives: bool) -> CompletionLogProbs:
    """Return the tokens of a completion, the one that ends it included.

    As in OpenAI's API, the alternatives of a token always hold the token itself, and the first token of a prompt has
    neither log-probability nor alternatives.
    """
    return CompletionLogProbs(
        tokens=[text_of(one.token, "bytes:") for one in scored],
        token_logprobs=[one.token.log_prob for one in scored],
        top_logprobs=[_alternatives(one) for one in scored] if alternatives else None,
        text_offset=[one.start for one in scored],
    )


def _alternatives(one: ScoredToken) -> dict[str, float] | None:
    if one.token.log_prob is None:
        return None
    found: dict[str, float] = {}
    for score in (*one.top, one.token):  # of two tokens with one text, the likelier one
        found.setdefault(text_of(score, "bytes:"), log_prob_of(score))
    return found


router = APIRouter(tags=["completions"], route_class=CleanRoute)

DEFAULT_TOKENS = 16

# Fields that would change the answer, with the values that ask for what happens anyway.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
}


@router.post(
    "/v1/completions",
    operation_id="create_completion",
    response_model=CompletionObject,
    responses=OPENAI.responses(*ANSWERING) | STREAMED,
)
async def create_completion(
    body: CompletionRequest, request: Request, service: ReadyService, facts: RequestFacts
) -> Response:
    """Continue prompts as they are: no chat template, no retrieval and no mitigation.

    With ``echo`` and ``logprobs`` the tokens of the prompt come with their log-probabilities: evaluations of multiple
    choice need them.
    """
    service.check_model(body.model or "")
    asked = to_request(body, service.pipeline.defaults.sampling)
    run = partial(complete, service.pipeline, asked)
    renderer = CompletionRenderer(
        service.identifiers.new(),
        service.model_id,
        service.pipeline.generator.fingerprint,
        top_logprobs=body.logprobs,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )
    if body.stream:
        return await respond_with_stream(service, request, facts, run, renderer)
    with service.chat.open() as job:
        answers = await job.until_gone(request.receive, lambda: job.call(lambda: _answers(run())))
    for answer in answers:
        service.record(answer, facts)
    return SafeJSONResponse(renderer.whole(answers))


def to_request(body: CompletionRequest, defaults: Sampling) -> PlainRequest:
    """Return the prompts of a request, and how they are continued."""
    refuse_fields(body.model_extra, _REFUSED)
    for name, value in (("n", body.n), ("best_of", body.best_of)):
        if value not in (None, 1):
            raise UnsupportedFeatureError(f"{name}={value} is not supported; it must be 1", param=name)
    check_top_logprobs(body.logprobs, "logprobs")
    longest = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = sampling_with(
        defaults,
        max_tokens=longest or 1,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        stop=stop_strings(body.stop, "stop"),
        top_logprobs=body.logprobs,
    )
    single = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
    prompts: Any = [body.prompt] if single else body.prompt
    return PlainRequest(prompts, sampling, echo=bool(body.echo), continued=longest != 0)


def _answers(chunks: Iterator[AnswerChunk]) -> list[Answer]:
    return [chunk.answer for chunk in chunks if chunk.answer is not None]


class CompletionRenderer(EventRenderer):
    """Renders the completions of one request, whole or as server-sent events.

    Args:
        top_logprobs: Alternatives of each token; None renders no log-probabilities.
        include_usage: Whether a stream ends with a chunk that has the usage.
    """

    def __init__(
        self, identity: str, model: str, fingerprint: str, *, top_logprobs: int | None, include_usage: bool = False
    ) -> None:
        self._top_logprobs = top_logprobs
        self._include_usage = include_usage
        self._done: list[Answer] = []
        self._shared = {
            "id": f"cmpl-{identity}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"fp_{fingerprint[:12]}",
        }

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        choices = [
            self._choice(index, answer.text, answer.log_probs, answer.finish_reason)
            for index, answer in enumerate(answers)
        ]
        return CompletionObject(**self._shared, choices=choices, usage=usage_output(_sum(answers))).model_dump()

    def piece(self, chunk: AnswerChunk) -> Iterator[bytes]:
        """Yield the event of a piece; the last piece of a prompt ends its completion."""
        finish = None if chunk.answer is None else chunk.answer.finish_reason
        yield self._event([self._choice(len(self._done), chunk.text, chunk.log_probs, finish)])
        if chunk.answer is not None:
            self._done.append(chunk.answer)

    def closing(self) -> Iterator[bytes]:
        """Yield the last events of a complete stream."""
        if self._include_usage:
            yield self._event([], _sum(self._done))
        yield DONE

    def failure(self, problem: Problem) -> Iterator[bytes]:
        """Yield the error event of a stream that failed."""
        yield event(OPENAI(problem))

    def _event(self, choices: list[CompletionChoice], usage: Usage | None = None) -> bytes:
        body = CompletionObject(**self._shared, choices=choices, usage=None if usage is None else usage_output(usage))
        return event(body.model_dump(exclude=None if self._include_usage else {"usage"}))

    def _choice(
        self, index: int, text: str, log_probs: Sequence[ScoredToken], finish_reason: str | None
    ) -> CompletionChoice:
        rendered = None
        if self._top_logprobs is not None:
            rendered = completion_log_probs(log_probs, alternatives=self._top_logprobs > 0)
        return CompletionChoice(index=index, text=text, logprobs=rendered, finish_reason=finish_reason)


def _sum(answers: Sequence[Answer]) -> Usage:
    return Usage(
        sum(one.usage.prompt_tokens for one in answers),
        sum(one.usage.completion_tokens for one in answers),
        sum(one.usage.cached_tokens for one in answers),
    )
