import pytest

from rag_posfix.evaluation.answers.answer_metrics import best_subspan_em, first_line, normalize


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Eiffel Tower!", "eiffel tower"),
        ("  a  cat\tand an\nowl ", "cat and owl"),
        ("Theatre an-other", "theatre another"),
        ("U.S.A.", "usa"),
        ("(1976)", "1976"),
        ("It's", "its"),
        ("the.cat", "thecat"),
        ("The", ""),
        ("", ""),
        ("Röntgen", "röntgen"),
    ],
)
def test_answers_are_normalised_as_squad_does(text, expected):
    assert normalize(text) == expected


@pytest.mark.parametrize(
    ("answer", "accepted", "score"),
    [
        ("It was Wilhelm Röntgen, in 1901.", ["Röntgen"], 1.0),
        ("the ANSWER is 42.", ["41", "42"], 1.0),
        ("The Eiffel Tower", ["an Eiffel tower"], 1.0),
        ("Eiffel", ["Eiffel Tower"], 0.0),
        ("", ["Eiffel Tower"], 0.0),
        ("anything", ["the", "!"], 0.0),
        ("anything", [], 0.0),
        ("Parisian", ["Paris"], 1.0),
    ],
)
def test_an_answer_is_right_if_it_holds_an_accepted_one(answer, accepted, score):
    assert best_subspan_em(answer, accepted) == score


@pytest.mark.parametrize(
    ("text", "line"), [("one\ntwo", "one"), (" one ", "one"), ("\none", ""), ("one\r\ntwo", "one"), ("", "")]
)
def test_the_first_line_is_what_stands_before_the_first_break(text, line):
    assert first_line(text) == line
