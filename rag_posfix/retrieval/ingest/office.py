"""Reads slides with python-pptx, workbooks with openpyxl, and mails."""

from __future__ import annotations

import email.policy
import itertools
import re
from collections.abc import Iterator, Sequence
from datetime import datetime, time
from email import message_from_bytes
from typing import Any, BinaryIO
from zipfile import ZipFile

from rag_posfix.errors import missing_extra
from rag_posfix.retrieval.ingest.decoding import codec_of, decode_html, decode_text
from rag_posfix.retrieval.ingest.html import html_items
from rag_posfix.retrieval.ingest.structure import FileText, Item, divided_tables, items_text, table_items
from rag_posfix.text import split_words

_MERGED = re.compile(rb'<mergeCell\b[^>]*\bref="([A-Z]+)(\d+):([A-Z]+)(\d+)"')
_TEXT = "{http://schemas.openxmlformats.org/drawingml/2006/main}t"
_DIAGRAM = "{http://schemas.openxmlformats.org/drawingml/2006/diagram}relIds"
_DATA = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}dm"
_NUMBERED = ("DATE", "SLIDE_NUMBER")
_FORMAT = re.compile(
    r'"([^"]*)"|\\(.)|\[\$([^\]-]*)[^\]]*\]|\[[^\]]*\]|[_*].|(General|[0#?][0#?,./]*)|([%€$£¥₹ ])', re.IGNORECASE
)
"""What the format of a number shows: text in quotes, an escaped character, a currency, the digits, another sign."""
_COMMENTS, _COMMENT = re.compile(r"xl/(?:comments/)?comments?\d*\.xml"), re.compile(rb"<comment\b")
_MAX_MERGED = 100_000


def read_slides(handle: BinaryIO) -> FileText:
    """Return the slides, each under its title, with tables, charts and notes; a slide is a page.

    Raises:
        ConfigError: python-pptx is not installed.
    """
    try:
        import pptx
    except ImportError as error:
        raise missing_extra("python-pptx (needed for .pptx files)", "office") from error
    items: list[Item] = []
    for number, slide in enumerate(pptx.Presentation(handle).slides, start=1):
        title = slide.shapes.title
        items.append(Item("heading", "" if title is None else title.text_frame.text, page=number))
        for shape in slide.shapes:
            if title is None or shape.shape_id != title.shape_id:
                items += _shape_items(shape, number)
        notes = slide.notes_slide.notes_text_frame if slide.has_notes_slide else None
        items.append(Item("text", "" if notes is None else notes.text, page=number))
    return items_text([item._replace(text=item.text.replace("\v", "\n")) for item in items])


def _shape_items(shape: Any, page: int) -> Iterator[Item]:
    if shape.is_placeholder and shape.placeholder_format.type.name in _NUMBERED:
        return
    if hasattr(shape, "shapes"):
        for inner in shape.shapes:
            yield from _shape_items(inner, page)
    elif shape.has_text_frame:
        yield Item("text", shape.text_frame.text, page=page)
    elif getattr(shape, "has_table", False):
        yield from table_items(_slide_table(shape.table), page)
    elif getattr(shape, "has_chart", False):
        if shape.chart.has_title and shape.chart.chart_title.has_text_frame:
            yield Item("text", shape.chart.chart_title.text_frame.text, page=page)
        for plot in shape.chart.plots:
            rows = [[series.name, *map(_cell_text, series.values)] for series in plot.series]
            yield from table_items([["", *map(str, plot.categories)], *rows], page)
    else:
        for diagram in shape._element.iter(_DIAGRAM):
            from pptx.oxml import parse_xml

            data = parse_xml(shape.part.related_part(diagram.get(_DATA)).blob)
            yield Item("text", "\n".join(text.text or "" for text in data.iter(_TEXT)), page=page)


def _slide_table(table: Any) -> list[list[str]]:
    rows = [list(row.cells) for row in table.rows]
    texts = [[cell.text for cell in row] for row in rows]
    for top, row in enumerate(rows):
        for left, cell in enumerate(row):
            if cell.is_merge_origin:
                for cells in texts[top : top + cell.span_height]:
                    cells[left : left + cell.span_width] = [cell.text] * len(cells[left : left + cell.span_width])
    return texts


def read_workbook(handle: BinaryIO) -> FileText:
    """Return each sheet as a table under its name, each cell as it is stored; merged cells count for each row.

    A title above the table is a heading. A formula without a stored value is its text, and a loss; so is each hidden
    sheet, whose text is read, and so are comments on cells, which are left out.

    Raises:
        ConfigError: openpyxl is not installed.
    """
    try:
        from openpyxl import load_workbook
    except ImportError as error:
        raise missing_extra("openpyxl (needed for .xlsx files)", "office") from error
    items: list[Item] = []
    losses: list[str] = []
    missing = 0
    formulas = load_workbook(handle, read_only=True).worksheets
    for number, sheet in enumerate(load_workbook(handle, read_only=True, data_only=True).worksheets):
        if sheet.sheet_state != "visible":
            losses.append(f"the sheet {sheet.title!r} is hidden; its text is read")
        with ZipFile(handle) as archive:
            source = archive.read(str(sheet._worksheet_path))
        rows = _rows(sheet)
        if b"<f" in source:
            for row, own in zip(rows, _rows(formulas[number]), strict=False):
                empty = [n for n, cell in enumerate(own[: len(row)]) if cell.startswith("=") and not row[n]]
                missing += len(empty)
                for n in empty:
                    row[n] = own[n]
        _fill_merged(rows, source)
        tables = [table_items([rows[n] for n in table]) for table in divided_tables(rows)]
        if any(item.text for found in tables for item in found):
            items.append(Item("heading", sheet.title, level=2))
        for found in tables:
            captions = [item.text for item in found[:-1]]
            items += [Item("heading", " ".join(captions), level=3)] * bool(captions) + found[-1:]
    with ZipFile(handle) as archive:
        comments = sum(
            len(_COMMENT.findall(archive.read(name))) for name in archive.namelist() if _COMMENTS.match(name)
        )
    if comments:
        losses.append(f"{comments} comments on cells are left out")
    if missing:
        losses.append(f"{missing} formulas have no stored value; open the file in a spreadsheet program and save it")
    return items_text(items, losses=losses)


