"""Parses a chat request into a question for the pipeline. Unsupported fields of the wire format are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rag_posfix.contracts.answer import Question
from rag_posfix.contracts.request import Sampling
from rag_posfix_api.dialects.cohere.chat_schemas import CohereChatRequest
from rag_posfix_api.dialects.conversation import refuse_fields
from rag_posfix_api.dialects.documents import DocumentObject, to_documents
from rag_posfix_api.dialects.messages import chat_message
from rag_posfix_api.dialects.questions import build_question, sampling_with, stop_strings

__all__ = ["to_question"]

# Fields that would change the answer, with the values that ask for what happens anyway.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "NONE"),
    "response_format": (None, {"type": "text"}),
    "logprobs": (None, False),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "thinking": (None, {"type": "disabled"}),
}


def to_question(
    body: CohereChatRequest, defaults: Sampling, max_documents: int
) -> tuple[Question, dict[str, dict[str, Any]]]:
    """Return the question of a chat request, and the fields of its documents by id.

    Args:
        body: The request.
        defaults: Default sampling parameters.
        max_documents: Maximum number of documents.

    Raises:
        InvalidRequestError: a field has a value that is not allowed.
        UnsupportedFeatureError: a field needs a feature that is not supported.
        TooManyDocumentsError: there are too many documents.
        ConfigError: a sampling parameter is out of range.
    """
    refuse_fields(body.model_extra, _REFUSED)
    given = body.documents or []
    documents = to_documents(given, max_documents)
    question = build_question(
        [chat_message(message, index) for index, message in enumerate(body.messages)],
        sampling_with(
            defaults,
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            top_p=body.p,
            top_k=body.k,
            seed=body.seed,
            stop=stop_strings(body.stop_sequences, "stop_sequences"),
        ),
        documents or None,  # Cohere's clients send an empty list for none
        body.posfix,
        role=body.messages[-1].role,
        seed=body.seed,
    )
    pairs = zip(documents, given, strict=True)
    return question, {document.id or "": _fields(one) for document, one in pairs}


def _fields(document: str | DocumentObject) -> dict[str, Any]:
    if isinstance(document, str):
        return {"text": document}
    if document.data is not None:
        return document.data.model_dump(exclude_none=True)
    return document.model_dump(include={"title", "text"}, exclude_none=True)
