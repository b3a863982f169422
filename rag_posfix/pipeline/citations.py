"""Citations: sentences of an answer whose evidence a passage contains, or that one passage's attention dominates."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

from rag_posfix.contracts.answer import AnswerDocument
from rag_posfix.contracts.request import TokenSource
from rag_posfix.pipeline.language import is_functional_pair, stop_words
from rag_posfix.text import is_pair, split_words

COVERAGE = 0.75
PAIR_COVERAGE = 0.6
"""Shares of a sentence's evidence that a passage must contain; pairs of characters also cross the borders of words."""

ENOUGH_EVIDENCE = 4
QUESTION_SHARE = 0.4
STEM = 6

MAX_CHARACTERS = 350_000
"""Characters of a passage that are searched: as many as a context window of 90,000 tokens holds."""

_ABBREVIATIONS = (
    "Abb|Abs|Anm|Art|Bd|Capt|Col|Dipl|Dr|Fa|Fig|Fr|Frl|Gen|Gov|Hon|Hr|Hrn|Hrsg|Ing|Jr|Kap|Lt|Mag|Mlle|Mme|Mr|Mrs|Ms|Mt|Nr|"
    "Messrs|Prof|Rep|Rev|Sen|Sgt|Sig|Sr|Sra|St|Tab|Vol|Ziff|approx|btw|bzw|ca|cf|ed|eds|elev|evtl|excl|geb|gest|ggf|incl|"
    "inkl|maks|max|min|pp|sog|ul|v|vgl|vs|"
    "z.B|d.h|e.g|i.e|u.a|h.c|o.g|v.a"
).replace(".", r"\.")
_MONTHS = (
    "Jan|Feb|M\u00e4r|Mar|Apr|Jun|Jul|Aug|Sept?|Okt|Oct|Nov|Dez|Dec|janv|f\u00e9vr|avr|juil|ene|abr|ago|dic|No|Nos|p|S|"
    "refs?|v|est|al|sec|ch|app|tel|tlf|kl|b"
)
_OF_ORDINALS = r"am|im|zum|vom|beim|ab|bis|seit|zur|ein\w*|jede[mnrs]?|de[mnrs]|die|das"
_GOES_ON = (  # what a full stop ends, and what follows it where it ends no sentence
    (re.compile(rf"(?<!\w)(?:{_ABBREVIATIONS})\.$"), re.compile(r"\S")),
    (re.compile(r"(?<!\w)(?:[zduov]|Co)\.$"), re.compile(r"[Bhag]\.|KG|Ltd|Inc")),
    (re.compile(rf"(?<!\w)(?:{_MONTHS})\.$", re.IGNORECASE), re.compile(r"\d")),
    (re.compile(r"(?<!\w)[A-Z]\.$"), re.compile(r"[A-Z\u00c0-\u00de](?:[^\W\d_]|\.\s)")),  # an initial before a name
    (re.compile(rf"(?<!\w)(?:{_OF_ORDINALS})\s+\d{{1,2}}\.$", re.IGNORECASE), re.compile(r"\w")),
    (re.compile(r"(?<![\w.])\d{1,2}\.$"), re.compile(
        "(?:Januar|Jan|J\u00e4nner|Februar|Feb|M\u00e4rz|April|Apr|Mai|Juni|Juli|August|Aug|September|Sept|Oktober|Okt|"
        r"November|Nov|Dezember|Dez|Jahrhundert|Quartal|Stock|Klasse)\b"
    )),
    (re.compile(r"\d{1,2}\.\s?\d{1,2}\.$"), re.compile(r"\d")),
    (re.compile(r"(?<!\w)(?:\w{1,3}|[IVXL]+|\w+\.\w+)\.$"), re.compile(r"[^\W\d_A-Z\u00c0-\u00de]")),
)  # fmt: skip
_LONGEST_ABBREVIATION = 24
_SENTENCE = re.compile(r"\S.*?(?:[.!?\u2026](?=\s)|(?=\n)|$|[\u3002\uff01\uff1f])", re.DOTALL)

