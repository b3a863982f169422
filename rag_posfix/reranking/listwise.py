"""Asks the model to write the ranking: the usual way, and what the others are compared with."""

from __future__ import annotations

import re
from collections.abc import Generator as Closable
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import PrivateAttr

from rag_posfix.assembly.layout import Frame, Passage, open_frame
from rag_posfix.assembly.prompt import PromptTemplate
from rag_posfix.contracts.cache_salt import current_salt
from rag_posfix.contracts.request import GenerationRequest, Sampling
from rag_posfix.reranking.base import RERANKERS
from rag_posfix.reranking.deadline import check_time
from rag_posfix.reranking.windowed import WindowedReranker

__all__ = ["ListwiseReranker", "repaired"]

SLACK_TOKENS = 8
"""Tokens that an answer may have beyond the complete ranking."""


@RERANKERS.register("listwise", aliases=("rankgpt",))
class ListwiseReranker(WindowedReranker):
    """Number the passages and let the model write their numbers, best first.

    Source: Sun et al. (2023), Is ChatGPT Good at Search?, section 3, https://arxiv.org/abs/2304.09542
    Formula: one greedy generation per window, "[2] > [3] > [1]". Numbers that no passage has and repeated ones are
        dropped; passages that were not named follow in their incoming order. ``raw_score`` is n - place;
        relevance_score = (n - place) / n, place from 0, in (0, 1].
    Differs from the paper: one window by default (``stride=10`` reads all candidates, as the paper does).
    Cost: tokens read: the whole prompt once per window. Forward passes: one, and one for every further token of the
        ranking, about five per passage.
    Limits: any generator, those that only generate included. Small models seldom write a ranking that can be read;
        what they do not name keeps its order. The result depends on the incoming order.

    Attributes:
        generator: The served model; any generator.
        top_n: How many passages to return, all if None.
        window: Passages that are read together at most; those after them keep their order, with score 0.
        stride: Reads all candidates in overlapping windows from the last to the first.
        max_document_tokens: Longer documents are read up to here (``long_document: "truncated"``).
        order: ``given`` or ``canonical``: how passages stand in the prompt. ``given`` is the paper's, and what the
            repair of an incomplete ranking falls back to.
        generations: How many rankings the model was asked to write so far.
    """

    name: ClassVar[str] = "listwise"

    order: Literal["canonical", "given"] = "given"
    _generations: int = PrivateAttr(default=0)

    @property
    def generations(self) -> int:
        """How many rankings the model was asked to write so far."""
        return self._generations

    def _frames(self, question: str, count: int) -> Sequence[Frame]:
        template = PromptTemplate(
            instruction=f"Below are {count} passages, each with a number in brackets.",
            question_prefix="Query: ",
            answer_cue=(
                f"\n\nRank the {count} passages above by their relevance to the query, the most relevant first. Write "
                "nothing but the numbers of all passages, like this: [2] > [3] > [1]"
            ),
        )
        return [open_frame(self.generator.encoder, template, question, with_passages=True)]

    def _marked(self, passages: Sequence[Passage]) -> Sequence[Passage]:
        marks = [tuple(self.generator.encoder.encode_text(f"[{place + 1}] ")) for place in range(len(passages))]
        return [
            replace(passage, heading=(*mark, *passage.heading)) for mark, passage in zip(marks, passages, strict=True)
        ]

    def _answer_tokens(self, count: int) -> int:
        complete = " > ".join(f"[{place + 1}]" for place in range(count))
        return len(self.generator.encoder.encode_text(complete)) + SLACK_TOKENS

    def _room_after(self, frames: Sequence[Frame], count: int) -> int:
        marks = count * len(self.generator.encoder.encode_text(f"[{count}] "))
        return super()._room_after(frames, count) - marks - self._answer_tokens(count)

    def _measure(self, frames: Sequence[Frame], passages: Sequence[Passage]) -> Sequence[float]:
        n = len(passages)
        sampling = Sampling(max_tokens=self._answer_tokens(n))
        request = GenerationRequest(frames[0].around(passages), sampling=sampling, salt=current_salt())
        self._generations += 1
        places = repaired(self._written(request), n)
        return [float(n - places.index(index)) for index in range(n)]

    def _written(self, request: GenerationRequest) -> str:
        """Return the answer; the deadline is looked at after each piece of it."""
        stream, text = self.generator.stream(request), ""
        try:
            for chunk in stream:
                text += chunk.text
                check_time()
        finally:
            if isinstance(stream, Closable):
                stream.close()  # which stops the model
        return text

    def _relevance(self, raw: Sequence[float]) -> Sequence[float]:
        return [value / len(raw) for value in raw]


def repaired(text: str, count: int) -> list[int]:
    """Return the ranking in a text as indices from 0, complete: each index once.

    Args:
        text: What the model wrote; numbers count from 1.
        count: How many passages there are.
    """
    named = [int(number) - 1 for number in re.findall(r"[0-9]{1,9}", text)]
    ranked = list(dict.fromkeys(index for index in named if 0 <= index < count))
    return [*ranked, *(index for index in range(count) if index not in ranked)]
