"""Rows with a part removed or replaced: read, or refused in words of the data; never an exception of Python."""

from __future__ import annotations

import copy
import json
import re

import pytest

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.questions import load_examples

LOST_IN_THE_MIDDLE = {
    "question": "Who?",
    "answers": ["Ada"],
    "ctxs": [{"title": "A", "text": "Ada.", "isgold": True}, {"title": "B", "text": "Bob.", "isgold": False}],
}
HOTPOTQA = {
    "_id": "x",
    "question": "Who?",
    "answer": "Ada",
    "supporting_facts": {"title": ["A", "B"], "sent_id": [0, 0]},
    "context": {"title": ["A", "B", "C"], "sentences": [["Ada."], ["Bob."], ["Cy."]]},
}
SQUAD = {
    "data": [
        {
            "title": "T",
            "paragraphs": [
                {"context": "Ada.", "qas": [{"id": "q", "question": "Who?", "answers": [{"text": "Ada"}]}]}
            ],
        }
    ]
}
NAMES_OF_PYTHON = re.compile(r"\w+Error\b|StopIteration|object|NoneType|subscript|attribute")


def places(value, path=()):
    """Yield the path of every part of a JSON value, the whole excepted."""
    if path:
        yield path
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(part, (*path, key))


def changed(value, path, new):
    """Return a copy with the part at the path replaced, or removed where ``new`` is ``...``."""
    found = copy.deepcopy(value)
    part = found
    for key in path[:-1]:
        part = part[key]
    if new is ...:
        del part[path[-1]]
    else:
        part[path[-1]] = new
    return found


@pytest.mark.parametrize("row", [LOST_IN_THE_MIDDLE, HOTPOTQA, SQUAD], ids=["litm", "hotpotqa", "squad"])
def test_a_damaged_row_is_read_or_refused_in_words_of_the_data(tmp_path, row):
    path = tmp_path / "rows.jsonl"
    told = []
    for place in places(row):
        for new in (..., None, 3, "x", [], {}, [1], {"a": 1}, True, ""):
            path.write_text(json.dumps(changed(row, place, new)) + "\n", encoding="utf-8")
            try:
                load_examples(path)
            except EvaluationError as error:
                told.append(str(error).removeprefix(str(path)))
    assert len(told) > 20
    assert [message for message in told if NAMES_OF_PYTHON.search(message)] == []


def test_a_missing_field_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(changed(LOST_IN_THE_MIDDLE, ("ctxs",), ...)) + "\n", encoding="utf-8")
    with pytest.raises(EvaluationError, match=r"rows.jsonl:1 is not a Lost-in-the-Middle row \(no 'ctxs'\)"):
        load_examples(path)
    unmarked = changed(LOST_IN_THE_MIDDLE, ("ctxs", 0, "isgold"), ...)
    path.write_text(json.dumps(unmarked) + "\n", encoding="utf-8")
    with pytest.raises(EvaluationError, match="no passage is marked as gold"):
        load_examples(path)
