"""OpenAI completions: prompts that clients wrote in full, continued without retrieval, template, method or cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Discriminator, Field, FiniteFloat, Tag
from starlette.responses import Response

from rag_posfix.caching.answers.tiered import tenant_salt
from rag_posfix.contracts.answer import Answer, AnswerChunk
from rag_posfix.contracts.generator import TokenEncoder, display_name, sum_usage
from rag_posfix.contracts.request import (
    MAX_TOP_LOGPROBS,
    Generation,
    GenerationRequest,
    MitigationChoice,
    Sampling,
    ScoredToken,
    Usage,
)
from rag_posfix.errors import PromptTooLongError
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.plan.layout import Layout
from rag_posfix.text import text_beginning
from rag_posfix_api.dialects.answering import (
    STREAMED,
    check_request,
    check_top_logprobs,
    chosen_sampling,
    respond_with_stream,
    sampling_fields,
)
from rag_posfix_api.dialects.openai import (
    CompletionParts,
    StreamOptions,
    UsageOutput,
    log_prob_of,
    text_of,
    usage_output,
)
from rag_posfix_api.dialects.requests import (
    Integer,
    ModelRequest,
    Natural,
    Seed,
    StopStrings,
    TopK,
    TopP,
    Unsupported,
    within,
)
from rag_posfix_api.http.errors import ANSWERING, OPENAI, RequestError
from rag_posfix_api.http.middleware import CleanRoute, SafeJSONResponse, event
from rag_posfix_api.runtime.service import ReadyCall, Service


def _form(value: Any) -> str:
    """Return the form of a prompt by its first entry, so that errors name one form only."""
    if isinstance(value, list | tuple) and value:
        if isinstance(value[0], list | tuple):
            return "form:lists"
        return "form:ids" if isinstance(value[0], int | float) else "array"
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


class CompletionRequest(ModelRequest):
    """A request. Fields of OpenAI's API without effect here are ignored; unsupported ones are refused."""

    unsupported: ClassVar[Unsupported] = {
        "suffix": (None, ""),
        "logit_bias": (None, {}),
        "frequency_penalty": (None, 0),
        "presence_penalty": (None, 0),
    }

    prompt: Prompt = Field(description="One text or list of token ids, or several. No chat template is applied.")
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
        json_schema_extra=within(minimum=0, maximum=MAX_TOP_LOGPROBS),
        description="Log-probabilities of the tokens, and of so many likeliest tokens in their places; with ``echo``, "
        "of the tokens of the prompt too.",
    )
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


router = APIRouter(tags=["completions"], route_class=CleanRoute)

DEFAULT_TOKENS = 16


@router.post("/v1/completions", response_model=CompletionObject, responses=OPENAI.responses(*ANSWERING) | STREAMED)
async def create_completion(body: CompletionRequest, call: ReadyCall) -> Response:
    """Continue prompts as they are: no chat template, no retrieval and no method.

    With ``echo`` and ``logprobs`` the tokens of the prompt come with their log-probabilities: evaluations of multiple
    choice need them.
    """
    service = call.service
    check_request(service, body)
    run = partial(_complete, service.pipeline, body, _sampling(body, service.pipeline.defaults.sampling))
    renderer = CompletionRenderer(service, body)
    if body.stream:
        return await respond_with_stream(call, run, renderer)
    answers = await call.compute(lambda: [chunk.answer for chunk in run() if chunk.answer])
    for answer in answers:
        call.record(answer)
    return SafeJSONResponse(renderer.whole(answers))


