"""Methods with several rows: the relevance of passages as log weights, the mixture of rows, copies of the question."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal

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


def relevance_rule(source: Relevance, score: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function from the rows' log-probability of the question to the log relevance of their passages.

    Shapes:
        score: (N,), ``log_relevance``. The function: (N,) -> (N,).
    """
    score_on = per_device(score)

    def relevance(question: Tensor) -> Tensor:
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


def without_copies(layout: Layout) -> Layout | None:
    """Return the layout in which a copy of the question is no evidence for a passage; None without copies.

    A passage is a copy if |G(question) & G(passage)| > ``COPIED_SHARE`` |G(question)|, where G is the set of runs of
    ``NGRAM_TOKENS`` tokens; of ``LETTER_NGRAM_TOKENS`` if less than ``DISTINCT_SHARE`` of the question's tokens are
    distinct, because then tokens are letters or bytes, and passages share three of them by chance. The tokens of the
    shared runs are cut out of it, so that the likelihood of the question after it is that of what else it says. Its
    score stays: an entry of an FAQ is retrieved by its question, and an echo has nothing else to say. A question with
    fewer than ``LEAST_NGRAMS`` runs has no copies: passages share the words of a short query because they are about
    it. The heading belongs to the passage: the title of a forum thread is the question.
    """
    question = layout.tokens(layout.question)
    size = NGRAM_TOKENS if len(set(question)) >= DISTINCT_SHARE * len(question) else LETTER_NGRAM_TOKENS
    wanted = set(_ngrams(question, size))
    if len(wanted) < LEAST_NGRAMS:
        return None
    copied = [spans for passage in layout.passages if (spans := _copied(layout, passage, wanted, size))]
    if not copied:
        return None
    return layout.cut([span for spans in copied for span in spans])


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
