"""Cache entries of answers: their keys, and the answers made of them for the documents of another question."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, Strict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from rag_posfix.assembly.assembler import Assembled
from rag_posfix.caching.answers.tiered import AnswerKey
from rag_posfix.contracts.answer import Answer, AnswerDocument, Citation, Question
from rag_posfix.contracts.request import (
    FinishReason,
    Generation,
    MitigationInfo,
    Sampling,
    ScoredToken,
    TokenScore,
    Usage,
)
from rag_posfix.contracts.retrieval import filter_key
from rag_posfix.pipeline.citations import attribute_sentences, dominant, find_quotes, page_of
from rag_posfix.pipeline.disagreement import list_disagreements
from rag_posfix.pipeline.run import RequestContext
from rag_posfix.pipeline.support import compare_words, has_words_of, read_texts, support_verdict
from rag_posfix.plan.layout import Layout
from rag_posfix.text import clean_text, content_hash

_Count = Annotated[int, Strict(), Field(ge=0)]
_Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
_Shares = dict[str, Annotated[_Number, Field(ge=0)]]
"""By the names of ``_passage_names``."""
_Scored = tuple[Annotated[str, Field(pattern="^([0-9a-f]{2})*$")], _Number | None]
"""The bytes of a token in hexadecimal, and its log-probability."""


class StoredAnswer(TypedDict):
    """The cache entry of an answer, or of a question that was ``refused``. Entries of earlier releases lack fields.

    ``odds`` are the judge's log-odds of passages, by the names of ``_passage_names``; ``rivals`` are answers that
    contradict this one, each with the name of its passage. Of a ``foreign`` answer no passage has a word.
    """

    text: Annotated[str, Strict()]
    finish_reason: FinishReason
    prompt_tokens: _Count
    completion_tokens: _Count
    cached_tokens: _Count
    attention: _Shares
    weighted: NotRequired[Annotated[bool, Strict()]]
    claims: NotRequired[list[tuple[_Count, _Count, _Shares]]]
    log_probs: NotRequired[list[tuple[_Count, _Scored, list[_Scored]]]]
    stop_string: NotRequired[Annotated[str, Strict()]]
    odds: NotRequired[dict[str, _Number]]
    refused: NotRequired[Annotated[bool, Strict()]]
    foreign: NotRequired[Annotated[bool, Strict()]]
    rivals: NotRequired[list[tuple[Annotated[str, Strict()], Annotated[str, Strict()]]]]


@functools.cache
def _adapter() -> TypeAdapter[StoredAnswer]:
    return TypeAdapter(StoredAnswer)


def answer_key(
    run: RequestContext,
    assembled: Assembled,
    info: MitigationInfo,
    sampling: Sampling,
    model: str,
    template: str,
    attribution: bool,
) -> str:
    """Return the key of an answer in the cache; ``model`` and ``template`` are the fingerprints of both."""
    layout, question = assembled.layout, run.question
    return AnswerKey(
        model=model,
        template=template,
        # The tokens around the passages: chat template, instructions and the conversation so far.
        assembly=content_hash(str(layout.tokens(layout.prefix)), str(layout.tokens(layout.suffix))),
        mitigation=info.fingerprint,
        sampling=repr(sampling) + (sampling.json_schema or ""),
        question=question.text,
        history=conversation_text(question),
        documents=_passage_names(layout),
        order_invariant=info.order_invariant,
        tenant=run.salt,
        filter="" if question.documents is not None else filter_key(run.filter),
        attribution=attribution,
    ).digest()


def _passage_names(layout: Layout) -> tuple[str, ...]:
    """Return a hash of what is read of each passage, its tokens and its score, and of how many before it are equal.

    Passages are equal if their texts were cut where they begin to differ.
    """
    relevance = layout.relevance or (None,) * layout.n_passages
    counts: Counter[str] = Counter()
    names = []
    for span, score in zip(layout.passages, relevance, strict=True):
        content = content_hash(str(layout.tokens(span)), repr(score))
        names.append(content_hash(content, str(counts[content])))
        counts[content] += 1
    return tuple(names)


def conversation_text(question: Question) -> str:
    """Return the conversation so far as text that is different for different conversations."""
    history = [(message.get("role"), message.get("content")) for message in question.history]
    if question.tools is None:
        return repr(history)
    return repr((history, [message.get("tool_calls") for message in question.history], question.tools.text))


def to_store(
    assembled: Assembled,
    generation: Generation,
    odds: Mapping[str, float] | None = None,
    rivals: Sequence[tuple[str, int]] = (),
) -> StoredAnswer:
    """Return the cache entry of an answer. Attention is stored by what was read: ids belong to one question.

    Args:
        odds: The judge's log-odds of the passages by content key.
        rivals: Answers that contradict this one, with the indices of their passages.
    """
    attention = generation.attention or (0.0,) * assembled.layout.n_passages
    names = _passage_names(assembled.layout)
    claims = attribute_sentences(generation.text, generation.sources)
    stored: StoredAnswer = {
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": generation.usage.prompt_tokens,
        "completion_tokens": generation.usage.completion_tokens,
        "cached_tokens": generation.usage.cached_tokens,
        "attention": dict(zip(names, attention, strict=True)),
        "claims": [(claim.start, claim.end, dict(zip(names, claim.shares, strict=True))) for claim in claims],
    }
    if odds:
        stored["odds"] = _odds_by_name(assembled, names, odds)
    if rivals:
        stored["rivals"] = [(text, names[index]) for text, index in rivals]
    if generation.weighted:
        stored["weighted"] = True
    if generation.stop_string is not None:
        stored["stop_string"] = generation.stop_string
    if generation.log_probs:
        stored["log_probs"] = [
            (token.start, _pair(token.token), [_pair(score) for score in token.top]) for token in generation.log_probs
        ]
    return stored


def refusal_to_store(assembled: Assembled, odds: Mapping[str, float]) -> StoredAnswer:
    """Return the cache entry of a question that none of its passages answers."""
    return {
        "text": "",
        "finish_reason": "stop",
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "cached_tokens": 0,
        "attention": {},
        "odds": _odds_by_name(assembled, _passage_names(assembled.layout), odds),
        "refused": True,
    }


def _odds_by_name(assembled: Assembled, names: Sequence[str], odds: Mapping[str, float]) -> dict[str, float]:
    return {name: odds[key] for name, key in zip(names, assembled.layout.keys, strict=True) if key in odds}


def stored_odds(stored: Mapping[str, Any], assembled: Assembled) -> tuple[float | None, ...]:
    """Return the judge's log-odds of the passages of a prompt, in its order; nothing if nobody judged them."""
    odds = stored.get("odds")
    if not odds:
        return ()
    return tuple(odds.get(name) for name in _passage_names(assembled.layout))


