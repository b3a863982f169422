"""Parses a responses request into a question for the pipeline. Unsupported fields of the wire format are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rag_posfix.contracts.answer import Question
from rag_posfix.contracts.generator import ChatMessage
from rag_posfix.contracts.request import Sampling
from rag_posfix.parameters import shown
from rag_posfix_api.dialects.conversation import refuse_fields
from rag_posfix_api.dialects.documents import to_documents
from rag_posfix_api.dialects.messages import Message, Part, chat_message
from rag_posfix_api.dialects.questions import build_question, sampling_with
from rag_posfix_api.dialects.responses.schemas import InputItem, ResponsesRequest
from rag_posfix_api.http.errors import UnsupportedFeatureError

__all__ = ["to_question"]

# Fields that would change the answer, with the values that ask for what happens anyway.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "previous_response_id": (None,),
    "conversation": (None,),
    "prompt": (None,),
    "background": (None, False),
    "top_logprobs": (None, 0),
    "text": (None, {}, {"format": {"type": "text"}}),
}
_TEXTS = ("input_text", "output_text", "text")


def to_question(body: ResponsesRequest, defaults: Sampling, max_documents: int) -> Question:
    """Return the question of a responses request.

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
    items = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    return build_question(
        [_chat_message(item, index) for index, item in enumerate(items)],
        sampling_with(defaults, max_tokens=body.max_output_tokens, temperature=body.temperature, top_p=body.top_p),
        None if body.documents is None else to_documents(body.documents, max_documents),
        body.posfix,
        role=items[-1].role or "",
        system=body.instructions,
        param="input",
    )


def _chat_message(item: InputItem, index: int) -> ChatMessage:
    if item.type != "message" or item.role is None:
        raise UnsupportedFeatureError(
            f"input[{index}]: an item of type {shown(item.type)} is not supported; use messages with a role",
            param="input",
        )
    if item.content is None or isinstance(item.content, str):
        return chat_message(Message(role=item.role, content=item.content), index, "input")
    parts = [Part(type="text" if part.type in _TEXTS else part.type, text=part.text) for part in item.content]
    return chat_message(Message(role=item.role, content=parts), index, "input")
