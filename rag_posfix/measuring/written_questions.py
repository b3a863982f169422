"""Questions with labels that a model writes from passages, and checks that do not ask the measured model.

A question is kept because of its text: its answer is in its passage and in no other passage that is found for it. A
writer that is not the measured model must also answer it from the passage. What the measured model answers from the
passage alone decides nothing: that filter would favour methods that read each passage alone.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from rag_posfix.assembly.documents import checked_document
from rag_posfix.contracts.answer import Question
from rag_posfix.contracts.generator import Generator
from rag_posfix.evaluation.answers.answering import best_subspan_em, normalize
from rag_posfix.evaluation.data.questions import PositionExample
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
    distinct = list({checked_document(passage).key: passage for passage in passages}.values())
    for passage in random.Random(seed).sample(distinct, len(distinct)):
        if len(examples) == count or not in_time():
            break
        written = _written(writer, passage, journal, asks_again=pipeline.writer is not None)
        match = _WRITTEN.match(written.text)
        question, answer = (match["question"].strip(), match["answer"].strip(" .\"'")) if match else ("", "")
        reason = _fault(question, answer, passage, written, seen)
        distractors = () if reason else _distractors(pipeline, question, passage, documents)
        if not reason and any(best_subspan_em(document.page_content, [answer]) for document in distractors):
            reason = "another passage holds the answer"
        if not reason and len(distractors) < documents - 1:
            reason = "too few other passages are found"
        if reason:
            dropped[reason] += 1
        else:
            seen.add(normalize(question))
            examples.append(PositionExample(str(passage.id), question, (answer,), (passage,), distractors))
        report(len(examples), count, f"writing questions, {dropped.total()} dropped")
    return examples, dropped


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


def _distractors(pipeline: Pipeline, question: str, gold: Document, documents: int) -> tuple[Document, ...]:
    found = pipeline.find_passages(Question(question, k=documents, floor="off", mitigation="none", order="relevance"))
    key = checked_document(gold).key
    return tuple(document for document in found if checked_document(document).key != key)[: documents - 1]
