"""Questions of a file in SQuAD's format: their order, their distractors, and damaged articles."""

from __future__ import annotations

import gzip
import json

import pytest

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.questions import load_examples


def article(number, *questions, title="Some_title"):
    """An article whose paragraph p is "text np" and has as many questions as ``questions[p]`` says."""
    return {
        "title": title,
        "paragraphs": [
            {
                "context": f"text {number}{p}",
                "qas": [
                    {"id": f"q{number}{p}{q}", "question": f"why {q}", "answers": [{"text": "so", "answer_start": 0}]}
                    for q in range(count)
                ],
            }
            for p, count in enumerate(questions)
        ],
    }


SQUAD = {"version": "1.1", "data": [article(0, 1, 2, 1), article(1, 2, 0), article(2, 1)]}


def write_squad(path, data, indent=None):
    text = json.dumps(data, indent=indent)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


class TestSquad:
    @pytest.mark.parametrize(("name", "indent"), [("x.json", None), ("x.json.gz", None), ("x.json", 2)])
    def test_it_is_known_by_its_content(self, tmp_path, name, indent):
        examples = load_examples(write_squad(tmp_path / name, SQUAD, indent))
        assert len(examples) == 7
        assert (examples[0].question, examples[0].answers) == ("why 0", ("so",))
        assert examples[0].gold[0].metadata == {"title": "Some title"}

    def test_questions_come_one_per_paragraph_and_article_in_turn(self, tmp_path):
        examples = load_examples(write_squad(tmp_path / "x.json", SQUAD))
        # The first question of each paragraph 0, then 1 (article 1 has none there), then 2; then the second ones.
        assert [e.id for e in examples] == ["q000", "q100", "q200", "q010", "q020", "q101", "q011"]

    def test_distractors_are_the_article_itself_then_the_following_articles_in_turn(self, tmp_path):
        examples = {e.id: e for e in load_examples(write_squad(tmp_path / "x.json", SQUAD))}
        texts = {name: [d.page_content for d in e.distractors] for name, e in examples.items()}
        assert texts["q010"] == ["text 00", "text 02", "text 10", "text 20", "text 11"]
        assert texts["q100"] == ["text 11", "text 20", "text 00", "text 01", "text 02"]
        assert examples["q010"].gold[0].page_content == "text 01"
        ids = [d.id for d in examples["q010"].documents(6, 2)]
        assert ids == ["0-0", "0-2", "0-1", "1-0", "2-0", "1-1"]

    @pytest.mark.parametrize(
        ("limits", "expected"),
        [({"limit": 2}, ["q000", "q100"]), ({"skip": 5}, ["q101", "q011"]), ({"skip": 1, "limit": 1}, ["q100"])],
    )
    def test_limit_and_skip_count_questions(self, tmp_path, limits, expected):
        assert [e.id for e in load_examples(write_squad(tmp_path / "x.json", SQUAD), **limits)] == expected

    def test_an_empty_id_is_the_place_and_a_repeated_one_is_refused(self, tmp_path):
        data = article(0, 2, 1)
        first, second, _ = (qa for paragraph in data["paragraphs"] for qa in paragraph["qas"])
        first["id"], second["id"] = None, ""
        places = ["data[0].paragraphs[0].qas[0]", "q010", "data[0].paragraphs[0].qas[1]"]
        assert [e.id for e in load_examples(write_squad(tmp_path / "x.json", {"data": [data]}))] == places
        first["id"] = "q010"
        with pytest.raises(EvaluationError, match=r"s\[1\].qas\[0\]: the id 'q010' is that of .*\[0\].qas\[0\];"):
            load_examples(write_squad(tmp_path / "x.json", {"data": [data]}))

    def test_an_answer_that_is_given_twice_counts_once(self, tmp_path):
        data = article(0, 1)
        data["paragraphs"][0]["qas"][0]["answers"] = [{"text": "b"}, {"text": "a"}, {"text": "b"}]
        (example,) = load_examples(write_squad(tmp_path / "x.json", {"data": [data]}))
        assert example.answers == ("b", "a")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"question": " "}, "qas[0] is not a SQuAD question (question is ' ', must be text)"),
            ({"answers": []}, "qas[0] is not a SQuAD question (answers is [], must be a list of one"),
            ({"answers": ["so"]}, "qas[0] is not a SQuAD question (a part has the wrong type)"),
            ({"answers": None}, "qas[0] is not a SQuAD question (a part has the wrong type)"),
        ],
    )
    def test_a_malformed_question_is_named_by_its_place(self, tmp_path, change, message):
        data = article(0, 1, 1)
        data["paragraphs"][1]["qas"][0].update(change)
        path = write_squad(tmp_path / "x.json", {"data": [article(1), data]})
        with pytest.raises(EvaluationError) as caught:
            load_examples(path)
        assert str(caught.value).startswith(f"{path}: data[1].paragraphs[1].{message}")
        assert str(caught.value).endswith("it needs question and answers with text")

    @pytest.mark.parametrize("data", [[], [article(0)], [{"paragraphs": []}]])
    def test_without_questions_it_is_refused(self, tmp_path, data):
        with pytest.raises(EvaluationError, match="holds no rows after the first 0"):
            load_examples(write_squad(tmp_path / "x.json", {"data": data}))

    def test_data_that_is_no_list_is_refused(self, tmp_path):
        with pytest.raises(EvaluationError, match="data must be a list of SQuAD articles, is no list"):
            load_examples(write_squad(tmp_path / "x.json", {"data": {}}))
