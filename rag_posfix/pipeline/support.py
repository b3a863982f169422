"""Whether the passages support an answer: what a judge says of them, and whether the answer's words stand in them.

The judge reads passages before the answer is written, so that an answer without support need not be written at all.
Words are compared afterwards. They are a necessary condition: a model that judges badly never says ``yes`` by them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembled
from rag_posfix.assembly.documents import content_key, document_id, without_source_claims
from rag_posfix.contracts.answer import SupportVerdict
from rag_posfix.contracts.request import salted
from rag_posfix.contracts.retrieval import DETAILS, Reranker, rerank_indexed
from rag_posfix.pipeline.citations import COVERAGE, NUMBERS, PAIR_COVERAGE, STEM, find_evidence, passage_words
from rag_posfix.pipeline.language import is_broad, is_reply, same_language
from rag_posfix.pipeline.run import RequestContext
from rag_posfix.text import clean_text, is_pair, titled_text

JUDGE = "yes_no"
"""The reranker whose log-odds say whether a passage contains the answer."""

JUDGING_HIDDEN_SIZE = 1536
"""Channels of the hidden state from which a model's judgements count."""

NO_BELOW, YES_FROM = 0.0, 0.6
"""Log-odds of the best passage: below the first no passage has the answer, from the second on one has it.

Below 0 each passage makes "yes" less likely than no passage does.
"""

_ASKS = re.compile(
    r"[?\uff1f\u061f]\s*$|^\W*(?:who|whom|whose|what|which|when|where|why|how|in which|is|are|was|were|do|does|did|"
    r"has|have|can|could|will|would|must|may|wer|wen|wem|was|welche[rsnm]?|wann|wo|wohin|woher|warum|wieso|wie|wieviele?|"
    r"qui|quels?|quelles?|quand|o\u00f9|pourquoi|comment|combien|est-ce|qu[e\u00e9]|qui\u00e9n(?:es)?|cu\u00e1l(?:es)?|"
    r"cu\u00e1ndo|d\u00f3nde|c\u00f3mo|cu\u00e1nt[oa]s?)\b|"
    "[\u4ec0\u4e48\u8c01\u54ea\u51e0\u5417\u600e]|\u591a\u5c11|\ubb34\uc5c7|\ub204\uad6c|\uc5b8\uc81c|\uc5b4\ub514|\uc5bc\ub9c8",
    re.IGNORECASE,
)


def asks_for_fact(text: str) -> bool:
    """Return whether a message is a question that one passage can answer: no order, no summary, no comparison."""
    return _ASKS.search(text) is not None and not is_broad(text)


UNSUPPORTED = (
    "the passages do not support this answer: by the judge none of them answers the question, or none has its words"
)
"""The warning with an answer that was written all the same."""

ALL_THE_SAME = (
    "to have an answer all the same: --allow-unsupported, the field allow_unsupported, or "
    "RAG_POSFIX_ALLOW_UNSUPPORTED=true"
)
"""What has an unsupported answer written."""

MIN_FORM = 3
"""Letters of the shortest form of a word that has another ending elsewhere."""

WordVerdict = Literal["all", "some", "none", "unknown"]


@dataclass(frozen=True, slots=True)
class WordSupport:
    """Whether passages have the words of an answer that the question does not have.

    Attributes:
        verdict: ``all``: a passage has the numbers, and enough of the other words. ``some``: passages have a word of
            them. ``none``: no passage has any. ``unknown``: there is nothing to compare ("Yes.", "Yes, you may"), or
            passages and answer are in different languages.
        holders: Indices of the passages with all of them; for ``some``, of those with most.
    """

    verdict: WordVerdict
    holders: tuple[int, ...] = ()


def compare_words(answer: str, passages: Sequence[str], question: str) -> WordSupport:
    """Return whether ``passages`` have the words of ``answer`` that are neither asked nor function words.

    A word is there if the passage has it (``shared_words``). A passage has
    enough of them with all numbers and ``COVERAGE`` of the words (``PAIR_COVERAGE`` of pairs of characters).

    Cost: linear in the passages.
    """
    evidence = find_evidence(answer, question)
    if not evidence or not passages:
        return WordSupport("unknown")
    numbers = {word for word in evidence if any(map(str.isdigit, word))}
    needed = (PAIR_COVERAGE if any(map(is_pair, evidence)) else COVERAGE) * len(evidence)
    shared = [shared_words(evidence, passage_words(passage)) for passage in passages]
    holders = tuple(i for i, words in enumerate(shared) if numbers <= words and len(words) >= needed)
    if holders:
        return WordSupport("all", holders)
    most = max(map(len, shared))
    if most:
        return WordSupport("some", tuple(index for index, words in enumerate(shared) if len(words) == most))
    is_comparable = any(same_language(answer, passage) for passage in passages) and (numbers or not is_reply(answer))
    return WordSupport("none" if is_comparable else "unknown")


def shared_words(evidence: Set[str], words: Set[str]) -> Set[str]:
    """Return the words of ``evidence`` that are in ``words``, also with another ending (boat, boats).

    Words of six letters and more may differ in all that follows. A number in words is that number in digits.
    """
    stems = {word[:STEM] for word in words if len(word) >= STEM}
    known = words | {NUMBERS[word] for word in words if word in NUMBERS}
    known |= {shorter for word in words for shorter in _without_ending(word)}
    return {
        word
        for word in evidence
        if word in known
        or NUMBERS.get(word) in known
        or not words.isdisjoint(_without_ending(word))
        or (word[:STEM] in stems and not word[-1].isdigit())
    }


