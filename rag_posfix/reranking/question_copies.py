"""Finds sentences of a passage that copy the question: they make it likely and do not answer it."""

from __future__ import annotations

import re
from dataclasses import replace

from rag_posfix.assembly.documents import CheckedDocument

NGRAM_WORDS = 3
COPIED_SHARE = 0.6
"""A sentence with more than this share of the question's n-grams is a copy. "The capital of France is Paris" has half
of the n-grams of "What is the capital of France?"."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])\s*|\n+")
_WORDS = re.compile(r"\w+")
# Scripts without spaces between words: each character counts as a word.
_UNSPACED = re.compile(r"([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\u0e00-\u0e7f])")


def without_copies(text: str, question: str) -> str:
    """Return the text without the sentences that copy the question; unchanged if none does.

    Formula: a sentence is left out if |G(question) & G(sentence)| / |G(question)| > ``COPIED_SHARE``, where G is the
        set of runs of three words, in lower case, without punctuation; of fewer for a shorter question.
    """
    words = _words(question)
    size = min(NGRAM_WORDS, len(words))
    wanted = _ngrams(words, size)
    if not wanted:
        return text
    retained, dropped, start = [], False, 0
    for end in [*(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]:
        sentence = text[start:end]
        if len(wanted & _ngrams(_words(sentence), size)) > COPIED_SHARE * len(wanted):
            dropped = True
        else:
            retained.append(sentence)
        start = end
    return "".join(retained).strip() if dropped else text


def document_without_copies(document: CheckedDocument, question: str) -> CheckedDocument:
    """Return the document without such sentences in title and text; the same object if there is none."""
    title, text = without_copies(document.title, question), without_copies(document.text, question)
    changed = (title, text) != (document.title, document.text)
    return replace(document, title=title, text=text) if changed else document


def _words(text: str) -> list[str]:
    return _WORDS.findall(_UNSPACED.sub(r" \1 ", text.casefold()))


def _ngrams(words: list[str], size: int) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)} if size else set()
