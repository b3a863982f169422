"""A second search, for questions that need two passages: with names that the first tells and the question describes.

"Which extension has the keeper of the key?": one passage says who keeps the key, another has the extension of this
person. The question leads to the first alone, and with its name to the second.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from langchain_core.documents import Document

from rag_posfix.assembly.documents import document_id
from rag_posfix.contracts.retrieval import SearchQuery
from rag_posfix.pipeline.language import content_words, language_of, stop_words
from rag_posfix.pipeline.support import shared_words
from rag_posfix.text import split_words, titled_text

MAX_LINKED = 2
"""Passages that a second search adds at most."""

SEARCHED = 10
"""Passages among which a second search looks for them, at least."""

MAX_NAMES = 8
"""Names in a second query: embedding models read the first few hundred tokens, and each name draws it away."""

_SHORTEST_WORD = 3
_UPPER = "[A-Z\u00c0-\u00d6\u00d8-\u00de\u0391-\u03a9\u0410-\u042f]"
_NAME = re.compile(
    rf"\b{_UPPER}[\w'\u2019-]*(?: (?:(?:of|de|la|von|van|the|&) ){{0,2}}(?:{_UPPER}[\w'\u2019-]*|\d+\b))*"
)
_SENTENCE_START = re.compile(r"(?:^|[.!?]\W*\s)\W*$|\n\W*$")
_DATE = re.compile(
    r"(?:mon|tues|wednes|thurs|fri|satur|sun)days?|january|february|march|april|may|june|july|august|september|october|"
    r"november|december|\d+",
)


@dataclass(frozen=True, slots=True)
class SecondStep:
    """The query of a second search, and what a passage must have that it finds.

    Attributes:
        query: The first query with the names.
        names: Words of each name that the best passage tells and the question lacks.
        missing: Content words of the question that the best passage lacks.
        best: The passage that tells the names.
    """

    query: SearchQuery
    names: tuple[frozenset[str], ...]
    missing: Set[str]
    best: Document

    def linked(self, documents: Sequence[Document]) -> list[Document]:
        """Return at most ``MAX_LINKED`` passages of other documents with a name and a missing word of the question."""
        source = self.best.metadata.get("source")
        found = []
        for document in documents:
            if document_id(document) == document_id(self.best) or (
                source and document.metadata.get("source") == source
            ):
                continue
            words = set(split_words(_text(document)))
            if any(name <= words for name in self.names) and shared_words(self.missing, words):
                found.append(document)
        return found[:MAX_LINKED]


def second_step(question: str, query: SearchQuery, best: Document) -> SecondStep | None:
    """Return the second search for a question; None if its best passage has all its words, or tells no other name.

    Args:
        query: What was searched for; names in it, those of earlier messages too, are no new ones.
    """
    words = set(split_words(_text(best)))
    asked = {word for word in content_words(question) if len(word) >= _SHORTEST_WORD}
    missing = asked - shared_words(asked, words)
    names = told_names(best.page_content, query.text) if missing else {}
    if not names:
        return None
    added = " ".join(names)
    weighted = query.weighted and ((f"{query.weighted[0][0]} {added}", query.weighted[0][1]), *query.weighted[1:])
    second = replace(query, text=f"{query.text} {added}", weighted=tuple(weighted))
    return SecondStep(second, tuple(names.values()), missing, best)


def with_linked(documents: Sequence[Document], linked: Sequence[Document], width: int) -> list[Document]:
    """Return at most ``width`` passages: the first of ``documents``, then the linked ones."""
    ids = {document_id(document) for document in linked}
    others = [document for document in documents if document_id(document) not in ids]
    return [*others[: max(1, width - len(linked))], *linked]


def told_names(text: str, known: str) -> dict[str, frozenset[str]]:
    """Return names in a text, at least half of whose words are not in ``known``, with their words.

    Names are capitalised words in a row. One word alone is none at the beginning of a sentence, and in German.
    """
    known_words, is_german = set(split_words(known)), language_of(text) == "de"
    names: dict[str, frozenset[str]] = {}
    for match in _NAME.finditer(text):
        parts = match.group().split()
        while parts and not set(split_words(parts[0])) - stop_words(text):
            del parts[0]
        words = frozenset(split_words(" ".join(parts)))
        alone = len(parts) < 2 and (
            is_german or _SENTENCE_START.search(text[max(0, match.start() - 9) : match.start()])
        )
        new = {word for word in words if word not in known_words and not _DATE.fullmatch(word)}
        if new and not alone and 2 * len(new) >= len(words):
            names.setdefault(" ".join(parts), words)
    return dict(list(names.items())[:MAX_NAMES])


def _text(document: Document) -> str:
    return titled_text(document.metadata.get("title"), document.page_content)
