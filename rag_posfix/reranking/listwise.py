"""Listwise reranking by generation: the model writes the ranking. The baseline of the other rerankers."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Generator as GeneratorIterator
from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.assembly.tokenization import (
    TokenizedPassage,
    TokenizedPrompt,
    label_passage,
    tokenize_passage,
    tokenize_prompt,
)
from rag_posfix.contracts.request import GenerationRequest, Sampling, current_salt
from rag_posfix.reranking.base import RERANKERS, log_sum
from rag_posfix.reranking.deadline import check_deadline
from rag_posfix.reranking.language_model import WindowedReranker

SLACK_TOKENS = 8
"""Tokens that are allowed for an answer in addition to a complete ranking."""

LETTERS = string.ascii_uppercase
"""Labels of one token in every vocabulary; a number above 9 takes two tokens in many."""


@RERANKERS.register("listwise", aliases=("rankgpt",))
class ListwiseReranker(WindowedReranker):
    """Number the passages and let the model generate their numbers, best first.

    Source: Sun et al. (2023), Is ChatGPT Good at Search?, section 3, https://arxiv.org/abs/2304.09542; ``calibrate``:
        Lv et al. (2026), CapCal, https://arxiv.org/abs/2604.10150, on the first token alone, as Reddy et al. (2024),
        FIRST, https://arxiv.org/abs/2406.15657
    Formula: one greedy generation per window, "[2] > [3] > [1]". Unknown and repeated numbers are ignored; passages
        that are not named follow in prompt order. ``raw_score`` is n - rank; relevance_score = (n - rank) / n, rank
        from 0, in (0, 1].
        With ``calibrate`` passages have letters, and the first token of the ranking decides: raw_score =
        log p(letter k | passages, question) - log p(letter k | as many empty passages, question); relevance_score is
        the softmax over the window.
    Differs from the paper: one window by default (``stride=10`` reads all candidates, as RankGPT does). The prior of
        empty passages has the weight 1; CapCal's depends on entropy.
    Cost: tokens read: the whole prompt once per window. Forward passes: one, and one for each further token of the
        ranking, about five per passage. With ``calibrate`` two, the second over empty passages, and none to generate.
    Limits: any generator, including those that can only generate; ``calibrate`` needs the weights in this process.
        Small models rarely write a complete ranking; passages that they do not name keep their order. The result
        depends on the given order. Measured readers of up to 0.5 billion parameters rank by position with
        ``calibrate``.

    Attributes:
        generator: The served model; any generator, with ``calibrate`` an ``Engine`` or a ``BatchingGenerator`` around
            one.
        top_n: Number of passages to return, all if None.
        window: Maximum number of passages in one prompt, up to 26 with ``calibrate``; later candidates keep their
            order, with score 0.
        stride: Reads all candidates in overlapping windows from the last to the first.
        max_document_tokens: Token limit of a document; a longer one is cut (``long_document: "truncated"``).
        order: Order of the passages in the prompt: ``input``, the given order, as in the paper, or ``canonical`` (by
            content hash). An incomplete ranking is completed in this order.
        calibrate: Score passages by the first token of the ranking minus its prior for empty passages.
        generations: Number of rankings that the model has generated.
    """

    name: ClassVar[str] = "listwise"

    order: Literal["canonical", "input"] = "input"
    calibrate: bool = False
    _generations: int = PrivateAttr(default=0)

    @model_validator(mode="after")
    def _can_calibrate(self) -> Self:
        if self.calibrate and self.window > len(LETTERS):
            raise PydanticCustomError(
                "window",
                "window={window} must be at most {most} with calibrate",
                {"window": self.window, "most": len(LETTERS)},
            )
        if self.calibrate and "first_token" not in self.generator.capabilities:
            raise PydanticCustomError(
                "calibrate",
                "calibrate=true reads log-probabilities, which {kind} does not return; use an Engine (load_engine, "
                "tp=1), or calibrate=false",
                {"kind": type(self.generator).__name__},
            )
        return self

    @property
    def generations(self) -> int:
        """Number of rankings that the model has generated."""
        return self._generations

    def _prompts(self, question: str, count: int) -> Sequence[TokenizedPrompt]:
        kind, example = ("letter", "B > C > A") if self.calibrate else ("number", "[2] > [3] > [1]")
        template = PromptTemplate(
            instruction=f"Below are {count} passages, each with a {kind} in brackets.",
            question_prefix="Query: ",
            answer_cue=(
                f"\n\nRank the {count} passages above by their relevance to the query, the most relevant first. Write "
                f"nothing but the {kind}s of all passages, like this: {example}"
            ),
        )
        return [tokenize_prompt(self.generator.encoder, template, question)]

    def _labels(self, count: int) -> Sequence[str]:
        return LETTERS[:count] if self.calibrate else [str(number) for number in range(1, count + 1)]

    def _labelled(self, passages: Sequence[TokenizedPassage]) -> Sequence[TokenizedPassage]:
        labelled = zip(self._labels(len(passages)), passages, strict=True)
        return [label_passage(self.generator.encoder, passage, f"[{label}] ") for label, passage in labelled]

    def _answer_tokens(self, count: int) -> int:
        if self.calibrate:
            return 1
        complete = " > ".join(f"[{label}]" for label in self._labels(count))
        return len(self.generator.encoder.encode_text(complete)) + SLACK_TOKENS

    def _max_passage_tokens(self, prompts: Sequence[TokenizedPrompt], count: int) -> int:
        labels = count * len(self.generator.encoder.encode_text(f"[{self._labels(count)[-1]}] "))
        return super()._max_passage_tokens(prompts, count) - labels - self._answer_tokens(count)

    def _raw_scores(self, prompts: Sequence[TokenizedPrompt], passages: Sequence[TokenizedPassage]) -> Sequence[float]:
        n = len(passages)
        if self.calibrate:
            encoder = self.generator.encoder
            empty = self._labelled([tokenize_passage(encoder, self._template, "") for _ in passages])
            measured, prior = (self._first_label(prompts[0], read) for read in (passages, empty))
            return [value - bias for value, bias in zip(measured, prior, strict=True)]
        sampling = Sampling(max_tokens=self._answer_tokens(n))
        request = GenerationRequest(prompts[0].with_passages(passages), sampling=sampling, salt=current_salt())
        self._generations += 1
        ranking = parse_ranking(self._generated_text(request), n)
        return [float(n - ranking.index(index)) for index in range(n)]

    def _first_label(self, prompt: TokenizedPrompt, passages: Sequence[TokenizedPassage]) -> list[float]:
        """Return how likely the ranking begins with the label of each passage, as log-probabilities."""
        check_deadline()
        encode = self.generator.encoder.encode_text
        spellings = [
            list(dict.fromkeys(ids[0] for text in (label, f" {label}") if len(ids := encode(text)) == 1))
            for label in self._labels(len(passages))
        ]
        layout = prompt.with_passages_in_suffix(passages)
        (row,) = self.generator.first_token_log_probs(layout, [i for ids in spellings for i in ids], current_salt())
        values = iter(row)
        return [log_sum([next(values) for _ in ids]) for ids in spellings]

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
        if self.calibrate:
            return [math.exp(value - log_sum(raw)) for value in raw]
        return [value / len(raw) for value in raw]


def parse_ranking(text: str, count: int) -> list[int]:
    """Return the ranking that a text contains as indices from 0; missing indices follow in ascending order."""
    named = [int(number) - 1 for number in re.findall(r"[0-9]{1,9}", text)]
    ranked = list(dict.fromkeys(index for index in named if 0 <= index < count))
    return [*ranked, *(index for index in range(count) if index not in ranked)]
