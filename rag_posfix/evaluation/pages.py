"""Pages of experiments: one HTML file that loads nothing from outside, readable on light and dark screens."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

_STYLE = Path(__file__).with_name("page.css")


def html_page(title: str, body: Iterable[str], script: str = "") -> str:
    """Return a page; ``title`` is escaped, ``body`` is HTML, and no other script than ``script`` runs."""
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = "img-src data:; style-src 'unsafe-inline'" + (f"; script-src 'sha256-{digest}'" if script else "")
    head = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; {allowed}">',
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE.read_text('utf-8')}</style>\n</head>\n<body>",
    ]
    end = [f"<script>{script}</script>"] if script else []
    return "\n".join([*head, *body, *end, "</body>\n</html>\n"])


def html_table(rows: Iterable[Sequence[Any]], title: str = "") -> str:
    """Return rows as a table, the headings first, with a caption; cells are escaped."""
    head, *body = rows
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    lines = [_row(head, "th"), *(_row(cells, "td") for cells in body)]
    return "\n".join([f'<div class="scroll" tabindex="0"><table>{caption}', *lines, "</table></div>"])


def _row(cells: Sequence[Any], kind: str) -> str:
    return f"<tr>{''.join(f'<{kind}>{escape(str(cell))}</{kind}>' for cell in cells)}</tr>"


def html_figure(png: bytes, text: str, caption: str = "") -> str:
    """Return a figure inside of a page; ``text`` names it, ``caption`` is under it."""
    image = f'<img alt="{escape(text)}" src="data:image/png;base64,{b64encode(png).decode()}">'
    under = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{image}{under}</figure>"
