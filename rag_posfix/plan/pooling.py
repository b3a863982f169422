"""Methods with several rows: the relevance of passages as log weights, the mixture of rows, copies of the question."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence, Set
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


Rule = Callable[[Tensor], Tensor]
"""(N,) log-probabilities of the question in the rows -> (N,) log relevance of their passages."""


def relevance_rule(source: Relevance, layout: Layout, passages: Sequence[int], cut: CutCopies | None = None) -> Rule:
    """Return the function from the rows' log-probability of the question to the log relevance of their passages.

    Args:
        passages: The passage of each row.
        cut: The copies of the question that were cut to make ``layout``.
    """
    score_on = per_device(log_relevance(layout, passages))
    neutral: Rule = (lambda question: question) if cut is None else cut.neutral(passages)

    def relevance(question: Tensor) -> Tensor:
        question = neutral(question)
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
SIBLING_SHARE = 1 / 3
LEAST_NGRAMS = 4


class CutCopies(NamedTuple):
    """A layout without the copies of the question.

    Attributes:
        copies: The passages that held one.
        siblings: The passages that ask in the same words about something else, as entries of one FAQ do.
    """

    layout: Layout
    copies: frozenset[int]
    siblings: frozenset[int]

    def neutral(self, passages: Sequence[int]) -> Rule:
        """Return a function from the rows' log-probability of the question to one in which copies count for nothing.

        A passage that held a copy counts with the median of the others where its own is lower: without the copy it
        says too little to make the question likely, as the answer of an FAQ does. A sibling counts at most as much as
        the best such passage: its words are those of the question because it asks too, and the scores decide.

        Args:
            passages: The passage of each row.

        Shapes:
            (N,) -> (N,).
        """
        copied, asking = ([index in group for index in passages] for group in (self.copies, self.siblings))
        if not any(copied) or all(copied):
            return lambda question: question
        copied_on, asking_on = per_device(torch.tensor(copied)), per_device(torch.tensor(asking))
        rows = [[row for row, is_copy in enumerate(copied) if is_copy == wanted] for wanted in (True, False)]
        copies_on, others_on = per_device(torch.tensor(rows[0])), per_device(torch.tensor(rows[1]))

        def neutral(question: Tensor) -> Tensor:
            device = question.device
            median = question.index_select(0, others_on(device)).median()
            question = torch.where(copied_on(device), question.clamp(min=median), question)
            best = question.index_select(0, copies_on(device)).amax()
            return torch.where(asking_on(device), question.clamp(max=best), question)

        return neutral


def without_copies(layout: Layout) -> CutCopies | None:
    """Return the layout in which a copy of the question is no evidence for a passage; None without copies.

    A passage is a copy if |G(question) & G(passage)| > ``COPIED_SHARE`` |G(question)|, where G is the set of runs of
    ``NGRAM_TOKENS`` tokens; of ``LETTER_NGRAM_TOKENS`` if less than ``DISTINCT_SHARE`` of the question's tokens are
    distinct, because then tokens are letters or bytes, and passages share three of them by chance. The tokens of the
    shared runs are cut out of it, so that the likelihood of the question after it is that of what else it says
    (``CutCopies.neutral`` says how it counts). Its score stays: an entry of an FAQ is retrieved by its question. Where
    there is a copy, the runs are also cut out of its siblings: passages with the first run of the question, which
    holds the interrogative, and more than ``SIBLING_SHARE`` of all. A question with fewer than ``LEAST_NGRAMS`` runs
    has no copies: passages share the words of a short query because they are about it. The heading belongs to the
    passage: the title of a forum thread is the question.
    """
    question = layout.tokens(layout.question)
    size = NGRAM_TOKENS if len(set(question)) >= DISTINCT_SHARE * len(question) else LETTER_NGRAM_TOKENS
    wanted = set(_ngrams(question, size))
    if len(wanted) < LEAST_NGRAMS:
        return None
    shared = [_ngrams(layout.tokens(passage), size) for passage in layout.passages]
    shares = [len(wanted.intersection(ngrams)) / len(wanted) for ngrams in shared]
    copies = frozenset(i for i, share in enumerate(shares) if share > COPIED_SHARE)
    if not copies:
        return None
    first = question[:size]
    asking = (i for i, share in enumerate(shares) if share > SIBLING_SHARE and first in shared[i])
    siblings = frozenset(asking) - copies
    spans = [
        _spans(ngrams, wanted, layout.passages[i].start) for i, ngrams in enumerate(shared) if i in copies | siblings
    ]
    return CutCopies(layout.cut([span for each in spans for span in each]), copies, siblings)


def _spans(ngrams: Sequence[tuple[int, ...]], wanted: Set[tuple[int, ...]], start: int) -> list[Span]:
    """Return the tokens of the wanted runs, in a passage that begins at ``start``, as spans."""
    spans: list[Span] = []
    for offset, ngram in enumerate(ngrams, start):
        if ngram in wanted:
            first = spans.pop().start if spans and spans[-1].stop >= offset else offset
            spans.append(Span(first, offset + len(ngram)))
    return spans


def _ngrams(tokens: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return list(zip(*(tokens[start:] for start in range(size)), strict=False))
