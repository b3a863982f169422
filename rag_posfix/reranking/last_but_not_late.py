"""Scores passages by the cosine of projected hidden states, one per passage and one of the question, of one prompt."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rag_posfix.assembly.documents import CheckedDocument
from rag_posfix.assembly.tokenization import truncate
from rag_posfix.contracts.generator import display_name
from rag_posfix.errors import ConfigError
from rag_posfix.parameters import Integer
from rag_posfix.reranking.base import RERANKERS, DocumentScore
from rag_posfix.reranking.deadline import check_deadline
from rag_posfix.reranking.language_model import FEWEST_TOKENS, LanguageModelReranker, check_limit

PASSAGE, QUESTION = "<|embed_token|>", "<|rerank_token|>"
"""Control tokens that follow each passage and the question; their states are compared."""

# The prompt that jina-reranker-v3 was trained with (modeling.py of https://huggingface.co/jinaai/jina-reranker-v3).
BEGINNING = (
    "<|im_start|>system\nYou are a search relevance expert who can determine a ranking of the passages based on how "
    "relevant they are to the query. If the query is a question, how relevant a passage is depends on how well it "
    "answers the question. If not, try to analyze the intent of the query and assess how well each passage satisfies "
    "the intent. If an instruction is provided, you should follow the instruction when determining the ranking."
    "<|im_end|>\n<|im_start|>user\nI will provide you with {count} passages, each indicated by a numerical identifier."
    " Rank the passages based on their relevance to query: "
)
OPENING = '\n<passage id="{index}">\n'
CLOSING = f"{PASSAGE}\n</passage>"
ENDING = f"{QUESTION}\n</query><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

SLACK_TOKENS = 4
"""Tokens that a passage may take beyond those of text and markup encoded apart."""


@RERANKERS.register("last_but_not_late", aliases=("jina_v3",))
class LastButNotLateReranker(LanguageModelReranker):
    """Read all passages and the question in one prompt, and compare the states of the tokens that follow them.

    Source: Wang et al. (2025), jina-reranker-v3: Last but Not Late Interaction, https://arxiv.org/abs/2509.25085
    Formula: v = W_2 relu(W_1 h), h the last hidden state of a control token; raw_score = cos(v_question, v_passage);
        relevance_score = (1 + raw_score) / 2. With several prompts v_question is their sum, weighted by the highest
        relevance_score of each.
    Differs from the paper: passages are ordered by content hash. Control tokens in a passage are text, not removed.
        The question is not cut.
    Cost: tokens read: all passages once, the question twice, and about 140 more and 14 per passage. One forward pass
        per ``window`` passages; nothing is generated or stored.
    Limits: for a model that was trained so, such as ``model=jinaai/jina-reranker-v3`` (non-commercial licence), with
        ``projector.N.weight`` and both control tokens, in one process.

    Attributes:
        generator: The model; an ``Engine``, or a ``BatchingGenerator`` around one.
        model: A model in place of the served one, as for ``--model``; loaded by its first question.
        top_n: Number of passages to return, all if None.
        window: Maximum number of passages in one prompt; more take several.
        max_document_tokens: Token limit of a document; a longer one is cut (``long_document: "truncated"``).
        order: Order of the passages in the prompt: ``canonical`` (by content hash) or ``input`` (as given).
    """

    name: ClassVar[str] = "last_but_not_late"
    reads = frozenset({"states"})

    model: str | None = Field(default=None, min_length=1)
    window: Annotated[int, Integer(1)] = 64
    max_document_tokens: Annotated[int, Integer(FEWEST_TOKENS)] = 2048
    order: Literal["canonical", "input"] = "canonical"

    def _score(self, question: str, documents: Sequence[CheckedDocument]) -> Sequence[DocumentScore]:
        order = list(range(len(documents)))
        if self.order == "canonical":
            order.sort(key=lambda index: documents[index].key)
        encoder = self.generator.encoder
        markup = len(encoder.encode_template(CLOSING + OPENING.format(index=len(documents)))) + SLACK_TOKENS
        free = self.generator.context_window - len(self._prompt(question, [])[0]) - SLACK_TOKENS
        limit = min(self.max_document_tokens, free - markup)
        check_limit(limit)
        texts = [f"{document.title}\n{document.text}" if document.title else document.text for document in documents]
        encoded = [encoder.encode_text(text) for text in texts]
        is_long = [len(ids) > limit for ids in encoded]
        read = [
            encoder.decode(truncate(ids, limit, encoder.decode)) if cut else text
            for text, ids, cut in zip(texts, encoded, is_long, strict=True)
        ]
        vectors: dict[int, Sequence[float]] = {}
        weighted = []
        for block in self._blocks(order, [min(len(ids), limit) + markup for ids in encoded], free):
            check_deadline()
            *states, asked = self._states(question, [read[index] for index in block])
            vectors |= zip(block, states, strict=True)
            weight = max(relevance(cosine(asked, state)) for state in states)
            weighted.append([weight * value for value in asked])
        total = [math.fsum(values) for values in zip(*weighted, strict=True)]
        cosines = [cosine(total, vectors[index]) for index in range(len(documents))]
        details = [{"long_document": "truncated"} if cut else {} for cut in is_long]
        return [DocumentScore(relevance(raw), raw, detail) for raw, detail in zip(cosines, details, strict=True)]

    def _blocks(self, order: Sequence[int], sizes: Sequence[int], free: int) -> Iterator[list[int]]:
        """Yield the passages of each prompt: as many in order as ``window`` and the free tokens allow."""
        block: list[int] = []
        for index in order:
            if block and (len(block) == self.window or sum(sizes[i] for i in (*block, index)) > free):
                yield block
                block = []
            block.append(index)
        yield block

    def _states(self, question: str, texts: Sequence[str]) -> list[tuple[float, ...]]:
        """Return the vector of each passage, and that of the question last."""
        ids, marked = self._prompt(question, texts)
        encode = self.generator.encoder.encode_template
        for name, indices in ((PASSAGE, marked[:-1]), (QUESTION, marked[-1:])):
            if any([ids[index]] != encode(name) for index in indices):
                raise ConfigError(
                    f"the tokenizer of {display_name(self.generator.model_id)} has no control token {name!r}; use a "
                    "model that was trained with it, such as model=jinaai/jina-reranker-v3"
                )
        return self.generator.projected_states(ids, marked)

    def _prompt(self, question: str, texts: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return the tokens of a prompt, and the indices of the control tokens after its passages and its question."""
        parts = [BEGINNING.format(count=len(texts)), question]
        for index, text in enumerate(texts):
            parts += [(CLOSING if index else "") + OPENING.format(index=index), text]
        parts += [(CLOSING if texts else "") + "\n<query>\n", question, ENDING]
        ids, spans = self.generator.encoder.encode_parts(parts)
        return ids, [span.start for span in spans[4::2]]


def relevance(raw: float) -> float:
    """Return (1 + cosine) / 2, in [0, 1]."""
    return min(max((1 + raw) / 2, 0.0), 1.0)


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the cosine of two vectors; 0 if one of them is 0."""
    norms = math.hypot(*a) * math.hypot(*b)
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / norms if norms else 0.0
