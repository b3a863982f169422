"""Scores passages by the attention of the question's tokens to them minus a content-free question's attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.assembly.tokenization import TokenizedPassage, TokenizedPrompt, tokenize_prompt
from rag_posfix.contracts.request import current_salt
from rag_posfix.plan.bias_profile import FileReader, read_head_list
from rag_posfix.reranking.base import RERANKERS, sigmoid_of_z_scores
from rag_posfix.reranking.deadline import check_deadline
from rag_posfix.reranking.language_model import PassageReadingReranker, WindowedReranker

CONTENT_FREE = "N/A"

INSTRUCTION = "Find the passages above that hold information for the following query.\n\nQuery: "


@RERANKERS.register("in_context", aliases=("icr",))
class InContextReranker(PassageReadingReranker, WindowedReranker):
    """Read all passages in one prompt and compare the question's attention to them with a content-free question's.

    Attention to a passage depends on its relevance, and also on its position, punctuation and length. With the query
    "N/A" only the latter remain; the difference of both measures relevance.

    Source: Chen et al. (2025), Attention in Large Language Models Yields Efficient Zero-Shot Re-Rankers, section 3,
        https://arxiv.org/abs/2410.02642
    Formula: s(i; Q) = sum over layers and heads of the mean over the tokens t of the query part of A(t, i);
        c(i) = s(i; Q) - s(i; "N/A"); score of passage k = sum of its c(i), without those below mean - 2 std of the
        passage. relevance_score = sigmoid of the score's z-score in the list: 0.5 for the mean; ``raw_score`` is the
        sum and may be negative.
    Differs from the paper: passages have no numbers and are ordered by their content hashes, so that the ranking does
        not depend on the given order. The prompt is that of an answer except for the query part, which is all text
        after the passages, as in the authors' code. Heading and text count, the separator does not.
    Cost: tokens read: prefix and passages once, the query part once for "N/A" and once for the question. Nothing is
        generated. Attention weights are computed for the rows of the query part only. Prefix and leading passages
        whose keys and values are in the passage store are not read again. Models with sliding windows read the whole
        prompt twice.
    Limits: a sum favours long passages (see ``normalize``). Candidates beyond ``window`` are not read unless
        ``stride`` is set.

    Attributes:
        generator: The served model; an ``Engine``, or a ``BatchingGenerator`` around one.
        top_n: Number of passages to return, all if None.
        window: Maximum number of passages in one prompt; later candidates keep their order, with score 0.
        stride: Reads all candidates in overlapping windows from the last to the first; the authors found it worse.
        max_document_tokens: Token limit of a document; a longer one is cut (``long_document: "truncated"``).
        order: Order of the passages in the prompt: ``canonical`` (by content hash) or ``input`` (as given).
        normalize: Divide each sum by its number of tokens; the paper does not.
        layers: Indices of the layers that are used, from 0; all if None, as in the paper. Only few layers carry the
            signal (Selective-ICR, https://arxiv.org/abs/2602.22591, uses those in the middle).
        heads: The query heads that are used, as [[layer, head], ...] from 0, in place of ``layers``; all if None. On
            the command line also a record of ``rag-posfix probe retrieval-heads``, or ``smollm2`` or ``gemma3-270m``
            for the shipped lists. Few heads retrieve (QRHead, https://arxiv.org/abs/2506.09944; CoRe,
            https://arxiv.org/abs/2510.02219).
    """

    name: ClassVar[str] = "in_context"
    file_parameters: ClassVar[Mapping[str, FileReader]] = MappingProxyType({"heads": read_head_list})

    normalize: bool = False
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(default=None, min_length=1)
    heads: tuple[tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]], ...] | None = Field(
        default=None, min_length=1
    )

    @model_validator(mode="after")
    def _layers_or_heads(self) -> Self:
        if self.layers is not None and self.heads is not None:
            raise PydanticCustomError("heads", "layers and heads exclude each other; give one of the two")
        return self

    def _prompts(self, question: str, count: int) -> Sequence[TokenizedPrompt]:
        template = PromptTemplate(question_prefix=INSTRUCTION, answer_cue="")
        return [tokenize_prompt(self.generator.encoder, template, query) for query in (CONTENT_FREE, question)]

    def _raw_scores(self, prompts: Sequence[TokenizedPrompt], passages: Sequence[TokenizedPassage]) -> Sequence[float]:
        layouts = [prompt.with_passages(passages) for prompt in prompts]
        baseline, attention = self.generator.question_attention(
            layouts, current_salt(), check_deadline, self.layers, self.heads
        )
        scores = []
        for passage, content_free, measured in zip(passages, baseline, attention, strict=True):
            calibrated = [value - bias for value, bias in zip(measured, content_free, strict=True)]
            scores.append(calibrated_score(calibrated[: passage.text.stop], self.normalize))
        return scores

    def _normalized(self, raw: Sequence[float]) -> Sequence[float]:
        return sigmoid_of_z_scores(raw)


def calibrated_score(tokens: Sequence[float], normalize: bool = False) -> float:
    """Return the score of a passage from the calibrated attention of its tokens.

    Formula: sum of the c_i with c_i >= mean(c) - 2 std(c), std with n - 1; divided by their number if ``normalize``.
        All c_i count if there are fewer than two.
    """
    threshold = -math.inf
    if len(tokens) > 1:
        mean = math.fsum(tokens) / len(tokens)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in tokens) / (len(tokens) - 1))
        threshold = mean - 2 * deviation
    retained = [value for value in tokens if not value < threshold]  # keeps NaN, which is reported later
    total = math.fsum(retained)
    return total / max(len(retained), 1) if normalize else total
