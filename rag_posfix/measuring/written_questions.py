"""Questions with labels that a model writes from passages, and checks that do not ask the measured model.

A question is kept because of its text: its answer is in its passage and in no other passage that is found for it. A
writer that is not the measured model must also answer it from the passage. What the measured model answers from the
passage alone decides nothing: that filter would favour methods that read each passage alone.

Small models write few questions. A sentence with a gap needs no writer.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from rag_posfix.assembly.documents import checked_document
from rag_posfix.contracts.answer import Question
from rag_posfix.contracts.generator import Generator
from rag_posfix.evaluation.data.questions import PositionExample
from rag_posfix.evaluation.grading import best_subspan_em, normalize
from rag_posfix.evaluation.journal import LineJournal
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.pipeline.query import text_request
from rag_posfix.text import content_hash

JOURNAL = "questions-journal.jsonl"
MAX_ANSWER_WORDS = 8
_TOKENS = 80
_CHARACTERS = 1500
_INSTRUCTION = """\
Write one question that only the text answers, and its answer in a few words of the text.

Text: The Ostrel bridge crosses the river Venn. It was opened in 1931 and is 210 metres long.
Question: In which year was the Ostrel bridge opened?
Answer: 1931

Text: {text}
Question:"""
GAP = "____"
_SENTENCE = re.compile(r"[^.!?\u3002\uff01\uff1f\n]+[.!?\u3002\uff01\uff1f]?")
_WORD = re.compile(r"\w+")
_WRITTEN = re.compile(r"\s*(?:Question:)?\s*(?P<question>[^\n]+?)\s*\n+\s*Answer:\s*(?P<answer>[^\n]+)")


@dataclass(frozen=True, slots=True)
class WrittenQuestion:
    """What the writer wrote for a passage; ``answered`` is its own answer from the passage, if it was asked."""

    text: str
    answered: str | None


class WrittenJournal(LineJournal[WrittenQuestion]):
    """What writers wrote, by writer and passage (see ``LineJournal``)."""

    def __init__(self, path: Path | None = None, *, fresh: bool = False) -> None:
        super().__init__("written", _read_written, path, fresh=fresh)


def _read_written(row: Any) -> WrittenQuestion | None:
    return WrittenQuestion(**row) if set(row) == {field.name for field in fields(WrittenQuestion)} else None


def write_text(writer: Generator, text: str, max_tokens: int) -> str:
    """Return what a generator answers to a text without passages."""
    return writer.generate(text_request(writer, text, max_tokens)).text


def same_by(writer: Generator) -> Callable[[str, str, str], bool]:
    """Return a judge that asks a generator whether two answers say the same; only "yes" counts."""

    def judge(question: str, first: str, second: str) -> bool:
        text = (
            f"Question: {question}\nFirst answer: {first}\nSecond answer: {second}\n\n"
            "Do both answers say the same? Answer with yes or no."
        )
        return normalize(write_text(writer, text, 4)).startswith("yes")

    return judge


def write_questions(
    pipeline: Pipeline,
    passages: Sequence[Document],
    count: int,
    *,
    documents: int,
    seed: int = 0,
    journal: WrittenJournal | None = None,
    in_time: Callable[[], bool] = lambda: True,
    report: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> tuple[list[PositionExample], Counter[str]]:
    """Return up to ``count`` questions that the pipeline's writer wrote from passages, and why others were dropped.

    Args:
        passages: The passages of the index; each is used at most once, in an order drawn by ``seed``.
        documents: Passages of a question: its own, and the best others that the pipeline finds for it.
        journal: What was written in earlier runs.
        in_time: Whether there is time for one more.
    """
    writer = pipeline.writer or pipeline.generator
    journal = journal or WrittenJournal()
    examples: list[PositionExample] = []
    dropped: Counter[str] = Counter()
    seen: set[str] = set()
    for passage in _shuffled(passages, seed):
        if len(examples) == count or not in_time():
            break
        written = _written(writer, passage, journal, asks_again=pipeline.writer is not None)
        match = _WRITTEN.match(written.text)
        question, answer = (match["question"].strip(), match["answer"].strip(" .\"'")) if match else ("", "")
        reason = _fault(question, answer, passage, written, seen)
        example = reason or _example(pipeline, question, answer, passage, documents)
        if isinstance(example, str):
            dropped[example] += 1
        else:
            seen.add(normalize(question))
            examples.append(example)
        report(len(examples), count, f"writing questions, {dropped.total()} dropped")
    return examples, dropped


def gap_questions(
    pipeline: Pipeline,
    passages: Sequence[Document],
    count: int,
    *,
    documents: int,
    seed: int,
    leave_out: Collection[str],
) -> list[PositionExample]:
    """Return up to ``count`` sentences of the passages with a gap, whose answer is the word that stood there.

    The sentence is one with two words or more that no other passage has; the gap takes the last of them.

    Args:
        leave_out: Ids of passages that are not used.
    """
    examples: list[PositionExample] = []
    holders = Counter(word for passage in passages for word in {*_WORD.findall(passage.page_content.casefold())})
    for passage in _shuffled(passages, seed):
        if len(examples) == count:
            break
        for sentence in _SENTENCE.findall(passage.page_content):
            own = [match for match in _WORD.finditer(sentence) if holders[match[0].casefold()] == 1]
            if str(passage.id) in leave_out or len(own) < 2:
                continue
            question = f"Fill the gap: {sentence[: own[-1].start()].lstrip()}{GAP}{sentence[own[-1].end() :]}"
            example = _example(pipeline, question, own[-1][0], passage, documents)
            if isinstance(example, PositionExample):
                examples.append(example)
                break
    return examples


def _shuffled(passages: Sequence[Document], seed: int) -> list[Document]:
    """Return the passages in an order drawn by a seed, each text once."""
    distinct = list({checked_document(passage).key: passage for passage in passages}.values())
    return random.Random(seed).sample(distinct, len(distinct))


def _written(writer: Generator, passage: Document, journal: WrittenJournal, *, asks_again: bool) -> WrittenQuestion:
    key = content_hash(writer.fingerprint, checked_document(passage).key, _INSTRUCTION, str(asks_again))
    written = journal.get(key)
    if written is None:
        text = passage.page_content[:_CHARACTERS]
        reply = write_text(writer, _INSTRUCTION.format(text=text), _TOKENS)
        match = _WRITTEN.match(reply) if asks_again else None
        answered = None
        if match is not None:
            answered = write_text(writer, f"{text}\n\nAnswer in a few words: {match['question']}", _TOKENS)
        written = WrittenQuestion(reply, answered)
        journal.add(key, written)
    return written


def _fault(question: str, answer: str, passage: Document, written: WrittenQuestion, seen: set[str]) -> str | None:
    """Return why a question cannot be used, by its text; None if it can."""
    if not question.endswith(("?", "\uff1f")) or not normalize(answer):
        return "no question with an answer was written"
    if len(answer.split()) > MAX_ANSWER_WORDS:
        return f"the answer has more than {MAX_ANSWER_WORDS} words"
    if not best_subspan_em(passage.page_content, [answer]):
        return "the answer is not in the passage"
    if best_subspan_em(question, [answer]):
        return "the question holds its answer"
    if normalize(question) in seen:
        return "the question was written before"
    if written.answered is not None and not best_subspan_em(written.answered, [answer]):
        return "the writer answers otherwise"
    return None


def _example(pipeline: Pipeline, question: str, answer: str, gold: Document, documents: int) -> PositionExample | str:
    """Return the question with the best other passages that the pipeline finds for it, or why it cannot be used."""
    found = pipeline.find_passages(
        Question(question, k=documents, min_relevance="off", mitigation="none", order="relevance")
    )
    key = checked_document(gold).key
    others = tuple(document for document in found if checked_document(document).key != key)[: documents - 1]
    if any(best_subspan_em(document.page_content, [answer]) for document in others):
        return "another passage holds the answer"
    if len(others) < documents - 1:
        return "too few other passages are found"
    return PositionExample(str(gold.id), question, (answer,), (gold,), others)
