"""The questions about own files: each kind has enough, its files hold the answers, and answers are graded by words."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.end_to_end.files import HERE, OWN_FILES, GateQuestion, half_of, load_questions, write_files
from benchmarks.end_to_end.gate import arrangement_of, grade, is_heading
from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.statistics import normalize

QUESTIONS = load_questions(OWN_FILES)
KINDS = {"faq", "titled", "short", "lists", "follow-ups", "off-topic"}


def test_each_kind_has_twenty_questions_and_halves_that_differ_by_one_at_most():
    counts = Counter(question.kind for question in QUESTIONS)
    assert counts.keys() == KINDS
    assert min(counts.values()) >= 20
    choose, report = (Counter(q.kind for q in half_of(QUESTIONS, half)) for half in ("choose", "report"))
    assert choose + report == counts
    assert all(abs(choose[kind] - report[kind]) <= 1 for kind in KINDS)
    near = [sum(question.near for question in half_of(QUESTIONS, half)) for half in ("choose", "report")]
    assert min(near) >= 7, "each half asks off topic near the files and far from them"
    assert len({question.question for question in QUESTIONS if not question.history}) == 150 - counts["follow-ups"]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.id)
def test_the_files_hold_the_answer_to_each_question(question: GateQuestion):
    if question.kind == "off-topic":
        assert (question.answers, question.gold) == ((), "")
        return
    text = normalize((HERE / OWN_FILES / question.gold).read_text("utf-8"))
    held = [any(normalize(form) in text for form in name.split("|")) for name in question.answers]
    assert all(held) if question.is_list else any(held)
    assert all(normalize(name) in text for name in question.unwanted)


def test_the_files_are_copied(tmp_path):
    written = write_files(tmp_path / "files", OWN_FILES)
    assert {str(path.relative_to(tmp_path / "files")) for path in written} >= {q.gold for q in QUESTIONS if q.gold}


@pytest.mark.parametrize(
    ("kind", "answer", "right", "names", "unwanted"),
    [
        ("short", "It has 23 employees.", True, 1.0, 0.0),
        ("short", "It has 123 employees.", False, 0.0, 0.0),  # 23 is no word of it
        ("lists", "Arvik, Dalen and Frosta.", True, 1.0, 0.0),
        ("lists", "Arvik and the town of Frosta", False, 2 / 3, 0.0),
        ("lists", "Arvik, Dalen, Frosta, Grimsby", False, 1.0, 1.0),
    ],
)
def test_answers_are_graded_by_whole_words_and_lists_by_their_names(kind, answer, right, names, unwanted):
    accepted = ("23",) if kind == "short" else ("Arvik", "Dalen", "Frosta|the town of Frosta")
    refused = () if kind == "short" else ("Grimsby",)
    question = GateQuestion("x1", kind, "?", accepted, "file", unwanted=refused, whole_words=True)
    assert grade(answer, question) == (right, pytest.approx(names), unwanted)


def test_an_answer_is_a_heading_if_all_its_words_are_in_one_title():
    titles = ["Lease contract Skipperveien 4 > Rent > Amount", "Keys"]
    assert is_heading("The rent > amount.", titles)
    assert not is_heading("Rent 1,150 euros", titles)
    assert not is_heading("Rent keys", titles)
    assert not is_heading("", titles)


def test_an_arrangement_is_a_name_or_reranker_order_and_method():
    assert arrangement_of("shipped") == {}
    assert arrangement_of("embedding:top_n=1/reverse/none") == {
        "reranker": "embedding:top_n=1", "order": "reverse", "mitigation": "none",
    }  # fmt: skip
    assert arrangement_of("/reverse/") == {"order": "reverse"}
    with pytest.raises(ConfigError, match="must be one of none, /reverse/none, default, shipped, or RERANKER"):
        arrangement_of("best")
