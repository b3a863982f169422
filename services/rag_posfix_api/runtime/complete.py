"""Continues prompts that clients wrote in full: no retrieval, no chat template, no mitigation and no answer cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rag_posfix.caching.answers.keys import tenant_salt
from rag_posfix.contracts.answer import Answer, AnswerChunk
from rag_posfix.contracts.generator import PromptEncoder, gives_scores, shown_model
from rag_posfix.contracts.request import Generation, GenerationRequest, MitigationChoice, Sampling, ScoredToken, Usage
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.plan.layout import Layout
from rag_posfix_api.http.errors import InvalidRequestError, UnsupportedFeatureError


@dataclass(frozen=True, slots=True)
class PlainRequest:
    """Prompts to continue, and how.

    Attributes:
        prompts: Each a text, or token ids.
        sampling: Sampling parameters; with ``top_logprobs`` tokens come with log-probabilities.
        echo: Whether the prompt is part of the text, and its tokens of the log-probabilities.
        continued: Whether anything is generated; without it one token is, and is dropped.
    """

    prompts: Sequence[str | Sequence[int]]
    sampling: Sampling
    echo: bool = False
    continued: bool = True


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt: its text, its tokens, and how much longer the text of the tokens is (by a token that begins texts)."""

    text: str
    token_ids: tuple[int, ...]
    lead: int = 0


def complete(pipeline: Pipeline, asked: PlainRequest) -> Iterator[AnswerChunk]:
    """Yield the completions of all prompts, one after another, in pieces; the last piece of each has its ``answer``.

    Raises:
        UnsupportedFeatureError: the generator takes no prompts without a chat template, or gives no log-probabilities.
        InvalidRequestError: a prompt is empty, or has a token that the vocabulary lacks.
        PromptTooLongError: a prompt exceeds the context window.
    """
    generator = pipeline.generator
    encoder = generator.encoder
    if not isinstance(encoder, PromptEncoder):
        raise UnsupportedFeatureError(
            f"{shown_model(generator.model_id)} takes no prompts without a chat template here; "
            "use /v1/chat/completions"
        )
    scored = asked.sampling.top_logprobs is not None
    if scored and not gives_scores(generator):
        raise UnsupportedFeatureError(
            f"{shown_model(generator.model_id)} returns no log-probabilities here; leave logprobs out",
            param="logprobs",
        )
    for prompt in [_read(encoder, given, index) for index, given in enumerate(asked.prompts)]:
        request = GenerationRequest(
            Layout.plain(prompt.token_ids),
            MitigationChoice("none"),
            asked.sampling,
            tenant_salt(pipeline.defaults.tenant, ""),
            prompt_scored=scored and asked.echo,
        )
        yield from _completed(pipeline, request, prompt, asked)


def _read(encoder: PromptEncoder, given: str | Sequence[int], index: int) -> _Prompt:
    if isinstance(given, str):
        ids = tuple(encoder.encode_prompt(given))
        prompt = _Prompt(given, ids, max(0, len(encoder.decode(ids)) - len(given)))
    else:
        largest = max(given, default=0)
        if largest >= encoder.vocab_size:
            raise InvalidRequestError(
                f"prompt {index} has the token {largest}; the vocabulary has tokens 0 to {encoder.vocab_size - 1}",
                param="prompt",
            )
        prompt = _Prompt(encoder.decode(given), tuple(given))
    if not prompt.token_ids:
        raise InvalidRequestError(f"prompt {index} is empty; give at least one token", param="prompt")
    return prompt


def _completed(
    pipeline: Pipeline, request: GenerationRequest, prompt: _Prompt, asked: PlainRequest
) -> Iterator[AnswerChunk]:
    offset = len(prompt.text) if asked.echo else 0
    # The tokens of the prompt are known at the end, and stand before those of the answer.
    whole = request.prompt_scored or not asked.continued
    if offset and not whole:
        yield AnswerChunk(prompt.text)
    for chunk in pipeline.generator.stream(request):
        if chunk.generation is None:
            if not whole:
                yield AnswerChunk(chunk.text, log_probs=_moved(chunk.log_probs, offset))
            continue
        answer = _answer(chunk.generation, prompt, asked)
        if whole:
            yield AnswerChunk(answer.text, answer, answer.log_probs)
        else:
            yield AnswerChunk(chunk.text, answer, _moved(chunk.log_probs, offset))


def _answer(generation: Generation, prompt: _Prompt, asked: PlainRequest) -> Answer:
    usage, text, log_probs = generation.usage, generation.text, generation.log_probs
    if not asked.continued:
        usage, text, log_probs = Usage(usage.prompt_tokens, 0, usage.cached_tokens), "", ()
    if asked.echo:
        text = prompt.text + text
        before = _moved(generation.prompt_log_probs, -prompt.lead)
        log_probs = (*before, *_moved(log_probs, len(prompt.text)))
    return Answer(
        text=text,
        documents=(),
        citations=(),
        usage=usage,
        cached=False,
        mitigation="none",
        order="",
        finish_reason=generation.finish_reason if asked.continued else "length",
        timings=generation.timings,
        log_probs=log_probs,
    )


def _moved(scored: Sequence[ScoredToken], offset: int) -> tuple[ScoredToken, ...]:
    return tuple(replace(one, start=max(0, one.start + offset)) for one in scored)
