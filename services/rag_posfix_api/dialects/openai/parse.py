"""Parses a chat request into a question for the pipeline. Unsupported fields of the wire format are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rag_posfix.contracts.answer import Question
from rag_posfix.contracts.request import Sampling
from rag_posfix_api.dialects.conversation import refuse_fields
from rag_posfix_api.dialects.documents import to_documents
from rag_posfix_api.dialects.messages import chat_message
from rag_posfix_api.dialects.openai.schemas import ChatRequest
from rag_posfix_api.dialects.posfix import PosfixInput
from rag_posfix_api.dialects.questions import build_question, check_top_logprobs, sampling_with, stop_strings
from rag_posfix_api.http.errors import InvalidRequestError, UnsupportedFeatureError

__all__ = ["to_question"]

# Fields that would change the answer, with the values that ask for what happens anyway.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
}


def to_question(body: ChatRequest, defaults: Sampling, max_documents: int) -> Question:
    """Return the question of a chat request.

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
    _refuse(body)
    return build_question(
        [chat_message(message, index) for index, message in enumerate(body.messages)],
        sampling_with(
            defaults,
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            seed=body.seed,
            stop=stop_strings(body.stop, "stop"),
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        ),
        None if body.documents is None else to_documents(body.documents, max_documents),
        _posfix(body),
        role=body.messages[-1].role,
        seed=body.seed,
        use_cache=body.cache is not False,
    )


def _refuse(body: ChatRequest) -> None:
    refuse_fields(body.model_extra, _REFUSED)
    if body.n not in (None, 1):
        raise UnsupportedFeatureError(f"n={body.n} is not supported; one answer is given, so n must be 1", param="n")
    check_top_logprobs(body.top_logprobs, "top_logprobs")
    if body.max_tokens is not None and body.max_tokens < 1:  # also where max_completion_tokens replaces it
        raise InvalidRequestError(f"max_tokens={body.max_tokens} must be >= 1", param="max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError(
            f"top_logprobs={body.top_logprobs} needs logprobs, which is false; set logprobs to true",
            param="top_logprobs",
        )


def _posfix(body: ChatRequest) -> PosfixInput:
    """Return the fields of this service, which may stand beside ``messages`` or in ``posfix``."""
    inside = body.posfix or PosfixInput()
    beside: dict[str, Any] = {name: getattr(body, name) for name in ("mitigation", "order", "k")}
    given = {name: value for name, value in beside.items() if value is not None}
    for name, value in given.items():
        if getattr(inside, name) not in (None, value):
            raise InvalidRequestError(
                f"{name} is given twice, beside messages and in posfix; give it once", param=name
            )
    return inside.model_copy(update=given)