def readable(stored: Any) -> bool:
    """Return whether a cache entry has the fields and types of ``to_store``; any other entry is a miss."""
    try:
        claims = _adapter().validate_python(stored).get("claims", [])
    except ValidationError:
        return False
    return all(start < end <= len(stored["text"]) for start, end, _ in claims)


def answer_from(
    stored: Mapping[str, Any],
    assembled: Assembled,
    mitigation: str,
    timings: Mapping[str, float],
    *,
    cached: bool,
    question: str = "",
) -> Answer:
    """Return the answer for the documents of *this* question; order and ids of the cached question's may differ.

    Args:
        question: Its words are no evidence for a citation.
    """
    names = _passage_names(assembled.layout)
    texts = read_texts(assembled.documents)
    documents = _documents(stored, assembled, names)
    words = compare_words(stored["text"], texts, question)
    support, supporting = support_verdict(stored_odds(stored, assembled), words)
    return Answer(
        text=stored["text"],
        documents=documents,
        citations=_citations(stored, documents, texts, names, question),
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
        stop_string=stored.get("stop_string"),
        grounded=bool(assembled.documents),
        support=support if assembled.documents else "no",
        supported_by=tuple(assembled.ids[index] for index in supporting),
        disagreements=list_disagreements(
            stored["text"],
            supporting,
            [(text, names.index(name)) for text, name in stored.get("rivals", [])],
            assembled.documents,
            assembled.ids,
        ),
        truncated=assembled.truncated,
    )


