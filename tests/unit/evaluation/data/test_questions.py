"""Questions with one or two gold passages: reading rows, placing passages, and damaged rows."""

from __future__ import annotations

import copy
import dataclasses
import gzip
import hashlib
import json
import re
from dataclasses import replace

import pytest

from rag_posfix.cli.options import parse_gold_positions
from rag_posfix.errors import ConfigError, EvaluationError
from rag_posfix.evaluation.data.questions import data_facts, load_examples, position_label, take_examples
from tests.support.outside_data import outside_data
from tests.support.tiny_evaluation import EXAMPLES

ROW = {
    "question": "who got the first nobel prize in physics",
    "answers": ["Wilhelm Conrad Röntgen", "Röntgen"],
    "ctxs": [
        {"title": "Asian Americans", "text": "Subrahmanyan Chandrasekhar.", "isgold": False},
        {"title": "Nobel Prize", "text": "The first went to Röntgen.", "isgold": True},
        {"text": "A third.", "isgold": False},
    ],
}


def write(path, *rows):
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_row_is_a_question_with_its_gold_passage_and_its_distractors(tmp_path, name):
    (example,) = load_examples(write(tmp_path / name, ROW))
    assert example.id == "0"
    assert example.question == "who got the first nobel prize in physics"
    assert example.answers == ("Wilhelm Conrad Röntgen", "Röntgen")
    assert (example.gold[0].id, example.gold[0].page_content) == ("0-1", "The first went to Röntgen.")
    assert example.gold[0].metadata == {"title": "Nobel Prize"}
    assert [(d.id, d.metadata["title"]) for d in example.distractors] == [("0-0", "Asian Americans"), ("0-2", "")]


def test_a_row_with_a_history_is_a_turn_of_a_conversation(tmp_path):
    history = [{"role": "user", "content": "Who was Chandrasekhar?"}, {"role": "assistant", "content": "A physicist."}]
    path = write(tmp_path / "rows.jsonl", {**ROW, "history": history}, ROW)
    turn, alone = load_examples(path)
    assert turn.history == tuple(history)
    assert turn.query == "Who was Chandrasekhar?\nwho got the first nobel prize in physics"
    assert (alone.history, alone.query) == ((), alone.question)
    assert data_facts([turn])["sha256"] != data_facts([replace(turn, history=())])["sha256"]


@pytest.mark.parametrize(
    "history", ["Who?", {"role": "user"}, [{"role": "user"}], ["Who?"], [{"role": 1, "content": "x"}]]
)
def test_a_history_that_is_none_is_refused(tmp_path, history):
    with pytest.raises(EvaluationError, match=r"history is .* must be a list of messages with role and content"):
        load_examples(write(tmp_path / "rows.jsonl", {**ROW, "history": history}))


@pytest.mark.parametrize(
    ("count", "position", "expected"),
    [
        (1, 0, ["0-1"]),
        (2, 0, ["0-1", "0-0"]),
        (2, 1, ["0-0", "0-1"]),
        (3, 0, ["0-1", "0-0", "0-2"]),
        (3, 1, ["0-0", "0-1", "0-2"]),
        (3, 2, ["0-0", "0-2", "0-1"]),
    ],
)
def test_the_gold_passage_stands_where_it_is_put_among_the_first_distractors(tmp_path, count, position, expected):
    (example,) = load_examples(write(tmp_path / "rows.jsonl", ROW))
    assert [document.id for document in example.documents(count, position)] == expected


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, "01234"),
        ({"limit": 2}, "01"),
        ({"skip": 3}, "34"),
        ({"skip": 1, "limit": 2}, "12"),
        ({"limit": 9}, "01234"),
    ],
)
def test_limit_and_skip_choose_rows_by_their_place_in_the_file(tmp_path, limits, expected):
    path = write(tmp_path / "rows.jsonl", *[ROW] * 5)
    assert "".join(example.id for example in load_examples(path, **limits)) == expected


def test_rows_outside_of_the_limits_are_not_checked(tmp_path):
    path = write(tmp_path / "rows.jsonl", "broken", ROW, "broken")
    assert [example.id for example in load_examples(path, skip=1, limit=1)] == ["1"]


def test_blank_lines_are_no_rows(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROW, "", "", ROW, "  ", ROW)
    assert [example.id for example in load_examples(path)] == ["0", "3", "5"]
    assert [example.id for example in load_examples(path, limit=2)] == ["0", "3"]
    assert [example.id for example in load_examples(path, skip=2)] == ["5"]
    assert [example.id for example in load_examples(path, skip=1, limit=1)] == ["3"]


def without(key):
    return {name: value for name, value in ROW.items() if name != key}


