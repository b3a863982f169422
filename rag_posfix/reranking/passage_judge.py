"""Judges whether a passage is about the question: how much more likely the question is after it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field, PrivateAttr

from rag_posfix.assembly.documents import CheckedDocument
from rag_posfix.assembly.prompt import PromptTemplate
from rag_posfix.contracts.cache_salt import current_salt
from rag_posfix.reranking.base import DocumentScore, sigmoid
from rag_posfix.reranking.deadline import check_deadline
from rag_posfix.reranking.likelihood import LikelihoodReranker
from rag_posfix.text import content_hash

_REMEMBERED = 4096
"""Judgements that are remembered, so that a cached answer needs no model."""


class PassageJudge(LikelihoodReranker):
    """Measure how much more likely a passage makes the question.

    Source: Jiang et al. (2024), LongLLMLingua, for the likelihood of the question; the difference to the likelihood
        without a passage is the pointwise mutual information of question and passage for each token.
    Formula: raw_score = (1 / N) sum_i [log p(x_i | passage, x_<i) - log p(x_i | x_<i)] in nats, over the question's
        tokens x; relevance_score = sigmoid(raw_score).
    Cost: tokens read: prefix once, each passage once, the question once per passage and once more. The prompt is that
        of answers: keys and values in the passage store are read there, and stored there for the answer.
    Limits: a passage that repeats the question is about it. Says nothing about whether the passage is right.

    Attributes:
        generator: The served model; an ``Engine``, or a ``BatchingGenerator`` around one.
        template: The template of answers.
    """

    name: ClassVar[str] = "judge"

    restriction: str = ""
    question_copies: bool = True
    template: PromptTemplate = Field(default_factory=PromptTemplate)
    _judged: OrderedDict[str, float] = PrivateAttr(default_factory=OrderedDict)  # by question, passage and salt

    @property
    def _template(self) -> PromptTemplate:
        return self.template

    def _score(self, question: str, documents: Sequence[CheckedDocument]) -> Sequence[DocumentScore]:
        names = [content_hash(current_salt(), question, document.key) for document in documents]
        new = [index for index, name in enumerate(names) if name not in self._judged]
        gains = {name: self._judged[name] for name in names if name in self._judged}
        if new:
            values = self._gains(question, [documents[index] for index in new])
            gains |= {names[index]: value for index, value in zip(new, values, strict=True)}
        self._judged.update(gains)
        while len(self._judged) > _REMEMBERED:
            self._judged.popitem(last=False)
        return [DocumentScore(sigmoid(gains[name]), gains[name]) for name in names]

    def _gains(self, question: str, documents: Sequence[CheckedDocument]) -> list[float]:
        prompt = self._prompt(question)
        limit = self.generator.context_window - len(prompt)
        fitted = [self._fitted(document, limit).passage for document in documents]
        gains: dict[int, float] = {}
        for batch in self._batches(fitted, len(prompt.suffix)):
            check_deadline()
            layout = prompt.with_passages([fitted[index] for index in batch])
            *values, bare = self.generator.question_likelihood(layout, current_salt(), bare=True)
            gains |= {index: value - bare for index, value in zip(batch, values, strict=True)}
        return [gains[index] for index in range(len(documents))]
