"""Long passages of several passages each."""

import pytest
from langchain_core.documents import Document

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.questions import PositionExample, with_joined_passages


def example(n_distractors, n_gold=1):
    def documents(name, count):
        return tuple(
            Document(f"Text of {name}{number}.", id=f"{name}{number}", metadata={"title": f"{name}{number}"})
            for number in range(count)
        )

    return PositionExample("q", "What?", ("x",), documents("g", n_gold), documents("d", n_distractors))


def test_the_gold_passage_is_in_the_middle_of_its_long_passage():
    (joined,) = with_joined_passages([example(8)], 3)
    (gold,) = joined.gold
    assert gold.page_content == "d0\nText of d0.\n\ng0\nText of g0.\n\nd1\nText of d1."
    assert (gold.id, gold.metadata) == ("g0", {})
    assert [document.id for document in joined.distractors] == ["d2+d3+d4", "d5+d6+d7"]
    assert joined.distractors[1].page_content.split("\n\n")[2] == "d7\nText of d7."


def test_what_does_not_fill_a_passage_is_left_out_and_two_gold_passages_have_distractors_of_their_own():
    (joined,) = with_joined_passages([example(7, n_gold=2)], 2)
    assert [document.page_content.split("\n")[0] for document in joined.gold] == ["d0", "d1"]
    assert [document.id for document in joined.distractors] == ["d2+d3", "d4+d5"]


@pytest.mark.parametrize(("count", "message"), [(1, "must be at least 2"), (4, "has 5 distractors; .* need 7 or")])
def test_too_short_and_too_long_passages_are_refused(count, message):
    with pytest.raises(EvaluationError, match=message):
        with_joined_passages([example(5)], count)
