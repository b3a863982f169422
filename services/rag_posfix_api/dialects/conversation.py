"""What the parsers of all chat dialects check: the last message, stop strings, and fields that are not supported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rag_posfix.contracts.generator import ChatMessage
from rag_posfix.parameters import shown
from rag_posfix_api.http.errors import InvalidRequestError, UnsupportedFeatureError

__all__ = ["MAX_STOPS", "MAX_STOP_CHARACTERS", "check_stops", "refuse_fields", "split_question"]

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256


def split_question(
    messages: Sequence[ChatMessage], role: str, param: str = "messages"
) -> tuple[list[ChatMessage], str]:
    """Return the history and the question of a conversation: the last message, which must be the user's.

    Args:
        messages: The messages.
        role: The role of the last message as the request has it, for the error.
        param: The field of the messages in this dialect.

    Raises:
        InvalidRequestError: the last message is another's, or is empty.
    """
    *history, asked = messages
    if asked["role"] != "user":
        raise InvalidRequestError(
            f"the last message has the role {shown(role)}; it must be 'user': the question", param=param
        )
    if not asked["content"].strip():
        raise InvalidRequestError("the last message is empty; it must hold the question", param=param)
    return history, asked["content"]


def refuse_fields(extra: Mapping[str, Any] | None, harmless: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise for a field that would change the answer and is not supported.

    Args:
        extra: The fields of the request that its schema does not have.
        harmless: Unsupported fields, with the values that ask for what happens anyway.

    Raises:
        UnsupportedFeatureError: a field has another value.
    """
    for name, allowed in harmless.items():
        if extra and name in extra and extra[name] not in allowed:
            values = ", ".join(repr(value) for value in allowed if value is not None) or "null"
            raise UnsupportedFeatureError(
                f"{name} is not supported here; leave it out (allowed: {values})", param=name
            )


def check_stops(stops: Sequence[str], param: str) -> None:
    """Raise for too many stop strings, or for one that is too long.

    Args:
        stops: The stop strings.
        param: Their field in this dialect.

    Raises:
        InvalidRequestError: there are more than ``MAX_STOPS``, or one has more than ``MAX_STOP_CHARACTERS``.
    """
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(f"{param} has {len(stops)} entries, at most {MAX_STOPS} are allowed", param=param)
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise InvalidRequestError(
            f"{param} holds a string of {longest} characters, at most {MAX_STOP_CHARACTERS} are allowed", param=param
        )
