"""Documents with metadata of every kind, and filters over them."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st
from langchain_core.documents import Document

GROUPS = ("red", "green", "blue", 'it\'s "quoted"')
YEARS = (-3, 0, 1, 1999, 2024)
VALUES: dict[str, tuple[Any, ...]] = {
    "acl": GROUPS,
    "group": (*GROUPS, None),
    "year": (*YEARS, 1.0, 7),
    "price": (0.5, 1, 12.25),
    "open": (True, False),
}


def documents_with_metadata(count: int = 40) -> list[Document]:
    """Return documents of the same words; fields are missing, None, empty and lists in some of them."""
    draw = random.Random(7)
    documents = []
    for number in range(count):
        metadata: dict[str, Any] = {"number": number}
        if draw.random() < 0.8:
            metadata["acl"] = draw.sample(GROUPS, draw.randint(0, 3))
        if draw.random() < 0.8:
            metadata["year"] = draw.choice(YEARS)
        if draw.random() < 0.7:
            metadata["price"] = draw.choice((0.5, 1.0, 12.25))
        if draw.random() < 0.7:
            metadata["group"] = draw.choice((*GROUPS, None))
        if draw.random() < 0.7:
            metadata["open"] = draw.random() < 0.5
        documents.append(Document(id=f"{number:04}", page_content=f"common words {number}", metadata=metadata))
    return documents


def _conditions(field: str) -> st.SearchStrategy[tuple[str, Any]]:
    """Return what a filter may say of ``field``."""
    values = VALUES.get(field, ("x", 1))
    value = st.sampled_from(values)
    conditions = (
        value,
        st.lists(value, max_size=3),
        st.fixed_dictionaries({"$exists": st.booleans()}),
        *(st.fixed_dictionaries({operator: value}) for operator in ("$eq", "$ne")),
        *(st.fixed_dictionaries({operator: st.lists(value, min_size=1, max_size=4)}) for operator in ("$in", "$nin")),
    )
    return st.tuples(st.just(field), st.one_of(conditions))


_COMPARISONS = st.tuples(
    st.sampled_from(("year", "price")),
    st.dictionaries(
        st.sampled_from(("$gt", "$gte", "$lt", "$lte")), st.sampled_from((*YEARS, 0.75)), min_size=1, max_size=2
    ),
)
_FIELDS = st.one_of(_COMPARISONS, st.one_of([_conditions(field) for field in (*VALUES, "nowhere")]))
FILTERS = st.recursive(
    st.lists(_FIELDS, min_size=1, max_size=2).map(dict),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"$not": inner}),
        *(st.fixed_dictionaries({name: st.lists(inner, min_size=1, max_size=3)}) for name in ("$and", "$or")),
    ),
    max_leaves=5,
)
"""Filters over the fields that documents have, and one that none has; they shrink to the shortest that fails."""
