"""Renders answers in OpenAI's wire format, as one object or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rag_posfix.contracts.answer import Answer, AnswerChunk
from rag_posfix.contracts.request import Usage
from rag_posfix_api.dialects.openai.errors import render_error
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

__all__ = ["Completion"]

DONE = b"data: [DONE]\n\n"


class Completion:
    """The common fields of all parts of one response.

    Args:
        identity: Unique among all responses.
        model: Name of the served model.
        fingerprint: Identity of its weights.
        include_usage: Whether a stream ends with a chunk that has the usage.
    """

    def __init__(self, identity: str, model: str, fingerprint: str, *, include_usage: bool = False) -> None:
        self._include_usage = include_usage
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
            choices=[Choice(message=MessageOutput(content=answer.text), finish_reason=answer.finish_reason)],
            usage=_usage(answer.usage),
            **dict(provenance(answer)),
        )
        return completion.model_dump()

    def opening(self) -> Iterator[bytes]:
        """Yield the first chunk, which has the role."""
        yield event(self._chunk({"role": "assistant", "content": "", "refusal": None}))

    def piece(self, chunk: AnswerChunk) -> Iterator[bytes]:
        """Yield the chunks for a piece of the answer; the last piece ends it."""
        if chunk.text:
            yield event(self._chunk({"content": chunk.text}))
        if chunk.answer is None:
            return
        sources = provenance(chunk.answer).model_dump()
        yield event(self._chunk({}, chunk.answer.finish_reason) | sources)
        if self._include_usage:
            yield event(self._head() | {"choices": [], "usage": _usage(chunk.answer.usage).model_dump()})

    def closing(self) -> Iterator[bytes]:
        """Yield the last events of a complete stream."""
        yield DONE

    def failure(self, problem: Problem) -> Iterator[bytes]:
        """Yield the error event of a stream that failed."""
        yield event(render_error(problem))

    def _head(self) -> dict[str, Any]:
        return {**self._shared, "object": "chat.completion.chunk"}

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        # OpenAI's clients expect the field in every chunk where they asked for it.
        usage = {"usage": None} if self._include_usage else {}
        return self._head() | {"choices": [choice]} | usage


def _usage(usage: Usage) -> UsageOutput:
    return UsageOutput(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
    )
