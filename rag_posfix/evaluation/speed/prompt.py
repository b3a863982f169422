"""The prompt that is timed: passages of real words, all different, each of exactly so many tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rag_posfix.assembly.prompt import PromptTemplate
from rag_posfix.assembly.tokenization import TokenizedPassage, tokenize_prompt
from rag_posfix.contracts.generator import TokenEncoder
from rag_posfix.demo_data import load_passages, load_questions
from rag_posfix.errors import EvaluationError
from rag_posfix.plan.layout import Layout
from rag_posfix.text import content_hash

__all__ = ["bench_layout"]

WORDS_APART = 97
"""Passages start this many words apart in the shipped corpus; it shares no divisor with the corpus, so all differ."""


def bench_layout(encoder: TokenEncoder, documents: int, tokens: int) -> Layout:
    """Return a prompt with ``documents`` different passages of exactly ``tokens`` tokens, of real words.

    Raises:
        EvaluationError: fewer passages or tokens than a prompt can be made of.
    """
    template = PromptTemplate()
    separator = tuple(encoder.encode_text(template.separator))
    if documents < 1 or tokens <= len(separator):
        raise EvaluationError(
            f"documents={documents} and tokens={tokens} must be at least 1 and {len(separator) + 1} (every passage "
            "ends in a separator); give larger numbers"
        )
    words = " ".join(document.page_content for document in load_passages()).split()
    passages = []
    for index in range(documents):
        ids = _words_as_tokens(encoder, words, index * WORDS_APART, tokens - len(separator))
        relevance = 1.0 - 0.9 * index / documents  # all different: methods may sort by it
        passages.append(TokenizedPassage((), ids, separator, content_hash("", encoder.decode(ids)), relevance))
    question = load_questions()[0].question
    return tokenize_prompt(encoder, template, question).with_passages(passages)


def _words_as_tokens(encoder: TokenEncoder, words: Sequence[str], start: int, count: int) -> tuple[int, ...]:
    """Return ``count`` tokens of the words from ``start`` on, beginning again at the end."""
    ids: list[int] = []
    taken = 0
    while len(ids) < count:
        taken += count
        ids = encoder.encode_text(" ".join(words[i % len(words)] for i in range(start, start + taken)))
    return tuple(ids[:count])
