"""Decodes the bytes of text files: by their mark, by what they state, as UTF-8, or in an encoding that is guessed."""

from __future__ import annotations

import codecs
import contextlib
import re

from rag_posfix.errors import NotTextError
from rag_posfix.text import clean_text

_BASE64 = "[A-Za-z0-9+/=%_-]"
_EMBEDDED = re.compile(
    rf"data:[\w/+.-]*(?:;[\w=.-]+)*;base64,{_BASE64}*(?:\r?\n{_BASE64}{{40,}})*(?:\r?\n{_BASE64}+(?=[)\"'>]))?",
    re.IGNORECASE,
)
MAX_RATIO, MIN_UNPACKED = 100, 16 * 2**20
"""Unpacked bytes for each packed one of a file, from 16 MiB on. Sheets of numbers have up to 30."""
_SAMPLE_BYTES = 8192
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_UTF32_MARKS = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)  # the first begins with that of UTF-16
_CHARSET = re.compile(
    rb"""(?:<meta[^>]{0,200}?charset|^\s*<\?xml[^>]{0,200}?encoding)\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE
)

# Encodings of files of the last decades. Without this list short texts are taken for those of mainframes.
_GUESSED = (
    "cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "koi8_r", "cp932", "euc_jp",
    "gb18030", "big5", "cp949",
)  # fmt: skip
_THAI = ("cp874",)  # takes much other text for Thai, so it is tried last

# Letters of Western European languages and typographic marks, as far as UTF-8 would not be ASCII.
_WESTERN = frozenset(
    "àáâãäåæçèéêëìíîïñòóôõöøùúûüýÿßœÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛÜŸŒ‘’‚“”„–—…‹›«»€£§°·¿¡²³½¼®©™\xa0"  # noqa: RUF001
)
_MARK_IN_WORD = re.compile(r"[^\W\d_][²³½¼¿¡£®©][^\W\d_]")
_MAX_WESTERN_SHARE = 0.3
_MIN_ZEROS = 0.5
"""Share of zeros among the high bytes of UTF-16 with Latin letters, at least."""


_SUPERSETS = {
    "ascii": "cp1252", "iso8859-1": "cp1252", "gb2312": "gb18030", "gbk": "gb18030", "shift_jis": "cp932",
    "euc_kr": "cp949", "euc_jp": "euc_jis_2004", "big5": "big5hkscs", "iso8859-9": "cp1254",
    "tis-620": "cp874", "iso8859-11": "cp874",
}  # fmt: skip
"""The encodings as which browsers decode others, by Python's names (WHATWG, Encoding Standard, section 4.2)."""
_LABELS = {
    "csgb2312": "gbk", "x-gbk": "gbk", "gb_2312": "gbk", "gb_2312-80": "gbk", "x-sjis": "shift_jis",
    "windows-31j": "cp932", "x-x-big5": "big5", "cn-big5": "big5", "cseuckr": "euc_kr", "ks_c_5601-1989": "euc_kr",
    "iso-ir-149": "euc_kr", "csksc56011987": "euc_kr", "ksc_5601": "euc_kr", "x-euc-jp": "euc_jp",
    "cseucpkdfmtjapanese": "euc_jp", "dos-874": "cp874", "logical": "iso8859-8", "visual": "iso8859-8",
    "sun_eu_greek": "iso8859-7", "csisolatin9": "iso8859-15", "koi": "koi8-r", "koi8": "koi8-r", "koi8-ru": "koi8-u",
    "mac": "mac_roman", "csmacintosh": "mac_roman", "x-mac-roman": "mac_roman", "x-mac-cyrillic": "mac_cyrillic",
    "x-mac-ukrainian": "mac_cyrillic", "unicode-1-1-utf-8": "utf-8", "unicode": "utf-16",
}  # fmt: skip
"""Labels of browsers that Python does not know, and those of these forms."""
_LABEL_FORMS = (
    (re.compile(r"(?:x-)?(?:cp|windows-)(\d+)"), r"cp\1"),
    (re.compile(r"(?:cs)?iso-?8859-?(\d\d?)(?:-?[ei])?"), r"iso8859-\1"),
    (re.compile(r"(?:x-)?unicode(?:11|20)utf-?8"), "utf-8"),
)


def decode_text(data: bytes, source: str) -> tuple[str, str | None]:
    """Return the text of a file without its byte order mark, and what is said about its encoding if that is a guess.

    Raises:
        NotTextError: there is a NUL byte in the first 8 KiB, or no encoding gives text.
    """
    if data.startswith(_UTF32_MARKS):
        return clean_text(data.decode("utf-32", "replace")), None
    if data.startswith(_UTF16_MARKS):
        return clean_text(data.decode("utf-16", "replace")), None
    if b"\0" in data[:_SAMPLE_BYTES]:
        wide = _wide_encoding(data[:_SAMPLE_BYTES])
        with contextlib.suppress(UnicodeDecodeError):
            if wide is not None:
                return clean_text(data.decode(wide)), f"no byte order mark, read as {wide}: a guess"
        raise NotTextError(f"{source!r} is binary, not text; leave it out, or give the file its own suffix")
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        return _with_line_feeds(clean_text(data.decode("utf-8"))), None
    except UnicodeDecodeError:
        if (mixed := _decode_lines(data, source)) is not None:
            return mixed
        encoding = guess_encoding(data, source)
    note = f"not UTF-8, read as {encoding}: a guess; check its accents, or save it in UTF-8"
    if encoding == "utf-8":
        note = "damaged UTF-8; undecodable bytes were replaced"
    return _with_line_feeds(clean_text(data.decode(encoding, "replace"))), note


def _with_line_feeds(text: str) -> str:
    """Return a text whose lines end with a carriage return alone with line feeds in its place."""
    return text if "\n" in text else text.replace("\r", "\n")


def _decode_lines(data: bytes, source: str) -> tuple[str, str] | None:
    """Return a text and what is said about it, if most of its lines with accents are UTF-8 and the others are not."""
    lines = data.split(b"\n")
    others = [line for line in lines if not _is_utf8(line)]
    if sum(not line.isascii() for line in lines) < 2 * len(others):
        return None
    encoding = guess_encoding(b"\n".join(others), source)
    if encoding == "utf-8":
        return None
    text = "\n".join(line.decode("utf-8" if _is_utf8(line) else encoding, "replace") for line in lines)
    return clean_text(text), f"{len(others)} lines are not UTF-8, read as {encoding}: a guess; check their accents"


def _is_utf8(line: bytes) -> bool:
    with contextlib.suppress(UnicodeDecodeError):
        line.decode("utf-8")
        return True
    return False


def without_embedded(text: str) -> str:
    """Return a text without the images and fonts that are written into it."""
    return _EMBEDDED.sub("", text) if "base64," in text.lower() else text


def _wide_encoding(sample: bytes) -> str | None:
    """Return the encoding of two or four bytes for each character that a text without a mark is in, if it is."""
    sample = sample[: len(sample) // 4 * 4]
    share = [sample[n::4].count(0) * 4 / max(1, len(sample)) for n in range(4)]
    if min(share[2:]) == 1 and share[0] == 0:
        return "utf-32-le"
    if min(share[:2]) == 1 and share[3] == 0:
        return "utf-32-be"
    if max(share[::2]) == 0 and min(share[1::2]) > _MIN_ZEROS:
        return "utf-16-le"
    return "utf-16-be" if max(share[1::2]) == 0 and min(share[::2]) > _MIN_ZEROS else None


def guess_encoding(data: bytes, source: str) -> str:
    """Return the most likely encoding of bytes that are not UTF-8.

    UTF-8 with a few damaged characters counts as UTF-8. Text that windows-1252 (a superset of Latin-1) turns into
    letters of Western European languages counts as that; charset-normalizer decides about other text.

    Raises:
        NotTextError: no encoding gives text.
    """
    lenient = data.decode("utf-8", "replace")
    damaged = lenient.count("\ufffd")
    if sum(character > "\x7f" for character in lenient) > 3 * damaged:
        return "utf-8"
    if _is_western(data):
        return "cp1252"
    from charset_normalizer import from_bytes

    for encodings in (_GUESSED, _THAI):
        best = from_bytes(data, cp_isolation=list(encodings)).best()
        if best is not None:
            return best.encoding
    raise NotTextError(f"{source!r} is not text in a known encoding; save it in UTF-8")


def _is_western(data: bytes) -> bool:
    text = data.decode("cp1252", "replace")
    foreign = [character for character in text if character > "\x7f"]
    letters = sum(character.isalpha() for character in text)
    return (
        _WESTERN.issuperset(foreign)
        and sum(map(str.isalpha, foreign)) <= _MAX_WESTERN_SHARE * letters
        and not _MARK_IN_WORD.search(text)
        and not any(character < " " and character not in "\t\n\r\f\x0b\x1b" for character in text)
    )


def codec_of(label: str) -> str:
    """Return Python's name of the encoding that browsers use for a label; LookupError for an unknown one."""
    name = _LABELS.get(label, label)
    for form, codec in _LABEL_FORMS:
        if match := form.fullmatch(name):
            name = match.expand(codec)
    codec = codecs.lookup(name).name
    return _SUPERSETS.get(codec, codec)


def decode_html(data: bytes, source: str = "the page") -> tuple[str, str | None]:
    """Return the text of an HTML file, and what is said about its encoding if that is a guess or wrong.

    The encoding is given by a byte order mark, else by the ``charset`` declared in the first 1024 bytes; else it is
    UTF-8, or guessed. Undecodable bytes are replaced.
    """
    declared = (
        None if data.startswith((*_UTF32_MARKS, *_UTF16_MARKS, codecs.BOM_UTF8)) else _CHARSET.search(data[:1024])
    )
    if declared is None:
        return decode_text(data, source)
    name = label = declared.group(1).decode("ascii", "replace").lower()
    with contextlib.suppress(LookupError):
        name = codec_of(label)
    if name.startswith(("utf-16", "utf-32")):
        name = "utf-8"  # the declaration itself is readable as ASCII, so the file is not UTF-16 or UTF-32
    try:
        b"a".decode(name)
    except (LookupError, ValueError):
        text, note = decode_text(data, source)
        return text, f"unknown charset {label!r}" + (f"; {note}" if note else "")
    try:
        return clean_text(data.decode(name)), None
    except UnicodeError as error:
        note = f"not {name} ({str(error).splitlines()[0]}); undecodable bytes were replaced"
        return clean_text(data.decode(name, "replace")), note
