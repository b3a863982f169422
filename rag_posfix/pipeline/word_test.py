"""Answers that no passage can have given: none has a word of them, or they only repeat the question.

Readers answer from memory, or with words of the question, where no passage has the answer. "Sunday" to "When does the
museum close on Sundays?" is no answer. A large reader whose judge was asked is tested too: it says of a passage on the
same matter that it has the answer, and then writes "is not mentioned".
How many right and wrong answers fail: ``python -m benchmarks.support --words RECORD=DATA``.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import closing

from langchain_core.documents import Document

from rag_posfix.contracts.answer import AnswerChunk
from rag_posfix.pipeline.citations import NUMBERS, find_evidence, passage_words
from rag_posfix.pipeline.headings import restates
from rag_posfix.pipeline.language import is_reply, same_language
from rag_posfix.pipeline.support import ALL_THE_SAME, passage_name, shared_words
from rag_posfix.text import is_pair

MAX_WORDS = 8
"""An answer with this many words that no passage has is in other words, or in another language: it is written."""

LARGEST_COUNT = 10
"""A bare number up to here may be a count of things that the passages name one by one."""

_NUMBER = re.compile(r"\d+")


class WordTest:
    """Whether an answer has a word of the passages that the question does not have.

    Not tested are answers in another language than the passages, small counts, answers of many words, and what follows
    yes or no without a number.

    Args:
        passages: Titles and texts, as the model reads them.
        question: The question for a fact.
    """

    def __init__(self, passages: Sequence[str], question: str) -> None:
        self._question = question
        self._words = frozenset[str]().union(*map(passage_words, passages))
        self._is_comparable = any(same_language(question, passage) for passage in passages)

    def fails(self, answer: str) -> bool:
        """Return whether no passage can have given a complete answer."""
        if not answer.strip() or not self._is_comparable:
            return False
        if restates(answer, self._question):
            return True
        evidence = find_evidence(answer, self._question)
        if not 0 < len(evidence) < MAX_WORDS or all(map(_is_count, evidence)):
            return False
        if is_reply(answer) and not any(map(str.isdigit, "".join(evidence))):
            return False
        return not shared_words(evidence, self._words)

    def is_open(self, beginning: str) -> bool:
        """Return whether an answer that begins so may fail: its complete words are not yet those of a passage."""
        if not self._is_comparable:
            return False
        evidence = find_evidence(beginning, self._question)
        complete = beginning[:-1] if any(map(is_pair, evidence)) else beginning.rpartition(" ")[0]
        evidence = find_evidence(complete, self._question)
        if len(evidence) >= MAX_WORDS:
            return False
        return not shared_words(evidence, self._words) or restates(complete, self._question)

    def hold_back(self, chunks: Generator[AnswerChunk, None, None]) -> Generator[AnswerChunk, None, None]:
        """Yield the chunks of an answer; its beginning is held back while it may fail.

        The last chunk has the complete answer. A refusal, which has no documents, comes alone.
        """
        held: list[AnswerChunk] = []
        text, is_open = "", True
        with closing(chunks):
            for chunk in chunks:
                text += chunk.text
                if chunk.answer is not None and not chunk.answer.documents:
                    yield AnswerChunk(chunk.answer.text if is_open else "", chunk.answer)
                    return
                is_open = is_open and chunk.answer is None and self.is_open(text)
                held.append(chunk)
                if not is_open:
                    yield from held
                    held.clear()


def failure_warning(documents: Sequence[Document], shares: Sequence[float]) -> str:
    """Return why an answer is not shown, with the passage of most attention, and what shows it all the same."""
    index = max(range(len(documents)), key=lambda number: shares[number])
    return (
        "no passage has a word of the answer that was written, beside those of the question; the best is "
        f"{passage_name(documents[index])}; {ALL_THE_SAME}"
    )


def _is_count(word: str) -> bool:
    digits = NUMBERS.get(word, word)
    return _NUMBER.fullmatch(digits) is not None and int(digits) <= LARGEST_COUNT
