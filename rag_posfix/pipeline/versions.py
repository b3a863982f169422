"""Dates and versions of documents; of two versions of one text the newer is read, and the older is named."""

from __future__ import annotations

import re
from collections.abc import Sequence

from langchain_core.documents import Document

from rag_posfix.assembly.documents import document_id
from rag_posfix.contracts.answer import warn
from rag_posfix.pipeline.language import content_words, is_broad
from rag_posfix.pipeline.run import RequestContext
from rag_posfix.pipeline.support import passage_name
from rag_posfix.text import single_spaced, split_words

SAME_WORDS = 0.5
"""Share of the words of two passages, numbers aside, that versions of one text have in common at least."""

MIN_WORDS = 4
"""Words without which two passages are too short to be versions of one text."""

_FIELDS = ("date", "updated", "modified", "last_modified", "published", "created", "year", "version")
_DATE = re.compile(r"(?<!\d)((?:19|20)\d\d)(?:[-_./]?(0[1-9]|1[0-2])(?:[-_./]?(0[1-9]|[12]\d|3[01]))?)?(?!\d)")
_MONTHS = {
    month: f"{number:02}"
    for number, months in enumerate(
        (
            "jan janv ene", "feb f\u00e9v febr", "mar m\u00e4r mars", "apr avr abr", "may mai mayo", "jun juin",
            "jul juil", "aug ao\u00fbt ago", "sep sept", "oct okt", "nov", "dec dez d\u00e9c dic",
        ),
        start=1,
    )
    for month in months.split()
}  # fmt: skip
_MONTH = rf"(?:{'|'.join(sorted(_MONTHS, key=len, reverse=True))})"
_WRITTEN_DATE = re.compile(
    rf"(?:(?P<day>[0-3]?\d)(?:\.|st|nd|rd|th)? (?:of |de )?)?\b(?P<month>{_MONTH})[^\W\d]*\.? (?:(?P<day2>[0-3]?\d)"
    r"(?:st|nd|rd|th)?,? )?(?:de )?(?P<year>(?:19|20)\d\d)(?!\d)",
    re.IGNORECASE,
)
_SAYS_DATE = re.compile(
    r"(?:valid|effective|in force|applies|applicable|version|revision|revised|updated|edition|as of|status|dated|"
    r"issued|stand|g\u00fcltig|fassung|ausgabe|aktualisiert|vom|en vigueur|mise? \u00e0 jour|vigente|actualizado)\b"
    r"[^.!?\n\d]{0,30}$",
    re.IGNORECASE,
)
_SEARCHED_CHARACTERS, _NAME_CHARACTERS = 4000, 1000
_VERSION = re.compile(
    r"(?:\bv|(?<=[\s_.-])v|\b(?:version|rev|revision|fassung|ausgabe|edition))[ ._-]*(\d{1,3}(?:\.\d{1,3})*)\b",
    re.IGNORECASE,
)
_SERIES = re.compile(
    r"(?<![^\W\d_])(?:invoice|receipt|bill|order|payslip|statement|minutes|meeting|standup|protocol|journal|diary|log|note|"
    r"report|newsletter|bulletin|letter|mail|ticket|incident|rechnung|quittung|bestellung|protokoll|sitzung|tagebuch|"
    r"bericht|notiz|brief|facture|compte.rendu|rapport|factura|acta|informe|daily|weekly|monthly|quarter(?:ly)?|q[1-4])"
    r"(?:s|e|en)?(?![^\W\d_])",
    re.IGNORECASE,
)
"""In a title or file name: a document of a series, each of which stays valid."""
_ASKS_FOR_OLD = re.compile(
    r"(?:19|20)\d\d|\b(?:jan(?:uar[yi]?|vier)|febr?(?:uar[yi]?)|f\u00e9vrier|march|m\u00e4rz|april|avril|in ma[iy]|"
    r"june|juni|juin|july|juli|juillet|august|ao\u00fbt|september|septembre|o[ck]tober|octobre|november|novembre|de[cz]ember|"
    r"d\u00e9cembre|old|older|oldest|previous(?:ly)?|earlier|former(?:ly)?|before|until|chang\w*|differ\w*|"
    r"used to|history|versions?|alte[nrs]?|\u00e4lter\w*|fr\u00fcher\w*|vorher\w*|bisher\w*|ge\u00e4ndert|"
    r"\u00e4nder\w*|unterschied\w*|ancien\w*|avant|anterior\w*|antes|cambi\w*)\b",
    re.IGNORECASE,
)


