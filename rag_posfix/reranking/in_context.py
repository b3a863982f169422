"""Scores passages by the attention that the question pays to them, less what any question would pay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from rag_posfix.assembly.layout import Frame, Passage, open_frame
from rag_posfix.assembly.prompt import PromptTemplate
from rag_posfix.contracts.cache_salt import current_salt
from rag_posfix.reranking.base import RERANKERS
from rag_posfix.reranking.deadline import check_time
from rag_posfix.reranking.relevance import standing
from rag_posfix.reranking.windowed import WindowedReader

__all__ = ["InContextReranker", "calibrated_score"]

CONTENT_FREE = "N/A"

INSTRUCTION = "Find the passages above that hold information for the following query.\n\nQuery: "


@RERANKERS.register("in_context", aliases=("icr",))
class InContextReranker(WindowedReader):
    """Read all passages at once and see which of them the question attends to more than a question about nothing does.

    Attention to a passage is part relevance, part habit: of its place, its punctuation, its length. The same prompt
    with the query "N/A" has the habit alone; what is left after taking it away is relevance.

    Source: Chen et al. (2025), Attention in Large Language Models Yields Efficient Zero-Shot Re-Rankers, section 3,
        https://arxiv.org/abs/2410.02642
    Formula: s(i; Q) = sum over layers and heads of the mean over the tokens t of the query part of A(t, i);
        c(i) = s(i; Q) - s(i; "N/A"); score of passage k = sum of its c(i), those below mean - 2 std of the passage
        left out. relevance_score = sigmoid of the score's distance from the mean of the list in standard deviations:
        0.5 is the average passage; ``raw_score`` is the sum itself and may be negative.
    Differs from the paper: passages carry no numbers, and stand in an order that their content decides, so that the
        ranking does not depend on the incoming order (a causal model reads each passage after those before it). The
        words around the passages are those of an answer's prompt, the query part aside. The query part is all that
        follows the passages, as in the authors' code. Heading and text count, the separator does not.
    Cost: tokens read: prefix and passages once, the query part once for "N/A" and once for the question. Nothing is
        generated. Of the attention, only the rows of the query part are spelled out. What the passage store holds of
        prefix and leading passages is not read again. Models with sliding windows read the whole prompt twice.
    Limits: a sum favours long passages (``normalize``). More candidates than ``window`` are not read, or in windows.

    Attributes:
        generator: The served model; an ``Engine``, or a ``BatchingGenerator`` around one.
        top_n: How many passages to return, all if None.
        window: Passages that are read together at most; those after them keep their order, with score 0.
        stride: Reads all candidates in overlapping windows from the last to the first; the authors found it worse.
        max_document_tokens: Longer documents are read up to here (``long_document: "truncated"``).
        order: ``canonical`` or ``given``: how passages stand in the prompt.
        normalize: Divide each sum by the number of tokens in it. The paper does not.
        layers: Which layers of the model are looked at, from 0; all if None, as in the paper. Few layers look for what
            was asked (Selective-ICR, https://arxiv.org/abs/2602.22591, takes those in the middle).
    """

    name: ClassVar[str] = "in_context"

    normalize: bool = False
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(default=None, min_length=1)

    def _frames(self, question: str, count: int) -> Sequence[Frame]:
        encoder, template = self.generator.encoder, PromptTemplate(question_prefix=INSTRUCTION, answer_cue="")
        return [open_frame(encoder, template, asked, with_passages=True) for asked in (CONTENT_FREE, question)]

    def _measure(self, frames: Sequence[Frame], passages: Sequence[Passage]) -> Sequence[float]:
        layouts = [frame.around(passages) for frame in frames]
        without, asked = self.generator.question_attention(layouts, current_salt(), check_time, self.layers)
        return [
            calibrated_score(
                [one - other for one, other in zip(paid, habit, strict=True)][: len(passage) - len(passage.separator)],
                self.normalize,
            )
            for passage, paid, habit in zip(passages, asked, without, strict=True)
        ]

    def _relevance(self, raw: Sequence[float]) -> Sequence[float]:
        return standing(raw)


def calibrated_score(tokens: Sequence[float], normalize: bool = False) -> float:
    """Return the score of a passage from the calibrated attention of its tokens.

    Formula: sum of the c_i with c_i >= mean(c) - 2 std(c), std with n - 1; divided by their number if ``normalize``.
        All count where there are fewer than two.
    """
    threshold = -math.inf
    if len(tokens) > 1:
        mean = math.fsum(tokens) / len(tokens)
        deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in tokens) / (len(tokens) - 1))
        threshold = mean - 2 * deviation
    kept = [one for one in tokens if not one < threshold]  # not a number stays one
    total = math.fsum(kept)
    return total / max(len(kept), 1) if normalize else total
