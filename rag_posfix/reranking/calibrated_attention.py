"""Scores passages by the attention of the prompt's last token, less what a passage about nothing gets there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from rag_posfix.assembly.layout import Frame, Passage, open_frame
from rag_posfix.contracts.cache_salt import current_salt
from rag_posfix.plan.bias_profile import BIAS_PROFILE, FileReader, bias_profile_from, scaled
from rag_posfix.plan.dummy import with_dummy
from rag_posfix.reranking.base import RERANKERS
from rag_posfix.reranking.deadline import check_time
from rag_posfix.reranking.relevance import standing
from rag_posfix.reranking.windowed import WindowedReader

__all__ = ["CalibratedAttentionReranker"]


@RERANKERS.register("calibrated_attention")
class CalibratedAttentionReranker(WindowedReader):
    """Take away from the attention that each passage gets what a passage about nothing would get in its place.

    Source: Hsieh et al. (2024), Found in the Middle: Calibrating Positional Attention Bias, section 3,
        https://arxiv.org/abs/2406.16008
    Formula: Attn(D, k) = mean attention per token of passage D in slot k, by the prompt's last token, averaged over
        layers and heads; rel(D_k) = Attn(D_k, k) - Attn(dummy, k), the other passages staying where they are.
        relevance_score = sigmoid of rel's distance from the mean of the list in standard deviations: 0.5 is the
        average passage; ``raw_score`` is rel and may be negative.
    Differs from the paper: the question is not repeated before the passages. The paper leaves the dummy open: here it
        is as long as the passage and repeats the sixteen tokens that stand in the most passages. A stored profile of
        the slots may stand in for the dummies; it is stretched to the number of slots and scaled to the prompt's mean
        attention. Passages stand in an order that their content decides.
    Cost: tokens read: the whole prompt once, and again from each dummy on: about N / 2 + 1 prompts for N passages.
        With a profile one prompt.
    Limits: attention is read at one token, where the bias of place is large and the signal small; ``in_context`` costs
        less and averages over the question.

    Attributes:
        generator: The served model; an ``Engine``, or a ``BatchingGenerator`` around one.
        top_n: How many passages to return, all if None.
        window: Passages that are read together at most; those after them keep their order, with score 0.
        stride: Reads all candidates in overlapping windows from the last to the first.
        max_document_tokens: Longer documents are read up to here (``long_document: "truncated"``).
        order: ``canonical`` or ``given``: how passages stand in the prompt.
        profile: Attention of each slot to a dummy, 2 to 1000 numbers of 0 and above in any unit, measured before. On
            the command line also the path of a file that ``rag-posfix probe slot-attention`` wrote. None reads a dummy
            in each slot.
    """

    name: ClassVar[str] = "calibrated_attention"
    file_parameters: ClassVar[Mapping[str, FileReader]] = MappingProxyType({"profile": bias_profile_from("profile")})

    profile: tuple[float, ...] | None = None

    @field_validator("profile", mode="before")
    @classmethod
    def _usable(cls, value: Any) -> tuple[float, ...] | None:
        if value is None:
            return None
        try:
            return BIAS_PROFILE.check(value)
        except ValueError as error:
            raise PydanticCustomError("profile", "must be {allowed}", {"allowed": BIAS_PROFILE.allowed}) from error

    def _frames(self, question: str, count: int) -> Sequence[Frame]:
        return [open_frame(self.generator.encoder, self._template, question, with_passages=True)]

    def _measure(self, frames: Sequence[Frame], passages: Sequence[Passage]) -> Sequence[float]:
        layout = frames[0].around(passages)
        dummies = [] if self.profile else [with_dummy(layout, slot) for slot in range(len(passages))]
        measured, *others = self.generator.passage_attention([layout, *dummies], current_salt(), check_time)
        if self.profile:
            bias: Sequence[float] = scaled(self.profile, measured)
        else:
            bias = [other[slot] for slot, other in enumerate(others)]
        return [value - expected for value, expected in zip(measured, bias, strict=True)]

    def _relevance(self, raw: Sequence[float]) -> Sequence[float]:
        return standing(raw)
