"""Scores passages by the attention of the prompt's last token, sorting and reading again a few times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from rag_posfix.assembly.layout import Frame, Passage, open_frame
from rag_posfix.contracts.cache_salt import current_salt
from rag_posfix.reranking.base import RERANKERS
from rag_posfix.reranking.deadline import check_time
from rag_posfix.reranking.relevance import shares
from rag_posfix.reranking.windowed import WindowedReader

__all__ = ["AttentionSortingReranker"]


@RERANKERS.register("attention_sorting")
class AttentionSortingReranker(WindowedReader):
    """Let the passages that get the most attention move to the end of the prompt, and look again.

    A model that is about to answer attends more to a relevant passage than to another in the same place, and more to
    passages near the end. Sorting by attention brings the relevant ones there, where they get more of it still.

    Source: Peysakhovich and Lerer (2023), Attention Sorting Combats Recency Bias, https://arxiv.org/abs/2310.01427
    Formula: attention of passage k = sum over its tokens of the attention of the prompt's last token, averaged over
        layers and heads. Each round reads the prompt with the passages sorted by it, the highest last. The ranking
        is the sort after the last round. relevance_score = the passage's share of the attention to all passages in
        the last reading, in [0, 1]; ``raw_score`` is the attention.
    Differs from the paper: passages start in an order that their content decides (``order="given"`` starts as they
        came). Rounds end when the order does not change any more. What is returned is best first: the order of the
        prompt is chosen later.
    Cost: tokens read: the whole prompt once per round; later rounds do not read again what the passage store holds
        of leading passages.
    Limits: for models that attend most to the end; where the end is the worst place, sorting strengthens the bias.
        The first round's order has a part in the result.

    Attributes:
        generator: The served model; an ``Engine``, or a ``BatchingGenerator`` around one.
        top_n: How many passages to return, all if None.
        window: Passages that are read together at most; those after them keep their order, with score 0.
        stride: Reads all candidates in overlapping windows from the last to the first.
        max_document_tokens: Longer documents are read up to here (``long_document: "truncated"``).
        order: ``canonical`` or ``given``: how passages stand in the first prompt.
        rounds: How often the prompt is read at most.
        normalize: Sort by the attention per token: without, long passages get more for being long.
    """

    name: ClassVar[str] = "attention_sorting"

    rounds: int = Field(default=3, ge=1, le=5)
    normalize: bool = False

    def _frames(self, question: str, count: int) -> Sequence[Frame]:
        return [open_frame(self.generator.encoder, self._template, question, with_passages=True)]

    def _measure(self, frames: Sequence[Frame], passages: Sequence[Passage]) -> Sequence[float]:
        order = list(range(len(passages)))
        attention: dict[int, float] = {}
        for _ in range(self.rounds):
            check_time()
            layout = frames[0].around([passages[index] for index in order])
            (measured,) = self.generator.passage_attention([layout], current_salt(), check_time)
            for index, value in zip(order, measured, strict=True):
                attention[index] = value if self.normalize else value * len(passages[index])
            ascending = sorted(order, key=attention.__getitem__)
            if ascending == order:
                break
            order = ascending
        return [attention[index] for index in range(len(passages))]

    def _relevance(self, raw: Sequence[float]) -> Sequence[float]:
        return shares(raw)
