"""The files of ``ask --questions``: which questions are read, and which of them a file of answers lacks."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

from rag_posfix.cli.ask import AnswerFile, QuestionRow, read_questions
from rag_posfix.contracts.answer import Question
from rag_posfix.errors import ConfigError


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ('{"question": "Who?"}\n{"question": "Where?", "id": 1}', 2),  # the first has the id 1, its number
        ('"Who?"\n{"question": "Where?", "documents": []}', 2),
        ('\n{"text": "Who?"}', 2),
        ('{"question": "Who?', 1),
        ('{"question": " "}', 1),
        ('{"question": "Who?", "id": 1.5}', 1),
    ],
)
def test_a_wrong_line_is_refused_with_its_number(tmp_path, lines, line):
    (tmp_path / "q.jsonl").write_text(lines)
    with pytest.raises(ConfigError, match=f"line {line}: "):
        read_questions(tmp_path / "q.jsonl", None, True)


def test_a_file_without_questions_is_refused(tmp_path):
    (tmp_path / "q.jsonl").write_text("\n")
    with pytest.raises(ConfigError):
        read_questions(tmp_path / "q.jsonl", None, True)


def test_a_byte_order_mark_is_no_part_of_the_first_question(tmp_path):
    (tmp_path / "q.txt").write_text("Who?\nWhere?\n", encoding="utf-8-sig")
    assert [row.question.text for row in read_questions(tmp_path / "q.txt", None, True)] == ["Who?", "Where?"]


@pytest.fixture
def answers(tmp_path):
    """The file of an earlier run that answered "Who?" under the id a, and failed at b."""
    lines = [{"id": "a", "question": "Who?", "answer": "Ilse."}, {"id": "b", "question": "Where?", "error": "no room"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with closing(AnswerFile(tmp_path / "a.jsonl")) as found:
        yield found


def rows(**texts):
    return [QuestionRow(identity, Question(text)) for identity, text in texts.items()]


def test_a_new_id_is_missing_although_its_question_was_answered_under_another(answers):
    asked = rows(a="Who?", b="Where?", c="Who?")
    assert answers.missing(asked) == asked[1:]


def test_an_id_that_has_the_answer_of_another_question_is_refused(answers):
    with pytest.raises(ConfigError):
        answers.missing(rows(a="When?"))


def test_a_file_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("notes\n")
    with pytest.raises(ConfigError):
        AnswerFile(tmp_path / "a.jsonl")
