"""Tokenises a chat prompt part by part, so that the token span of every part is known exactly.

The chat template is rendered with placeholders instead of message contents. Text of the template is encoded with
control tokens; contents are encoded without, each part separately. So no content can add a turn, and no token crosses
the boundary of a span.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rag_posfix.assembly.prompt import BLANK_LINE, PromptTemplate, merge_messages
from rag_posfix.cancellation import check_wanted
from rag_posfix.contracts.generator import ChatMessage, TokenEncoder
from rag_posfix.errors import ConfigError
from rag_posfix.plan.layout import Layout, Span, Turn
from rag_posfix.text import clean_text, content_hash

__all__ = ["RELEVANCE_FLOOR", "TokenizedPassage", "TokenizedPrompt", "tokenize_passage", "tokenize_prompt"]

RELEVANCE_FLOOR = 0.01
"""Scores are clipped to [this, 1] in a layout, because methods divide by them. A missing score becomes this."""

# Private-use characters: no chat template writes them, and trimming a message does not remove them. Contents are never
# rendered, so they cannot contain a placeholder.
_PLACEHOLDER = re.compile("\ue000([0-9]+)\ue001")


@dataclass(frozen=True, slots=True)
class TokenizedPassage:
    """The tokens of a passage.

    Attributes:
        heading: Tokens of the heading; may be empty.
        text: Tokens of the document's text.
        separator: Tokens after the text.
        key: A content hash of the document's title and complete text, also if ``text`` is cut.
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
class TokenizedPrompt:
    """The tokens of a prompt before and after its passages.

    Attributes:
        prefix: Tokens before the first passage.
        suffix: Tokens after the last passage.
        question: The span of the question in ``suffix``.
        earlier: The messages in ``prefix``; some chat templates write one behind the user's last, which is not listed.
        content_start: Where the content of the user's last message begins in ``prefix``.
        content_stop: Where it ends in ``suffix``.
    """

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    question: Span
    earlier: tuple[Turn, ...]
    content_start: int
    content_stop: int

    def __len__(self) -> int:
        return len(self.prefix) + len(self.suffix)

    def with_passages(self, passages: Sequence[TokenizedPassage]) -> Layout:
        """Return the layout of the prompt with ``passages`` in this order.

        Args:
            passages: The passages; may be empty.
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
            turns=(*self.earlier, Turn("user", Span(self.content_start, at + self.content_stop))),
        )


def _clipped(scores: Sequence[float | None]) -> tuple[float, ...] | None:
    if all(score is None for score in scores):
        return None
    return tuple(RELEVANCE_FLOOR if score is None else min(max(score, RELEVANCE_FLOOR), 1.0) for score in scores)


def tokenize_passage(
    encoder: TokenEncoder, template: PromptTemplate, text: str, *, title: str = "", relevance: float | None = None
) -> TokenizedPassage:
    """Tokenise one passage.

    Args:
        encoder: The generator's tokenizer.
        template: Gives heading and separator.
        text: The document's text.
        title: Its title; empty for no heading.
        relevance: Its score, or None.
    """
    return TokenizedPassage(
        heading=tuple(encoder.encode_text(clean_text(template.heading_for(title)))),
        text=tuple(encoder.encode_text(clean_text(text))),
        separator=tuple(encoder.encode_text(template.separator)),
        key=content_hash(title, text),
        relevance=relevance,
    )


def tokenize_prompt(
    encoder: TokenEncoder,
    template: PromptTemplate,
    question: str,
    *,
    history: Sequence[ChatMessage] = (),
    has_passages: bool = True,
) -> TokenizedPrompt:
    """Render the chat template and tokenise all parts of the prompt except its passages.

    Cost: linear in the characters and in the number of messages.

    Args:
        encoder: The generator's tokenizer.
        template: The text of the user's turn.
        question: The question.
        history: Earlier messages; if the last is by the user, it is joined to this turn.
        has_passages: False for a prompt without passages: the user's turn is the question alone.

    Raises:
        ConfigError: the chat template loses or repeats a message, or a message is malformed.
    """
    system: list[ChatMessage] = [{"role": "system", "content": template.system}] if template.system else []
    earlier = list(merge_messages([*system, *history]))
    lead = ""
    if earlier and earlier[-1]["role"] == "user":
        lead = earlier.pop()["content"] + BLANK_LINE
    before, after, turns = _render(encoder, earlier)
    texts = (template.opening, template.question_prefix, template.answer_cue) if has_passages else ("", "", "")
    opening, question_prefix, answer_cue = (encoder.encode_text(clean_text(text)) for text in texts)
    question_tokens = encoder.encode_text(clean_text(question))
    start = len(question_prefix)
    content = (*question_prefix, *question_tokens, *answer_cue)
    return TokenizedPrompt(
        prefix=(*before, *encoder.encode_text(lead), *opening),
        suffix=(*content, *after),
        question=Span(start, start + len(question_tokens)),
        earlier=turns,
        content_start=len(before),
        content_stop=len(content),
    )


def _render(encoder: TokenEncoder, earlier: Sequence[ChatMessage]) -> tuple[list[int], list[int], tuple[Turn, ...]]:
    """Return the tokens before and after the content of the user's turn that follows ``earlier``, and its turns."""
    roles = [message["role"] for message in earlier] + ["user"]
    placeholders = [{"role": role, "content": f"\ue000{index}\ue001"} for index, role in enumerate(roles)]
    # An odd number of parts: text of the template, alternating with indices of messages.
    parts = _PLACEHOLDER.split(encoder.render_chat(placeholders, open_answer=True))
    found = Counter(int(part) for part in parts[1::2])
    for index, role in enumerate(roles):
        if found[index] != 1:
            raise ConfigError(
                f"the chat template wrote message {index} ({role}) {found[index]} times, must be once; "
                f"it was given the roles {_shown(roles)}: leave that message out or use another chat template"
            )
    before: list[int] = []
    after: list[int] = []
    side = before
    contents: dict[int, Span] = {}
    for index, part in enumerate(parts):
        check_wanted()
        if index % 2 == 0:
            side += encoder.encode_template(part) if part else []
        elif int(part) == len(earlier):
            side = after
        else:
            start = len(side)
            side += encoder.encode_text(earlier[int(part)]["content"])
            if side is before:
                contents[int(part)] = Span(start, len(side))
    return before, after, tuple(Turn(earlier[number]["role"], contents[number]) for number in sorted(contents))


def _shown(roles: Sequence[str]) -> str:
    return ", ".join(roles) if len(roles) <= 20 else f"{', '.join(roles[:20])}, ... ({len(roles)} messages)"