_SOURCE = (
    r"(?:documents?|docs?|sources?|passages?|references?|refs?|dokumente?|quellen?|abschnitte?|fuentes?|pages?|pp?)\.?"
)
_WHICH = r"[:#]?\s*(?:no\.?\s*)?(?:\[?\d{1,3}|[A-Z]\b|(?i:one|two|three)\b)"
_MARKER = re.compile(  # of a source: [1], [Document 1, 2], (source 1: a.pdf), passage 1, a raised number behind a mark
    rf"[\[\u3010(<{{]\s*(?:(?:see|from)\s+)?(?i:{_SOURCE})\s*{_WHICH}[^\n()\u3011>}}]{{0,80}}[\])\u3011>}}]|"
    rf"[\[(]\s*(?i:{_SOURCE})\s*:[^\n\])]{{1,80}}[\])]|<sup>\s*\[?\d{{1,3}}\]?\s*</sup>|(?<=[^\s\d])\s?\^\d{{1,2}}(?=\W|$)|"
    r"\[\[\d{1,3}\]\](?:\(\S{0,80}?\))?|[\[\u3010]\^?\d{1,3}(?:\s*[,;\u2020&\u2013-][^\n\]\u3011]{0,40})?[\]\u3011]|[({<]\d{1,2}[)}>](?=\s*(?:[.!?,;]|$))|"
    rf"(?i:\b(?:according to|as stated in|as|in|see|per|from|by|laut|siehe)\s+)?\b(?i:{_SOURCE})\s+\d{{1,3}}\b"
    r"(?i:\s+(?:states?|says?|shows?|notes?|mentions?)\b)?|"
    r"(?:(?<=[^\w\s])|(?<=[^\W\d_]{4}))[\u00b9\u00b2\u00b3\u2070\u2074-\u2079]+"
)
NUMBERS = {
    word: str(value)
    for words in (
        "one two three four five six seven eight nine ten eleven twelve",
        "ein zwei drei vier f\u00fcnf sechs sieben acht neun zehn elf zw\u00f6lf",
        "eine zwo",
        "un deux trois quatre cinq six sept huit neuf dix onze douze",
        "une dos tres cuatro cinco seis siete ocho nueve diez once doce",
    )
    for value, word in enumerate(words.split(), start=1)
} | {"twenty": "20", "thirty": "30", "zwanzig": "20", "drei\u00dfig": "30", "vingt": "20", "veinte": "20"}
"""Numbers in words."""
_REPEATED = re.compile(rf"(\b(?:{'|'.join(NUMBERS)})) \(\d+\)", re.IGNORECASE)
"""A number that is written twice, as contracts do: six (6)."""
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:(?:[.,'\u2019\u00a0\u202f ]\d{3})+|(?:,\d\d)+,\d{3})(?!\d)")
_DECIMAL = re.compile(r"(?<![\d.,:/-])(\d+)[.,:](\d{1,2})(?![\d:/-]|[.,]\d)")
_DAYTIME = re.compile(r"(?<!\w)([ap])\.\s?m\b\.?", re.IGNORECASE)

_WRAPPED = re.compile(r"\n(?=[^\W\d_A-Z\u00c0-\u00de])")
"""A line break inside of a sentence: the next line begins with a letter that is no capital."""

SHARE = 1 / 3
"""A passage dominates a sentence with at least this share of the attention to passages, ..."""
LEAD = 2.0
"""... if that is at least this many times the share of every other passage."""


@dataclass(frozen=True, slots=True)
class Quote:
    """A sentence of the answer, from ``start`` to before ``end``, whose evidence ``passages`` (indices) contain."""

    start: int
    end: int
    passages: tuple[int, ...]


def find_quotes(answer: str, passages: Sequence[str], question: str = "") -> list[Quote]:
    """Return the sentences of ``answer`` that ``passages`` contain, left to right; doubtful ones are left out.

    The evidence of a sentence is its words (``split_words``: pairs of characters in scripts without spaces) that are
    neither in the question nor function words. A passage contains it if at most two adjacent sentences of it have all
    numbers and ``COVERAGE`` of the evidence (``PAIR_COVERAGE`` of pairs). Few words, below ``ENOUGH_EVIDENCE``, are
    in a passage by chance: then only the passages with most words of the question count, and only if these are
    ``QUESTION_SHARE`` of its words. "No." has no evidence. Markers of sources, such as ``[1]``, are none.

    Args:
        passages: Texts, with their titles; of each, the first ``MAX_CHARACTERS`` are searched.
        question: "" for a text that answers none: then its words are not needed either.

    Cost: words of the answer's sentences times the sentences of the passages.
    """
    asked = _content(question, stop_words(f"{question} {answer}"))
    searched = [PassageSentences(passage) for passage in passages]
    relatedness = [_relatedness(asked, passage.words) for passage in searched]
    quotes = []
    for start, end in _sentences(answer):
        evidence = find_evidence(_with_whole_numbers(answer[start:end]), _with_whole_numbers(question), answer)
        holders = [index for index, passage in enumerate(searched) if evidence and passage.holds(evidence)]
        if asked and len(evidence) < ENOUGH_EVIDENCE:
            most = max((relatedness[index] for index in holders), default=0.0)
            holders = [index for index in holders if relatedness[index] == most >= QUESTION_SHARE]
        if holders:
            quotes.append(Quote(start, end, tuple(holders)))
    return quotes


def find_evidence(text: str, question: str, answer: str = "") -> set[str]:
    """Return the words of an answer, or of a sentence of ``answer``, that are neither asked nor function words."""
    functional = stop_words(f"{question} {answer or text}")
    stated = _REPEATED.sub(r"\1", _MARKER.sub(" ", text))
    return _content(stated, functional) - set(_words(question))


def passage_words(passage: str) -> frozenset[str]:
    """Return the words of a passage, of its first ``MAX_CHARACTERS``."""
    return frozenset(_words(_WRAPPED.sub(" ", passage[:MAX_CHARACTERS])))


class PassageSentences:
    """The sentences of a passage and their words. Cost: linear in the passage, once.

    Args:
        passage: The text of the passage; the first ``MAX_CHARACTERS`` are searched.
    """

    def __init__(self, passage: str) -> None:
        self.spans = _sentences(_WRAPPED.sub(" ", passage[:MAX_CHARACTERS]))
        self._own = [
            frozenset(_numbered(_words(_with_whole_numbers(passage[start:end])))) for start, end in self.spans
        ]
        self._pairs = [first | second for first, second in pairwise(self._own)]
        self.words = frozenset[str]().union(*self._own)

    def holds(self, evidence: Set[str]) -> bool:
        """Return whether a sentence, or two adjacent ones, have all numbers and enough other words of the evidence."""
        needed = (PAIR_COVERAGE if any(map(is_pair, evidence)) else COVERAGE) * len(evidence)
        numbers = {word for word in evidence if any(map(str.isdigit, word))}
        if not numbers <= self.words:
            return False
        forms = {word for word in evidence if word in NUMBERS or (len(word) == 1 and is_pair(word))}
        return any(
            len(evidence & words) + sum(_has_form(word, words) for word in forms - words) >= needed
            for words in [*self._own, *self._pairs]
            if numbers <= words
        )

    def find(self, text: str, question: str = "") -> tuple[int, int] | None:
        """Return the characters of the sentence that shares most content words with ``text``; None if none does.

        Of two sentences that share as many that with more words of the question counts, then the shorter one.
        """
        text, question = _with_whole_numbers(text), _with_whole_numbers(question)
        wanted = _content(text, stop_words(text)) or set(_words(text))
        asked = _content(question, stop_words(question))
        counts = [(len(wanted & own), len(asked & own), -len(own)) for own in self._own]
        best = max(range(len(counts)), key=counts.__getitem__, default=None)
        return None if best is None or not counts[best][0] else self.spans[best]


@dataclass(frozen=True, slots=True)
class SentenceAttribution:
    """A sentence of the answer, from ``start`` to before ``end``, and the mean share of each passage in its tokens."""

    start: int
    end: int
    shares: tuple[float, ...]


def attribute_sentences(answer: str, sources: Sequence[TokenSource]) -> list[SentenceAttribution]:
    """Return the sentences of ``answer`` with the mean shares of their tokens, left to right.

    A token belongs to the sentence that contains its last character. White space and tokens without text belong to no
    sentence. A sentence without tokens is left out.
    """
    spans = _sentences(answer)
    ends = [end for _, end in spans]
    tokens: list[list[tuple[float, ...]]] = [[] for _ in spans]
    written = 0
    for source in sources:
        text = answer[written : source.end].rstrip()
        index = bisect_left(ends, written + len(text))
        if text and index < len(spans) and spans[index][0] < written + len(text):
            tokens[index].append(source.shares)
        written = max(written, source.end)
    return [
        SentenceAttribution(start, end, tuple(sum(column) / len(rows) for column in zip(*rows, strict=True)))
        for (start, end), rows in zip(spans, tokens, strict=True)
        if rows
    ]


def dominant(shares: Sequence[float]) -> int | None:
    """Return the passage that dominates, by ``SHARE`` and ``LEAD``; None if none does."""
    if not shares:
        return None
    first = max(range(len(shares)), key=shares.__getitem__)
    runner_up = max((share for index, share in enumerate(shares) if index != first), default=0.0)
    return first if shares[first] >= SHARE and shares[first] >= LEAD * runner_up else None


def page_of(text: str, document: AnswerDocument, question: str = "") -> int | None:
    """Return the page of a passage on which the sentence that a text comes from begins; None without pages."""
    span = PassageSentences(document.text).find(_MARKER.sub(" ", text), question) if document.pages else None
    return document.page if span is None else document.page_at(span[0])


def source_span(passage: str, answer: str, quotes: Sequence[str] = ()) -> tuple[int, int]:
    """Return the characters of the sentence that an answer comes from; of the first if none shares a word.

    Args:
        quotes: Texts of the citations by quote; the first one is looked for, else the answer.
    """
    sentences = PassageSentences(passage)
    return sentences.find(quotes[0] if quotes else answer) or next(iter(sentences.spans), (0, 0))


def _sentences(text: str) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    goes_on = False
    for match in _SENTENCE.finditer(text):
        end = match.start() + len(match.group().rstrip())
        start = spans.pop()[0] if goes_on else match.start()
        spans.append((start, end))
        goes_on = (
            text[end - 1] == "." and text[end : end + 1] != "\n" and _goes_on(text[start:end], text[end : end + 9])
        )
    return spans


def _goes_on(sentence: str, following: str) -> bool:
    """Return whether a sentence does not end with its full stop, as after an abbreviation."""
    before, after = sentence[-_LONGEST_ABBREVIATION:], following.lstrip()
    last = before.rpartition(" ")[2][:-1]
    if (len(last) > 7 and last.isalpha()) or (len(last) > 3 and last.isdigit()):  # most sentences: nothing to look up
        return False
    return any(begin.match(after) and end.search(before) for end, begin in _GOES_ON)


def _words(text: str) -> list[str]:
    """Return the words of a text; a number is the same with and without marks of thousands."""
    return split_words(_THOUSANDS.sub(lambda match: re.sub(r"\D", "", match.group()), text))


def _with_whole_numbers(text: str) -> str:
    """Return a text whose decimals and times are one word each: 5.50 and 5,5 are ``5d5``, which 5 is not in."""
    plain = _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match.group()), _DAYTIME.sub(r"\1m", text))
    return _DECIMAL.sub(lambda match: f"{match[1]}d{match[2].rstrip('0')}".removesuffix("d"), plain)


def _numbered(words: Sequence[str]) -> set[str]:
    """Return words, and the digits of numbers in words."""
    return {*words, *(NUMBERS[word] for word in words if word in NUMBERS)}


def _has_form(word: str, words: Set[str]) -> bool:
    """Return whether words have the digits of a number in words, or a pair with a single character."""
    return NUMBERS.get(word) in words or (len(word) == 1 and any(word in pair for pair in words if len(pair) == 2))


def _content(text: str, functional: Set[str]) -> set[str]:
    """Return the words of a text that are no function words."""
    return {word for word in _words(text) if word not in functional and not is_functional_pair(word)}


def _relatedness(asked: Set[str], words: Set[str]) -> float:
    """Return the share of the question's words that a passage has; inflected words count by their beginning."""
    stems = {word[:STEM] for word in words}
    return sum(word[:STEM] in stems for word in asked) / len(asked) if asked else 0.0
