import pytest

from rag_posfix.evaluation.answers.answering import is_sound, repeats, summarize_form


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Pi Day Die Day Pi Day Die Day", True),  # four words, twice in succession
        ("no no no", True),
        ("no, no: it was Rome", False),  # a word twice is ordinary English
        ("new york new york", True),
        ("The lighthouse was built in 1901 by Ilse.", False),
        ("a b c a b d", False),
        ("", False),
    ],
)
def test_a_repetition_is_a_run_of_words_twice_in_succession(text, expected):
    assert repeats(text) is expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Rome", True),
        ("Rome\nParis is another town.", True),
        ("\nRome", False),
        ("...", False),
        (" ".join(f"w{n}" for n in range(30)), True),
        (" ".join(f"w{n}" for n in range(31)), False),
        ("Rome Rome Rome", False),
    ],
)
def test_a_sound_answer_has_one_to_thirty_words_in_its_first_line_and_repeats_nothing(answer, expected):
    assert is_sound(answer) is expected


def test_the_summary_counts():
    assert summarize_form(["Rome", "no no no", ""]) == {"sound": 1 / 3, "repeats": 1 / 3, "words": 4 / 3}
    assert summarize_form([]) == {"sound": 0.0, "repeats": 0.0, "words": 0.0}
