"""The query of a follow-up question: what the retriever searches for, from the question and the turns before it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, get_args

from rag_posfix.assembly.tokenization import tokenize_prompt
from rag_posfix.contracts.generator import ChatMessage, Generator
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, PromptTemplate, Sampling
from rag_posfix.contracts.retrieval import SearchQuery
from rag_posfix.errors import ConfigError, GenerationCancelled, GenerationError, OverloadedError
from rag_posfix.pipeline.language import same_language
from rag_posfix.text import clean_text

_log = logging.getLogger(__name__)

QueryChoice = Literal["last", "history", "rewrite"]

DECAY = 0.7
"""Weight of a message relative to the next one of the user. Chosen on benchmarks/conversations.jsonl."""

MESSAGES = 3
"""Messages of the user in a query, the question included."""

MAX_CHARACTERS = 500
"""Characters of an earlier message in a query: embedding models read the first few hundred tokens of a text."""

_INSTRUCTION = (
    "Rewrite the last question so that it can be understood without the conversation. Keep its language. Write the "
    "question alone, on one line."
)
_REWRITE_TOKENS = 64
_MARKS = ("?", "\uff1f", "\u061f")
"""Question marks at the end of a sentence; small models answer the question instead of rewriting it."""
_REWRITE_MESSAGES = 6


def checked_query(choice: str) -> QueryChoice:
    """Return the name of a kind of query, or raise ConfigError."""
    if choice not in get_args(QueryChoice):
        raise ConfigError(f"query={choice!r} must be one of {', '.join(get_args(QueryChoice))}")
    return choice  # type: ignore[return-value]


def search_query(
    choice: QueryChoice, question: str, history: Sequence[ChatMessage], writer: Generator, salt: str = ""
) -> SearchQuery:
    """Return the query of a question.

    Args:
        choice: ``last`` is the question; ``history`` joins the last messages of the user with falling weight;
            ``rewrite`` has ``writer`` write one question, and is ``history`` if it does not.
        history: Earlier messages; without one of the user the query is the question.
        salt: As in ``GenerationRequest``.
    """
    question = clean_text(question)
    query = SearchQuery(question) if choice == "last" else history_query(question, history)
    if choice == "rewrite" and query.weighted:
        written = _rewrite(question, history, writer, salt)
        query = query if written is None else SearchQuery(written)
    _log.debug("query (%s): %s", choice, query.text)
    return query


def text_request(writer: Generator, text: str, max_tokens: int, salt: str = "") -> GenerationRequest:
    """Return the request that asks a generator a text without passages."""
    prompt = tokenize_prompt(writer.encoder, PromptTemplate(), text, has_passages=False)
    return GenerationRequest(prompt.with_passages(()), MitigationChoice("none"), Sampling(max_tokens=max_tokens), salt)


def _contents(history: Sequence[ChatMessage], role: str) -> list[str]:
    return [clean_text(str(message.get("content"))) for message in history if message.get("role") == role]


def history_query(question: str, history: Sequence[ChatMessage]) -> SearchQuery:
    """Return the question and the user's last messages before it with falling weight; without one, the question."""
    question = clean_text(question)
    earlier = [content for content in _contents(history, "user") if content.strip()]
    if not earlier:
        return SearchQuery(question)
    messages = [message[:MAX_CHARACTERS] for message in earlier[1 - MESSAGES :]]
    newest_first = [question, *reversed(messages)]
    weighted = tuple((text, DECAY**age) for age, text in enumerate(newest_first))
    return SearchQuery("\n".join((*messages, question)), weighted)


def _rewrite(question: str, history: Sequence[ChatMessage], writer: Generator, salt: str) -> str | None:
    """Return a question that stands alone, or None if the model writes none."""
    spoken = [message for message in history if message.get("role") != "system"][-_REWRITE_MESSAGES:]
    lines = [f"{message.get('role')}: {str(message.get('content'))[:MAX_CHARACTERS]}" for message in spoken]
    text = "\n".join((_INSTRUCTION, "", *lines, "", f"Last question: {question}"))
    request = text_request(writer, text, _REWRITE_TOKENS, salt)
    if len(request.layout.token_ids) + _REWRITE_TOKENS > writer.context_window:
        return None
    try:
        generation = writer.generate(request)
    except GenerationCancelled:
        raise
    except (GenerationError, OverloadedError) as error:
        _log.warning("the query of a follow-up was not rewritten (%s); the history is used", type(error).__name__)
        return None
    written = clean_text(generation.text).strip()
    context = " ".join((*(_contents(history, "user")), question))
    is_line = len(written.splitlines()) == 1 and generation.finish_reason == "stop"
    is_question = is_line and (written.endswith(_MARKS) or not question.rstrip().endswith(_MARKS))
    return written if is_question and same_language(written, context) else None
