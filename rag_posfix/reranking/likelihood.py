"""Scores passages by the likelihood of the question given the passage, and judges them by how much it gains."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field, PrivateAttr

from rag_posfix.assembly.documents import CheckedDocument
from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.assembly.tokenization import TokenizedPrompt, tokenize_prompt
from rag_posfix.contracts.request import current_salt
from rag_posfix.errors import ConfigError
from rag_posfix.parameters import Integer
from rag_posfix.reranking.base import RERANKERS, DocumentScore, sigmoid
from rag_posfix.reranking.deadline import check_deadline
from rag_posfix.reranking.language_model import SeparatePassageReranker, document_without_copies
from rag_posfix.text import content_hash

RESTRICTION = " We can get the answer to this question in the given documents."


@RERANKERS.register("likelihood", aliases=("longllmlingua",))
class LikelihoodReranker(SeparatePassageReranker):
    """Measure the likelihood of the question after each passage.

    Each passage is read alone, between the beginning of an answer's prompt and the question. A passage that answers
    the question makes its tokens more likely.

    Source: Jiang et al. (2024), LongLLMLingua, section 4.1, https://aclanthology.org/2024.acl-long.91
    Formula: r_k = (1 / N) sum_i log p(x_i | passage k, x_<i), over the tokens x of question and restriction (the
        paper's r_k is the negative). relevance_score = exp(r_k), the geometric mean probability of a token, in (0, 1].
    Differs from the paper: the served chat model and its prompt replace a small base model; see ``question_copies``.
    Cost: tokens read: prefix once, each passage once, question and restriction once per passage. Passages whose keys
        and values are in the passage store are not read again; answers with independent passages
        (``context_experts``, ...) reuse those that are read here. Passages are read in batches; the deadline is
        checked between batches.
    Limits: any model.

    Attributes:
        generator: The served model; an ``Engine``, or a ``BatchingGenerator`` around one.
        top_n: Number of passages to return, all if None.
        restriction: The sentence after the question that restricts the answer to the documents; may be empty.
        batch_size: Maximum number of passages per batch.
        max_document_tokens: Token limit of a document; a longer one is cut (``long_document: "truncated"``). None is
            the rest of the context window.
        question_copies: Whether sentences that copy the question count, as in the paper. Without, they are left out of
            the passage (``question_copies: "left out"``): a forum post that repeats the question would rank first.
    """

    name: ClassVar[str] = "likelihood"
    reads = frozenset({"likelihood"})

    restriction: str = RESTRICTION
    max_document_tokens: Annotated[int | None, Integer(16)] = None
    question_copies: bool = False

    def _score(self, question: str, documents: Sequence[CheckedDocument]) -> Sequence[DocumentScore]:
        prompt = self._prompt(question)
        free_tokens = self.generator.context_window - len(prompt)
        limit = free_tokens if self.max_document_tokens is None else min(self.max_document_tokens, free_tokens)
        read = documents if self.question_copies else [document_without_copies(one, question) for one in documents]
        fitted = [self._fitted(document, limit) for document in read]
        likelihoods: dict[int, float] = {}
        for batch in self._batches([item.passage for item in fitted], len(prompt.suffix)):
            check_deadline()
            layout = prompt.with_passages([fitted[index].passage for index in batch])
            values = self.generator.question_likelihood(layout, current_salt())
            likelihoods.update(zip(batch, values, strict=True))
        return [
            DocumentScore(
                math.exp(min(likelihoods[index], 0.0)),
                likelihoods[index],
                {**passage.details, **({} if read[index] is documents[index] else {"question_copies": "left out"})},
            )
            for index, passage in enumerate(fitted)
        ]

    def _prompt(self, question: str) -> TokenizedPrompt:
        """Return the prompt of an answer, up to the end of the restriction."""
        template = replace(self._template, answer_cue="")  # its line break may be in the question's last token
        prompt = tokenize_prompt(self.generator.encoder, template, question + self.restriction)
        if not len(prompt.question):
            raise ConfigError(f"the question {question!r} has no tokens; ask something else")
        stop = prompt.question.stop
        return replace(prompt, suffix=prompt.suffix[:stop], content_stop=stop)


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
