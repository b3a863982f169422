"""Conditions of filters in the languages of Qdrant, PostgreSQL, Elasticsearch and Milvus.

Every function raises ``UntranslatableError`` for a condition that its language cannot state exactly.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from rag_posfix.contracts.filters import AllOf, AnyOf, Condition, Exists, InRange, Negation, OneOf, Scalar

_SIGNS: Final = {"$gt": ">", "$gte": ">=", "$lt": "<", "$lte": "<="}


class UntranslatableError(ValueError):
    """A condition that a store's language cannot state exactly."""


def qdrant_filter(condition: Condition, payload_key: str = "metadata") -> Any:
    """Return a ``qdrant_client.models.Filter`` over the fields of the payload under ``payload_key``."""
    from qdrant_client import models

    def key(field: str) -> str:
        if '"' in field:
            raise UntranslatableError(f"a field with a quote: {field}")
        return f'{payload_key}."{field}"' if not field.isidentifier() else f"{payload_key}.{field}"

    def equal(field: str, value: Scalar) -> Any:
        if value is None:
            raise UntranslatableError("Qdrant's null conditions also match missing values")
        if isinstance(value, str | bool):
            return models.FieldCondition(key=key(field), match=models.MatchValue(value=value))
        return models.FieldCondition(key=key(field), range=models.Range(gte=value, lte=value))

    def clause(condition: Condition) -> Any:
        match condition:
            case AllOf(conditions):
                return models.Filter(must=[clause(member) for member in conditions])
            case AnyOf(conditions):
                return models.Filter(should=[clause(member) for member in conditions])
            case Negation(negated):
                return models.Filter(must_not=[clause(negated)])
            case Exists(field):
                missing = models.IsEmptyCondition(is_empty=models.PayloadField(key=key(field)))
                return models.Filter(must_not=[missing])
            case OneOf(_, ()):
                return models.Filter(must=[models.HasIdCondition(has_id=[])])
            case OneOf(field, values):
                return models.Filter(should=[equal(field, value) for value in values])
            case InRange(field, operator, bound):
                if isinstance(bound, str):
                    raise UntranslatableError("Qdrant has no ranges of texts")
                limits: dict[str, Any] = {operator.removeprefix("$"): bound}
                return models.FieldCondition(key=key(field), range=models.Range(**limits))

    translated = clause(condition)
    return translated if isinstance(translated, models.Filter) else models.Filter(must=[translated])


def postgres_clause(condition: Condition, column: Any) -> Any:
    """Return an SQLAlchemy condition on a ``jsonb`` column that is true or false for every row, never null."""
    import sqlalchemy
    from sqlalchemy.dialects.postgresql import JSONB

    def contains(value: Any) -> Any:
        return column.op("@>")(sqlalchemy.cast(sqlalchemy.literal(value, JSONB), JSONB))

    match condition:
        case AllOf(conditions):
            return sqlalchemy.and_(sqlalchemy.true(), *(postgres_clause(member, column) for member in conditions))
        case AnyOf(conditions):
            return sqlalchemy.or_(sqlalchemy.false(), *(postgres_clause(member, column) for member in conditions))
        case Negation(negated):
            return sqlalchemy.not_(postgres_clause(negated, column))
        case Exists(field):
            value = column.op("->")(sqlalchemy.literal(field, sqlalchemy.Text))
            empty = [sqlalchemy.literal(text, sqlalchemy.Text) for text in ("null", "[]")]
            return sqlalchemy.func.coalesce(sqlalchemy.cast(value, sqlalchemy.Text).not_in(empty), sqlalchemy.false())
        case OneOf(field, values):
            members = [contains({field: candidate}) for value in values for candidate in (value, [value])]
            return sqlalchemy.or_(sqlalchemy.false(), *members)
        case InRange(field, operator, bound):
            # In lax mode [*] is the elements of a list, or the value itself; other types than the bound's are unknown,
            # which is no match. Texts are compared by their code points.
            kind = "string" if isinstance(bound, str) else "number"
            path = f'$.{json.dumps(field)}[*] ? (@.type() == "{kind}" && @ {_SIGNS[operator]} $bound)'
            return sqlalchemy.func.jsonb_path_exists(
                column,
                sqlalchemy.cast(sqlalchemy.literal(path, sqlalchemy.Text), sqlalchemy.dialects.postgresql.JSONPATH),
                sqlalchemy.cast(sqlalchemy.literal({"bound": bound}, JSONB), JSONB),
            )


def elasticsearch_filter(condition: Condition) -> dict[str, Any]:
    """Return a query clause over ``metadata.*``, whose texts have the subfield ``keyword`` of dynamic mappings."""
    match condition:
        case AllOf(()):
            return {"match_all": {}}
        case AllOf(conditions):
            return {"bool": {"filter": [elasticsearch_filter(member) for member in conditions]}}
        case AnyOf(conditions):
            clauses = [elasticsearch_filter(member) for member in conditions]
            return {"bool": {"should": clauses, "minimum_should_match": 1}}
        case Negation(negated):
            return {"bool": {"must_not": [elasticsearch_filter(negated)]}}
        case Exists(field):
            return {"exists": {"field": f"metadata.{field}"}}
        case OneOf(field, values):
            if None in values:
                raise UntranslatableError("Elasticsearch does not index null")
            texts = [value for value in values if isinstance(value, str)]
            if any(len(text) > 256 for text in texts):
                raise UntranslatableError("dynamic mappings do not index texts of more than 256 characters")
            others = [value for value in values if not isinstance(value, str)]
            if texts and others:
                raise UntranslatableError("a field of Elasticsearch has one type")
            name = f"metadata.{field}.keyword" if texts else f"metadata.{field}"
            return {"terms": {name: texts or others}} if values else {"match_none": {}}
        case InRange(field, operator, bound):
            if isinstance(bound, str):
                raise UntranslatableError("dynamic mappings read some texts as dates")
            return {"range": {f"metadata.{field}": {operator.removeprefix("$"): bound}}}


def milvus_expression(condition: Condition, metadata_field: str = "metadata") -> str:
    """Return a filter expression over a JSON field.

    Milvus compares a missing key as no match in a comparison, but not under ``not``, and equality does not look into
    lists: only conditions of texts and numbers without ``not`` are translated, each with its list form.
    """

    def name(field: str) -> str:
        return f"{metadata_field}[{json.dumps(field, ensure_ascii=False)}]"

    def joined(conditions: Sequence[Condition], word: str) -> str:
        return "(" + f" {word} ".join(milvus_expression(member, metadata_field) for member in conditions) + ")"

    match condition:
        case AllOf(conditions) if conditions:
            return joined(conditions, "and")
        case AnyOf(conditions):
            return joined(conditions, "or")
        case OneOf(field, values) if values and not any(_is_unwritable(value) for value in values):
            members = [
                f"({name(field)} == {json.dumps(value, ensure_ascii=False)} or "
                f"json_contains({name(field)}, {json.dumps(value, ensure_ascii=False)}))"
                for value in values
            ]
            return "(" + " or ".join(members) + ")"
    raise UntranslatableError("Milvus cannot state this exactly")


def _is_unwritable(value: Scalar) -> bool:
    """Return whether Milvus' parser takes no such literal in every place: null, and numbers with a sign."""
    return value is None or (isinstance(value, int | float) and value < 0)
