"""Converts answers to cache entries, and cache entries to answers for the documents of another question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rag_posfix.assembly.assembler import Assembled
from rag_posfix.contracts.answer import Answer, AnswerDocument, Citation
from rag_posfix.contracts.request import Generation, ScoredToken, TokenScore, Usage
from rag_posfix.pipeline.citations import attribute_sentences, dominant, find_quotes
from rag_posfix.text import clean_text


def to_store(assembled: Assembled, generation: Generation) -> dict[str, Any]:
    """Return the cache entry of an answer. Attention is stored by content key, because ids belong to one question."""
    attention = generation.attention or (0.0,) * assembled.layout.n_passages
    keys = assembled.layout.keys
    claims = attribute_sentences(generation.text, generation.sources)
    stored: dict[str, Any] = {
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": generation.usage.prompt_tokens,
        "completion_tokens": generation.usage.completion_tokens,
        "cached_tokens": generation.usage.cached_tokens,
        "attention": dict(zip(keys, attention, strict=True)),
        "claims": [[claim.start, claim.end, dict(zip(keys, claim.shares, strict=True))] for claim in claims],
    }
    if generation.log_probs:
        stored["log_probs"] = _stored_scores(generation.log_probs)
    return stored


def readable(stored: Any) -> bool:
    """Return whether a cache entry has the fields and types of ``to_store``; any other entry is a miss.

    Entries of older versions without claims are valid: their answers have no citations by attention.
    """
    numbers = ("prompt_tokens", "completion_tokens", "cached_tokens")
    return (
        isinstance(stored, Mapping)
        and isinstance(stored.get("text"), str)
        and stored.get("finish_reason") in ("stop", "length")
        and all(isinstance(stored.get(name), int) for name in numbers)
        and _are_shares(stored.get("attention"))
        and isinstance(stored.get("claims", []), list)
        and all(_is_claim(claim, len(stored["text"])) for claim in stored.get("claims", []))
        and _are_scores(stored.get("log_probs", []))
    )


def _are_shares(stored: Any) -> bool:
    return isinstance(stored, dict) and all(isinstance(share, int | float) for share in stored.values())


def _is_claim(stored: Any, length: int) -> bool:
    if not isinstance(stored, list) or len(stored) != 3 or not _are_shares(stored[2]):
        return False
    start, end = stored[:2]
    return isinstance(start, int) and isinstance(end, int) and 0 <= start < end <= length


def answer_from(
    stored: Mapping[str, Any], assembled: Assembled, mitigation: str, timings: Mapping[str, float], *, cached: bool
) -> Answer:
    """Return the answer for the documents of *this* question; order and ids of the cached question's may differ."""
    return Answer(
        text=stored["text"],
        documents=_documents(stored["attention"], assembled),
        citations=_citations(stored, assembled),
        usage=Usage(
            prompt_tokens=stored["prompt_tokens"],
            completion_tokens=stored["completion_tokens"],
            cached_tokens=stored["prompt_tokens"] if cached else stored["cached_tokens"],
        ),
        cached=cached,
        mitigation=mitigation,
        order=assembled.order,
        finish_reason=stored["finish_reason"],
        dropped=tuple((dropped.id, dropped.reason) for dropped in assembled.dropped),
        timings=dict(timings),
        log_probs=_scores_from(stored.get("log_probs", [])),
    )


def _documents(attention: Mapping[str, float], assembled: Assembled) -> tuple[AnswerDocument, ...]:
    layout = assembled.layout
    relevance = layout.relevance or (None,) * layout.n_passages
    return tuple(
        AnswerDocument(
            id=identity,
            score=score,
            position=position,
            attention=float(attention.get(key, 0.0)),
            title=_text_or_none(document.metadata.get("title")),
            source=_text_or_none(document.metadata.get("source")),
            text=clean_text(document.page_content),
            page=_page(document.metadata.get("page")),
        )
        for position, (identity, score, key, document) in enumerate(
            zip(assembled.ids, relevance, layout.keys, assembled.documents, strict=True)
        )
    )


def _citations(stored: Mapping[str, Any], assembled: Assembled) -> tuple[Citation, ...]:
    """Return citations by quote and by attention, sorted by start; for equal starts the quote first."""
    text = stored["text"]
    citations = []
    for quote in find_quotes(text, [document.page_content for document in assembled.documents]):
        ids = tuple(assembled.ids[index] for index in quote.passages)
        citations.append(Citation(quote.start, quote.end, text[quote.start : quote.end], ids))
    for start, end, shares in stored.get("claims", []):
        index = dominant([float(shares.get(key, 0.0)) for key in assembled.layout.keys])
        if index is not None:
            citations.append(Citation(start, end, text[start:end], (assembled.ids[index],), "attention"))
    return tuple(sorted(citations, key=lambda citation: (citation.start, citation.origin == "attention")))


def _page(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text_or_none(value: object) -> str | None:
    return clean_text(value) if isinstance(value, str) and value else None


def _stored_scores(scored: Sequence[ScoredToken]) -> list[Any]:
    """Return ``[start, [hex bytes, log-probability], [[hex bytes, log-probability], ...]]`` for each token."""
    return [[token.start, _pair(token.token), [_pair(score) for score in token.top]] for token in scored]


def _are_scores(stored: Any) -> bool:
    return isinstance(stored, list) and all(map(_is_scored, stored))


def _scores_from(stored: Sequence[Any]) -> tuple[ScoredToken, ...]:
    return tuple(
        ScoredToken(_score(token), start, tuple(_score(pair) for pair in top)) for start, token, top in stored
    )


def _pair(score: TokenScore) -> list[Any]:
    return [score.data.hex(), score.log_prob]


def _score(pair: Sequence[Any]) -> TokenScore:
    return TokenScore(bytes.fromhex(pair[0]), pair[1])


def _is_scored(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 3:
        return False
    start, token, top = entry
    return isinstance(start, int) and isinstance(top, list) and all(map(_is_pair, (token, *top)))


def _is_pair(pair: Any) -> bool:
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
        return False
    try:
        bytes.fromhex(pair[0])
    except ValueError:
        return False
    return pair[1] is None or isinstance(pair[1], int | float)
