"""Files that were found and not indexed, each with the reason. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

SkippedKind: TypeAlias = Literal["unsupported", "empty", "binary", "duplicate", "unreadable"]
"""Why a file gave no document of its own: type, no text, no text file, content of another file, or an error."""


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file that gave no document of its own.

    Attributes:
        file: Its path as it was found.
        kind: The category of the reason.
        reason: The reason, on one line.
    """

    file: str
    kind: SkippedKind
    reason: str
