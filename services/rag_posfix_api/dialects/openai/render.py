"""Renders answers in OpenAI's wire format, as one object or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rag_posfix.contracts.answer import Answer, AnswerChunk
from rag_posfix.contracts.request import Usage
from rag_posfix_api.dialects.openai.errors import render_error
from rag_posfix_api.dialects.openai.log_probs import chat_log_probs
from rag_posfix_api.dialects.openai.schemas import (
    ChatCompletion,
    Choice,
    MessageOutput,
    PromptTokensDetails,
    UsageOutput,
)
from rag_posfix_api.dialects.provenance import provenance
from rag_posfix_api.http.encoding import event
from rag_posfix_api.http.errors import Problem

__all__ = ["DONE", "Completion", "usage_output"]

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""


class Completion:
    """The common fields of all parts of one response.

    Args:
        identity: Unique among all responses.
        model: Name of the served model.
        fingerprint: Identity of its weights.
        include_usage: Whether a stream ends with a chunk that has the usage.
        log_probs: Whether the tokens of the answer are rendered with their log-probabilities.
    """

    def __init__(
        self, identity: str, model: str, fingerprint: str, *, include_usage: bool = False, log_probs: bool = False
    ) -> None:
        self._include_usage = include_usage
        self._log_probs = log_probs
        self._shared = {
            "id": f"chatcmpl-{identity}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"fp_{fingerprint[:12]}",
        }

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        completion = ChatCompletion(
            **self._shared,
            choices=[
                Choice(
                    message=MessageOutput(content=answer.text),
                    logprobs=chat_log_probs(answer.log_probs, len(answer.text)) if self._log_probs else None,
                    finish_reason=answer.finish_reason,
                )
            ],
            usage=usage_output(answer.usage),
            **dict(provenance(answer)),
        )
        return completion.model_dump()

    def opening(self) -> Iterator[bytes]:
        """Yield the first chunk, which has the role."""
        yield event(self._chunk({"role": "assistant", "content": "", "refusal": None}))

    def piece(self, chunk: AnswerChunk) -> Iterator[bytes]:
        """Yield the chunks for a piece of the answer; the last piece ends it."""
        tokens = self._tokens(chunk)
        if chunk.text or (tokens and tokens["content"]):
            yield event(self._chunk({"content": chunk.text}, log_probs=tokens))
        if chunk.answer is None:
            return
        sources = provenance(chunk.answer).model_dump()
        yield event(self._chunk({}, chunk.answer.finish_reason) | sources)
        if self._include_usage:
            yield event(self._head() | {"choices": [], "usage": usage_output(chunk.answer.usage).model_dump()})

    def closing(self) -> Iterator[bytes]:
        """Yield the last events of a complete stream."""
        yield DONE

    def failure(self, problem: Problem) -> Iterator[bytes]:
        """Yield the error event of a stream that failed."""
        yield event(render_error(problem))

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


def usage_output(usage: Usage) -> UsageOutput:
    """Return token counts in OpenAI's form."""
    return UsageOutput(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
    )
