"""Renders answers in Anthropic's wire format, as one message or as server-sent events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from rag_posfix.contracts.answer import Answer, AnswerChunk
from rag_posfix_api.dialects.anthropic.citations import CitableDocument, cited_blocks, locations
from rag_posfix_api.dialects.anthropic.errors import render_error
from rag_posfix_api.dialects.anthropic.schemas import AnthropicResponse, AnthropicUsage
from rag_posfix_api.dialects.provenance import provenance
from rag_posfix_api.http.encoding import event
from rag_posfix_api.http.errors import Problem

__all__ = ["MessageRenderer"]


class MessageRenderer:
    """Renders one message.

    A stream has one text block: which parts of an answer are quotes is known at its end. Its citations come after its
    text, each with the characters of the answer that it supports.

    Args:
        identity: Unique among all responses.
        model: Name of the served model.
        documents: The document blocks of the request.
    """

    def __init__(self, identity: str, model: str, documents: Sequence[CitableDocument]) -> None:
        self._id = f"msg_{identity}"
        self._model = model
        self._documents = documents

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        return AnthropicResponse(
            id=self._id,
            model=self._model,
            content=cited_blocks(answer, self._documents),
            stop_reason=_stop_reason(answer),
            usage=_usage(answer),
            posfix=provenance(answer),
        ).model_dump()

    def opening(self) -> Iterator[bytes]:
        """Yield the head of the message; its token counts are known at the end."""
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        yield _event("message_start", message=message)
        yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})

    def piece(self, chunk: AnswerChunk) -> Iterator[bytes]:
        """Yield the events for a piece of the answer; the last piece ends the message."""
        if chunk.text:
            yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": chunk.text})
        if chunk.answer is None:
            return
        for location in locations(chunk.answer, self._documents):
            delta = {"type": "citations_delta", "citation": location.model_dump()}
            yield _event("content_block_delta", index=0, delta=delta)
        yield _event("content_block_stop", index=0)
        yield _event(
            "message_delta",
            delta={"stop_reason": _stop_reason(chunk.answer), "stop_sequence": None},
            usage=_usage(chunk.answer).model_dump(),
            posfix=provenance(chunk.answer).model_dump(),
        )

    def closing(self) -> Iterator[bytes]:
        """Yield the last event of a complete stream."""
        yield _event("message_stop")

    def failure(self, problem: Problem) -> Iterator[bytes]:
        """Yield the error event of a stream that failed."""
        yield event(render_error(problem), "error")


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)


def _stop_reason(answer: Answer) -> Literal["end_turn", "max_tokens"]:
    # Which stop string ended an answer is not known here: an end by one is an end of turn.
    return "max_tokens" if answer.finish_reason == "length" else "end_turn"


def _usage(answer: Answer) -> AnthropicUsage:
    cached = answer.usage.cached_tokens
    return AnthropicUsage(
        input_tokens=answer.usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=answer.usage.completion_tokens,
    )
