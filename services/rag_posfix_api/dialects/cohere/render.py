"""Renders answers in Cohere's wire format, as one object or as server-sent events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rag_posfix.contracts.answer import Answer, AnswerChunk
from rag_posfix_api.dialects.cohere.chat_schemas import (
    CohereChatResponse,
    CohereCitation,
    CohereMessage,
    CohereSource,
    CohereText,
    CohereTokens,
    CohereUsage,
    FinishReason,
)
from rag_posfix_api.dialects.provenance import provenance
from rag_posfix_api.http.encoding import event
from rag_posfix_api.http.errors import Problem

__all__ = ["ChatRenderer"]


class ChatRenderer:
    """Renders one answer.

    Args:
        identity: Unique among all responses.
        documents: The fields of the documents of the request, by id.
        cites: Whether the answer has citations.
    """

    def __init__(self, identity: str, documents: Mapping[str, Mapping[str, Any]], *, cites: bool) -> None:
        self._id = identity
        self._documents = documents
        self._cites = cites

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        message = CohereMessage(content=[CohereText(text=answer.text)], citations=self._citations(answer) or None)
        response = CohereChatResponse(
            id=self._id,
            finish_reason=_finish_reason(answer),
            message=message,
            usage=_usage(answer),
            posfix=provenance(answer),
        )
        return response.model_dump()

    def opening(self) -> Iterator[bytes]:
        """Yield the head of the answer."""
        message = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}
        yield _event("message-start", id=self._id, delta={"message": message})
        yield _event("content-start", index=0, delta={"message": {"content": {"type": "text", "text": ""}}})

    def piece(self, chunk: AnswerChunk) -> Iterator[bytes]:
        """Yield the events for a piece of the answer; the last piece ends it, after its citations."""
        if chunk.text:
            yield _event("content-delta", index=0, delta={"message": {"content": {"text": chunk.text}}})
        if chunk.answer is None:
            return
        for index, citation in enumerate(self._citations(chunk.answer)):
            yield _event("citation-start", index=index, delta={"message": {"citations": citation.model_dump()}})
            yield _event("citation-end", index=index)
        yield _event("content-end", index=0)
        delta = {"finish_reason": _finish_reason(chunk.answer), "usage": _usage(chunk.answer).model_dump()}
        yield _event("message-end", id=self._id, delta=delta, posfix=provenance(chunk.answer).model_dump())

    def closing(self) -> Iterator[bytes]:
        """Yield nothing: a complete stream ends with its last piece."""
        yield from ()

    def failure(self, problem: Problem) -> Iterator[bytes]:
        """Yield the last event of a stream that failed."""
        yield _event("message-end", id=self._id, delta={"finish_reason": "ERROR", "error": problem.message})

    def _citations(self, answer: Answer) -> list[CohereCitation]:
        """Return the quotes, and the sentences known by attention that hold no quote: spans do not overlap."""
        if not self._cites:
            return []
        titles = {document.id: document.title for document in answer.documents}
        quotes = [(one.start, one.end) for one in answer.citations if one.origin == "quote"]
        found = []
        for one in answer.citations:
            overlaps = any(start < one.end and one.start < end for start, end in quotes)
            if one.origin == "quote" or not overlaps:
                sources = [self._source(identity, titles.get(identity)) for identity in one.document_ids]
                found.append(CohereCitation(start=one.start, end=one.end, text=one.text, sources=sources))
        return found

    def _source(self, identity: str, title: str | None) -> CohereSource:
        # A retrieved document has a title at most: its text is not part of an answer.
        fields = self._documents.get(identity, {} if title is None else {"title": title})
        return CohereSource(id=identity, document={"id": identity, **fields})


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)


def _finish_reason(answer: Answer) -> FinishReason:
    # Which stop string ended an answer is not known here: an end by one is a complete answer.
    return "MAX_TOKENS" if answer.finish_reason == "length" else "COMPLETE"


def _usage(answer: Answer) -> CohereUsage:
    tokens = CohereTokens(input_tokens=answer.usage.prompt_tokens, output_tokens=answer.usage.completion_tokens)
    return CohereUsage(billed_units=tokens, tokens=tokens, cached_tokens=answer.usage.cached_tokens)
