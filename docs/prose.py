"""Keeps numbers in prose equal to the records that they were read from.

A section of a hand-written page whose prose has measured numbers says which records it is about:
``<!-- read from: RECORD... (DIGEST) -->``. The digest is of the summaries of these records, so it changes with them.
A test fails for a section whose digest is old, and for a section with such numbers and no mark. After reading the
section again and correcting its numbers, ``python -m docs.prose PAGE...`` writes the digests. Numbers that no record
has, such as those of a paper, are marked ``<!-- read from: no record -->``.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.keep_record import RESULTS
from rag_posfix.evaluation.record import read_head

NO_RECORD = "no record"
MARK = re.compile(r"<!-- read from: (.+?)(?: \(([0-9a-f]{8})\))? -->")
HEADING = re.compile(r"^(?=#{1,4} )", re.MULTILINE)
UNREAD = re.compile(
    r"(<!-- (?!read from)[^>]*? -->\n).*?<!-- end of [^>]* -->|```.*?```|`[^`\n]*`|^\|.*?$|\]\([^)]*\)|arXiv [\d.]+",
    re.DOTALL | re.MULTILINE,
)
NUMBER = re.compile(r"(?<![\w./:=])[-+]?\d*\.\d+(?![\w/]|\.\d)")
VERSION = re.compile(r"\b(?:Python|torch|transformers|Apache|buildah|[Uu]ntil)[\s-]\d+\.\d+")


def digest(names: Sequence[str], results: Path = RESULTS) -> str:
    """Return eight hexadecimal digits of the summaries of records.

    Raises:
        EvaluationError: a record is missing.
    """
    heads = [read_head(results / f"{name}.json") for name in names]
    summaries = [head.get("summary", head) for head in heads]
    return hashlib.sha256(json.dumps(summaries, sort_keys=True).encode()).hexdigest()[:8]


def sections(page: str) -> Iterator[tuple[str, str]]:
    """Yield (heading, text) of the sections of a page, the text with its heading."""
    for text in HEADING.split(page):
        yield text.partition("\n")[0].lstrip("# "), text


def problems(page: str, results: Path = RESULTS) -> list[str]:
    """Return what is wrong with the numbers in the prose of a page."""
    found = []
    for heading, text in sections(UNREAD.sub("", page)):
        marks = MARK.findall(text)
        numbers = NUMBER.findall(MARK.sub("", VERSION.sub("", text)))
        if numbers and not marks:
            found.append(f"{heading!r} has {', '.join(numbers[:5])}, and does not say which record they are read from")
        for names, old in marks:
            if names != NO_RECORD and digest(names.split(), results) != old:
                found.append(f"{heading!r} was written for other values of {names}; read it again, then write digests")
    return found


def with_digests(page: str, results: Path = RESULTS) -> str:
    """Return a page with the digests that its records have now."""
    return MARK.sub(
        lambda found: (
            found[0]
            if found[1] == NO_RECORD
            else f"<!-- read from: {found[1]} ({digest(found[1].split(), results)}) -->"
        ),
        page,
    )


def main(paths: Sequence[str]) -> int:
    """Write the digests of pages; return the exit status."""
    if not paths:
        sys.stderr.write("usage: python -m docs.prose PAGE...\n")
        return 2
    for path in map(Path, paths):
        path.write_text(with_digests(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
