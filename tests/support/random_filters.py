"""Documents with metadata of every kind, and random filters over them."""

from __future__ import annotations

import random
from typing import Any

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


def random_filter(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a filter with up to three levels, over fields that documents have and one that none has."""
    if depth < 3 and draw.random() < 0.4:
        combination = draw.choice(("$and", "$or", "$not"))
        if combination == "$not":
            return {"$not": random_filter(draw, depth + 1)}
        return {combination: [random_filter(draw, depth + 1) for _ in range(draw.randint(1, 3))]}
    return dict(_random_field(draw) for _ in range(draw.randint(1, 2)))


def _random_field(draw: random.Random) -> tuple[str, Any]:
    field = draw.choice(("acl", "year", "price", "group", "open", "nowhere"))
    if draw.random() < 0.1:
        return field, {"$exists": draw.random() < 0.5}
    values: tuple[Any, ...] = VALUES.get(field, ("x", 1))
    operator = draw.choice(("plain", "list", "$eq", "$ne", "$in", "$nin", "$gt", "$gte", "$lt", "$lte"))
    if operator in ("$gt", "$gte", "$lt", "$lte"):
        field = draw.choice(("year", "price"))
        return field, {operator: draw.choice((*YEARS, 0.75))}
    if operator == "plain":
        return field, draw.choice(values)
    if operator == "list":
        return field, draw.sample(values, draw.randint(0, len(values)))
    operand = draw.sample(values, draw.randint(1, len(values))) if "in" in operator else draw.choice(values)
    return field, {operator: operand}
