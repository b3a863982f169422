"""What was answered before, so that a sweep can be interrupted and extended.

One JSON line per answer, appended as it is known. The key of a line says all that the answer depends on: weights,
method, prompt template, question, passages, their relevance, tokens. It does not say which version of this library
wrote the line; that stands beside it. After a change to a method's code, start afresh.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from rag_posfix.assembly.documents import checked_document
from rag_posfix.assembly.prompt import PromptTemplate
from rag_posfix.evaluation.answers.answering import Answer, Asked
from rag_posfix.evaluation.journal import LineJournal
from rag_posfix.generation.engine import Engine
from rag_posfix.text import content_hash

__all__ = ["Journal", "answer_key"]

KEY_VERSION = 1
_FIELDS = {field.name: str if field.name == "answer" else float for field in fields(Answer)}


class Journal(LineJournal[Answer]):
    """Answers by key, in memory and, with a path, in a file that only grows (see ``LineJournal``).

    Args:
        path: The file; it and its folder are made with the first answer. None keeps answers in memory only.
        fresh: Start without the answers of earlier runs. They stay in the file.

    Raises:
        EvaluationError: the file exists and cannot be read.
    """

    def __init__(self, path: Path | None = None, *, fresh: bool = False) -> None:
        super().__init__("answer", _answer, path, fresh=fresh)


def _answer(row: Any) -> Answer | None:
    whole = set(row) == set(_FIELDS) and all(isinstance(row[name], kind) for name, kind in _FIELDS.items())
    return Answer(**row) if whole else None


def answer_key(engine: Engine, asked: Asked, max_new_tokens: int, *, any_order: bool) -> str:
    """Return a digest of all that an answer depends on.

    Args:
        engine: The model.
        asked: The question, its passages and the mitigation.
        max_new_tokens: Tokens of the answer.
        any_order: Give the same key to every order of the passages.
    """
    passages: Iterable[list[Any]] = (
        [read.key, read.relevance] for read in (checked_document(document) for document in asked.documents)
    )
    parts = {
        "version": KEY_VERSION,
        "model": engine.fingerprint,
        "device": engine.loaded.device.type,
        "method": engine.describe(asked.choice).fingerprint,
        "template": PromptTemplate().fingerprint(),
        "question": asked.example.question,
        "answers": asked.example.answers,
        "passages": sorted(passages, key=str) if any_order else list(passages),
        "any_order": any_order,
        "max_new_tokens": max_new_tokens,
    }
    return content_hash(json.dumps(parts, sort_keys=True))
