import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.caching.answers import tiered
from rag_posfix.caching.answers.tiered import AnswerKey

KEY = AnswerKey(
    model="model",
    template="template",
    assembly="assembly",
    mitigation="mitigation",
    sampling="sampling",
    question="question",
    documents=("one", "two"),
    order_invariant=False,
    history="history",
    tenant="tenant",
)
TEXT_FIELDS = [field.name for field in dataclasses.fields(AnswerKey) if field.type == "str"]
# Texts are cleaned at the door: a lone surrogate and a NUL are the same U+FFFD there.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=8)


def test_the_digest_does_not_depend_on_the_process():
    assert KEY.digest() == "8bcb2afdef5ae7e2f663d473ac4b3ea7"


@pytest.mark.parametrize("field", TEXT_FIELDS)
@given(text=texts)
def test_every_text_changes_the_digest(field, text):
    other = dataclasses.replace(KEY, **{field: text})
    assert (other.digest() == KEY.digest()) == (other == KEY)


@given(documents=st.lists(texts, max_size=4))
def test_the_documents_change_the_digest(documents):
    other = dataclasses.replace(KEY, documents=tuple(documents))
    assert (other.digest() == KEY.digest()) == (other == KEY)


@pytest.mark.parametrize("change", [{"order_invariant": True}, {"attribution": False}])
def test_order_invariance_and_citations_by_attention_change_the_digest(change):
    assert dataclasses.replace(KEY, **change).digest() != KEY.digest()


def test_the_schema_version_changes_the_digest(monkeypatch):
    before = KEY.digest()
    monkeypatch.setattr(tiered, "SCHEMA_VERSION", tiered.SCHEMA_VERSION + 1)
    assert KEY.digest() != before


@given(first=st.lists(texts, min_size=9, max_size=9), second=st.lists(texts, min_size=9, max_size=9))
def test_moving_text_between_fields_changes_the_digest(first, second):
    one, two = (
        AnswerKey(**dict(zip(TEXT_FIELDS, values, strict=True)), documents=(), order_invariant=False)
        for values in (first, second)
    )
    assert (one.digest() == two.digest()) == (one == two)


@pytest.mark.parametrize(
    ("first", "second"),
    [(("ab", "c"), ("a", "bc")), (("ab",), ("a", "b")), ((), ("",)), (("a", ""), ("", "a")), (("a",), ("a", "a"))],
)
def test_the_boundaries_of_documents_count(first, second):
    digests = {dataclasses.replace(KEY, documents=documents).digest() for documents in (first, second)}
    assert len(digests) == 2


def test_a_field_does_not_run_into_the_documents():
    assert (
        dataclasses.replace(KEY, tenant="", documents=("x",)).digest()
        != dataclasses.replace(KEY, tenant="x", documents=()).digest()
    )


@given(data=st.data(), documents=st.lists(texts, min_size=2, max_size=5))
def test_a_shuffled_context_is_the_same_key_only_for_an_order_invariant_mitigation(data, documents):
    shuffled = data.draw(st.permutations(documents))
    for order_invariant in (False, True):
        one, two = (
            dataclasses.replace(KEY, documents=tuple(order), order_invariant=order_invariant).digest()
            for order in (documents, shuffled)
        )
        assert (one == two) == (order_invariant or documents == shuffled)
