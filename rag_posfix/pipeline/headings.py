"""Answers that are the heading of a passage: a small model copies the path of headings that the prompt shows.

"Supplier contract > Delivery" says where an answer stands, and not what it is. "Cancel the booking." repeats the
heading "How do I cancel a booking?". Such a question is read again without headings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from rag_posfix.contracts.generator import sum_usage
from rag_posfix.contracts.request import Chunk, Generation
from rag_posfix.pipeline.citations import find_evidence, passage_words
from rag_posfix.pipeline.support import shared_words
from rag_posfix.text import single_spaced

_AROUND = " \t\n\"'`*#_.:?!\u201c\u201d\u00ab\u00bb"
"""What stands around a heading that is copied."""

MAX_CHARACTERS = 1000
"""Of a title: no answer copies a longer one."""


_OPEN = re.compile(
    r"^\W*(?:how|why|when|where|who|what|wie|warum|wieso|wann|wo|wer|was|comment|pourquoi|quand|o\u00f9|qui|que|"
    r"c\u00f3mo|por qu\u00e9|cu\u00e1ndo|d\u00f3nde|qui\u00e9n|qu\u00e9)\b",
    re.IGNORECASE,
)
_PERSONS = frozenset(
    {
        "i", "me", "my", "you", "your", "we", "us", "our", "ich", "mich", "mein", "du", "dein", "sie", "ihr", "wir",
        "uns", "unser", "je", "moi", "mon", "ma", "mes", "vous", "votre", "vos", "nous", "notre", "yo", "mi", "mis",
        "usted", "tu", "tus", "su", "sus", "nosotros", "nuestro",
    }
)  # fmt: skip
"""An answer may turn "my account" into "your account"."""
_CHOICE = re.compile(r"\b(?:or|oder|ou|o|between|zwischen|entre)\b", re.IGNORECASE)


class CopiedHeading:
    """Whether an answer is a heading of the passages: two of a path, or one that only repeats the question.

    A heading that answers ("Which section is it?", "Torvane Lighthouse") adds words to the question, and is no path.

    Args:
        titles: The titles of the passages: paths of headings, with " > " between them.
        question: Its words add nothing.
        rewords: Whether an answer that adds no word to an open question is a heading in other words.
    """

    def __init__(self, titles: Sequence[object], question: str, rewords: bool = False) -> None:
        read = [title for title in titles if isinstance(title, str) and len(title) <= MAX_CHARACTERS]
        paths = [[_folded(part) for part in re.split(r"\s>\s", title)] for title in read]
        self._paths = {f"{first} > {second}" for path in paths for first, second in pairwise(path)}
        self._headings = {part for path in paths for part in path if " " in part and not find_evidence(part, question)}
        self._question = question
        self._rewords = rewords

    def is_copied(self, answer: str) -> bool:
        """Return whether an answer begins with a path, or only repeats the question."""
        text = _folded(answer)
        return (
            text in self._headings or text.startswith(tuple(self._paths)) or (" " in text and self._restates(answer))
        )

    def may_be_copied(self, beginning: str) -> bool:
        """Return whether an answer that begins so may be one: it begins a heading, or adds no word yet."""
        text = _folded(beginning)
        complete = beginning.rpartition(" ")[0]  # the last word may go on
        is_beginning = any(entry.startswith(text) for entry in self._paths | self._headings)
        return is_beginning or self.is_copied(beginning) or self._restates(complete)

    def _restates(self, text: str) -> bool:
        """Return whether a text adds no word to an open question, but other endings."""
        return self._rewords and restates(text, self._question)


def restates(text: str, question: str) -> bool:
    """Return whether a text adds no word to an open question, but other endings."""
    if not _OPEN.match(question) or _CHOICE.search(question):
        return False
    added = find_evidence(text, question) - _PERSONS
    return added == shared_words(added, passage_words(question))


def read_again(
    chunks: Iterator[Chunk], headings: CopiedHeading, again: Callable[[], Iterator[Chunk]]
) -> Generator[Chunk, None, None]:
    """Yield the chunks of an answer, or those of ``again`` in place of a copied heading.

    Chunks are held back while the answer may be a heading.
    """
    held: list[Chunk] = []
    text = ""
    for chunk in chunks:
        held.append(chunk)
        text += chunk.text
        if chunk.generation is not None and headings.is_copied(chunk.generation.text):
            for piece in again():
                second = piece.generation
                yield piece if second is None else replace(piece, generation=both_readings(chunk.generation, second))
            return
        if not headings.may_be_copied(text):
            break
    yield from held
    yield from chunks


def both_readings(first: Generation, second: Generation) -> Generation:
    """Return the second generation with the tokens and the time of both."""
    names = {*first.timings, *second.timings}
    timings = {name: first.timings.get(name, 0.0) + second.timings.get(name, 0.0) for name in names}
    return replace(second, usage=sum_usage((first.usage, second.usage)), timings=timings)


def _folded(text: str) -> str:
    return single_spaced(text).casefold().strip(_AROUND)
