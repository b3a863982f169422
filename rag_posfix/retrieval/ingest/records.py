"""Reads records: each JSON object, each line of JSON lines, and each row of a table is one document.

Which fields are text, title and id is found by name, by content, or named by the user.
"""

from __future__ import annotations

import csv
import gzip
import html
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from rag_posfix.errors import ConfigError, RetrievalError
from rag_posfix.retrieval.ingest.decoding import MAX_RATIO, MIN_UNPACKED, decode_text, without_embedded
from rag_posfix.retrieval.ingest.html import fragment_text
from rag_posfix.retrieval.ingest.structure import divided_tables, passage_title, title_from_path
from rag_posfix.text import allow_long_cells, clean_json, clean_text, content_hash, parse_json

JSON_SUFFIXES = (".geojson", ".json", ".jsonl", ".jsonl.gz", ".ndjson")
TABLE_SUFFIXES = (".csv", ".tsv")
RECORD_SUFFIXES = (*JSON_SUFFIXES, *TABLE_SUFFIXES)

_SNIFFED_CHARACTERS = 8192
_DELIMITERS = ",;\t|"
_COMMENTS = ("# ", "##")
_SPACE = re.compile(r"\s*")
_QUOTED = re.compile(r'"[^"]*"')
_STATED_DELIMITER = re.compile(r'"?sep=([,;\t|])"?\s*')
_SAMPLED_RECORDS = 1000
_MAX_OPEN_QUOTES = 20
"""Rows whose quote is never closed, before the remaining rows are given up: each of them costs a pass."""

# Our names, BEIR's names, and langchain's. Where records have such a text, other fields are metadata, and ids count.
_ID_FIELDS = ("id", "_id")
_TEXT_FIELDS = ("text", "page_content", "contents")

# Other common names, without case, spaces and marks. The first of several titles counts; every text counts.
_TITLES = ("title", "subject", "headline", "heading", "question", "topic", "name")
_TEXTS = (
    "content", "body", "text", "answer", "description", "message", "passage", "article", "abstract", "summary",
    "details", "comment", "comments", "note", "notes", "resolution", "solution", "response", "reply", "review",
)  # fmt: skip
_SPEAKERS = ("author", "from", "sender", "speaker", "user", "username")
_PERSONS = {"firstname", "fullname", "givenname", "lastname", "surname"}
"""Columns beside which a title is that of a person."""
_LISTS = ("data", "items", "records", "results", "rows", "entries", "documents", "docs", "hits")
_ENVELOPE = (
    "encoding", "format", "message", "next", "object", "previous", "schema", "status", "total", "type", "version",
)  # fmt: skip
_ENVELOPE_OBJECTS = ("crs", "shards", "total")
_WRAPPERS = ("response", "result", "payload", "body")
"""Names of objects around records, as those of lists of them; other names are the caption of the records."""
_MIN_PROSE_WORDS = 8
_MIN_LONG_PROSE_WORDS = 30
_MAX_HEADING_CHARACTERS = 200
_MAX_METADATA_CHARACTERS = 10_000
"""A longer value is no metadata: each passage of a long record would have it."""
_MAX_LISTED_NUMBERS = 16
_HEADER_SHARE = 0.6
"""The row of names has this share of the cells of the widest row, at least; a title above it has fewer."""
_SAMPLED_ROWS = 20
_KINDS = {
    "number": re.compile(r"[-+]?\d[\d.,]*[%€$£]?"),
    "date": re.compile(r"\d{4}-\d\d-\d\d.*|\d{1,2}[./]\d{1,2}[./]\d{2,4}"),
    "address": re.compile(r"\S+@\S+\.\w+|https?://\S+"),
}
"""Kinds of values that are no names of columns where the cells below are of the same kind."""
_YEAR = re.compile(r"(?:19|20)\d\d")
_ROLES = ("text", "title", "id")


