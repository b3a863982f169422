"""Parses a chat request into a question for the pipeline. Unsupported fields of the wire format are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rag_posfix.contracts.answer import Question
from rag_posfix.contracts.request import Sampling
from rag_posfix_api.dialects.cohere.chat_schemas import CohereChatRequest
from rag_posfix_api.dialects.conversation import check_stops, refuse_fields, split_question
from rag_posfix_api.dialects.documents import DocumentObject, to_documents
from rag_posfix_api.dialects.messages import chat_message
from rag_posfix_api.dialects.posfix import PosfixInput, mitigation_choice

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
    check_stops(body.stop_sequences or [], "stop_sequences")
    messages = [chat_message(message, index) for index, message in enumerate(body.messages)]
    history, text = split_question(messages, body.messages[-1].role)
    given = body.documents or []
    documents = to_documents(given, max_documents)
    added = body.posfix or PosfixInput()
    question = Question(
        text=text,
        documents=documents or None,  # Cohere's clients send an empty list for none
        history=history,
        mitigation=mitigation_choice(added.mitigation),
        order=added.order,
        seed=body.seed or 0,
        k=added.k,
        sampling=_sampling(body, defaults),
    )
    pairs = zip(documents, given, strict=True)
    return question, {document.id or "": _fields(one) for document, one in pairs}


def _fields(document: str | DocumentObject) -> dict[str, Any]:
    if isinstance(document, str):
        return {"text": document}
    if document.data is not None:
        return document.data.model_dump(exclude_none=True)
    return document.model_dump(include={"title", "text"}, exclude_none=True)


def _sampling(body: CohereChatRequest, defaults: Sampling) -> Sampling:
    given: dict[str, Any] = {
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.p,
        "top_k": body.k,
        "seed": body.seed,
        "stop": None if body.stop_sequences is None else tuple(body.stop_sequences),
    }
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})
