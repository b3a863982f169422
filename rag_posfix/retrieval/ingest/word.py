"""Reads Word files: python-docx opens them, and everything with words in their XML becomes an item.

Headings are found by outline level, in any language; numbers of clauses are counted as Word counts them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from rag_posfix.errors import missing_extra
from rag_posfix.retrieval.ingest.structure import FileText, Item, items_text, raised_number, table_items

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_M = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"
_HOLDERS = {f"{_W}{name}" for name in ("sdt", "sdtContent", "ins", "customXml", "moveTo")}
_LEFT_OUT = {f"{_W}{name}" for name in ("del", "moveFrom", "txbxContent", "pPr", "rPr", "instrText", "rt")} | {
    _FALLBACK
}
_MARKS = {f"{_W}tab": "\t", f"{_W}br": "\n", f"{_W}cr": "\n", f"{_W}noBreakHyphen": "-"}
_NOTES = {f"{_W}{kind}Reference": f"{kind}s" for kind in ("footnote", "endnote", "comment")}
_HEADING_STYLE = re.compile(
    "(?:heading|\u00fcberschrift|titre|t\u00edtulo|titolo|kop|rubrik|overskrift|otsikko|nag\u0142\u00f3wek|nadpis|"
    "\u0437\u0430\u0433\u043e\u043b\u043e\u0432\u043e\u043a|\u6807\u9898|\u6a19\u984c|\u898b\u51fa\u3057|\uc81c\ubaa9)\\s*([1-9])",
    re.IGNORECASE,
)
"""Names of styles without an outline level, as some programs write them."""
_MAX_STYLES = 20
_ON = {"1", "on", "true"}
_ROMAN = ((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"), (40, "xl"), (10, "x"),
          (9, "ix"), (5, "v"), (4, "iv"), (1, "i"))  # fmt: skip


def read_docx(handle: BinaryIO) -> FileText:
    """Return what a Word file says: headers and footers first, then its body, each note below its paragraph.

    Raises:
        ConfigError: python-docx is not installed.
    """
    try:
        import docx
    except ImportError as error:
        raise missing_extra("python-docx (needed for Word files)", "docx") from error
    document = docx.Document(handle)
    parts = {
        rel.reltype.rpartition("/")[2]: rel.target_part for rel in document.part.rels.values() if not rel.is_external
    }
    reader = _Word(
        document,
        {name: _root(parts.get(name)) for name in _NOTES.values()},
        _Numbers(_root(parts.get("numbering"))),
        {style.get(f"{_W}styleId"): style for style in document.styles.element.iter(f"{_W}style")},
    )
    body = [item for element in _blocks(document.element.body) for item in reader.items(element)]
    titled = next((number for number, item in enumerate(body) if not item.level), None)
    title = "" if titled is None else " ".join(body.pop(titled).text.split())
    body = [item if item.level else item._replace(level=1) for item in body]
    edges = [
        " ".join(_text(paragraph).split())
        for rel in document.part.rels.values()
        if rel.reltype.endswith(("/header", "/footer"))
        for paragraph in rel.target_part.element.iter(f"{_W}p")
    ]
    furniture = [Item("text", text) for text in dict.fromkeys(edges) if any(map(str.isalpha, text))]
    return items_text([*furniture, *body], title or items_text(body).title)


def _root(part: Any) -> Any:
    if part is None:
        return None
    from docx.oxml import parse_xml

    return getattr(part, "element", None) if hasattr(part, "element") else parse_xml(part.blob)


def _blocks(parent: Any) -> Iterator[Any]:
    """Yield paragraphs and tables, also those in content controls; Word's table of contents is left out."""
    gallery = parent.find(f"{_W}sdtPr/{_W}docPartObj/{_W}docPartGallery")
    if gallery is not None and gallery.get(f"{_W}val") == "Table of Contents":
        return
    for child in parent:
        if child.tag in (f"{_W}p", f"{_W}tbl"):
            yield child
        elif child.tag in _HOLDERS:
            yield from _blocks(child)


