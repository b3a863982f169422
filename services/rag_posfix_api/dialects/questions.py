"""Builds the question of a chat request, from what the parsers of all dialects find in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from langchain_core.documents import Document

from rag_posfix.contracts.answer import Question
from rag_posfix.contracts.generator import ChatMessage
from rag_posfix.contracts.request import Sampling
from rag_posfix.contracts.token_scores import MOST_ALTERNATIVES
from rag_posfix_api.dialects.conversation import check_stops, split_question
from rag_posfix_api.dialects.posfix import PosfixInput, chosen_methods
from rag_posfix_api.http.errors import InvalidRequestError

__all__ = ["build_question", "check_top_logprobs", "sampling_with", "stop_strings"]


def build_question(
    messages: Sequence[ChatMessage],
    sampling: Sampling,
    documents: Sequence[Document] | None,
    posfix: PosfixInput | None,
    *,
    role: str,
    system: str | None = None,
    seed: int | None = None,
    use_cache: bool = True,
    param: str = "messages",
) -> Question:
    """Return the question that the last message asks.

    Args:
        messages: The conversation.
        sampling: Sampling parameters.
        documents: The passages; None retrieves them.
        posfix: What this service adds to the dialect.
        role: The role of the last message as the request has it, for the error.
        system: Instructions that stand before the conversation.
        seed: Seed of the order ``random``.
        use_cache: Whether the answer cache may be used.
        param: The field of the messages in this dialect.

    Raises:
        InvalidRequestError: the last message is not the user's or is empty, or fields of ``posfix`` contradict each
            other.
    """
    history, text = split_question(messages, role, param)
    if system is not None:
        history.insert(0, {"role": "system", "content": system})
    return Question(
        text=text,
        documents=documents,
        history=history,
        seed=seed or 0,
        sampling=sampling,
        use_cache=use_cache,
        **chosen_methods(posfix or PosfixInput()),
    )


def sampling_with(defaults: Sampling, **given: Any) -> Sampling:
    """Return sampling parameters with those that a request gives.

    Args:
        defaults: Default sampling parameters.
        given: Parameters by name; None takes the default.

    Raises:
        ConfigError: a parameter is out of range.
    """
    known: Mapping[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(defaults, **known)


def stop_strings(given: str | Sequence[str] | None, param: str) -> tuple[str, ...] | None:
    """Return the stop strings of a request as a tuple, checked; None without any.

    Args:
        given: A string, or several.
        param: Their field in this dialect.

    Raises:
        InvalidRequestError: there are too many, or one is too long.
    """
    if given is None:
        return None
    stops = (given,) if isinstance(given, str) else tuple(given)
    check_stops(stops, param)
    return stops


def check_top_logprobs(count: int | None, param: str) -> None:
    """Raise for a number of alternatives that is out of range.

    Args:
        count: The number, or None.
        param: Its field in this dialect.

    Raises:
        InvalidRequestError: it is not between 0 and ``MOST_ALTERNATIVES``.
    """
    if count is not None and not 0 <= count <= MOST_ALTERNATIVES:
        raise InvalidRequestError(f"{param}={count} must be between 0 and {MOST_ALTERNATIVES}", param=param)