@dataclass(frozen=True, slots=True)
class FieldRoles:
    """The fields of records that are their text, title and id; empty where records have none.

    Several text fields are joined, each but the first after its name. The fields ``beside`` them stand in the heading.
    All but the text and the title are metadata, too.
    """

    text: tuple[str, ...] = ()
    title: str = ""
    id: str = ""
    beside: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return the roles on one line."""
        text = ", ".join(self.text) if self.text else "all fields, one line each"
        others = (("title", self.title), ("id", self.id), ("heading", ", ".join(self.beside)))
        return "; ".join([f"text: {text}", *(f"{role}: {names}" for role, names in others if names)])


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


def _find_roles(records: Sequence[Mapping[str, Any]], requested: FieldRoles, *, is_table: bool) -> FieldRoles:
    """Return the roles of the fields of records, of which some are enough; ``requested`` roles count first.

    Beside a text with one of our names are the other columns of a table, who speaks, and nested fields.
    """
    nested = {name for record in records for name, value in record.items() if _is_metadata(name, value)}
    names = list(dict.fromkeys(name for record in records for name in record if name and name not in nested))
    plain = {name: _plain(name) for name in names}
    known = next((name for name in _TEXT_FIELDS if name in names), "")
    titles = _TITLES[1:] if _PERSONS & {*plain.values()} else _TITLES
    title = requested.title or next(
        (name for wanted in titles for name in names if plain[name] == wanted and _is_text(records, name)), ""
    )
    title = title or ("title" if known and "title" in names else "")
    text = requested.text or ((known,) if known else ())
    record_id = requested.id or next(
        (name for name in _ID_FIELDS if name in names and set(text) & {*_TEXT_FIELDS}), ""
    )
    if not text:
        others = [name for name in names if name not in (title, record_id, *_ID_FIELDS)]
        by_name = [name for wanted in _TEXTS for name in others if plain[name] == wanted and _is_text(records, name)]
        prose = [name for name in others if name not in by_name and _mean_words(records, name) >= _MIN_PROSE_WORDS]
        text = tuple(by_name + prose)
        numbers = [name for name in _ID_FIELDS if is_table and name in names and not _is_counter(records, name)]
        beside = tuple(name for name in (*numbers, *others) if name not in (*text, title, record_id))
        if beside and not any(_mean_words(records, name) >= _MIN_LONG_PROSE_WORDS for name in text):
            text, beside = (), ()
        return FieldRoles(text, title, record_id, beside)
    others = [name for name in names if name not in (*text, title, record_id, *_TEXT_FIELDS, *_ID_FIELDS)]
    beside = tuple(name for name in others if is_table or plain[name] in _SPEAKERS or _is_nested(records, name))
    return FieldRoles(text, title, record_id, () if requested.text else beside)


def _is_counter(records: Sequence[Mapping[str, Any]], name: str) -> bool:
    return all(str(record.get(name) or "0").isdecimal() for record in records)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", "", name).lower()


def _without_tags(value: Any) -> Any:
    """Return a value with the text of each string in it that is HTML."""
    if isinstance(value, dict):
        return {name: _without_tags(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_tags(item) for item in value]
    return fragment_text(value) if isinstance(value, str) else value


def _field_text(value: Any) -> str:
    """Return a value as text: strings as they are, lists of strings by line, and no text for other structures."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "\n".join(value)
    if value is None or isinstance(value, dict | list):
        return ""
    return str(value).strip()


def _lines(name: str, value: Any) -> Iterator[str]:
    """Yield a field as lines ``name: value``, nested ones as ``a.b: value``; long lists of numbers are left out."""
    if isinstance(value, dict):
        for key, item in value.items():  # {"$date": ...} is a value, as MongoDB exports it
            yield from _lines(name if key.startswith("$") and len(value) == 1 else f"{name}.{key}", item)
    elif isinstance(value, list):
        scalars = [str(item).strip() for item in value if item is not None and not isinstance(item, dict | list)]
        if len(scalars) <= _MAX_LISTED_NUMBERS or any(isinstance(item, str) for item in value):
            yield from [f"{name}: {', '.join(scalars)}"] if any(scalars) else []
        for item in value:
            if isinstance(item, dict) or (isinstance(item, list) and not _is_numeric(item)):
                yield from _lines(name, item)
    elif text := _field_text(value):
        yield f"{name}: {text}"