@dataclass(frozen=True, slots=True)
class _Word:
    """The document, its notes by kind, its numbering, and the elements of its styles by their ids."""

    document: Any
    notes: dict[str, Any]
    numbers: _Numbers
    styles: dict[str, Any]

    def items(self, element: Any) -> Iterator[Item]:
        """Yield the items of a paragraph or table. The title of the document has level 0."""
        yield from self._table(element) if element.tag == f"{_W}tbl" else self._paragraph(element)
        for box in element.iter(f"{_W}txbxContent"):
            if not any(parent.tag in (_FALLBACK, f"{_W}txbxContent") for parent in box.iterancestors()):
                for inner in _blocks(box):
                    yield from self.items(inner)
        for reference in element.iter(*_NOTES):
            notes, number = self.notes[_NOTES[reference.tag]], reference.get(f"{_W}id")
            for note in () if notes is None else notes:
                if note.get(f"{_W}id") == number:
                    yield Item("text", " ".join(_text(note).split()))

    def _table(self, element: Any) -> Iterator[Item]:
        """Yield a table; where it only lays a page out, which shows by headings and tables in it, their items."""
        from docx.table import Table

        rows = [[cell._tc for cell in row.cells] for row in Table(element, self.document).rows]
        cells = {cell: list(self._cell(cell)) for cell in dict.fromkeys(itertools.chain(*rows))}
        inner = [item for items in cells.values() for item in items]
        if any(item.kind in ("heading", "table") for item in inner):
            yield from inner
        else:
            yield from table_items([[" ".join(item.text for item in cells[cell]) for cell in row] for row in rows])

    def _cell(self, cell: Any) -> Iterator[Item]:
        for element in _blocks(cell):
            yield from self._table(element) if element.tag == f"{_W}tbl" else self._paragraph(element)

    def _paragraph(self, element: Any) -> Iterator[Item]:
        text = _text(element)
        if not text.strip():
            return
        chain, names = self._properties(element)
        outline = next((found for item in chain if (found := _value(item, "outlineLvl"))), None)
        named = next((match.group(1) for name in names if (match := _HEADING_STYLE.fullmatch(name))), 10)
        level = int(named) if outline is None else int(outline) + 1
        number = self.numbers.label(chain)
        label = "" if number is None else f"{number} ".lstrip()
        if "Title" in names:
            yield Item("text", text, level=0)
        elif level < 10:
            yield Item("heading", label.removeprefix("- ") + text, level=level)
        elif number is not None:
            yield Item("list", label + text)
        else:
            bold = {_value(run.find(f"{_W}rPr"), "b", "1") for run in element.iter(f"{_W}r") if _text(run).strip()}
            yield Item("bold" if bold and bold <= _ON else "text", text)

    def _properties(self, paragraph: Any) -> tuple[list[Any], list[str]]:
        """Return the properties of a paragraph and of its style and those that this is based on, and their names."""
        chain, names = [], []
        holder, link = paragraph, "pStyle"
        for _ in range(_MAX_STYLES):
            properties = holder.find(f"{_W}pPr")
            chain += [] if properties is None else [properties]
            if link == "basedOn":
                names.append(_value(holder, "name") or "")
            reference = _value(holder if link == "basedOn" else properties, link)
            holder, link = self.styles.get(reference or ""), "basedOn"
            if holder is None:
                break
        return chain, names


def _text(element: Any) -> str:
    """Return the text of a paragraph with insertions and equations, without deletions and text boxes."""
    parts = []
    for child in element:
        if child.tag == f"{_W}t":
            parts.append(child.text or "")
        elif child.tag in _MARKS:
            parts.append(_MARKS[child.tag])
        elif child.tag == f"{_M}oMath":
            parts.append(_formula(child))
        elif child.tag not in _LEFT_OUT and isinstance(child.tag, str):
            is_raised = child.tag == f"{_W}r" and _value(child.find(f"{_W}rPr"), "vertAlign") == "superscript"
            text = raised_number(_text(child)) if is_raised else _text(child)
            parts.append(text + ("\n" if child.tag == f"{_W}p" else ""))
    return "".join(parts)