def no_passage_answer(
    text: str, assembled: Assembled, mitigation: str, timings: Mapping[str, float], *, cached: bool = False
) -> Answer:
    """Return the answer to a question without a passage, or that none answers: ``text``, which no model wrote."""
    unsupported = ((identity, "unsupported") for identity in assembled.ids)
    return Answer(
        text=text,
        documents=(),
        citations=(),
        usage=Usage(prompt_tokens=0, completion_tokens=0),
        cached=cached,
        mitigation=mitigation,
        order=assembled.order,
        finish_reason="stop",
        dropped=(*((dropped.id, dropped.reason) for dropped in assembled.dropped), *unsupported),
        timings=dict(timings),
        grounded=False,
        support="no",
    )


def _documents(stored: Mapping[str, Any], assembled: Assembled, names: Sequence[str]) -> tuple[AnswerDocument, ...]:
    layout, attention = assembled.layout, stored["attention"]
    is_weighted = stored.get("weighted", False)
    relevance = layout.relevance or (None,) * layout.n_passages
    return tuple(
        AnswerDocument(
            id=identity,
            score=score,
            position=position,
            attention=float(attention.get(name, 0.0)),
            title=_text_or_none(document.metadata.get("title")),
            source=_text_or_none(document.metadata.get("source")),
            text=clean_text(document.page_content),
            page=_page(document.metadata.get("page")),
            weight=float(attention.get(name, 0.0)) if is_weighted else None,
            **_pages(document.metadata),
        )
        for position, (identity, score, name, document) in enumerate(
            zip(assembled.ids, relevance, names, assembled.documents, strict=True)
        )
    )


def _citations(
    stored: Mapping[str, Any],
    documents: Sequence[AnswerDocument],
    passages: Sequence[str],
    names: Sequence[str],
    question: str,
) -> tuple[Citation, ...]:
    """Return citations by quote, and by attention of sentences without a quote, sorted by start.

    Attention alone is no evidence: the passage must have a word of the sentence.
    """
    text = stored["text"]

    def citation(start: int, end: int, indices: Sequence[int], origin: Literal["quote", "attention"]) -> Citation:
        cited = [documents[index] for index in indices]
        pages = tuple(page_of(text[start:end], document, question) for document in cited)
        return Citation(start, end, text[start:end], tuple(document.id for document in cited), origin, pages)

    quotes = find_quotes(text, passages, question)
    citations = [citation(quote.start, quote.end, quote.passages, "quote") for quote in quotes]
    for start, end, shares in stored.get("claims", []):
        index = dominant([float(shares.get(name, 0.0)) for name in names])
        is_quoted = any(quote.start < end and start < quote.end for quote in quotes)
        if index is not None and not is_quoted and has_words_of(text[start:end], passages[index], question):
            citations.append(citation(start, end, [index], "attention"))
    return tuple(sorted(citations, key=lambda item: item.start))


def _page(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _pages(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pages of a passage on several, and where in it they begin; nothing for other metadata."""
    pages, starts = metadata.get("pages"), metadata.get("page_starts")
    if not isinstance(pages, list) or not isinstance(starts, list) or len(pages) != len(starts):
        return {}
    whole = all(_page(value) is not None for value in (*pages, *starts))
    return {"pages": tuple(pages), "page_starts": tuple(starts)} if whole and starts == sorted(starts) else {}


def _text_or_none(value: object) -> str | None:
    return clean_text(value) if isinstance(value, str) and value else None


def _scores_from(stored: Sequence[Any]) -> tuple[ScoredToken, ...]:
    return tuple(
        ScoredToken(_score(token), start, tuple(_score(pair) for pair in top)) for start, token, top in stored
    )


def _pair(score: TokenScore) -> _Scored:
    return score.data.hex(), score.log_prob


def _score(pair: Sequence[Any]) -> TokenScore:
    return TokenScore(bytes.fromhex(pair[0]), pair[1])
