"""Reads what a chain gives to ``PosfixRAG``: text, messages, a dict of a langchain chain, or a ``Question``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.prompt_values import PromptValue

from rag_posfix.contracts.answer import Question
from rag_posfix.errors import ConfigError
from rag_posfix.integrations.langchain.content_blocks import read_conversation

RAGInput: TypeAlias = str | dict[str, Any] | Question | PromptValue | BaseMessage | Sequence[BaseMessage]
"""The question; or ``{"question", "documents", "history", ...}``, the fields of ``Question``; or messages."""

_FIELDS = ("documents", "history", "mitigation", "order", "seed", "k", "sampling", "tenant", "use_cache")
_OTHER_NAMES = {"input": "question", "context": "documents", "chat_history": "history"}
_ROLES = {"human": "user", "ai": "assistant", "system": "system"}
_HOW = (
    'give the question as text, as {"question": text, "documents": [...]}, as messages, or as a Question; a retriever '
    'is joined by {"context": retriever, "question": RunnablePassthrough()} | rag, or PosfixRAG(retriever=retriever)'
)


def question_fields(asked: RAGInput) -> dict[str, Any]:
    """Return the given fields of a question: ``text`` and those of ``Question`` that are there.

    Args:
        asked: The input. A dict may use the names of langchain's chains: ``input`` for the question, ``context`` for
            the documents, ``chat_history`` for the history. Documents may be ``Document`` objects or texts; one text
            is one passage.

    Raises:
        ConfigError: there is no question, or a field is unknown, given twice, or of a wrong type.
    """
    if isinstance(asked, str):
        return {"text": asked}
    if isinstance(asked, Question):
        return {"text": asked.text, **{name: getattr(asked, name) for name in _FIELDS}}
    messages = _messages(asked)
    if messages is not None:
        conversation = read_conversation(messages)
        found = {"documents": list(conversation.documents)} if conversation.documents else {}
        return {"text": conversation.question, "history": list(conversation.history), **found}
    if not isinstance(asked, dict):
        raise ConfigError(f"PosfixRAG was asked with {_shown(asked)}; {_HOW}")
    return _from_dict(_renamed(asked))


def joined_input(chunks: Sequence[RAGInput]) -> RAGInput:
    """Return the sum of the chunks of a streamed input.

    Raises:
        ConfigError: there is none.
    """
    if not chunks:
        raise ConfigError("PosfixRAG was asked nothing; give a question")
    whole: Any = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    asked: RAGInput = whole
    return asked


def _from_dict(asked: Mapping[str, Any]) -> dict[str, Any]:
    question = asked.get("question")
    if isinstance(question, BaseMessage):
        question = question.text
    if not isinstance(question, str):
        raise ConfigError(f"PosfixRAG was asked with {_shown(asked)}; {_HOW}")
    unknown = sorted(set(asked) - {"question", *_FIELDS})
    if unknown:
        others = ", ".join(f"{other} for {name}" for other, name in _OTHER_NAMES.items())
        raise ConfigError(
            f"PosfixRAG was asked with {unknown[0]!r}; a question may hold question, {', '.join(_FIELDS)} ({others})"
        )
    fields = {name: asked[name] for name in _FIELDS if name in asked}
    if fields.get("documents") is not None:
        fields["documents"] = _documents(fields["documents"])
    if "history" in fields:
        fields["history"] = [_message(message) for message in fields["history"] or ()]
    return {"text": question, **fields}


def _renamed(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict under our names; the names of langchain's chains are other names of the same fields."""
    renamed: dict[str, Any] = {}
    for name, value in asked.items():
        own = _OTHER_NAMES.get(name, name)
        if own in renamed:
            raise ConfigError(f"PosfixRAG was asked with {own!r} under two names; leave out {name!r} or the other")
        renamed[own] = value
    return renamed


def _documents(given: Any) -> list[Any]:
    """Return documents; a text is a document of its own. Assembly says which one is neither."""
    if isinstance(given, str):
        given = [given] if given.strip() else []
    if not isinstance(given, Sequence):
        raise ConfigError(f"documents is {type(given).__name__}; give a list of Documents or texts")
    return [Document(page_content=one) if isinstance(one, str) else one for one in given]


def _messages(asked: object) -> Sequence[BaseMessage] | None:
    """Return the messages if ``asked`` is a message, a list of them or a formatted chat prompt."""
    if isinstance(asked, PromptValue):
        return asked.to_messages()
    if isinstance(asked, BaseMessage):
        return [asked]
    if isinstance(asked, list | tuple) and asked and all(isinstance(one, BaseMessage) for one in asked):
        return asked
    return None


def _message(message: Any) -> Any:
    """Return a langchain message as ``{"role", "content"}``; any other object unchanged."""
    if not isinstance(message, BaseMessage):
        return message
    return {"role": _ROLES.get(message.type, message.type), "content": message.text}


def _shown(asked: object) -> str:
    if isinstance(asked, dict):
        return f"a dict of {', '.join(map(repr, asked)) or 'nothing'} without a question"
    if isinstance(asked, list) and asked and all(isinstance(one, Document) for one in asked):
        return f"{len(asked)} documents and no question"
    return type(asked).__name__
