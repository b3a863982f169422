"""Labelled questions of one's own: two files, and a check that names the row."""

from __future__ import annotations

import csv
import json

import pytest

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.collection import check_labels, load_labels

PASSAGES = [
    {"id": "a", "text": "The Arn bridge was built in 1901.", "title": "Arn"},
    {"id": "b", "text": "The Bel bridge was built in 1902."},
    {"id": "c", "text": "Bread is baked."},
]


def lines(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture
def passages(tmp_path):
    return lines(tmp_path / "passages.jsonl", PASSAGES)


def test_the_most_similar_passages_are_the_first_distractors(tmp_path, passages):
    path = lines(
        tmp_path / "q.jsonl", [{"question": "When was the Arn bridge built?", "answers": ["1901"], "passage": "a"}]
    )
    (example,) = load_labels(path, passages)
    assert (example.gold[0].id, example.gold[0].metadata) == ("a", {"title": "Arn"})
    assert [document.id for document in example.distractors] == ["b", "c"]


def test_csv_has_several_answers_in_one_cell(tmp_path, passages):
    path = tmp_path / "q.csv"
    path.write_text("question,answers,passage\nWhen was the Arn bridge built?,1901|in 1901,a\n")
    (example,) = load_labels(path, passages)
    assert example.answers == ("1901", "in 1901")


def test_a_long_cell_of_a_csv_file_is_read(tmp_path, passages):
    csv.field_size_limit(131_072)  # Python's default, which an earlier test may have raised
    path, long = tmp_path / "q.csv", "When was the Arn bridge built? " * 5000
    path.write_text(f"question,answers,passage\n{long},1901,a\n")
    assert load_labels(path, passages)[0].question.strip() == long.strip()
    assert check_labels(path, passages) == (1, [])


def test_every_problem_has_its_row(tmp_path, passages):
    good = {"question": "When was the Arn bridge built?", "answers": ["1901"], "passage": "a"}
    path = lines(
        tmp_path / "q.jsonl",
        [
            good,
            {**good, "passage": "z"},
            "{not json",
            {"question": " ", "answers": ["x"], "passage": "a"},
            {"question": "Which bridge?", "passage": "a"},
            {"question": "What was built in 1902?", "answers": ["bridge"], "passage": "b"},
            {"question": "What is baked?", "answer": "cake", "passage": "c"},
            good,
            "[1]",
        ],
    )
    usable, problems = check_labels(path, passages)
    assert usable == 4
    assert [(problem.row, problem.severity) for problem in problems] == [
        (2, "error"), (3, "error"), (4, "error"), (5, "error"), (6, "warning"), (7, "warning"), (8, "warning"),
        (9, "error"),
    ]  # fmt: skip
    text = {problem.row: problem.message for problem in problems}
    assert "passage 'z' is not among the 3 passages" in text[2]
    assert "is not JSON" in text[3]
    assert "question" in text[4]
    assert "answer" in text[5]
    assert "also in 1 other passages" in text[6]
    assert "no accepted answer is in the gold passage" in text[7]
    assert "that of row 1" in text[8]
    assert "must be a JSON object" in text[9]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("会议在1月末举行。", "1月"),
        ("那里是京都的北边。", "京"),
        ("여섯 달이 걸렸다.", "여섯 달"),
    ],
)
def test_an_answer_of_a_script_without_clear_words_is_found_in_its_passage(tmp_path, text, answer):
    table = lines(tmp_path / "p.jsonl", [{"id": "a", "text": text}, {"id": "b", "text": "Bread is baked."}])
    path = lines(tmp_path / "q.jsonl", [{"question": "?", "answers": [answer], "passage": "a"}])
    assert check_labels(path, table) == (1, [])


def test_an_answer_of_articles_and_punctuation_alone_is_named(tmp_path, passages):
    path = lines(
        tmp_path / "q.jsonl", [{"question": "Which word?", "answers": ["The", "1901", "?!"], "passage": "a"}]
    )  # fmt: skip
    _, problems = check_labels(path, passages)
    assert [problem.message.split(" has ")[0] for problem in problems[:2]] == [
        "the accepted answer 'The'", "the accepted answer '?!'",
    ]  # fmt: skip
    assert {problem.severity for problem in problems} == {"warning"}


def test_a_malformed_row_stops_loading_and_says_how_to_find_all(tmp_path, passages):
    path = lines(tmp_path / "q.jsonl", [{"question": "Which bridge?", "answers": ["a"], "passage": "z"}])
    with pytest.raises(EvaluationError, match=r"row 1: .*data check"):
        load_labels(path, passages)


def test_passages_without_a_text_or_with_one_id_twice_are_refused(tmp_path):
    questions = lines(tmp_path / "q.jsonl", [])
    with pytest.raises(EvaluationError, match="row 1 is not a passage"):
        load_labels(questions, lines(tmp_path / "p.jsonl", [{"id": "a"}]))
    with pytest.raises(EvaluationError, match="row 2 repeats the id 'a'"):
        load_labels(questions, lines(tmp_path / "p2.jsonl", [PASSAGES[0], PASSAGES[0]]))