def _without_ending(word: str) -> tuple[str, ...]:
    """Return a word without one and without two letters, where ``MIN_FORM`` are left."""
    return tuple(word[:-cut] for cut in (1, 2) if word.isalpha() and len(word) - cut >= MIN_FORM)


def has_words_of(sentence: str, passage: str, question: str) -> bool:
    """Return whether a passage has a word of a sentence of an answer: of those that are not asked, if it has any."""
    evidence = find_evidence(sentence, question) or find_evidence(sentence, "")
    return bool(shared_words(evidence, passage_words(passage)))


def support_verdict(odds: Sequence[float | None], words: WordSupport) -> tuple[SupportVerdict, tuple[int, ...]]:
    """Return whether passages support an answer, and the indices of those that do.

    Rule: ``no`` if the judge finds the answer in no passage, or if no passage has any of its words. ``yes`` if the
    judge finds it, and a passage has its words, or there are none to compare. ``partly`` if passages have some of its
    words, or if the judge is in doubt. ``unknown`` without a judge, and where neither can tell.

    Args:
        odds: Of each passage the calibrated log-odds that it contains the answer; None without a judge.
    """
    judged = [value for value in odds if value is not None]
    if words.verdict == "none" or (judged and max(judged) < NO_BELOW):
        return "no", ()
    if not judged:
        return "unknown", ()
    found = tuple(index for index, value in enumerate(odds) if value is not None and value >= YES_FROM)
    if words.verdict == "unknown":
        return ("yes", found) if found else ("unknown", ())
    return ("yes" if found and words.verdict == "all" else "partly"), words.holders


@dataclass(frozen=True, slots=True)
class SupportTest:
    """Asks the judge about the passages of a prompt.

    Attributes:
        judge: Returns the reranker ``yes_no``; None without one. The log-odds of a reranker that scored the passages
            of the question already are used first.
        is_trusted: Whether the judgements of the model count: small models say yes to nearly every passage.
    """

    judge: Callable[[], Reranker | None] = lambda: None
    is_trusted: bool = False

    def odds(self, run: RequestContext, assembled: Assembled) -> dict[str, float]:
        """Return the log-odds of the passages by content key; empty if nobody judges them.

        Only questions for a fact are judged: no passage contains "the answer" to "Summarise the report".
        """
        if not self.is_trusted or not assembled.documents or not asks_for_fact(run.question.text):
            return {}
        keys = assembled.layout.keys
        missing = [document for key, document in zip(keys, assembled.documents, strict=True) if key not in run.odds]
        judge = self.judge() if missing else None
        if judge is not None:
            with run.timed("support"), salted(run.salt):
                ranked = rerank_indexed(judge, run.query.text, [_without_details(one) for one in missing])
            run.odds.update(odds_of(judge, [entry.document for entry in ranked], missing))
        return {key: run.odds[key] for key in keys if key in run.odds}


def of_passages(odds: Mapping[str, float], assembled: Assembled) -> list[float | None]:
    """Return the log-odds of the passages of a prompt, in its order, of those by content key."""
    return [odds.get(key) for key in assembled.layout.keys]


def is_refused(odds: Sequence[float | None]) -> bool:
    """Return whether the judge finds the answer in no passage; False unless it judged all."""
    return bool(odds) and all(value is not None and value < NO_BELOW for value in odds)


def _without_details(document: Document) -> Document:
    """Return a copy without what another reranker, or whoever sent the document, says of it."""
    metadata = {name: value for name, value in document.metadata.items() if name != DETAILS}
    return document.model_copy(update={"metadata": metadata})


def odds_of(judge: Reranker, ranked: Sequence[Document], given: Sequence[Document]) -> dict[str, float]:
    """Return the log-odds that the judge gave to documents, by content key; none of another reranker.

    A judge that fails returns the documents as they were ``given``: their details are no verdict.
    """
    reader = getattr(judge, "reranker", judge)  # without its deadline
    asks_itself = getattr(reader, "template", None) == "answer" and getattr(reader, "model", None) is None
    if not (asks_itself and getattr(reader, "calibrate", False)):
        return {}
    before = {id(document.metadata.get(DETAILS)) for document in given}
    odds = {}
    for document in ranked:
        details = document.metadata.get(DETAILS)
        if not isinstance(details, Mapping) or id(details) in before or details.get("reranker") != JUDGE:
            continue
        if isinstance(value := details.get("raw_score"), float):
            odds[content_key(document)] = value
    return odds


def read_texts(documents: Sequence[Document]) -> list[str]:
    """Return what a model reads of documents: title and text, without sentences about other documents."""
    return [
        titled_text(document.metadata.get("title"), without_source_claims(clean_text(document.page_content)))
        for document in documents
    ]


def silenced_warning(assembled: Assembled) -> str:
    """Return which passages tell the reader what to believe of other documents, in sentences that were not read."""
    by_id = dict(zip(assembled.ids, assembled.documents, strict=True))
    names = "; ".join(passage_name(by_id[identity]) for identity in assembled.silenced)
    return f"sentences that say what to believe of other documents were not read: {names}"


def passage_name(document: Document) -> str:
    """Return source and title of a document for messages; its id if it has neither."""
    names = [str(value) for name in ("source", "title") if (value := document.metadata.get(name))]
    return ", ".join(names) or repr(document_id(document))


def refusal_warning(documents: Sequence[Document], odds: Sequence[float | None]) -> str:
    """Return why an answer was not written, with the best passage, and what has it written all the same."""
    value, index = max((value, index) for index, value in enumerate(odds) if value is not None)
    return (
        f"no passage answers the question: the best is {passage_name(documents[index])}, with log-odds of "
        f"{value:.2f}, at least {NO_BELOW:.2f} are needed; {ALL_THE_SAME}"
    )
