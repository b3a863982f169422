import gzip
import json

import pytest

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.datasets import load_examples

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
    assert (example.gold.id, example.gold.page_content) == ("0-1", "The first went to Röntgen.")
    assert example.gold.metadata == {"title": "Nobel Prize"}
    assert [(d.id, d.metadata["title"]) for d in example.distractors] == [("0-0", "Asian Americans"), ("0-2", "")]


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
    ("count", "position", "message"),
    [
        (4, 0, "documents=4 must be between 1 and 3, what question 0 has"),
        (0, 0, "documents=0 must be between 1 and 3"),
        (3, 3, "gold position 3 must be between 0 and 2"),
        (3, -1, "gold position -1 must be between 0 and 2"),
    ],
)
def test_places_that_do_not_exist_are_refused(tmp_path, count, position, message):
    (example,) = load_examples(write(tmp_path / "rows.jsonl", ROW))
    with pytest.raises(EvaluationError, match=message):
        example.documents(count, position)


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
    path = write(tmp_path / "rows.jsonl", ROW, "", ROW, "  ")
    assert [example.id for example in load_examples(path)] == ["0", "2"]


def without(key):
    return {name: value for name, value in ROW.items() if name != key}


@pytest.mark.parametrize(
    "row",
    [
        "{",
        "5",
        "null",
        "[]",
        without("question"),
        without("answers"),
        without("ctxs"),
        {**ROW, "question": 5},
        {**ROW, "question": " "},
        {**ROW, "answers": []},
        {**ROW, "answers": "Röntgen"},
        {**ROW, "answers": [5]},
        {**ROW, "answers": [""]},
        {**ROW, "ctxs": []},
        {**ROW, "ctxs": ["text"]},
        {**ROW, "ctxs": [{"text": "x"}]},
        {**ROW, "ctxs": [{"isgold": True}]},
        {**ROW, "ctxs": [{"text": None, "isgold": True}]},
        {**ROW, "ctxs": {"text": "x", "isgold": True}},
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
        ("rows.jsonl.gz", gzip.compress(json.dumps(ROW).encode())[:-20]),
        ("rows.jsonl.gz", gzip.compress(json.dumps(ROW).encode())[:20] + b"damage" * 9),
        ("rows.jsonl", gzip.compress(json.dumps(ROW).encode())),
        ("rows.jsonl", b"\xff\xfe"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(EvaluationError) as caught:
        load_examples(path)
    assert str(path) in str(caught.value)
