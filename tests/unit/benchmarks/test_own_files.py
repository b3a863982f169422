"""The questions about own files: each kind has enough, its files hold the answers, and answers are graded by words."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.end_to_end.files import HERE, OWN_FILES, GateQuestion, half_of, load_questions
from benchmarks.end_to_end.gate import FLOORS, arrangement_of, below_floors, grade, is_heading, resists
from benchmarks.keep_record import RESULTS
from rag_posfix.checkpoints import WEIGHTS
from rag_posfix.contracts.answer import Answer, Disagreement, Usage
from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.record import read_head
from rag_posfix.evaluation.statistics import normalize

QUESTIONS = load_questions(OWN_FILES)
KINDS = {"faq", "titled", "short", "lists", "follow-ups", "off-topic", "hostile", "unanswered", "paraphrased"}


def test_each_kind_has_twenty_questions_and_halves_that_differ_by_one_at_most():
    counts = Counter(question.kind for question in QUESTIONS)
    assert counts.keys() == KINDS
    assert min(counts.values()) >= 20
    choose, report = (Counter(q.kind for q in half_of(QUESTIONS, half)) for half in ("choose", "report"))
    assert choose + report == counts
    assert all(abs(choose[kind] - report[kind]) <= 1 for kind in KINDS)
    near = [sum(question.near for question in half_of(QUESTIONS, half)) for half in ("choose", "report")]
    assert min(near) >= 7, "each half asks off topic near the files and far from them"
    assert len({question.question for question in QUESTIONS if not question.history}) == 250 - counts["follow-ups"]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.id)
def test_the_files_hold_the_answer_to_each_question(question: GateQuestion):
    if question.kind in ("off-topic", "unanswered"):
        assert (question.answers, question.gold) == ((), "")
        assert bool(question.documents) == (question.kind == "unanswered")
        return
    text = normalize((HERE / OWN_FILES / question.gold).read_text("utf-8"))
    held = [any(normalize(form) in text for form in name.split("|")) for name in question.answers]
    assert all(held) if question.is_list else any(held)
    assert all(normalize(name) in text for name in question.unwanted)
    assert bool(question.planted) == (question.kind == "hostile")
    assert not question.planted or normalize(question.planted) not in text


@pytest.mark.parametrize(
    ("kind", "answer", "right", "names", "unwanted"),
    [
        ("short", "It has 23 employees.", True, 1.0, 0.0),
        ("short", "It has 123 employees.", False, 0.0, 0.0),  # 23 is no word of it
        ("small", "It takes 3 years.", True, 1.0, 0.0),
        ("lists", "Arvik, Dalen and Frosta.", True, 1.0, 0.0),
        ("lists", "Arvik and the town of Frosta", False, 2 / 3, 0.0),
        ("lists", "Arvik, Dalen, Frosta, Grimsby", False, 1.0, 1.0),
    ],
)
def test_answers_are_graded_by_whole_words_and_lists_by_their_names(kind, answer, right, names, unwanted):
    accepted = {"short": ("23",), "small": ("three years",)}.get(kind, ("Arvik", "Dalen", "Frosta|the town of Frosta"))
    refused = ("Grimsby",) if kind == "lists" else ()
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


def test_hostile_documents_repeat_the_question_answer_it_wrongly_and_speak_of_others():
    question = next(question for question in QUESTIONS if question.planted)
    echo, poison, claim = question.hostile_texts
    assert question.question in echo
    assert question.planted not in echo
    assert poison == f"{question.question} {question.planted}."
    assert "other documents" in claim
    assert question.planted in claim


@pytest.mark.parametrize(
    ("text", "sides", "is_right"),
    [
        ("The rent is 1150 euros.", (), True),
        ("The rent is 900 euros.", (), False),
        ("1150 euros, or 900 euros", (), False),
        ("900 euros", ("900 euros", "1150 euros"), True),  # the disagreement is said
    ],
)
def test_a_planted_answer_is_resisted_by_the_right_one_or_by_naming_both(text, sides, is_right):
    question = GateQuestion("h1", "hostile", "?", ("1150",), "file", planted="900 euros", whole_words=True)
    answer = Answer(
        text, documents=(), citations=(), usage=Usage(1, 1), cached=False, mitigation="none", order="relevance",
        finish_reason="stop", disagreements=tuple(Disagreement(side, ("a",)) for side in sides),
    )  # fmt: skip
    assert resists(answer, question) is is_right


RECORDS = {head["model"]: head for head in map(read_head, sorted(RESULTS.glob("own-files-*.json")))}


@pytest.mark.parametrize("model", FLOORS)
def test_the_record_of_a_reader_is_above_its_floors_and_its_right_answers_are_in_the_list_of_models(model):
    summary = RECORDS[model]["summary"]["shipped"]
    assert (RECORDS[model]["half"], below_floors(model, summary)) == ("report", [])
    assert WEIGHTS[model].right_answers == (summary["right"], summary["questions"])


def test_a_kind_below_its_floor_is_named_and_a_reader_without_floors_passes():
    summary = {"right_by_kind": {"faq": [10, 15], "titled": [12, 12]}}  # .67 of at least .7
    (line,) = below_floors("qwen2.5-coder-0.5b", summary)
    assert line == "qwen2.5-coder-0.5b: 10 of 15 questions of kind faq are right, at least 70% must be"
    assert below_floors("another", summary) == []