ROW = {"question": "When was the Arn bridge built?", "answers": ["1901"], "passage": "a"}
CONTEXTS = [
    {"title": "Arn", "text": "Built in 1901.", "isgold": True},
    {"title": "Bel", "text": "Tall.", "isgold": False},
]
LITM = {"question": "When?", "answers": ["1901"], "ctxs": CONTEXTS}
HOTPOT = {
    "question": "When?", "answer": "1901", "supporting_facts": [["Arn", 0], ["Bel", 0]],
    "context": [["Arn", ["Built in 1901."]], ["Bel", ["Tall."]], ["Cor", ["Old."]]],
}  # fmt: skip


def parquet(path, rows):
    table = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed; `pip install pyarrow`")
    import pyarrow

    table.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(
    ("name", "write", "rows", "needs_passages", "message"),
    [
        ("q.jsonl", lines, [ROW, {**ROW, "passage": "z"}], True, "passage 'z' is not among"),
        ("q.csv", lines, ["question,answers,passage", "When was Arn built?,1901,a", "Who?,,a"], True, "no 'answer'"),
        ("q.parquet", parquet, [ROW, {**ROW, "passage": "z"}], True, "passage 'z' is not among"),
        ("litm.jsonl", lines, [LITM, {**LITM, "ctxs": CONTEXTS[1:]}], False, "no passage is marked as gold"),
        ("litm.parquet", parquet, [LITM, {**LITM, "ctxs": CONTEXTS[1:]}], False, "no passage is marked as gold"),
        ("hotpot.jsonl", lines, [HOTPOT, {**HOTPOT, "context": HOTPOT["context"][1:]}], False, "name 2 titles, of"),
    ],
)
def test_every_format_has_its_faulty_row_named(tmp_path, passages, name, write, rows, needs_passages, message):
    path = write(tmp_path / name, rows)
    usable, problems = check_labels(path, passages if needs_passages else None)
    assert usable == 1
    assert [(problem.row, problem.severity) for problem in problems] == [(2, "error")]
    assert message in problems[0].message


QUESTIONS = [
    {"question": "When was the Arn bridge built?", "answers": ["1901"], "passage": "a"},
    {"question": "When was the Bel bridge built?", "answers": ["1902"], "passage": "b"},
    {"question": "What is baked?", "answers": ["bread"], "passage": "c"},
]


@pytest.mark.parametrize(("ids", "name", "row"), [("xyx", "x", 3), ((7, "7", "y"), "7", 2), ((3, "y", None), "3", 3)])
def test_an_id_that_an_earlier_row_has_is_an_error_of_the_row(tmp_path, passages, ids, name, row):
    path = lines(tmp_path / "q.jsonl", [{**good, "id": each} for good, each in zip(QUESTIONS, ids, strict=True)])
    usable, (problem,) = check_labels(path, passages)
    assert (usable, problem.row, problem.severity) == (2, row, "error")
    assert problem.message == f"the id {name!r} is that of row 1; give each its own"
    with pytest.raises(EvaluationError, match=rf"row {row}: the id '{name}' is that of .*row 1; give each"):
        load_labels(path, passages)
    assert len(load_labels(path, passages, limit=1)) == 1


def test_an_empty_id_is_none_and_the_row_has_its_number(tmp_path, passages):
    path = lines(tmp_path / "q.jsonl", [{**QUESTIONS[0], "id": None}, {**QUESTIONS[1], "id": " "}, QUESTIONS[2]])
    assert [example.id for example in load_labels(path, passages)] == ["1", "2", "3"]
    path = lines(tmp_path / "q.csv", ["id,question,answers,passage", ",When?,1901,a", ",What?,x,c", "x,Who?,Bel,b"])
    assert [example.id for example in load_labels(path, passages)] == ["1", "2", "x"]
    assert [problem for problem in check_labels(path, passages)[1] if problem.severity == "error"] == []


def test_a_file_in_squads_format_is_checked_by_question(tmp_path):
    def article(*paragraphs):
        return {"paragraphs": [{"context": text, "qas": qas} for text, qas in paragraphs]}

    good = {"question": "When?", "answers": [{"text": "1901"}]}
    path = tmp_path / "squad.json"
    path.write_text(
        json.dumps({"data": [article(("Built in 1901.", [good]), ("Tall.", [{**good, "question": "How tall?"}]))]})
    )
    usable, problems = check_labels(path)
    assert usable == 2
    assert [(problem.row, problem.message) for problem in problems] == [
        (2, "no accepted answer is in the gold passage, word by word"),
        (2, "an accepted answer is also in 1 other passages; they count as wrong positions"),
    ]
    path.write_text(json.dumps({"data": [article(("Built in 1901.", [{"question": "When?", "answers": []}]))]}))
    with pytest.raises(EvaluationError, match=r"paragraphs\[0\].qas\[0\] is not a SQuAD question"):
        check_labels(path)


def test_a_damaged_parquet_file_says_so(tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed; `pip install pyarrow`")
    path = tmp_path / "q.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(EvaluationError, match="must be a Parquet file"):
        check_labels(path)
