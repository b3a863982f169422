"""Scores passages by the attention of the prompt's last token; sorts them by it and reads the prompt again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from rag_posfix.assembly.tokenization import TokenizedPassage, TokenizedPrompt, tokenize_prompt
from rag_posfix.contracts.request import current_salt
from rag_posfix.parameters import Integer
from rag_posfix.reranking.base import RERANKERS, sum_normalized
from rag_posfix.reranking.deadline import check_deadline
from rag_posfix.reranking.language_model import PassageReadingReranker, WindowedReranker


@RERANKERS.register("attention_sorting")
class AttentionSortingReranker(PassageReadingReranker, WindowedReranker):
    """Sort the passages in the prompt by attention, the highest last, and measure the attention again.

    The last token attends more to relevant passages, and more to those near the end: sorting moves the relevant there.

    Source: Peysakhovich and Lerer (2023), Attention Sorting Combats Recency Bias, https://arxiv.org/abs/2310.01427
    Formula: attention of passage k = sum over its tokens of the attention of the prompt's last token, averaged over
        layers and heads. Each round reads the prompt with the passages sorted by attention, the highest last. The
        ranking is the order after the last round. relevance_score = the attention of the passage divided by that of
        all passages in the last round, in [0, 1]; ``raw_score`` is the attention.
    Differs from the paper: passages start in the order of their content hashes (``order="input"``: in the given
        order). Rounds end when the order does not change. The result is best first; the order of the answer's prompt
        is chosen later.
    Cost: tokens read: the whole prompt once per round; in later rounds, leading passages whose keys and values are in
        the passage store are not read again.
    Limits: for models that attend most to the end of the prompt; with others, sorting strengthens the bias. The result
        depends on the order of the first round.

    Attributes:
        generator: The served model; an ``Engine``, or a ``BatchingGenerator`` around one.
        top_n: Number of passages to return, all if None.
        window: Maximum number of passages in one prompt; later candidates keep their order, with score 0.
        stride: Reads all candidates in overlapping windows from the last to the first.
        max_document_tokens: Token limit of a document; a longer one is cut (``long_document: "truncated"``).
        order: Order of the passages in the first prompt: ``canonical`` (by content hash) or ``input`` (as given).
        rounds: Maximum number of times that the prompt is read.
        normalize: Sort by the mean attention per token; the sum favours long passages.
    """

    name: ClassVar[str] = "attention_sorting"

    rounds: Annotated[int, Integer(1, 5)] = 3
    normalize: bool = False

    def _prompts(self, question: str, count: int) -> Sequence[TokenizedPrompt]:
        return [tokenize_prompt(self.generator.encoder, self._template, question)]

    def _raw_scores(self, prompts: Sequence[TokenizedPrompt], passages: Sequence[TokenizedPassage]) -> Sequence[float]:
        order = list(range(len(passages)))
        attention: dict[int, float] = {}
        for _ in range(self.rounds):
            check_deadline()
            layout = prompts[0].with_passages([passages[index] for index in order])
            (measured,) = self.generator.passage_attention([layout], current_salt(), check_deadline)
            for index, value in zip(order, measured, strict=True):
                attention[index] = value if self.normalize else value * len(passages[index])
            ascending = sorted(order, key=attention.__getitem__)
            if ascending == order:
                break
            order = ascending
        return [attention[index] for index in range(len(passages))]

    def _normalized(self, raw: Sequence[float]) -> Sequence[float]:
        return sum_normalized(raw)
