"""Listwise reranking by generation: the model writes the ranking. The baseline of the other rerankers."""

from __future__ import annotations

import re
from collections.abc import Generator as GeneratorIterator
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import PrivateAttr

from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.assembly.tokenization import TokenizedPassage, TokenizedPrompt, label_passage, tokenize_prompt
from rag_posfix.contracts.request import GenerationRequest, Sampling, current_salt
from rag_posfix.reranking.base import RERANKERS
from rag_posfix.reranking.deadline import check_deadline
from rag_posfix.reranking.language_model import WindowedReranker

SLACK_TOKENS = 8
"""Tokens that are allowed for an answer in addition to a complete ranking."""


@RERANKERS.register("listwise", aliases=("rankgpt",))
class ListwiseReranker(WindowedReranker):
    """Number the passages and let the model generate their numbers, best first.

    Source: Sun et al. (2023), Is ChatGPT Good at Search?, section 3, https://arxiv.org/abs/2304.09542
    Formula: one greedy generation per window, "[2] > [3] > [1]". Unknown and repeated numbers are ignored; passages
        that are not named follow in prompt order. ``raw_score`` is n - rank; relevance_score = (n - rank) / n, rank
        from 0, in (0, 1].
    Differs from the paper: one window by default (``stride=10`` reads all candidates, as the paper does).
    Cost: tokens read: the whole prompt once per window. Forward passes: one, and one for each further token of the
        ranking, about five per passage.
    Limits: any generator, including those that can only generate. Small models rarely write a complete ranking;
        passages that they do not name keep their order. The result depends on the given order.

    Attributes:
        generator: The served model; any generator.
        top_n: Number of passages to return, all if None.
        window: Maximum number of passages in one prompt; later candidates keep their order, with score 0.
        stride: Reads all candidates in overlapping windows from the last to the first.
        max_document_tokens: Token limit of a document; a longer one is cut (``long_document: "truncated"``).
        order: Order of the passages in the prompt: ``input``, the given order, as in the paper, or ``canonical`` (by
            content hash). An incomplete ranking is completed in this order.
        generations: Number of rankings that the model has generated.
    """

    name: ClassVar[str] = "listwise"

    order: Literal["canonical", "input"] = "input"
    _generations: int = PrivateAttr(default=0)

    @property
    def generations(self) -> int:
        """Number of rankings that the model has generated."""
        return self._generations

    def _prompts(self, question: str, count: int) -> Sequence[TokenizedPrompt]:
        template = PromptTemplate(
            instruction=f"Below are {count} passages, each with a number in brackets.",
            question_prefix="Query: ",
            answer_cue=(
                f"\n\nRank the {count} passages above by their relevance to the query, the most relevant first. Write "
                "nothing but the numbers of all passages, like this: [2] > [3] > [1]"
            ),
        )
        return [tokenize_prompt(self.generator.encoder, template, question)]

    def _labelled(self, passages: Sequence[TokenizedPassage]) -> Sequence[TokenizedPassage]:
        encoder = self.generator.encoder
        return [label_passage(encoder, passage, f"[{n}] ") for n, passage in enumerate(passages, start=1)]

    def _answer_tokens(self, count: int) -> int:
        complete = " > ".join(f"[{number}]" for number in range(1, count + 1))
        return len(self.generator.encoder.encode_text(complete)) + SLACK_TOKENS

    def _max_passage_tokens(self, prompts: Sequence[TokenizedPrompt], count: int) -> int:
        labels = count * len(self.generator.encoder.encode_text(f"[{count}] "))
        return super()._max_passage_tokens(prompts, count) - labels - self._answer_tokens(count)

    def _raw_scores(self, prompts: Sequence[TokenizedPrompt], passages: Sequence[TokenizedPassage]) -> Sequence[float]:
        n = len(passages)
        sampling = Sampling(max_tokens=self._answer_tokens(n))
        request = GenerationRequest(prompts[0].with_passages(passages), sampling=sampling, salt=current_salt())
        self._generations += 1
        ranking = parse_ranking(self._generated_text(request), n)
        return [float(n - ranking.index(index)) for index in range(n)]

    def _generated_text(self, request: GenerationRequest) -> str:
        """Return the answer; the deadline is checked after each chunk of it."""
        stream, text = self.generator.stream(request), ""
        try:
            for chunk in stream:
                text += chunk.text
                check_deadline()
        finally:
            if isinstance(stream, GeneratorIterator):
                stream.close()  # stops the model
        return text

    def _normalized(self, raw: Sequence[float]) -> Sequence[float]:
        return [value / len(raw) for value in raw]


def parse_ranking(text: str, count: int) -> list[int]:
    """Return the ranking that a text contains as indices from 0; missing indices follow in ascending order."""
    named = [int(number) - 1 for number in re.findall(r"[0-9]{1,9}", text)]
    ranked = list(dict.fromkeys(index for index in named if 0 <= index < count))
    return [*ranked, *(index for index in range(count) if index not in ranked)]
