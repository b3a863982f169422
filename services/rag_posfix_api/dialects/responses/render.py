"""Renders answers as OpenAI's responses, as one object or as numbered server-sent events."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any, Literal

from rag_posfix.contracts.answer import Answer, AnswerChunk
from rag_posfix.contracts.request import Sampling
from rag_posfix_api.dialects.provenance import provenance
from rag_posfix_api.dialects.responses.schemas import (
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)
from rag_posfix_api.http.encoding import event
from rag_posfix_api.http.errors import Problem

__all__ = ["ResponseRenderer"]


class ResponseRenderer:
    """Renders one response.

    Args:
        identity: Unique among all responses.
        model: Name of the served model.
        sampling: Sampling parameters of the question, which responses repeat.
        instructions: The instructions of the request.
    """

    def __init__(self, identity: str, model: str, sampling: Sampling, instructions: str | None) -> None:
        self._item_id = f"msg_{identity}"
        self._numbers = itertools.count()
        self._shared: dict[str, Any] = {
            "id": f"resp_{identity}",
            "created_at": int(time.time()),
            "model": model,
            "instructions": instructions,
            "max_output_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        status = _status(answer)
        return ResponseObject(
            **self._shared,
            status=status,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            output=[OutputMessage(id=self._item_id, status=status, content=[OutputText(text=answer.text)])],
            usage=_usage(answer),
            posfix=provenance(answer),
        ).model_dump()

    def opening(self) -> Iterator[bytes]:
        """Yield the four events before the text."""
        begun = ResponseObject(**self._shared, status="in_progress", output=[]).model_dump()
        item = OutputMessage(id=self._item_id, status="in_progress", content=[])
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        yield self._event("response.output_item.added", output_index=0, item=item.model_dump())
        yield self._part_event("response.content_part.added", part=OutputText(text="").model_dump())

    def piece(self, chunk: AnswerChunk) -> Iterator[bytes]:
        """Yield the events for a piece of the answer; the last piece ends it."""
        if chunk.text:
            yield self._part_event("response.output_text.delta", delta=chunk.text, logprobs=[])
        if chunk.answer is None:
            return
        response = self.whole(chunk.answer)
        (item,) = response["output"]
        (part,) = item["content"]
        yield self._part_event("response.output_text.done", text=part["text"], logprobs=[])
        yield self._part_event("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{response['status']}", response=response)

    def closing(self) -> Iterator[bytes]:
        """Yield nothing: a complete stream ends with its last piece."""
        yield from ()

    def failure(self, problem: Problem) -> Iterator[bytes]:
        """Yield the last event of a stream that failed."""
        error = ResponseError(code=problem.code, message=problem.message)
        failed = ResponseObject(**self._shared, status="failed", error=error, output=[])
        yield self._event("response.failed", response=failed.model_dump())

    def _event(self, name: str, **fields: Any) -> bytes:
        return event({"type": name, "sequence_number": next(self._numbers), **fields}, name)

    def _part_event(self, name: str, **fields: Any) -> bytes:
        return self._event(name, item_id=self._item_id, output_index=0, content_index=0, **fields)


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