def date_of(document: Document) -> str:
    """Return the date of a document, YYYY, YYYY-MM or YYYY-MM-DD; "" if unknown.

    The first of: its metadata, its title, its file name, and a date of its text that is said to be that of the text
    ("valid from 1 March 2023", "Stand: 2023-03").
    """
    metadata = document.metadata
    for value in (*(metadata.get(name) for name in _FIELDS), metadata.get("title"), metadata.get("source")):
        if value is not None and (found := _date_in(str(value)[:_NAME_CHARACTERS])):
            return found
    text = single_spaced(document.page_content[:_SEARCHED_CHARACTERS])
    for pattern in (_WRITTEN_DATE, _DATE):
        for match in pattern.finditer(text):
            if _SAYS_DATE.search(text[: match.start()][-60:]):
                return _date_in(match.group())
    return ""


def older_versions(documents: Sequence[Document], question: str) -> dict[int, int]:
    """Return the indices of passages that are older versions of another passage, each with that of the newest one.

    Versions are passages of different files with another date, or number of a version, and most words in common. None
    is older for a broad question, or one that names a year or month or asks for an earlier state. A passage is none if
    its name is that of a series (invoices, minutes), or if it has a word of the question that the newer one lacks:
    contracts with two people are two texts.
    """
    if _ASKS_FOR_OLD.search(question) or is_broad(question):
        return {}
    ages = [_age(document) for document in documents]
    texts = [set(split_words(document.page_content)) for document in documents]
    words = [{word for word in text if not word.isdigit()} for text in texts]
    asked = content_words(question)
    named = [asked & text.union(split_words(_name(document))) for text, document in zip(texts, documents, strict=True)]
    sources = [document.metadata.get("source") for document in documents]
    older = {}
    for index, age in enumerate(ages):
        newer = [
            other
            for other in range(len(documents))
            if sources[other] != sources[index]
            and named[index] <= named[other]
            and not _SERIES.search(_name(documents[index]))
            and _is_older(age, ages[other])
            and _is_same(words[index], words[other])
        ]
        if newer:
            older[index] = max(newer, key=lambda other: ages[other])
    return older


def leave_out_older(run: RequestContext, documents: Sequence[Document]) -> list[Document]:
    """Return the passages without ``older_versions``, which are named in a warning."""
    older = older_versions(documents, run.question.text)
    for index, newest in older.items():
        run.left_out.append((document_id(documents[index]), "older_version"))
        warn(
            f"{_dated_name(documents[index])} is an older version of {_dated_name(documents[newest])} and was not "
            "read; to read it, name its year in the question, or min_relevance=off"
        )
    return [document for index, document in enumerate(documents) if index not in older]


def _name(document: Document) -> str:
    return " ".join(str(document.metadata.get(name) or "")[:_NAME_CHARACTERS] for name in ("title", "source"))


def _dated_name(document: Document) -> str:
    date = date_of(document)
    return passage_name(document) + (f" ({date})" if date else "")


def _age(document: Document) -> tuple[str, tuple[int, ...]]:
    names = [document.metadata.get("version"), document.metadata.get("title"), document.metadata.get("source")]
    found = next((match for name in names if name and (match := _VERSION.search(str(name)[:_NAME_CHARACTERS]))), None)
    return date_of(document), () if found is None else tuple(map(int, found[1].split(".")))


def _is_older(one: tuple[str, tuple[int, ...]], other: tuple[str, tuple[int, ...]]) -> bool:
    """Return whether a date is before another; of equal dates, a version. "2023" is not before "2023-05"."""
    (date, version), (other_date, other_version) = one, other
    if date and other_date and not other_date.startswith(date) and not date.startswith(other_date):
        return date < other_date
    return date == other_date and bool(version) and bool(other_version) and version < other_version


def _is_same(one: set[str], other: set[str]) -> bool:
    return min(len(one), len(other)) >= MIN_WORDS and len(one & other) >= SAME_WORDS * len(one | other)


def _date_in(text: str) -> str:
    if found := _WRITTEN_DATE.search(text):
        day = found["day"] or found["day2"]
        return "-".join([found["year"], _MONTHS[found["month"].lower()], *([f"{int(day):02}"] if day else [])])
    found = _DATE.search(text)
    return "-".join(filter(None, found.groups())) if found else ""
