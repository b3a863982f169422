"""Parses a chat request into a question for the pipeline. Unsupported fields of the wire format are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rag_posfix.contracts.answer import Question
from rag_posfix.contracts.request import Sampling
from rag_posfix_api.dialects.conversation import check_stops, refuse_fields, split_question
from rag_posfix_api.dialects.documents import to_documents
from rag_posfix_api.dialects.messages import chat_message
from rag_posfix_api.dialects.openai.schemas import ChatRequest
from rag_posfix_api.dialects.posfix import mitigation_choice
from rag_posfix_api.http.errors import InvalidRequestError, UnsupportedFeatureError

__all__ = ["to_question"]

# Fields that would change the answer, with the values that ask for what happens anyway.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
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
    messages = [chat_message(message, index) for index, message in enumerate(body.messages)]
    history, text = split_question(messages, body.messages[-1].role)
    return Question(
        text=text,
        documents=None if body.documents is None else to_documents(body.documents, max_documents),
        history=history,
        mitigation=mitigation_choice(_chosen(body, "mitigation")),
        order=_chosen(body, "order"),
        seed=body.seed or 0,
        k=_chosen(body, "k"),
        sampling=_sampling(body, defaults),
        use_cache=body.cache is not False,
    )


def _refuse(body: ChatRequest) -> None:
    refuse_fields(body.model_extra, _REFUSED)
    if body.n not in (None, 1):
        raise UnsupportedFeatureError(f"n={body.n} is not supported; one answer is given, so n must be 1", param="n")
    check_stops([body.stop] if isinstance(body.stop, str) else body.stop or [], "stop")


def _chosen(body: ChatRequest, name: str) -> Any:
    """Return a field of this service, which may stand beside ``messages`` or in ``posfix``."""
    beside, inside = getattr(body, name), getattr(body.posfix, name, None)
    if beside is not None and inside is not None and beside != inside:
        raise InvalidRequestError(f"{name} is given twice, beside messages and in posfix; give it once", param=name)
    return inside if beside is None else beside


def _sampling(body: ChatRequest, defaults: Sampling) -> Sampling:
    longest = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    stops = (body.stop,) if isinstance(body.stop, str) else body.stop and tuple(body.stop)
    given: dict[str, Any] = {
        "max_tokens": longest,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "seed": body.seed,
        "stop": stops,
    }
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})
