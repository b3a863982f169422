"""Where a chat template writes each content, for templates that look into messages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from weakref import WeakSet

from rag_posfix.cancellation import check_cancelled
from rag_posfix.contracts.generator import ChatMessage, TokenEncoder
from rag_posfix.errors import ConfigError
from rag_posfix.plan.layout import Span

_log = logging.getLogger(__name__)

_MARK, _END = "\ue002", "\ue003"
"""No chat template writes these characters."""

_MOST_MESSAGES = 256
"""Of a conversation whose contents are looked for: the cost grows with the square of their number."""

_warned: WeakSet[TokenEncoder] = WeakSet()
_probed: WeakSet[TokenEncoder] = WeakSet()
_PROBE = "A passage of some words, and of two lines.\nIt is the second.\n\n"


def written_contents(
    encoder: TokenEncoder, messages: Sequence[ChatMessage], filled: str
) -> tuple[str, list[Span]] | None:
    """Return the chat template's own rendering of ``messages``, and where in it each content is.

    A template that leaves out thoughts of earlier turns, or obeys a switch in a message, writes other text for the
    true contents than for placeholders. A content is found by rendering the other messages truly, and it marked.

    Cost: two renderings per message, and none of them if ``filled`` is what the template writes.

    Args:
        filled: The rendering of placeholders, filled with the contents.

    Returns:
        None if ``filled`` is what the template writes, or if the places cannot be told, which logs a warning.

    Raises:
        ConfigError: the template refuses a content.
    """
    try:
        rendered = encoder.render_chat(messages, open_answer=True)
    except ConfigError:
        if all(message["content"].strip() for message in messages):
            raise
        warn_once(encoder)  # passages may fill what is empty
        return None
    if rendered == filled:
        return None
    try:
        spans = [
            _find(encoder, messages, n, rendered) for n in range(len(messages)) if len(messages) <= _MOST_MESSAGES
        ]
    except ConfigError:  # it refuses a content that is marked
        spans = [None]
    found = [span for span in spans if span is not None]
    if len(found) == len(messages) and all(a.stop <= b.start for a, b in pairwise(found)):
        return rendered, found
    warn_once(encoder)
    return None


def probe_passages(encoder: TokenEncoder, messages: Sequence[ChatMessage], place: int, offset: int, text: str) -> None:
    """Warn if the chat template writes passages otherwise than as they are, or other text around them.

    Passages are encoded without the template, so one that counts or changes their words cannot be followed. Cost: one
    rendering for the first prompt of an encoder.

    Args:
        place: The message with the passages.
        offset: Where in its content they are.
        text: The rendering of ``messages``, which have none.
    """
    if encoder in _probed:
        return
    _probed.add(encoder)
    content = messages[place]["content"]
    changed = [*messages]
    changed[place] = {**changed[place], "content": content[:offset] + _PROBE + content[offset:]}
    try:
        written = encoder.render_chat(changed, open_answer=True)
    except ConfigError:
        written = ""
    if written.count(_PROBE) != 1 or written.replace(_PROBE, "") != text:
        warn_once(encoder)


def warn_once(encoder: TokenEncoder) -> None:
    """Log that prompts of ``encoder`` may differ from those of the stock model."""
    if encoder not in _warned:
        _warned.add(encoder)
        _log.warning(
            "the chat template writes other text for these messages than around placeholders (it tests or changes "
            "contents), so the prompt differs from the stock model's; take switches such as /no_think out of "
            "messages, or use another chat template"
        )


def _find(encoder: TokenEncoder, messages: Sequence[ChatMessage], index: int, rendered: str) -> Span | None:
    """Return where ``rendered`` has the content of a message; None if it cannot be told."""
    check_cancelled()
    content = messages[index]["content"]
    # Around a content, marks leave its switches to the template; alone, they are in what it keeps of a content.
    for marked in (f"{_MARK}{content}{_END}", f"{_MARK}{_END}"):
        changed = [*messages]
        changed[index] = {**changed[index], "content": marked}
        text = encoder.render_chat(changed, open_answer=True)
        if (text.count(_MARK), text.count(_END)) != (1, 1):
            continue
        before, after = text.split(_MARK)[0], text.split(_END)[1]
        stop = len(rendered) - len(after)
        if len(before) <= stop and rendered.startswith(before) and rendered.endswith(after):
            return Span(len(before), stop)
    # A template that tests the ends of a content leaves a mark in its middle.
    middle = len(content) // 2
    changed = [*messages]
    changed[index] = {**changed[index], "content": f"{content[:middle]}{_MARK}{content[middle:]}"}
    text = encoder.render_chat(changed, open_answer=True)
    start = text.find(_MARK) - middle
    written = content
    if not rendered.startswith(content, max(start, 0)):  # a template may trim it
        written = content.strip()
        start += content.find(written)
    is_there = start >= 0 and bool(written) and rendered.startswith(written, start)
    return Span(start, start + len(written)) if is_there and text.replace(_MARK, "", 1) == rendered else None


def rewritten_pieces(pieces: Sequence[str], split: int | None, written: str) -> list[str] | None:
    """Return the pieces of a content as the chat template wrote it, in which one of them differs.

    Args:
        split: The piece that the passages precede, which may not be next to what differs on both sides.

    Returns:
        None if it cannot be told which piece differs.
    """
    result, first, last = list(pieces), 0, len(pieces) - 1
    while first < last and written.startswith(result[first]):
        written = written.removeprefix(result[first])
        first += 1
    while first < last and written.endswith(result[last]):
        written = written.removesuffix(result[last])
        last -= 1
    if first < last and split is not None:
        return None
    result[first : last + 1] = [written, *[""] * (last - first)]
    return result
