"""Which fields of records are their text, title and id: by name, by content, or as they are named by the user."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_posfix.errors import ConfigError

# Our names, BEIR's names, and langchain's. Where records have such a text, other fields are metadata, and ids count.
ID_FIELDS = ("id", "_id")
TEXT_FIELDS = ("text", "page_content", "contents")

# Other common names, without case, spaces and marks. The first of several titles counts; every text counts.
_TITLES = ("title", "subject", "headline", "heading", "question", "topic", "name")
_TEXTS = (
    "content", "body", "text", "answer", "description", "message", "passage", "article", "abstract", "summary",
    "details", "comment", "comments", "note", "notes", "resolution", "solution", "response", "reply", "review",
)  # fmt: skip
_MIN_PROSE_WORDS = 8
_ROLES = ("text", "title", "id")


@dataclass(frozen=True, slots=True)
class FieldRoles:
    """The fields of records that are their text, title and id; empty where records have none.

    Several text fields are joined, each but the first after its name. Other fields are metadata.
    """

    text: tuple[str, ...] = ()
    title: str = ""
    id: str = ""

    def describe(self) -> str:
        """Return the roles on one line."""
        text = ", ".join(self.text) if self.text else "all fields, one line each"
        return "; ".join(
            [f"text: {text}", *(f"{role}: {name}" for role, name in (("title", self.title), ("id", self.id)) if name)]
        )


def parse_fields(specs: Iterable[str]) -> FieldRoles:
    """Return roles from ``NAME`` (text), ``ROLE=NAME`` with the roles text, title and id; commas separate several.

    Raises:
        ConfigError: a role is unknown, a name is empty, or a title or id is given twice.
    """
    roles: dict[str, list[str]] = {role: [] for role in _ROLES}
    for spec in (item for group in specs for item in group.split(",")):
        role, equals, name = spec.strip().rpartition("=")
        if not equals:
            role = "text"
        if role not in roles or not name.strip():
            raise ConfigError(
                f"field {spec.strip()!r} must be NAME for a field with text, or text=NAME, title=NAME or id=NAME"
            )
        roles[role].append(name.strip())
    if twice := next((role for role in ("title", "id") if len(roles[role]) > 1), None):
        raise ConfigError(f"field {twice}={roles[twice][1]!r}: the {twice} is given twice; name one field")
    return FieldRoles(tuple(roles["text"]), "".join(roles["title"]), "".join(roles["id"]))


def find_roles(records: Sequence[Mapping[str, Any]], requested: FieldRoles) -> FieldRoles:
    """Return the roles of the fields of records, of which some are enough; ``requested`` roles count first."""
    names = list(dict.fromkeys(name for record in records for name in record if name))
    plain = {name: re.sub(r"[\W_]+", "", name).lower() for name in names}
    known = next((name for name in TEXT_FIELDS if name in names), "")
    title = requested.title or next(
        (name for wanted in _TITLES for name in names if plain[name] == wanted and _is_text(records, name)), ""
    )
    title = title or ("title" if known else "")
    text = requested.text or ((known,) if known else ())
    record_id = requested.id or next((name for name in ID_FIELDS if name in names and set(text) & {*TEXT_FIELDS}), "")
    if not text:
        others = [name for name in names if name not in (title, record_id, "metadata", *ID_FIELDS)]
        by_name = [name for wanted in _TEXTS for name in others if plain[name] == wanted and _is_text(records, name)]
        prose = [name for name in others if name not in by_name and _mean_words(records, name) >= _MIN_PROSE_WORDS]
        text = tuple(by_name + prose)
    return FieldRoles(text, title, record_id)


def field_text(value: Any) -> str:
    """Return a value as text: strings as they are, lists of strings by line, and no text for other structures."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "\n".join(value)
    if value is None or isinstance(value, dict | list):
        return ""
    return str(value).strip()


def _is_text(records: Sequence[Mapping[str, Any]], name: str) -> bool:
    return any(isinstance(record.get(name), str) and record[name].strip() for record in records)


def _mean_words(records: Sequence[Mapping[str, Any]], name: str) -> float:
    values = [record[name] for record in records if isinstance(record.get(name), str) and record[name].strip()]
    return sum(len(value.split()) for value in values) / len(values) if values else 0.0
