"""Renders answers in Ollama's wire format, as one object or as lines of JSON."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from rag_posfix.contracts.answer import Answer, AnswerChunk
from rag_posfix_api.dialects.ollama.errors import render_error
from rag_posfix_api.dialects.ollama.schemas import OllamaChatResponse, OllamaMessage
from rag_posfix_api.dialects.provenance import provenance
from rag_posfix_api.http.encoding import encode_json
from rag_posfix_api.http.errors import Problem

__all__ = ["OllamaRenderer"]


class OllamaRenderer:
    """Renders one answer.

    Args:
        model: The name that the request gave the model; clients expect it back.
    """

    def __init__(self, model: str) -> None:
        self._model = model

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        return self._last(answer, answer.text)

    def opening(self) -> Iterator[bytes]:
        """Yield nothing: a stream begins with its first piece."""
        yield from ()

    def piece(self, chunk: AnswerChunk) -> Iterator[bytes]:
        """Yield the line of a piece; the last one has the counts."""
        if chunk.answer is not None:
            yield encode_json(self._last(chunk.answer, chunk.text)) + b"\n"
        elif chunk.text:
            yield encode_json(self._body(chunk.text, done=False)) + b"\n"

    def closing(self) -> Iterator[bytes]:
        """Yield nothing: a complete stream ends with its last piece."""
        yield from ()

    def failure(self, problem: Problem) -> Iterator[bytes]:
        """Yield the last line of a stream that failed."""
        yield encode_json(render_error(problem)) + b"\n"

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
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        body = OllamaChatResponse(model=self._model, created_at=now, message=OllamaMessage(content=text), **fields)
        return body.model_dump(exclude_none=True)
