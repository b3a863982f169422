"""What the site does with links that leave docs/: the target is checked, and its path is written in place of a link.

The pages are read in the repository too, where such links work. On the site there is nothing to link to.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
log = logging.getLogger("mkdocs.hooks.links")

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\.?/[^)\s#]*)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page without links to files outside of docs/."""
    return without_links_to_files(markdown, page.file.src_uri)


def without_links_to_files(markdown: str, page: str) -> str:
    """Return ``markdown`` with the path in place of each link that leaves docs/.

    Args:
        markdown: The text of the page.
        page: Path of the page in docs/.
    """

    def shown(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
        if path.startswith("docs/"):
            return found[0]
        if not (ROOT / path).exists():
            log.warning("%s links to %s, which the repository does not have", page, path)
        plain = text.strip("`")
        return text if plain in path else f"{text} (`{path}`)"

    return _LINK.sub(shown, markdown)
