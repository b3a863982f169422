"""What was answered before, so that a sweep can be interrupted and extended.

One JSON line per answer, appended as it is known. The key of a line says all that the answer depends on: weights,
method, prompt template, question, passages, their relevance, tokens. It does not say which version of this library
wrote the line; that stands beside it. After a change to a method's code, start afresh.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import orjson

from rag_posfix.assembly.documents import read_document
from rag_posfix.assembly.prompt import PromptTemplate
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.answers import Answer, Asked
from rag_posfix.evaluation.record import source_commit
from rag_posfix.generation.engine import Engine
from rag_posfix.text import content_hash

__all__ = ["Journal", "answer_key"]

KEY_VERSION = 1
_FIELDS = {field.name: str if field.name == "answer" else float for field in fields(Answer)}


class Journal:
    """Answers by key, in memory and, with a path, in a file that only grows.

    Lines that cannot be read, such as one torn by an interrupt, count as absent. Of two lines with one key, the last
    counts.

    Args:
        path: The file; it and its folder are made with the first answer. None keeps answers in memory only.
        fresh: Start without the answers of earlier runs. They stay in the file.

    Raises:
        EvaluationError: the file exists and cannot be read.
    """

    def __init__(self, path: Path | None = None, *, fresh: bool = False) -> None:
        self._path = path
        self._answers: dict[str, Answer] = {}
        self._earlier: dict[str, str] = {}  # key -> who wrote it, for lines of earlier runs
        self._used: set[str] = set()
        self._torn = False
        self._writer: dict[str, str | None] | None = None
        if path is not None and path.exists():
            self._load(path, fresh)

    @property
    def sources(self) -> list[str]:
        """Version and commit of the library that wrote the answers that were taken from earlier runs, each once."""
        return sorted(self._used)

    def get(self, key: str) -> Answer | None:
        """Return the answer with this key, or None."""
        if key in self._earlier:
            self._used.add(self._earlier[key])
        return self._answers.get(key)

    def add(self, key: str, answer: Answer) -> None:
        """Keep an answer.

        Raises:
            EvaluationError: the file cannot be written.
        """
        self._answers[key] = answer
        self._earlier.pop(key, None)
        if self._path is None:
            return
        if self._writer is None:
            self._writer = _writer()
        line = orjson.dumps(
            {
                "key": key,
                "answer": asdict(answer),
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                **self._writer,
            }
        )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as opened:
                opened.write((b"\n" if self._torn else b"") + line + b"\n")
        except OSError as error:
            raise EvaluationError(
                f"cannot write the journal {self._path}: {error.strerror}; choose another --out"
            ) from error
        self._torn = False

    def _load(self, path: Path, fresh: bool) -> None:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise EvaluationError(
                f"cannot read the journal {path}: {error.strerror}; remove it or choose another --out"
            ) from error
        self._torn = bool(data) and not data.endswith(b"\n")
        for line in [] if fresh else data.splitlines():
            read = _read(line)
            if read is not None:
                key, answer, source = read
                self._answers[key], self._earlier[key] = answer, source


def _read(line: bytes) -> tuple[str, Answer, str] | None:
    try:
        found = orjson.loads(line)
        key, row = found["key"], found["answer"]
        whole = set(row) == set(_FIELDS) and all(isinstance(row[name], kind) for name, kind in _FIELDS.items())
        if not whole or not isinstance(key, str):
            return None
        return key, Answer(**row), f"{found.get('version')} {found.get('commit')}"
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None


def _writer() -> dict[str, str | None]:
    try:
        own = version("rag-posfix")
    except PackageNotFoundError:
        own = "not installed"
    return {"version": own, "commit": source_commit()}


def answer_key(engine: Engine, asked: Asked, max_new_tokens: int, *, any_order: bool) -> str:
    """Return a digest of all that an answer depends on.

    Args:
        engine: The model.
        asked: The question, its passages and the mitigation.
        max_new_tokens: Tokens of the answer.
        any_order: Give the same key to every order of the passages.
    """
    passages: Iterable[list[Any]] = (
        [read.key, read.relevance] for read in (read_document(document) for document in asked.documents)
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
