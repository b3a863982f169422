"""Methods with several rows: the relevance of passages as log weights, the mixture of rows, copies of the question."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rag_posfix.plan.layout import Layout, Span

Relevance = Literal["question", "score", "both"]
"""What a passage is weighed by: the likelihood of the question after it, the score that came with it, or both."""

RELEVANCE_FLOOR = 0.01
"""Lower bound of a relevance, so that its logarithm is finite."""


def log_relevance(layout: Layout, passages: Sequence[int]) -> Tensor:
    """Return the log relevance of some passages, at least log 0.01; zeros if the prompt has no relevance.

    Shapes:
        returns: (len(passages),) float32.
    """
    relevance = torch.tensor([layout.relevance[i] if layout.relevance else 1.0 for i in passages])
    return relevance.clamp(min=RELEVANCE_FLOOR).log()


def relevance_rule(source: Relevance, score: Tensor, copies: Sequence[bool] = ()) -> Callable[[Tensor], Tensor]:
    """Return a function from the rows' log-probability of the question to the log relevance of their passages.

    A passage that copied the question counts with the median of those that did not, where its own is lower: without
    the copy it says too little to make the question likely, as the answer of an FAQ does.

    Args:
        copies: For each row whether its passage copied the question; empty if none did.

    Shapes:
        score: (N,), ``log_relevance``. The function: (N,) -> (N,).
    """
    score_on = per_device(score)
    has_both = any(copies) and not all(copies)
    copied_on = per_device(torch.tensor(copies, dtype=torch.bool))
    others_on = per_device(torch.tensor([row for row, copied in enumerate(copies) if not copied], dtype=torch.long))

    def relevance(question: Tensor) -> Tensor:
        if has_both:
            median = question.index_select(0, others_on(question.device)).median()
            question = torch.where(copied_on(question.device), question.clamp(min=median), question)
        if source == "question":
            return question
        return score_on(question.device) + (question if source == "both" else 0.0)

    return relevance


def mixture(log_probs: Tensor, log_weights: Tensor) -> Tensor:
    """Return log sum_r w_r p_r(t), normalised over the vocabulary.

    Shapes:
        log_probs: (R, V). log_weights: (R,). returns: (V,).
    """
    pooled = (log_probs + log_weights[:, None]).logsumexp(dim=0)
    return pooled - pooled.logsumexp(dim=0)


def per_device(tensor: Tensor) -> Callable[[torch.device], Tensor]:
    """Return a function that gives ``tensor`` on a device. It is copied to each device once, not at every token."""
    return functools.cache(lambda device: tensor.to(device))


NGRAM_TOKENS = 3
LETTER_NGRAM_TOKENS = 9
DISTINCT_SHARE = 2 / 3
COPIED_SHARE = 0.6
LEAST_NGRAMS = 4


class CutCopies(NamedTuple):
    """A layout without the copies of the question, and the passages that held one."""

    layout: Layout
    passages: frozenset[int]

    def of_rows(self, passages: Sequence[int]) -> tuple[bool, ...]:
        """Return for each row, which reads one of ``passages``, whether its passage held a copy."""
        return tuple(index in self.passages for index in passages)


def without_copies(layout: Layout) -> CutCopies | None:
    """Return the layout in which a copy of the question is no evidence for a passage; None without copies.

    A passage is a copy if |G(question) & G(passage)| > ``COPIED_SHARE`` |G(question)|, where G is the set of runs of
    ``NGRAM_TOKENS`` tokens; of ``LETTER_NGRAM_TOKENS`` if less than ``DISTINCT_SHARE`` of the question's tokens are
    distinct, because then tokens are letters or bytes, and passages share three of them by chance. The tokens of the
    shared runs are cut out of it, so that the likelihood of the question after it is that of what else it says
    (``relevance_rule`` says how it counts). Its score stays: an entry of an FAQ is retrieved by its question. A
    question with fewer than ``LEAST_NGRAMS`` runs has no copies: passages share the words of a short query because
    they are about it. The heading belongs to the passage: the title of a forum thread is the question.
    """
    question = layout.tokens(layout.question)
    size = NGRAM_TOKENS if len(set(question)) >= DISTINCT_SHARE * len(question) else LETTER_NGRAM_TOKENS
    wanted = set(_ngrams(question, size))
    if len(wanted) < LEAST_NGRAMS:
        return None
    copied = {i: spans for i, text in enumerate(layout.passages) if (spans := _copied(layout, text, wanted, size))}
    if not copied:
        return None
    return CutCopies(layout.cut([span for spans in copied.values() for span in spans]), frozenset(copied))


def _copied(layout: Layout, passage: Span, wanted: set[tuple[int, ...]], size: int) -> list[Span]:
    """Return the tokens of a passage that copy the question, as spans; none unless it shares enough runs with it."""
    ngrams = _ngrams(layout.tokens(passage), size)
    if len(wanted.intersection(ngrams)) <= COPIED_SHARE * len(wanted):
        return []
    spans: list[Span] = []
    for start, ngram in enumerate(ngrams, passage.start):
        if ngram in wanted:
            first = spans.pop().start if spans and spans[-1].stop >= start else start
            spans.append(Span(first, start + size))
    return spans


def _ngrams(tokens: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return list(zip(*(tokens[start:] for start in range(size)), strict=False))