def _sampling(body: CompletionRequest, defaults: Sampling) -> Sampling:
    """Return the sampling parameters of a request; a token that was not asked for is dropped (``max_tokens=0``)."""
    for name, value in (("n", body.n), ("best_of", body.best_of)):
        if value not in (None, 1):
            raise RequestError(f"{name}={value} is not supported; it must be 1", param=name, code="unsupported")
    check_top_logprobs(body.logprobs, "logprobs")
    max_tokens = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens or 1
    return chosen_sampling(defaults, sampling_fields(body) | {"max_tokens": max_tokens, "top_logprobs": body.logprobs})


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt: its text, its tokens, and how much longer the text of the tokens is (by a token that begins texts)."""

    text: str
    token_ids: tuple[int, ...]
    lead: int = 0


def _complete(pipeline: Pipeline, body: CompletionRequest, sampling: Sampling) -> Iterator[AnswerChunk]:
    """Yield the completions of all prompts, one after another, in pieces; the last piece of each has its ``answer``.

    Raises:
        RequestError: the generator takes no prompts without a chat template, or gives no log-probabilities; a
            prompt is empty, or has a token that the vocabulary lacks.
        PromptTooLongError: a prompt exceeds the context window.
    """
    generator = pipeline.generator
    encoder = generator.encoder
    if not encoder.vocab_size:
        raise RequestError(
            f"{display_name(generator.model_id)} takes no prompts without a chat template here; "
            "use /v1/chat/completions",
            code="unsupported",
        )
    needs_scores = sampling.top_logprobs is not None
    if needs_scores and "log_probs" not in generator.capabilities:
        raise RequestError(
            f"{display_name(generator.model_id)} returns no log-probabilities here; leave logprobs out",
            param="logprobs",
            code="unsupported",
        )
    is_single = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
    prompts: Any = [body.prompt] if is_single else body.prompt
    window = generator.context_window
    for prompt in [_read_prompt(encoder, prompt, index, window) for index, prompt in enumerate(prompts)]:
        request = GenerationRequest(
            Layout.plain(prompt.token_ids),
            MitigationChoice("none"),
            sampling,
            tenant_salt(pipeline.defaults.tenant, ""),
            prompt_scored=needs_scores and bool(body.echo),
        )
        yield from _complete_prompt(pipeline, request, prompt, body)


def _read_prompt(encoder: TokenEncoder, prompt: str | Sequence[int], index: int, window: int) -> _Prompt:
    if isinstance(prompt, str):
        if text_beginning(prompt, window, lambda text: len(encoder.encode_prompt(text))) != prompt:
            raise PromptTooLongError(
                f"prompt {index} has {len(prompt)} characters, more than the {window} tokens of the context window "
                "hold; shorten it"
            )
        ids = tuple(encoder.encode_prompt(prompt))
        encoded = _Prompt(prompt, ids, max(0, len(encoder.decode(ids)) - len(prompt)))
    else:
        largest = max(prompt, default=0)
        if largest >= encoder.vocab_size:
            raise RequestError(
                f"prompt {index} has the token {largest}; the vocabulary has tokens 0 to {encoder.vocab_size - 1}",
                param="prompt",
            )
        encoded = _Prompt(encoder.decode(prompt), tuple(prompt))
    if not encoded.token_ids:
        raise RequestError(f"prompt {index} is empty; give at least one token", param="prompt")
    return encoded


def _complete_prompt(
    pipeline: Pipeline, request: GenerationRequest, prompt: _Prompt, body: CompletionRequest
) -> Iterator[AnswerChunk]:
    offset = len(prompt.text) if body.echo else 0
    # The log-probabilities of the prompt are complete at the end, and precede the answer's.
    at_once = request.prompt_scored or body.max_tokens == 0
    if offset and not at_once:
        yield AnswerChunk(prompt.text)
    for chunk in pipeline.generator.stream(request):
        if chunk.generation is None:
            if not at_once:
                yield AnswerChunk(chunk.text, log_probs=_shift(chunk.log_probs, offset))
            continue
        answer = _answer(chunk.generation, prompt, body)
        if at_once:
            yield AnswerChunk(answer.text, answer, answer.log_probs)
        else:
            yield AnswerChunk(chunk.text, answer, _shift(chunk.log_probs, offset))


def _answer(generation: Generation, prompt: _Prompt, body: CompletionRequest) -> Answer:
    usage, text, log_probs = generation.usage, generation.text, generation.log_probs
    if body.max_tokens == 0:
        usage, text, log_probs = Usage(usage.prompt_tokens, 0, usage.cached_tokens), "", ()
    if body.echo:
        text = prompt.text + text
        log_probs = (*_shift(generation.prompt_log_probs, -prompt.lead), *_shift(log_probs, len(prompt.text)))
    return Answer(
        text=text,
        documents=(),
        citations=(),
        usage=usage,
        cached=False,
        mitigation="none",
        order="",
        finish_reason="length" if body.max_tokens == 0 else generation.finish_reason,
        timings=generation.timings,
        log_probs=log_probs,
    )


def _shift(scored: Sequence[ScoredToken], offset: int) -> tuple[ScoredToken, ...]:
    return tuple(replace(token, start=max(0, token.start + offset)) for token in scored)


def completion_log_probs(scored: Sequence[ScoredToken], *, alternatives: bool) -> CompletionLogProbs:
    """Return the tokens of a completion, the one that ends it included.

    As in OpenAI's API, the alternatives of a token always hold the token itself, and the first token of a prompt has
    neither log-probability nor alternatives.
    """
    return CompletionLogProbs(
        tokens=[text_of(token.token, "bytes:") for token in scored],
        token_logprobs=[token.token.log_prob for token in scored],
        top_logprobs=[_alternatives(token) for token in scored] if alternatives else None,
        text_offset=[token.start for token in scored],
    )


def _alternatives(token: ScoredToken) -> dict[str, float] | None:
    if token.token.log_prob is None:
        return None
    alternatives: dict[str, float] = {}
    for score in (*token.top, token.token):  # of two tokens with one text, the likelier one
        alternatives.setdefault(text_of(score, "bytes:"), log_prob_of(score))
    return alternatives


class CompletionRenderer(CompletionParts):
    """Renders the completions of one request; with ``body.logprobs`` their tokens have log-probabilities."""

    def __init__(self, service: Service, body: CompletionRequest) -> None:
        super().__init__(service, "cmpl", body.stream_options)
        self._top_logprobs = body.logprobs
        self._done: list[Usage] = []

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            self._choice(index, answer.text, answer.log_probs, answer.finish_reason)
            for index, answer in enumerate(answers)
        ]
        usage = usage_output(sum_usage([answer.usage for answer in answers]))
        return CompletionObject(**self._shared, choices=choices, usage=usage).model_dump()

    def piece(self, chunk: AnswerChunk) -> Iterator[bytes]:
        finish = None if chunk.answer is None else chunk.answer.finish_reason
        yield self._event([self._choice(len(self._done), chunk.text, chunk.log_probs, finish)])
        if chunk.answer is not None:
            self._done.append(chunk.answer.usage)

    def closing(self) -> Iterator[bytes]:
        if self._include_usage:
            yield self._event([], sum_usage(self._done))
        yield from super().closing()

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
