"""Parses a chat request into a question for the pipeline. Unsupported fields of the wire format are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rag_posfix.contracts.answer import Question
from rag_posfix.contracts.generator import ChatMessage
from rag_posfix.contracts.request import MitigationChoice, Sampling
from rag_posfix.parameters import shown
from rag_posfix_api.dialects.documents import to_documents
from rag_posfix_api.dialects.openai.schemas import ChatRequest, Message, MitigationInput
from rag_posfix_api.http.errors import InvalidRequestError, UnsupportedFeatureError

__all__ = ["MAX_STOPS", "MAX_STOP_CHARACTERS", "to_question"]

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256

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
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def to_question(body: ChatRequest, defaults: Sampling, max_documents: int) -> Question:
    """Return the question of a chat request.

    Args:
        body: The request.
        defaults: Default sampling parameters.
        max_documents: Maximum number of documents.

    Raises:
        InvalidRequestError: a field has a value that is not allowed.
        UnsupportedFeatureError: a field needs a feature that is not supported.
        TooLargeError: there are too many documents.
        ConfigError: a sampling parameter is out of range.
    """
    _refuse(body)
    *history, asked = [_chat_message(message, index) for index, message in enumerate(body.messages)]
    if asked["role"] != "user":
        raise InvalidRequestError(
            f"the last message has the role {shown(body.messages[-1].role)}; it must be 'user': the question",
            param="messages",
        )
    if not asked["content"].strip():
        raise InvalidRequestError("the last message is empty; it must hold the question", param="messages")
    return Question(
        text=asked["content"],
        documents=None if body.documents is None else to_documents(body.documents, max_documents),
        history=history,
        mitigation=_mitigation(_chosen(body, "mitigation")),
        order=_chosen(body, "order"),
        seed=body.seed or 0,
        k=_chosen(body, "k"),
        sampling=_sampling(body, defaults),
        use_cache=body.cache is not False,
    )


def _refuse(body: ChatRequest) -> None:
    extra = body.model_extra or {}
    for name, harmless in _REFUSED.items():
        if name in extra and extra[name] not in harmless:
            allowed = ", ".join(repr(value) for value in harmless if value is not None) or "null"
            raise UnsupportedFeatureError(
                f"{name} is not supported here; leave it out (allowed: {allowed})", param=name
            )
    if body.n not in (None, 1):
        raise UnsupportedFeatureError(f"n={body.n} is not supported; one answer is given, so n must be 1", param="n")
    if isinstance(body.stop, list) and len(body.stop) > MAX_STOPS:
        raise InvalidRequestError(f"stop has {len(body.stop)} entries, at most {MAX_STOPS} are allowed", param="stop")
    longest = max(map(len, [body.stop] if isinstance(body.stop, str) else body.stop or []), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise InvalidRequestError(
            f"stop holds a string of {longest} characters, at most {MAX_STOP_CHARACTERS} are allowed", param="stop"
        )


def _chat_message(message: Message, index: int) -> ChatMessage:
    role = _ROLES.get(message.role)
    if role is None:
        raise UnsupportedFeatureError(
            f"messages[{index}]: role {shown(message.role)} is not supported; use one of {', '.join(_ROLES)}",
            param="messages",
        )
    if isinstance(message.content, str):
        return {"role": role, "content": message.content}
    parts = message.content or []
    for part in parts:
        if part.type != "text" or part.text is None:
            raise UnsupportedFeatureError(
                f"messages[{index}]: a part of type {shown(part.type)} is not supported; use "
                '{"type": "text", "text": ...}',
                param="messages",
            )
    return {"role": role, "content": "\n".join(part.text or "" for part in parts)}


def _chosen(body: ChatRequest, name: str) -> Any:
    """Return a field of this service, which may stand beside ``messages`` or in ``posfix``."""
    beside, inside = getattr(body, name), getattr(body.posfix, name, None)
    if beside is not None and inside is not None and beside != inside:
        raise InvalidRequestError(f"{name} is given twice, beside messages and in posfix; give it once", param=name)
    return inside if beside is None else beside


def _mitigation(given: str | MitigationInput | None) -> MitigationChoice | None:
    if given is None or isinstance(given, str):
        return None if given is None else MitigationChoice(given)
    return MitigationChoice(given.name, given.parameters)


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