def _rows(sheet: Any) -> list[list[str]]:
    sheet.reset_dimensions()  # the size that a program wrote into the file may be wrong
    return [[_formatted_number(cell) or _cell_text(cell.value) for cell in row] for row in sheet.iter_rows()]


def _fill_merged(rows: list[list[str]], source: bytes) -> None:
    """Write the text of merged cells into each of their rows, and that of a row over all columns into each of them."""
    width = max(map(len, rows), default=0)
    for left, top, right, bottom in _MERGED.findall(source)[:_MAX_MERGED]:
        first, last = _column(left), _column(right)
        if int(top) <= len(rows) and first < len(rows[int(top) - 1]):
            text = rows[int(top) - 1][first]
            for row in rows[int(top) - 1 : int(bottom)]:
                row += [""] * (min(last + 1, width) - len(row))
                row[first : last + 1] = [text] * len(row[first : last + 1])


def _column(letters: bytes) -> int:
    number = 0
    for letter in letters:
        number = 26 * number + letter - ord("A") + 1
    return number - 1


def _formatted_number(cell: Any) -> str:
    """Return a number with the percent sign, currency or unit that its format shows; nothing without any.

    Of the formats for positive, negative and other numbers the first counts. Its decimals do not: the number is whole.
    """
    value = cell.value
    if not isinstance(value, int | float) or isinstance(value, bool):
        return ""
    before, after, scale, is_after, is_percentage = "", "", 0, False, False
    for quoted, escaped, currency, digits, shown in _FORMAT.findall(cell.number_format.partition(";")[0]):
        is_after |= bool(digits)
        is_percentage |= shown == "%"
        scale += 3 * (len(digits) - len(digits.rstrip(",")))
        literal = quoted or escaped or currency or shown
        before, after = (before, after + literal) if is_after else (before + literal, after)
    if not is_after or not (before + after).strip():
        return ""
    size = abs(value)
    number = f"{100 * size:.12g}" if is_percentage else f"{size / 10**scale:.12g}" if scale else _cell_text(size)
    return f"{'-' * (value < 0)}{before.lstrip()}{number}{after.rstrip()}"


def _cell_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, float):
        return f"{value:.15g}"  # as Excel computes
    if isinstance(value, datetime):
        return value.isoformat(" ") if value.time() != time() else value.date().isoformat()
    return "" if value is None else str(getattr(value, "text", value))  # the text of an array formula


def read_mail(data: bytes) -> FileText:
    """Return a mail under its subject, with its people, date, texts and forwarded mails; other attachments are losses.

    Of a text and a web page that say the same, that with more words is read. The encoding of a text that is not in the
    one that the mail states is guessed.
    """
    mail = message_from_bytes(data, policy=email.policy.default)
    losses: list[str] = []
    return items_text(_message(mail, losses), _subject(mail), losses)


def _subject(mail: Any) -> str:
    return " ".join(str(mail["Subject"] or "").split())


def _message(mail: Any, losses: list[str], level: int = 1) -> Iterator[Item]:
    yield Item("heading", _subject(mail), level)
    yield Item("text", "\n".join(f"{name}: {mail[name]}" for name in ("From", "To", "Cc", "Date") if mail[name]))
    yield from _part(mail, losses, level)


def _part(part: Any, losses: list[str], level: int) -> Iterator[Item]:
    kind, name = part.get_content_type(), part.get_filename()
    inner = part.get_payload() if part.is_multipart() else []
    if kind == "multipart/alternative":  # and of a calendar, which says more than the text beside it
        forms = [(form.get_content_type(), list(_part(form, losses, level))) for form in inner]
        best = max((items for form, items in forms if form != "text/calendar"), key=_count_words, default=[])
        yield from itertools.chain(best, *(items for form, items in forms if form == "text/calendar"))
    elif kind == "message/rfc822":
        for message in inner:
            yield from _message(message, losses, level + 1)
    elif inner:
        for other in inner:
            yield from _part(other, losses, level)
    elif part.get_content_maintype() == "text":
        yield from [Item("heading", name, level + 1)] if name else []
        text = _part_text(part, losses)
        if kind == "text/html":
            yield from (item._replace(level=item.level + level + bool(name)) for item in html_items(text))
        else:
            yield from (Item("text", paragraph) for paragraph in text.split("\n\n"))
    elif name:
        losses.append(f"the attachment {name!r} is not read")


def _count_words(items: Sequence[Item]) -> int:
    return sum(len(split_words(item.text)) for item in items)


def _part_text(part: Any, losses: list[str]) -> str:
    data, charset, note = part.get_payload(decode=True) or b"", part.get_content_charset("us-ascii"), None
    try:
        text = data.decode(codec_of("utf-8" if charset == "us-ascii" else charset))
    except (LookupError, UnicodeError):
        text, note = (decode_html if part.get_content_subtype() == "html" else decode_text)(data, "the mail")
    losses += [] if note is None else [f"a text of the mail is {note}"]
    return text.replace("\r\n", "\n")