def _is_numeric(value: Any) -> bool:
    return all(map(_is_numeric, value)) if isinstance(value, list) else isinstance(value, int | float)


def _is_text(records: Sequence[Mapping[str, Any]], name: str) -> bool:
    return any(isinstance(record.get(name), str) and record[name].strip() for record in records)


def _is_nested(records: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Return whether a field has objects with words in them, or lists of these."""
    values = (record.get(name) for record in records)
    items = (item for value in values for item in (value if isinstance(value, list) else [value]))
    return any(isinstance(item, dict) and _has_words(item) for item in items)


def _mean_words(records: Sequence[Mapping[str, Any]], name: str) -> float:
    values = [record[name] for record in records if isinstance(record.get(name), str) and record[name].strip()]
    return sum(len(value.split()) for value in values) / len(values) if values else 0.0


@dataclass(frozen=True, slots=True)
class Record:
    """The fields of a record, its position for messages, and metadata of the position.

    Attributes:
        caption: What stands above its table.
        table: The title of a record of a table without any: the name of the file.
    """

    fields: dict[str, Any]
    position: str
    metadata: dict[str, Any]
    caption: str = ""
    table: str = ""


@dataclass(frozen=True, slots=True)
class RecordFile:
    """The documents of a file of records, each with its position.

    Attributes:
        documents: One for each record with text.
        roles: Which fields are text, title and id.
        encoding_note: What is said about the encoding, if that is a guess.
        without_text: Number of records without text.
    """

    documents: tuple[tuple[Document, str], ...]
    roles: FieldRoles
    encoding_note: str | None
    without_text: int


def read_records(file: Path, requested: FieldRoles, report: Callable[[str], None]) -> RecordFile:
    """Return the documents of a ``.json``, ``.jsonl``, ``.jsonl.gz``, ``.csv`` or ``.tsv`` file.

    ``report`` is called with each record that cannot be read, by its line; the others are read.

    Raises:
        RetrievalError: the file is no text, not compressed or damaged.
        OSError: the file cannot be read.
    """
    source, suffix = clean_text(str(file)), file.name.lower()
    text, note = decode_text(_unpacked(file, source), source)
    text = without_embedded(text)
    if suffix.endswith(TABLE_SUFFIXES):
        records = list(_table_records(text, source, report))
    elif suffix.endswith((".json", ".geojson")):
        records = list(_json_records(text, source, report))
    else:
        records = list(_json_lines(text, source, report))
    is_table = suffix.endswith(TABLE_SUFFIXES)
    roles = _find_roles([record.fields for record in records[:_SAMPLED_RECORDS]], requested, is_table=is_table)
    documents = []
    without_text = 0
    for record in records:
        try:
            document = _document(replace(record, fields=_without_tags(record.fields)), roles, source)
        except ValueError as error:
            report(f"{record.position}: {error}")
            continue
        if document.page_content.strip():
            documents.append((document, record.position))
        else:
            without_text += 1
    return RecordFile(tuple(documents), roles, note, without_text)


def _unpacked(file: Path, source: str) -> bytes:
    if file.suffix.lower() != ".gz":
        return file.read_bytes()
    try:
        most = max(MIN_UNPACKED, MAX_RATIO * file.stat().st_size)
        with gzip.open(file) as unpacked:
            data = unpacked.read(most + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RetrievalError(f"cannot unpack {source!r}: {error}; the file is cut off or not gzip") from error
    if len(data) > most:
        raise RetrievalError(f"cannot unpack {source!r}: it unpacks to more than {most:,} bytes; leave the file out")
    return data


def _json_lines(text: str, source: str, report: Callable[[str], None]) -> Iterator[Record]:
    for number, line in enumerate(text.split("\n"), start=1):
        position = f"{source}:{number}"
        if not line.strip():
            continue
        try:
            value = parse_json(line, lenient=True)
        except ValueError as error:
            values = [] if any(other.strip() for other in text.split("\n")[: number - 1]) else _json_values(text)
            if values:  # objects over several lines
                yield from _listed(values, source, report)
                return
            report(f"{position}: not JSON ({error}); each line must be one JSON object")
            continue
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            yield from (Record(_unwrapped(item), position, {}) for item in value)
        elif isinstance(value, dict | str):
            yield Record(_unwrapped(value) if isinstance(value, dict) else {"text": value}, position, {})
        else:
            report(f"{position}: a {type(value).__name__}, expected a JSON object")


def _json_values(text: str) -> list[Any]:
    """Return JSON values that follow each other; nothing if the text is anything else."""
    decoder = json.JSONDecoder(parse_constant=lambda _: None)
    values, end, ends = [], 0, len(text.rstrip())
    try:
        while end < ends:
            value, end = decoder.raw_decode(text, _SPACE.match(text, end).end())  # type: ignore[union-attr]
            values.append(clean_json(value))
    except (ValueError, RecursionError):
        return []
    return values if all(isinstance(value, dict) for value in values) else []


def _json_records(text: str, source: str, report: Callable[[str], None]) -> Iterator[Record]:
    """Yield the objects of a list, of the one list or of all values of an object, at any depth, or the object itself.

    The title of an object is the caption of those in its list, and what else it says is a record of its own.
    """
    try:
        value = parse_json(text, lenient=True)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("{") and error.msg == "Extra data":  # JSON lines under another name
            values = _json_values(text)
            yield from _listed(values, source, report) if values else _json_lines(text, source, report)
            return
        raise RetrievalError(f"{source}:{error.lineno}: not JSON ({error})") from error
    except ValueError as error:
        raise RetrievalError(f"{source}: not JSON ({error})") from error
    caption = ""
    while isinstance(value := _rows_of_columns(value), dict):
        names = _lists_of_records(value)
        if not names or _has_own_text(value, names[0]):
            break
        title = next((key for key in value if _plain(key) in _TITLES and isinstance(value[key], str)), None)
        is_said = isinstance(value[names[0]], dict) and _plain(names[0]) not in (*_LISTS, *_WRAPPERS)
        caption = passage_title(caption, [str(value.get(title, ""))] * bool(value.get(title)) + names[:1] * is_said)
        left_out = {title, *names, *(key for key in value if _is_envelope(key, value[key]))}
        others = {key: item for key, item in value.items() if key not in left_out}
        if any(map(_has_words, others.values())):
            yield Record(others, source, {}, caption)
        if len(names) > 1:
            for name in names:
                yield from _listed(value[name], source, report, passage_title(caption, [name]))
            return
        value = value[names[0]]
    if isinstance(value, dict):
        value = [{"key": key, **item} for key, item in value.items()] if _holds_records(value) else [value]
    elif isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise RetrievalError(f"{source}: a {type(value).__name__}, expected a list of JSON objects")
    header = value[0] if value and isinstance(value[0], list) else None
    if header and all(isinstance(name, str) and name for name in header) and len(value) > 1:  # names above rows
        value = [dict(zip(header, row, strict=False)) if isinstance(row, list) else row for row in value[1:]]
    yield from _listed(value, source, report, caption)


def _listed(values: Sequence[Any], source: str, report: Callable[[str], None], caption: str = "") -> Iterator[Record]:
    for number, item in enumerate(values, start=1):
        position = f"{source}, item {number}"
        if isinstance(item, dict | str):
            yield Record(_unwrapped(item) if isinstance(item, dict) else {"text": item}, position, {}, caption)
        else:
            report(f"{position}: a {type(item).__name__}, expected a JSON object")


def _is_envelope(name: str, value: Any) -> bool:
    """Return whether a field beside the records of a file says nothing about them."""
    return _plain(name) in (_ENVELOPE if not isinstance(value, dict | list) else _ENVELOPE_OBJECTS)


def _lists_of_records(value: Mapping[str, Any]) -> list[str]:
    """Return the fields of an object that hold records: its lists of objects, or an object beside no words."""
    lists = [name for name, item in value.items() if isinstance(item, list) and item and isinstance(item[0], dict)]
    if lists:
        return lists
    said = [name for name, item in value.items() if not _is_envelope(name, item) and _has_words(item)]
    if len(said) != 1 or not isinstance(inner := value[said[0]], dict):
        return []
    return said if _lists_of_records(inner) or _holds_records(inner) else []


def _rows_of_columns(value: Any) -> Any:
    """Return the rows of a table that is written by column, as pandas does; other values as they are."""
    if not isinstance(value, dict) or not value:
        return value
    if isinstance(value.get("columns"), list) and isinstance(value.get("data"), list):
        return [value["columns"], *value["data"]]
    numbers = [list(item) if isinstance(item, dict) else [] for item in value.values()]
    if not numbers[0] or not all(names == numbers[0] for names in numbers) or not all(map(str.isdecimal, numbers[0])):
        return value
    return [{name: column[number] for name, column in value.items()} for number in numbers[0]]


def _holds_records(value: Mapping[str, Any]) -> bool:
    """Return whether all values of an object are records with a common field."""
    items = list(value.values())
    are_objects = len(items) > 1 and all(isinstance(item, dict) for item in items)
    return are_objects and bool(set.intersection(*map(set, items)))


def _has_words(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_words, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and any(map(str.isalnum, value))


def _unwrapped(record: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a record; a hit of Elasticsearch and a feature of GeoJSON have them in an object."""
    wrapper = "_source" if "_source" in record else "properties" if record.get("type") == "Feature" else ""
    inner = record.get(wrapper)
    if isinstance(inner, dict):
        record = {name: record[name] for name in _ID_FIELDS if name in record} | inner
    return {name: _plain_value(value) for name, value in record.items()}


def _plain_value(value: Any) -> Any:
    """Return a value without what exports wrap it in: an id of MongoDB, HTML of WordPress, a text in parts."""
    if isinstance(value, dict) and list(value) in (["$oid"], ["$uuid"]):
        return next(iter(value.values()))
    if isinstance(value, dict) and isinstance(text := value.get("rendered"), str):
        return text if "<" in text else html.unescape(text)
    if isinstance(value, list) and any(isinstance(part, str) for part in value):
        parts = [part.get("text") if isinstance(part, dict) else part for part in value]
        if parts != value and all(isinstance(part, str) for part in parts):
            return "".join(map(str, parts))
    return value


def _has_own_text(record: Mapping[str, Any], list_name: str) -> bool:
    """Return whether an object is a record with a list in it, such as its comments, and does not hold records."""
    texts = {name for name, value in record.items() if isinstance(value, str) and value.strip()}
    if _plain(list_name) in _LISTS:  # a description or message beside it is that of the list
        return bool(texts & {*_TEXT_FIELDS})
    return any(name in _TEXT_FIELDS or _plain(name) in _TEXTS for name in texts)


def _table_records(text: str, source: str, report: Callable[[str], None]) -> Iterator[Record]:
    """Yield the rows of a table under the names of its columns; a title above these is the caption of each row.

    The delimiter is that of a first line ``sep=;``, as spreadsheets write it, a tab in ``.tsv`` files, else the comma,
    semicolon, tab or vertical bar that most lines have equally often. Empty and comment lines are no rows. Of two
    columns with one name the second is ``NAME 2``; a column without a name is ``column N``, or left out if it numbers
    the rows. A table whose first row is a row of values has columns without names. Empty cells at the end of a row do
    not count.
    """
    rows = list(_table_rows(text, source, report))
    tables = [[rows[number] for number in table] for table in divided_tables([row for _, row in rows])]
    width = [max((sum(map(bool, row)) for _, row in table), default=0) for table in tables[:2]]
    if len(tables) > 1 and width[0] < _HEADER_SHARE * width[1]:  # what stands above the first table
        tables[:2] = [tables[0] + tables[1]]
    for table in tables:
        yield from _rows_of_table(table, source, report)


def _rows_of_table(
    rows: Sequence[tuple[int, list[str]]], source: str, report: Callable[[str], None]
) -> Iterator[Record]:
    widths = [sum(map(bool, row)) for _, row in rows[:_SAMPLED_ROWS]]
    least = _HEADER_SHARE * max(widths, default=0)
    first = next((index for index, width in enumerate(widths) if width >= max(least, min(2, max(widths)))), 0)
    if not rows:
        return
    caption = " ".join(cell for _, row in rows[:first] for cell in row if cell)
    below = [row for _, row in rows[first + 1 :]]
    if _is_row_of_values(rows[first][1], below[:_SAMPLED_ROWS]):
        names = [f"column {number}" for number in range(1, max(len(row) for _, row in rows[first:]) + 1)]
        first -= 1
    else:
        header = rows[first][1]
        if below and _continues_names(header, below[0]):
            above = [name or next(filter(None, header[column::-1]), "") for column, name in enumerate(header)]
            header = [f"{name} {more}".strip() for name, more in zip(above, below.pop(0), strict=True)]
            first += 1
        names = _column_names(header, below)
    for line, row in rows[first + 1 :]:
        while len(row) > len(names) and not row[-1]:
            row.pop()
        if len(row) > len(names):
            report(f"{source}:{line}: {len(row)} cells, but the row of names has {len(names)}")
            continue
        fields: dict[str, Any] = {name: cell for name, cell in zip(names, row, strict=False) if name}
        yield Record(fields, f"{source}:{line}", {"row": line}, caption, title_from_path(source))


def _continues_names(header: Sequence[str], row: Sequence[str]) -> bool:
    """Return whether a row has the second part of the names of columns, whose first part counts for several."""
    parts = header[1:]
    is_shared = "" in parts or len({*parts}) < len(parts)
    is_whole = len(row) == len(header) and all(map(str.__add__, parts, row[1:])) and any(row[1:])
    return is_shared and is_whole and not row[0] and all(not _kind_of(cell) or _YEAR.fullmatch(cell) for cell in row)


def _is_row_of_values(row: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
    """Return whether the first row of a table has a number, date or address above others of its kind.

    Numbers in order are names (36, 37, 38), and so is a year above what are no years.
    """
    values: list[int] = []  # columns
    for column, cell in enumerate(row):
        cells = [other[column] for other in below if column < len(other) and other[column]]
        kind = _kind_of(cell)
        is_year = _YEAR.fullmatch(cell) and not all(map(_YEAR.fullmatch, cells))
        if kind and cells and not is_year and all(_kind_of(other) == kind for other in cells):
            values.append(column)
    if not values or _counts_columns(row):
        return False
    numbers = [int(row[column]) for column in values if row[column].isdecimal()]
    are_neighbours = values == list(range(values[0], values[0] + len(values)))
    is_ordered = 1 < len(numbers) == len(values) and numbers == sorted(set(numbers))
    return not (are_neighbours and is_ordered)


def _counts_columns(row: Sequence[str]) -> bool:
    """Return whether a row has the numbers of the columns, from 0 or 1, as tables without names are exported."""
    return any(list(row) == [str(number) for number in range(start, start + len(row))] for start in (0, 1))


def _kind_of(cell: str) -> str:
    return next((kind for kind, pattern in _KINDS.items() if pattern.fullmatch(cell)), "")


def _column_names(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return distinct names of columns; an empty name for a column that is to be left out."""
    names: set[str] = set()
    result, counts = [], Counter[str]()
    for column, name in enumerate(header):
        if not name:
            cells = [row[column] for row in rows if column < len(row)]
            is_number = column == 0 and all(cell.isdecimal() for cell in cells)
            name = "" if is_number or not any(cells) else f"column {column + 1}"
        distinct = name
        while distinct in names:
            counts[name] += 1
            distinct = f"{name} {counts[name] + 1}"
        if distinct:
            names.add(distinct)
        result.append(distinct)
    return result


def _table_rows(text: str, source: str, report: Callable[[str], None]) -> Iterator[tuple[int, list[str]]]:
    """Yield the line at which each row ends, and its cells; empty rows and comments before the first are left out.

    A row whose quote is never closed is reported, and reading continues on the next line; in ``.tsv`` files, where
    quotes need not be marks, such a quote is a character of its cell.
    """
    lines = list(io.StringIO(text, newline=""))
    stated = _STATED_DELIMITER.fullmatch(lines[0][:_SNIFFED_CHARACTERS]) if lines else None
    sample = [line[:_SNIFFED_CHARACTERS] for line in lines[:_SAMPLED_ROWS] if line.strip()]
    is_tabbed = source.lower().endswith(".tsv") and any("\t" in line for line in sample)
    delimiter = stated.group(1) if stated else "\t" if is_tabbed else _likely_delimiter(sample)
    start, open_quotes, is_first = int(stated is not None), 0, True
    allow_long_cells(text)
    has_quotes = not is_tabbed or _is_quoted(lines, delimiter)
    read = partial(csv.reader, delimiter=delimiter, strict=True)
    read = read if has_quotes else partial(read, quoting=csv.QUOTE_NONE)
    rows = read(lines[start:])
    while True:
        first = start + rows.line_num + 1
        try:
            row = ["" if cell == "\\N" else cell.strip() for cell in next(rows)]  # NULL in exports of databases
        except StopIteration:
            return
        except csv.Error as error:
            report(f"{source}:{first}: not CSV ({error}); save the table again as CSV")
            if start + rows.line_num > first:  # a quote took in the lines that follow
                open_quotes += 1
                if open_quotes > _MAX_OPEN_QUOTES:
                    report(f"{source}:{first + 1}: the remaining rows are not read: too many quotes are not closed")
                    return
                start = first
                rows = read(lines[start:])
            continue
        if not is_first or (any(row) and not row[0].startswith(_COMMENTS)):
            is_first = False
            yield start + rows.line_num, row


def _likely_delimiter(lines: Sequence[str]) -> str:
    """Return the delimiter that occurs equally often, outside of quotes, in most lines; most often in the first.

    A table whose first lines have none, and few others, has one column: its delimiter is one that no text has.
    """
    unquoted = [_QUOTED.sub("", line) for line in lines] or [""]

    def regularity(delimiter: str) -> tuple[int, int]:
        counts = Counter(count for line in unquoted if (count := line.count(delimiter)))
        return max(counts.values(), default=0), unquoted[0].count(delimiter)

    best = max(_DELIMITERS, key=regularity)
    has_one_column = not any(line.count(best) for line in unquoted[:2]) and 2 * regularity(best)[0] < len(unquoted)
    return "\x1f" if has_one_column else best


def _is_quoted(lines: Sequence[str], delimiter: str) -> bool:
    """Return whether all quotes at the beginning of cells are closed at the end of one."""
    try:
        return all(csv.reader(lines, delimiter=delimiter, strict=True)) or True
    except csv.Error:
        return False


def _document(record: Record, roles: FieldRoles, source: str) -> Document:
    """Return the document of a record; ValueError with the reason if a field is missing or of a wrong type."""
    fields = record.fields
    title = fields.get(roles.title) if roles.title else None
    has_known_text = len(roles.text) == 1 and roles.text[0] in _TEXT_FIELDS
    if has_known_text:
        by_rank = dict.fromkeys((*roles.text, *_TEXT_FIELDS))
        names: tuple[str, ...] = tuple(name for name in by_rank if fields.get(name) is not None)[:1]
        text = fields[names[0]] if names else None
        if isinstance(text, dict | list) or text is None:
            left_out = {roles.title, *roles.beside, *_ID_FIELDS}
            names = tuple(name for name in fields if name not in left_out and not _is_metadata(name, fields[name]))
            text = "\n".join(line for name in names for line in _lines(name, fields[name]))
            text = text or (text if any(fields.get(name) for name in roles.beside) else None)
        if not isinstance(text, str):
            raise ValueError(f"no text; the record needs a string in one of {', '.join(_TEXT_FIELDS)}")
        if title not in (None, "") and not isinstance(title, str):
            raise ValueError(f"title {title!r} must be a string")
    else:
        names = roles.text
        if not any(name in fields for name in (*names, roles.title)) if names else not fields:
            raise ValueError(f"no text; the record needs one of the fields {', '.join(names or _TEXT_FIELDS)}")
        text = _joined_text(fields, names, roles)
    title = _field_text(title)
    if not has_known_text and not text.strip():
        text, title = title, ""
    has_ids = has_known_text or bool(roles.id)
    heading, rest = _beside(fields, roles)
    if not text.strip():  # a row whose text is empty has its other fields by line
        heading, rest = "", "\n".join(line for name in roles.beside for line in _lines(name, fields.get(name)))
    text = "\n\n".join(filter(None, [text, rest]))
    title = passage_title(record.caption, [part for part in (title, heading) if part])
    title = title or ("" if names else record.table)
    metadata = _metadata(record, {*names, roles.title, *((roles.id, *_ID_FIELDS) if has_ids else ())}, source)
    if title:
        metadata["title"] = title
    known = next((fields[name] for name in (roles.id, *_ID_FIELDS) if fields.get(name) not in (None, "")), None)
    if known is not None and (not isinstance(known, str | int) or isinstance(known, bool)):
        raise ValueError(f"id {known!r} must be a string or an integer")
    stated = {name: value for name, value in metadata.items() if name not in ("source", "title", *record.metadata)}
    content: tuple[str, ...] = (str(metadata.get("title", "")), text)
    if stated:  # rows with one text differ in what filters read
        content += (json.dumps(stated, sort_keys=True),)
    # An id counts where it is asked for, or beside a text with one of our names: many tables number rows from 1.
    if known is None or not has_ids:
        document_id = content_hash(*content) if known is None else content_hash(str(known), *content)
    else:
        document_id = str(known)
    return Document(id=document_id, page_content=text, metadata=metadata)


def _joined_text(fields: dict[str, Any], names: tuple[str, ...], roles: FieldRoles) -> str:
    """Return the texts of some fields, each but the first after its name; without names, all fields by line."""
    if not names:
        shown = (item for item in fields.items() if item[0] != roles.title and not _is_metadata(*item))
        return "\n".join(line for name, value in shown for line in _lines(name, value))
    texts = {name: text for name in names if (text := _field_text(fields.get(name))).strip()}
    return "\n\n".join(text if name == next(iter(texts)) else f"{name}: {text}" for name, text in texts.items())


def _beside(fields: Mapping[str, Any], roles: FieldRoles) -> tuple[str, str]:
    """Return the short fields beside a long text on one line, for its heading, and others and nested ones by line."""
    heading, rest = "", []
    for name in roles.beside:
        value = fields.get(name)
        for line in _lines(name, value):
            longer = f"{heading}; {line}" if heading else line
            if isinstance(value, dict | list) or "\n" in line or len(longer) > _MAX_HEADING_CHARACTERS:
                rest.append(line)
            else:
                heading = longer
    return heading, "\n".join(rest)


def _metadata(record: Record, used: set[str], source: str) -> dict[str, Any]:
    """Return the fields of a record that are neither text, title nor id, and its nested ``metadata``."""
    nested = record.fields.get("metadata")
    others = {
        name: value
        for name, value in record.fields.items()
        if name and name not in used and not _is_metadata(name, value) and value not in (None, "")
        if len(str(value)) <= _MAX_METADATA_CHARACTERS
    }
    return {"source": source, **others, **(nested if isinstance(nested, dict) else {}), **record.metadata}


def _is_metadata(name: str, value: Any) -> bool:
    """Return whether a field is the metadata of a document as langchain and BEIR write it."""
    return name == "metadata" and isinstance(value, dict)
