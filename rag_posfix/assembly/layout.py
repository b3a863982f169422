"""A chat prompt, tokenised piece by piece, so that it is known to the token where everything stands.

The chat template is rendered once around marks instead of around messages. What the template wrote is encoded with
control tokens, what people wrote without, each piece on its own: text can neither forge a turn nor blur the border of
a span.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rag_posfix.assembly.prompt import BLANK_LINE, PromptTemplate, merge_messages
from rag_posfix.contracts.generator import ChatMessage, TokenEncoder
from rag_posfix.errors import ConfigError
from rag_posfix.plan.layout import Layout, Span
from rag_posfix.text import clean_text, content_hash

__all__ = ["RELEVANCE_FLOOR", "Frame", "Passage", "encode_passage", "lay_out", "open_frame"]

RELEVANCE_FLOOR = 0.01
"""Scores are clipped to [this, 1] in a layout: methods divide by them, and a missing score counts as the lowest."""

# Private-use characters: no chat template writes them, and trimming a message does not remove them. The messages'
# own text is never rendered, so it cannot collide.
_MARK = re.compile("\ue000([0-9]+)\ue001")


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage in tokens.

    Attributes:
        heading: Tokens of the heading; may be none.
        text: Tokens of the document's text.
        separator: Tokens that end the passage.
        key: A content hash of the document's title and whole text.
        relevance: The document's score, or None.
    """

    heading: tuple[int, ...]
    text: tuple[int, ...]
    separator: tuple[int, ...]
    key: str
    relevance: float | None = None

    def __len__(self) -> int:
        return len(self.heading) + len(self.text) + len(self.separator)


@dataclass(frozen=True, slots=True)
class Frame:
    """Everything around the passages, in tokens.

    Attributes:
        prefix: Tokens before the first passage.
        suffix: Tokens after the last one.
        question: The question inside of ``suffix``.
    """

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    question: Span

    def __len__(self) -> int:
        return len(self.prefix) + len(self.suffix)

    def around(self, passages: Sequence[Passage]) -> Layout:
        """Return the layout of the prompt with ``passages`` in this order.

        Args:
            passages: The passages; may be none.
        """
        ids = list(self.prefix)
        segments: list[Span] = []
        texts: list[Span] = []
        for passage in passages:
            start, text = len(ids), len(ids) + len(passage.heading)
            ids += passage.heading
            ids += passage.text
            ids += passage.separator
            segments.append(Span(start, len(ids)))
            texts.append(Span(text, text + len(passage.text)))
        at = len(ids)
        ids += self.suffix
        return Layout(
            token_ids=tuple(ids),
            prefix=Span(0, len(self.prefix)),
            passages=tuple(segments),
            texts=tuple(texts),
            suffix=Span(at, len(ids)),
            question=Span(at + self.question.start, at + self.question.stop),
            keys=tuple(passage.key for passage in passages),
            relevance=_clipped([passage.relevance for passage in passages]),
        )


def _clipped(scores: Sequence[float | None]) -> tuple[float, ...] | None:
    if all(score is None for score in scores):
        return None
    return tuple(RELEVANCE_FLOOR if score is None else min(max(score, RELEVANCE_FLOOR), 1.0) for score in scores)


def encode_passage(
    encoder: TokenEncoder, template: PromptTemplate, text: str, *, title: str = "", relevance: float | None = None
) -> Passage:
    """Encode one passage.

    Args:
        encoder: The generator's tokenizer.
        template: Heading and separator.
        text: The document's text.
        title: Its title; empty for no heading.
        relevance: Its score, or None.
    """
    return Passage(
        heading=tuple(encoder.encode_text(clean_text(template.heading_for(title)))),
        text=tuple(encoder.encode_text(clean_text(text))),
        separator=tuple(encoder.encode_text(template.separator)),
        key=content_hash(title, text),
        relevance=relevance,
    )


def open_frame(
    encoder: TokenEncoder,
    template: PromptTemplate,
    question: str,
    *,
    history: Sequence[ChatMessage] = (),
    with_passages: bool,
) -> Frame:
    """Render the chat template once and encode everything around the passages.

    Args:
        encoder: The generator's tokenizer.
        template: The words of the user's turn.
        question: What is asked.
        history: Earlier messages; a last one by the user is joined to this turn.
        with_passages: False for plain chat: the turn is the question alone.

    Raises:
        ConfigError: the chat template loses or repeats a message, or a message is malformed.
    """
    system: list[ChatMessage] = [{"role": "system", "content": template.system}] if template.system else []
    earlier = list(merge_messages([*system, *history]))
    lead = ""
    if earlier and earlier[-1]["role"] == "user":
        lead = earlier.pop()["content"] + BLANK_LINE
    before, after = _render(encoder, earlier)
    words = (template.opening, template.question_prefix, template.answer_cue) if with_passages else ("", "", "")
    opening, question_prefix, answer_cue = (encoder.encode_text(clean_text(piece)) for piece in words)
    asked = encoder.encode_text(clean_text(question))
    start = len(question_prefix)
    return Frame(
        prefix=(*before, *encoder.encode_text(lead), *opening),
        suffix=(*question_prefix, *asked, *answer_cue, *after),
        question=Span(start, start + len(asked)),
    )


def _render(encoder: TokenEncoder, earlier: Sequence[ChatMessage]) -> tuple[list[int], list[int]]:
    """Return the tokens before and after the content of the user's turn that follows ``earlier``."""
    roles = [message["role"] for message in earlier] + ["user"]
    marks = [{"role": role, "content": f"\ue000{index}\ue001"} for index, role in enumerate(roles)]
    # An odd number of parts: what the template wrote, alternating with the number of the message in between.
    parts = _MARK.split(encoder.render_chat(marks, open_answer=True))
    found = [int(part) for part in parts[1::2]]
    for index, role in enumerate(roles):
        if found.count(index) != 1:
            raise ConfigError(
                f"the chat template wrote message {index} ({role}) {found.count(index)} times, must be once; "
                f"it was given the roles {', '.join(roles)}: leave that message out or use another chat template"
            )
    before: list[int] = []
    after: list[int] = []
    side = before
    for index, part in enumerate(parts):
        if index % 2 == 0:
            side += encoder.encode_template(part) if part else []
        elif int(part) == len(earlier):
            side = after
        else:
            side += encoder.encode_text(earlier[int(part)]["content"])
    return before, after


def lay_out(
    encoder: TokenEncoder,
    question: str,
    passages: Sequence[Passage] = (),
    *,
    template: PromptTemplate | None = None,
    history: Sequence[ChatMessage] = (),
) -> Layout:
    """Return the layout of a prompt with ``passages`` in this order.

    Args:
        encoder: The generator's tokenizer.
        question: What is asked.
        passages: Encoded passages (``encode_passage``); without any, the prompt is plain chat.
        template: The words of the user's turn; the default ones if None.
        history: Earlier messages.

    Raises:
        ConfigError: the chat template loses or repeats a message, or a message is malformed.
    """
    frame = open_frame(encoder, template or PromptTemplate(), question, history=history, with_passages=bool(passages))
    return frame.around(passages)
