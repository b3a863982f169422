import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.assembly.orders import OrderInputs, permute
from rag_posfix.assembly.orders.profile import Profile
from rag_posfix.errors import ConfigError
from rag_posfix.plan.bias_profile import stretched
from tests.support.toy_encoder import ToyEncoder

values = st.lists(st.floats(0, 1), min_size=2, max_size=12).map(tuple)


def test_the_best_documents_stand_in_the_slots_with_the_highest_values():
    # Slots by value: 3 (0.5), 0 (0.4), 1 (0.2), 2 (0.1). Documents by score: 2, 0, 3, 1.
    assert permute("profile:slots=[0.4,0.2,0.1,0.5]", [0.7, 0.1, 0.9, 0.3]) == (0, 3, 1, 2)


def test_of_equal_slots_the_earlier_gets_the_better_document():
    assert permute("profile:slots=[0.3,0.1,0.3]", [0.9, 0.8, 0.7]) == (0, 2, 1)


def test_a_profile_is_interpolated_linearly_to_more_slots():
    # Three slots on five: places 0, 1/2, 1, 3/2, 2 of the profile.
    assert stretched((4.0, 0.0, 2.0), 5) == (4.0, 2.0, 0.0, 1.0, 2.0)
    # By value: slots 0, 1 (2.0), 4 (2.0), 3, 2.
    assert permute("profile:slots=[4,0,2]", [0.9, 0.8, 0.7, 0.6, 0.5]) == (0, 1, 4, 3, 2)


def test_a_profile_is_interpolated_linearly_to_fewer_slots():
    # Five slots on three: places 0, 2, 4; on four: 0, 4/3, 8/3, 4.
    assert stretched((5.0, 1.0, 0.0, 3.0, 4.0), 3) == (5.0, 0.0, 4.0)
    assert stretched((5.0, 1.0, 0.0, 3.0, 4.0), 4) == pytest.approx((5.0, 2 / 3, 2.0, 4.0))
    assert stretched((5.0, 1.0), 1) == (5.0,)
    assert stretched((5.0, 1.0), 0) == ()


@given(values, st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_no_other_order_gives_more_relevance_to_well_read_slots(profile, relevance):
    """By the rearrangement inequality the sum of value times relevance is the largest when both are sorted alike."""
    slots = stretched(profile, len(relevance))
    placed = Profile(slots=profile)
    order = placed(OrderInputs(tuple(relevance)))
    reached = sum(value * relevance[index] for value, index in zip(slots, order, strict=True))
    best = sum(a * b for a, b in zip(sorted(slots), sorted(relevance), strict=True))
    assert reached == pytest.approx(best)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("profile", "needs the measured value of each slot"),
        ("profile:slots=[1,2]:file=x", "order profile has no parameter 'file'"),
        ("profile:slots=[1]", "must be a list of 2 to 1000 finite numbers"),
        ("profile:slots=[1,true]", r"slots\[1\]=True must be a number"),
        ("profile:slots=[1,Infinity]", r"slots\[1\]=inf must be a finite number"),
    ],
)
def test_a_profile_that_cannot_be_used_is_refused(order, message):
    with pytest.raises(ConfigError, match=message):
        permute(order, [None, None])


def test_an_assembler_uses_its_parameters_where_an_order_comes_without():
    assembler = Assembler(ToyEncoder(), 4096, order_parameters={"profile": {"slots": (0.1, 0.9, 0.5)}})
    documents = [
        Document(page_content=f"text {i}", id=str(i), metadata={"relevance_score": 1 - i / 10}) for i in range(3)
    ]
    assert assembler.assemble("Why?", documents, order="profile").ids == ("2", "0", "1")
    chosen = assembler.assemble("Why?", documents, order="profile:slots=[0.9,0.5,0.1]")
    assert (chosen.ids, chosen.order) == (("0", "1", "2"), "profile")