@pytest.mark.parametrize(
    "row",
    [
        "{",
        "5",
        without("question"),
        {**ROW, "question": " "},
        {**ROW, "answers": []},
        {**ROW, "answers": [""]},
        {**ROW, "ctxs": [{"text": "x"}]},
        {**ROW, "ctxs": [{"text": None, "isgold": True}]},
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path, row):
    path = write(tmp_path / "rows.jsonl", ROW, row)
    with pytest.raises(EvaluationError) as caught:
        load_examples(path)
    assert str(caught.value).startswith(f"{path}:2 is not a Lost-in-the-Middle row (")
    assert "it needs question, answers and ctxs with one isgold" in str(caught.value)


@pytest.mark.parametrize("skip", [0, 7])
def test_a_file_without_rows_is_refused(tmp_path, skip):
    path = write(tmp_path / "rows.jsonl", *[ROW] * (skip and 7))
    with pytest.raises(EvaluationError, match=f"holds no rows after the first {skip}"):
        load_examples(path, skip=skip)


def test_what_is_no_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing.jsonl"):
        with pytest.raises(EvaluationError, match="is not a file"):
            load_examples(path)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("rows.jsonl.gz", b"plain text"),
        ("rows.jsonl.gz", gzip.compress(json.dumps(ROW).encode(), mtime=0)[:-20]),
        ("rows.jsonl.gz", gzip.compress(json.dumps(ROW).encode(), mtime=0)[:20] + b"damage" * 9),
        ("rows.jsonl", gzip.compress(json.dumps(ROW).encode(), mtime=0)),
        ("rows.jsonl", b"\xff\xfe"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(EvaluationError) as caught:
        load_examples(path)
    assert str(path) in str(caught.value)


class TestOutsideData:
    def test_xquad_has_632_questions_that_cover_all_articles_early(self):
        examples = load_examples(outside_data("xquad/xquad-en.json.gz"))
        assert len(examples) == len({e.id for e in examples}) == 632
        assert {len(e.distractors) for e in examples} == {119}
        assert len({e.gold[0].metadata["title"] for e in examples[:24]}) == 24
        assert all(e.answers[0] in e.gold[0].page_content for e in examples)
        assert all(d.metadata["title"] == e.gold[0].metadata["title"] for e in examples for d in e.distractors[:4])

    def test_lost_in_the_middle_has_220_rows_of_20_passages(self):
        examples = load_examples(outside_data("litm/nq-open-20docs-gold-first.jsonl.gz"))
        assert [e.id for e in examples] == [str(n) for n in range(220)]
        assert {len(e.distractors) for e in examples} == {19}


def test_questions_with_one_id_are_refused(tmp_path):
    first, again = EXAMPLES[0], dataclasses.replace(EXAMPLES[1], id=EXAMPLES[0].id)
    with pytest.raises(EvaluationError, match=rf"data\[2\]: the id '{first.id}' is that of data\[0\]; give each"):
        take_examples([first, EXAMPLES[1], again], None, 0)
    assert take_examples([first, EXAMPLES[1], again], 2, 1) == [EXAMPLES[1], again]
    path = write(tmp_path / "rows.jsonl", HOTPOT_ROW, "", {**HOTPOT_ROW, "id": ""}, HOTPOT_ROW)
    assert [example.id for example in load_examples(path, limit=2)] == ["5a71", "2"]
    with pytest.raises(EvaluationError, match=r"rows.jsonl:4: the id '5a71' is that of .*rows.jsonl:1; give each"):
        load_examples(path)


def test_given_questions_are_taken_as_those_of_a_file_are():
    assert take_examples(EXAMPLES, None, 0) == EXAMPLES
    assert take_examples(EXAMPLES, 1, 1) == EXAMPLES[1:2]
    with pytest.raises(EvaluationError, match="3 questions leave none with limit=2 and skip=3"):
        take_examples(EXAMPLES, 2, 3)


def test_data_is_named_by_its_file_or_by_what_the_questions_hold(tmp_path):
    (tmp_path / "rows").write_bytes(b"abc")
    assert data_facts(tmp_path / "rows") == {"name": "rows", "sha256": hashlib.sha256(b"abc").hexdigest()}
    facts = [data_facts(examples) for examples in (EXAMPLES, list(EXAMPLES), EXAMPLES[:2], EXAMPLES[::-1])]
    assert facts[0] == facts[1]
    assert facts[0]["name"] is None
    assert len({one["sha256"] for one in facts}) == 3
    other = dataclasses.replace(EXAMPLES[0], answers=("no",))
    assert data_facts([other, *EXAMPLES[1:]])["sha256"] != facts[0]["sha256"]


HOTPOT_ROW = {
    "id": "5a71",
    "question": "Which of both is older? ",
    "answer": "Alpha",
    "supporting_facts": [["Alpha", 0], ["Beta", 1], ["Beta", 0]],
    "context": [
        ["Gamma", ["Gamma is new."]],
        ["Beta", ["Beta is old.", " It was built in 1900."]],
        ["Delta", ["Delta is blue."]],
        ["Alpha", ["Alpha is from 1800."]],
    ],
}


@pytest.fixture
def examples(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(HOTPOT_ROW) + "\n", encoding="utf-8")
    return load_examples(path)


def test_paragraphs_of_the_supporting_facts_are_gold(examples):
    (example,) = examples
    assert (example.id, example.question, example.answers) == ("5a71", "Which of both is older?", ("Alpha",))
    assert [one.metadata["title"] for one in example.gold] == ["Beta", "Alpha"]
    assert example.gold[0].page_content == "Beta is old. It was built in 1900."
    assert [one.metadata["title"] for one in example.distractors] == ["Gamma", "Delta"]


@pytest.mark.parametrize(
    ("count", "positions", "titles"),
    [
        (4, (0, 3), ["Beta", "Gamma", "Delta", "Alpha"]),
        (4, (3, 0), ["Alpha", "Gamma", "Delta", "Beta"]),
        (3, (1, 2), ["Gamma", "Beta", "Alpha"]),
        (4, None, ["Beta", "Alpha", "Gamma", "Delta"]),
    ],
)
def test_gold_passages_stand_where_they_are_put(examples, count, positions, titles):
    assert [one.metadata["title"] for one in examples[0].documents(count, positions)] == titles


@pytest.mark.parametrize(
    ("count", "positions", "message"),
    [
        (4, 1, "gold position 1 places 1 passages, but question 5a71 has 2 gold"),
        (4, (1, 1), r"gold position 1\+1 must be between 0 and 3, each once"),
        (4, (0, 4), r"gold position 0\+4 must be between 0 and 3"),
        (1, (0, 1), "documents=1 must be between 2 and 4"),
    ],
)
def test_positions_that_cannot_be_are_refused(examples, count, positions, message):
    with pytest.raises(EvaluationError, match=message):
        examples[0].documents(count, positions)


def test_gold_that_is_no_tuple_of_documents_is_refused(examples):
    with pytest.raises(EvaluationError, match="question 5a71: gold is a Document, must be a tuple of one document"):
        replace(examples[0], gold=examples[0].gold[0])
    with pytest.raises(EvaluationError, match="gold is a tuple"):
        replace(examples[0], gold=())


def test_a_supporting_title_that_the_context_lacks_is_told(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**HOTPOT_ROW, "supporting_facts": [["Alpha", 0], ["Omega", 0]]}), encoding="utf-8")
    with pytest.raises(EvaluationError, match="supporting_facts name 2 titles, of which the context has 1"):
        load_examples(path)


