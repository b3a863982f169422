"""Text files line by line, compressed or not, with errors that name the location."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import ValidationError

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.whole_file import write_whole


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (location, line) of every line with visible characters; a location reads ``file:number``.

    Args:
        path: UTF-8 text, compressed where the name ends in ``.gz``; a byte order mark is passed over.

    Raises:
        EvaluationError: the file is missing, or cannot be read as UTF-8 text.
    """
    if not path.is_file():
        raise EvaluationError(f"{path} is not a file; give the path of a file, .gz or plain")
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="\n") as opened:
            for number, line in enumerate(opened, start=1):
                if line.strip():
                    yield f"{path}:{number}", line.rstrip("\r\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise EvaluationError(
            f"{path} cannot be read ({type(error).__name__}: {error}); it must be UTF-8 text, compressed where its "
            "name ends in .gz"
        ) from error


def malformed(error: Exception) -> str:
    """Return what is wrong with a row of a file, in the words of a user, from what reading it raised."""
    if isinstance(error, KeyError):
        return f"no {error.args[0]!r}"
    if isinstance(error, ValueError) and not isinstance(error, ValidationError):
        return str(error)
    if isinstance(error, StopIteration):
        return "no passage is marked as gold"
    return "a part has the wrong type"  # the texts of these errors speak of classes and attributes


def checked_id(value: object, location: str, what: str) -> str:
    """Return an id that TREC files can hold: text without white space.

    Args:
        value: What stands where the id is expected; integers become text.

    Raises:
        EvaluationError: it is missing, empty, of another type, or holds white space.
    """
    name = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(name, str) or not name:
        raise EvaluationError(f"{location}: {what} without an id (found {value!r}); give each an id, text or integer")
    if len(name.split()) != 1 or name.split()[0] != name or "\0" in name:
        raise EvaluationError(f"{location}: {what} id {name!r} holds white space, which TREC files cannot; rename it")
    return name


def write_text(path: Path, pieces: Iterable[str | bytes]) -> None:
    """Write a file whole or not at all, replacing one that is there.

    Args:
        path: The file; its folder is made.
        pieces: Its content; text is encoded as UTF-8.

    Raises:
        EvaluationError: it cannot be written.
    """
    try:
        write_whole(path, (piece.encode() if isinstance(piece, str) else piece for piece in pieces))
    except OSError as error:
        raise EvaluationError(f"cannot write {path}: {error.strerror or error}; choose another --out") from error
