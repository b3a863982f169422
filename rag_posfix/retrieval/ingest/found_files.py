"""Finds the files of paths, in an order that does not depend on the file system. Reads no file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.ingest.json_lines import JSON_LINES_SUFFIXES
from rag_posfix.retrieval.ingest.readers import TEXT_SUFFIXES
from rag_posfix.retrieval.ingest.skipped import SkippedFile
from rag_posfix.retrieval.ingest.tables import TABLE_SUFFIXES

SUFFIXES = tuple(sorted((*JSON_LINES_SUFFIXES, *TABLE_SUFFIXES, *TEXT_SUFFIXES)))
"""Suffixes of files that can be read, in upper or lower case."""

_BEIR_CORPORA = ("corpus.jsonl", "corpus.jsonl.gz")
_BEIR_QUESTIONS = ("queries.jsonl", "queries.jsonl.gz", "qrels")


def files_of(path: Path, skip: Callable[[SkippedFile], None], *, strict: bool) -> Iterator[Path]:
    """Yield the files of a path that can be read; hidden files are left out silently.

    Args:
        path: A file or a folder. In a folder in BEIR's layout only the corpus is found.
        skip: Called with each file of another type and each folder that cannot be opened.
        strict: Raise for a file of another type that is given itself, and for a folder that cannot be opened.

    Raises:
        RetrievalError: the path is missing or neither a file nor a folder, or as ``strict`` says.
    """
    if path.is_dir():
        yield from _walk(path, skip, strict)
    elif not path.exists():
        raise RetrievalError(f"no such file or folder: {str(path)!r}")
    elif not path.is_file():
        raise RetrievalError(
            f"{str(path)!r} is neither a file nor a folder; give files ending in {', '.join(SUFFIXES)}"
        )
    elif path.name.lower().endswith(SUFFIXES):
        yield path
    elif strict:
        raise RetrievalError(f"cannot read {str(path)!r}: {_unsupported(path)}")
    else:
        skip(SkippedFile(str(path), "unsupported", _unsupported(path)))


def _unsupported(path: Path) -> str:
    return f"suffix {path.suffix!r} is not one of {', '.join(SUFFIXES)}"


def _walk(folder: Path, skip: Callable[[SkippedFile], None], strict: bool) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        if strict:
            raise RetrievalError(f"cannot read {str(error.filename)!r}: {error.strerror}") from error
        skip(SkippedFile(str(error.filename), "unreadable", str(error.strerror or error)))

    files = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        corpus = next((name for name in _BEIR_CORPORA if name in names), None)
        if corpus is not None and any(name in names or name in folders for name in _BEIR_QUESTIONS):
            folders[:], names = [], [corpus]  # leave out queries and judgements
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    for file in sorted(files, key=lambda file: file.relative_to(folder).parts):
        if not file.name.lower().endswith(SUFFIXES):
            skip(SkippedFile(str(file), "unsupported", _unsupported(file)))
        elif file.is_file():
            yield file
        else:
            skip(SkippedFile(str(file), "unreadable", "not a regular file, or a link to a file that is missing"))