def _formula(element: Any) -> str:
    """Return an equation on one line: ``r^2``, ``(a+b)/c``."""

    def part(name: str) -> str:
        inner = element.find(f"{_M}{name}")
        text = "" if inner is None else _formula(inner)
        return f"({text})" if len(text) > 1 and name != "e" else text

    name = str(element.tag).removeprefix(_M)
    if name == "t":
        return element.text or ""
    if name == "f":
        return f"{part('num')}/{part('den')}"
    if name in ("sSup", "sSub", "sSubSup", "nary"):
        sign = element.find(f"{_M}naryPr/{_M}chr") if name == "nary" else None
        base = part("e") if name != "nary" else "\u222b" if sign is None else str(sign.get(f"{_M}val"))
        scripts = (f"_{part('sub')}" if part("sub") else "") + (f"^{part('sup')}" if part("sup") else "")
        return f"{base}{scripts}" + (f" {part('e')}" if name == "nary" else "")
    if name == "d":
        return f"({', '.join(_formula(child) for child in element.findall(f'{_M}e'))})"
    if name == "rad":
        return f"\u221a({part('e')})"
    return "".join(_formula(child) for child in element if isinstance(child.tag, str))


@dataclass(slots=True)
class _Numbers:
    """Counts the numbers of clauses and list items as Word does: for each definition, over the whole document."""

    numbering: Any
    _counts: dict[str, list[int]] = field(default_factory=dict)
    _begun: set[tuple[str, int]] = field(default_factory=set)

    def label(self, chain: list[Any]) -> str | None:
        """Return the label of the next paragraph with these properties, ``-`` for a bullet; None without numbering."""
        properties = [found for item in chain if (found := item.find(f"{_W}numPr")) is not None]
        number = next((value for item in properties if (value := _value(item, "numId"))), None)
        level = int(next((value for item in properties if (value := _value(item, "ilvl"))), "0"))
        if number in (None, "0") or self.numbering is None or not 0 <= level <= 8:
            return None
        instance = self._child("num", "numId", str(number))
        definition = (
            None
            if instance is None
            else self._child("abstractNum", "abstractNumId", _value(instance, "abstractNumId"))
        )
        if instance is None or definition is None:
            return "-"
        levels = {int(item.get(f"{_W}ilvl")): item for item in definition.iter(f"{_W}lvl")}
        begins = [int(_value(levels[n], "start") or 1) if n in levels else 1 for n in range(9)]
        counts = self._counts.setdefault(str(definition.get(f"{_W}abstractNumId")), [begin - 1 for begin in begins])
        for override in instance.iter(f"{_W}lvlOverride"):
            at, begin = int(override.get(f"{_W}ilvl")), _value(override, "startOverride")
            if at == level and begin and (str(number), at) not in self._begun:
                counts[at] = int(begin) - 1
        self._begun.add((str(number), level))
        counts[level] += 1
        counts[level + 1 :] = [begin - 1 for begin in begins[level + 1 :]]
        if level not in levels or _value(levels[level], "numFmt") == "bullet":
            return "-"
        return re.sub(
            r"%([1-9])",
            lambda match: _number(
                max(counts[n := int(match.group(1)) - 1], begins[n]),
                _value(levels[n], "numFmt") if n in levels and levels[level].find(f"{_W}isLgl") is None else "decimal",
            ),
            _value(levels[level], "lvlText") or "",
        ).strip()

    def _child(self, tag: str, attribute: str, value: str | None) -> Any:
        return next(
            (item for item in self.numbering.iter(f"{_W}{tag}") if item.get(f"{_W}{attribute}") == value), None
        )


def _value(element: Any, name: str, default: str | None = None) -> str | None:
    """Return the value of a property, ``default`` if none is written, and None without the property."""
    found = None if element is None else element.find(f"{_W}{name}")
    return None if found is None else found.get(f"{_W}val", default)


def _number(number: int, style: str | None) -> str:
    letters = chr(ord("a") + (number - 1) % 26) * ((number - 1) // 26 + 1)
    roman, rest = "", number
    for value, numeral in _ROMAN:
        roman, rest = roman + numeral * (rest // value), rest % value
    styles = {"lowerLetter": letters, "upperLetter": letters.upper(), "lowerRoman": roman, "upperRoman": roman.upper()}
    return styles.get(
        style or "", f"{number:02}" if style == "decimalZero" else "" if style == "none" else str(number)
    )
