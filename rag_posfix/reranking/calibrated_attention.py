"""Scores passages by the last token's attention to them minus its attention to a dummy passage in the same slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, ClassVar

from rag_posfix.assembly.tokenization import TokenizedPassage, TokenizedPrompt, tokenize_prompt
from rag_posfix.contracts.request import current_salt
from rag_posfix.plan.bias_profile import BIAS_PROFILE, FileReader, bias_profile_from, scaled, with_dummy
from rag_posfix.reranking.base import RERANKERS, sigmoid_of_z_scores
from rag_posfix.reranking.deadline import check_deadline
from rag_posfix.reranking.language_model import PassageReadingReranker, WindowedReranker


@RERANKERS.register("calibrated_attention")
class CalibratedAttentionReranker(PassageReadingReranker, WindowedReranker):
    """Subtract from the attention to each passage the attention to a dummy passage in the same slot.

    Source: Hsieh et al. (2024), Found in the Middle: Calibrating Positional Attention Bias, section 3,
        https://arxiv.org/abs/2406.16008
    Formula: Attn(D, k) = mean attention of the prompt's last token to the tokens of passage D in slot k, averaged over
        layers and heads; rel(D_k) = Attn(D_k, k) - Attn(dummy, k), where the other passages stay in their slots.
        relevance_score = sigmoid of the z-score of rel in the list: 0.5 for the mean; ``raw_score`` is rel and may be
        negative.
    Differs from the paper: the question is not repeated before the passages. The paper does not specify the dummy:
        here it has the length of the passage and repeats the sixteen tokens that occur in the most passages. A stored
        profile of the slots may replace the dummies; it is interpolated to the number of slots and scaled to the mean
        attention of the prompt.
    Cost: tokens read: the whole prompt once, and for each dummy all tokens from it to the end: about N / 2 + 1 prompts
        for N passages. With a profile one prompt.
    Limits: attention is measured at one token, where the position bias is large compared with the signal;
        ``in_context`` costs less and averages over the tokens of the question.

    Attributes:
        generator: The served model; an ``Engine``, or a ``BatchingGenerator`` around one.
        top_n: Number of passages to return, all if None.
        window: Maximum number of passages in one prompt; later candidates keep their order, with score 0.
        stride: Reads all candidates in overlapping windows from the last to the first.
        max_document_tokens: Token limit of a document; a longer one is cut (``long_document: "truncated"``).
        order: Order of the passages in the prompt: ``canonical`` (by content hash) or ``input`` (as given).
        profile: Measured attention to a dummy in each slot, 2 to 1000 numbers of 0 and above in any unit. The command
            line also takes the path of a record of ``rag-posfix probe slot-attention``. None reads a dummy in each
            slot.
    """

    name: ClassVar[str] = "calibrated_attention"
    file_parameters: ClassVar[Mapping[str, FileReader]] = MappingProxyType({"profile": bias_profile_from("profile")})

    profile: Annotated[tuple[float, ...] | None, BIAS_PROFILE] = None

    def _prompts(self, question: str, count: int) -> Sequence[TokenizedPrompt]:
        return [tokenize_prompt(self.generator.encoder, self._template, question)]

    def _raw_scores(self, prompts: Sequence[TokenizedPrompt], passages: Sequence[TokenizedPassage]) -> Sequence[float]:
        layout = prompts[0].with_passages(passages)
        dummies = [] if self.profile else [with_dummy(layout, slot) for slot in range(len(passages))]
        measured, *baselines = self.generator.passage_attention([layout, *dummies], current_salt(), check_deadline)
        if self.profile:
            bias: Sequence[float] = scaled(self.profile, measured)
        else:
            bias = [attention[slot] for slot, attention in enumerate(baselines)]
        return [value - expected for value, expected in zip(measured, bias, strict=True)]

    def _normalized(self, raw: Sequence[float]) -> Sequence[float]:
        return sigmoid_of_z_scores(raw)