def test_positions_of_two_gold_passages_are_read_from_the_command_line():
    assert parse_gold_positions("0+9,4,1+2") == [(0, 9), 4, (1, 2)]
    assert position_label((0, 9)) == "0+9"
    with pytest.raises(ConfigError, match="for example 0,4,9, or 0"):
        parse_gold_positions("0+,1")


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
SMALL_SQUAD = {
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


def positions(value, path=()):
    """Yield the path of every part of a JSON value, the whole excepted."""
    if path:
        yield path
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from positions(part, (*path, key))


def changed(value, path, new):
    """Return a copy with the part at the path repositiond, or removed where ``new`` is ``...``."""
    found = copy.deepcopy(value)
    part = found
    for key in path[:-1]:
        part = part[key]
    if new is ...:
        del part[path[-1]]
    else:
        part[path[-1]] = new
    return found


@pytest.mark.parametrize("row", [LOST_IN_THE_MIDDLE, HOTPOTQA, SMALL_SQUAD], ids=["litm", "hotpotqa", "squad"])
def test_a_damaged_row_is_read_or_refused_in_words_of_the_data(tmp_path, row):
    path = tmp_path / "rows.jsonl"
    told = []
    for position in positions(row):
        for new in (..., None, 3, "x", [], {}, [1], {"a": 1}, True, ""):
            path.write_text(json.dumps(changed(row, position, new)) + "\n", encoding="utf-8")
            try:
                load_examples(path)
            except EvaluationError as error:
                told.append(str(error).removeprefix(str(path)))
    assert len(told) > 20
    assert [message for message in told if NAMES_OF_PYTHON.search(message)] == []
