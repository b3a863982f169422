"""Tokenises a chat prompt as the model's own tokenizer would, with the token span of every segment.

The chat template is rendered with placeholders instead of message contents. Text of the template is encoded with
control tokens, contents without, so no content can add a turn. The text before the passages, each passage and the
text after them are encoded whole, each between constant text: the tokens of a passage depend on the passage alone, and
equal the joined text's tokens wherever a token ends on either side of the passage. A blank line nearly always does so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rag_posfix.assembly.budget import truncate
from rag_posfix.assembly.prompt import BLANK_LINE, PromptTemplate, merge_messages
from rag_posfix.cancellation import check_cancelled
from rag_posfix.contracts.generator import ChatMessage, TokenEncoder
from rag_posfix.errors import ConfigError
from rag_posfix.plan.layout import Layout, Span, Turn
from rag_posfix.text import clean_text, content_hash

RELEVANCE_FLOOR = 0.01
"""Scores are clipped to [this, 1] in a layout, because methods divide by them. A missing score becomes this."""

# No chat template writes these characters; U+001F is white space, which one that trims messages removes. Contents are
# never rendered, so they cannot contain a placeholder.
_PLACEHOLDER = re.compile("(\x1f?)\ue000([0-9]+)\ue001(\x1f?)")

_CONTEXTS = ("\n", "x", "0")
"""Contexts before a segment where the separator merges with its first character; at most one of them does."""

_FOLLOWER = "x"
"""Placeholder for the text after a segment: GPT-2's pre-tokeniser splits a blank line only before a word."""


@dataclass(frozen=True, slots=True)
class TokenizedPassage:
    """The tokens of a passage.

    Attributes:
        token_ids: Tokens of heading, text and separator.
        text: The tokens that hold the document's text; the first and the last may also hold white space around it.
        written: Heading, text and separator, as they were encoded.
        key: A content hash of the document's title and complete text, also if the text is cut.
        relevance: The document's score, or None.
    """

    token_ids: tuple[int, ...]
    text: Span
    written: tuple[str, str, str]
    key: str
    relevance: float | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


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
        """Return the layout of the prompt with ``passages`` in this order."""
        ids = list(self.prefix)
        passage_spans: list[Span] = []
        texts: list[Span] = []
        for passage in passages:
            start = len(ids)
            ids += passage.token_ids
            passage_spans.append(Span(start, len(ids)))
            texts.append(Span(start + passage.text.start, start + passage.text.stop))
        suffix_start = len(ids)
        ids += self.suffix
        return Layout(
            token_ids=tuple(ids),
            prefix=Span(0, len(self.prefix)),
            passages=tuple(passage_spans),
            texts=tuple(texts),
            suffix=Span(suffix_start, len(ids)),
            question=Span(suffix_start + self.question.start, suffix_start + self.question.stop),
            keys=tuple(passage.key for passage in passages),
            relevance=_clip_relevance([passage.relevance for passage in passages]),
            turns=(*self.earlier, Turn("user", Span(self.content_start, suffix_start + self.content_stop))),
        )


def _clip_relevance(scores: Sequence[float | None]) -> tuple[float, ...] | None:
    if all(score is None for score in scores):
        return None
    return tuple(RELEVANCE_FLOOR if score is None else min(max(score, RELEVANCE_FLOOR), 1.0) for score in scores)


def tokenize_passage(
    encoder: TokenEncoder, template: PromptTemplate, text: str, *, title: str = "", relevance: float | None = None
) -> TokenizedPassage:
    """Tokenise one passage."""
    written = (clean_text(template.heading_for(title)), clean_text(text), template.separator)
    return _encode_passage(encoder, written, content_hash(title, text), relevance)


def _encode_passage(
    encoder: TokenEncoder, written: tuple[str, str, str], key: str, relevance: float | None
) -> TokenizedPassage:
    heading, text, separator = written
    segments = ["", heading, "", text, "", separator, ""]
    ids, spans = _encode_between(encoder, segments, separator or BLANK_LINE, _FOLLOWER if separator else "")
    return TokenizedPassage(tuple(ids), spans[3], written, key, relevance)


def label_passage(encoder: TokenEncoder, passage: TokenizedPassage, label: str) -> TokenizedPassage:
    """Return the passage with ``label`` before its heading."""
    heading, text, separator = passage.written
    return _encode_passage(encoder, (label + heading, text, separator), passage.key, passage.relevance)


def cut_passage(
    encoder: TokenEncoder,
    passage: TokenizedPassage,
    limit: int,
    shorten: Callable[[Sequence[int], int, Callable[[Sequence[int]], str]], tuple[int, ...]] = truncate,
    *,
    heading_limit: int | None = None,
) -> TokenizedPassage:
    """Return the passage with less of its text, at most ``limit`` tokens long.

    The key stays, so that cached keys and values of the cut passage are dropped with the document.

    Raises:
        PromptTooLongError: too few tokens are left for the text.
    """
    heading, text, separator = passage.written
    if heading_limit is not None:
        heading = encoder.decode(truncate(encoder.encode_text(heading), heading_limit, encoder.decode))
    text_ids: Sequence[int] = passage.token_ids[passage.text.slice]
    # Its first token may hold the end of the heading, and decoding may drop the space that it begins with.
    if heading or text[:1].isspace():
        text_ids = encoder.encode_text(text)
    allowed = limit - len(_encode_passage(encoder, (heading, "", separator), "", None))
    while True:
        beginning = encoder.decode(shorten(text_ids, allowed, encoder.decode))
        cut = _encode_passage(encoder, (heading, beginning, separator), passage.key, passage.relevance)
        if len(cut) <= limit:
            return cut
        allowed -= len(cut) - limit  # another last word may take more tokens


def _encode_between(
    encoder: TokenEncoder, segments: Sequence[str], before: str = "", after: str = ""
) -> tuple[list[int], list[Span]]:
    """Return the tokens and spans of ``segments`` between ``before`` and ``after``, which are not returned.

    A context that shares a token with the segments is replaced, or left out if all do.
    """
    ids: list[int] = []
    spans: list[Span] = []
    for context in dict.fromkeys((before, *_CONTEXTS, "")) if before else ("",):
        ids, spans = encoder.encode_parts(["", context, *segments, after, ""])
        if spans[1].stop == spans[2].start:
            break
    start, inner, end = spans[2].start if before else 0, spans[2:-2], spans[-2].start
    if after and inner[-1].stop != end:
        return _encode_between(encoder, segments, before)
    return ids[start:end], [Span(span.start - start, span.stop - start) for span in inner]


def tokenize_prompt(
    encoder: TokenEncoder,
    template: PromptTemplate,
    question: str,
    *,
    history: Sequence[ChatMessage] = (),
    has_passages: bool = True,
) -> TokenizedPrompt:
    """Render the chat template and tokenise the prompt except its passages.

    Cost: linear in the characters and in the number of messages.

    Args:
        encoder: The generator's tokenizer.
        template: The text of the user's turn.
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
    before, after, order, trims = _render(encoder, earlier)
    question = clean_text(question)
    if not has_passages:
        lead, question = _trimmed((lead, question), *trims)
        ids, spans = encoder.encode_parts([*before, lead, "", question, *after])
        question_span = spans[len(before) + 2]
        return TokenizedPrompt(
            prefix=tuple(ids[: question_span.start]),
            suffix=tuple(ids[question_span.start :]),
            question=Span(0, len(question_span)),
            earlier=_turns(earlier, order, spans),
            content_start=spans[len(before)].start,
            content_stop=len(question_span),
        )
    lead, opening = _trimmed((lead, template.opening), trims[0], False)
    ends = _trimmed((template.question_prefix, question, template.answer_cue), False, trims[1])
    prefix, spans = _encode_between(encoder, [*before, lead, "", opening, ""], after=_FOLLOWER)
    segments = ["", ends[0], "", ends[1], "", ends[2], *after]
    suffix, end_spans = _encode_between(encoder, segments, before=template.separator or BLANK_LINE)
    return TokenizedPrompt(
        prefix=tuple(prefix),
        suffix=tuple(suffix),
        question=end_spans[3],
        earlier=_turns(earlier, order, spans),
        content_start=spans[len(before)].start,
        content_stop=max(end_spans[3].stop, end_spans[5].stop),
    )


def _trimmed(texts: Sequence[str], left: bool, right: bool) -> list[str]:
    """Return the texts without the white space at the left end of the joined text, at its right end, or at both."""
    result = list(texts)
    for index in range(len(result)) if left else ():
        result[index] = result[index].lstrip()
        if result[index]:
            break
    for index in reversed(range(len(result))) if right else ():
        result[index] = result[index].rstrip()
        if result[index]:
            break
    return result


def _turns(earlier: Sequence[ChatMessage], order: Sequence[int], spans: Sequence[Span]) -> tuple[Turn, ...]:
    """Return the turns of the messages ``order``, from the spans of template text and contents in turn."""
    contents = dict(zip(order, spans[1::2], strict=False))
    return tuple(Turn(earlier[number]["role"], contents[number]) for number in sorted(contents))


def _render(
    encoder: TokenEncoder, earlier: Sequence[ChatMessage]
) -> tuple[list[str], list[str], list[int], tuple[bool, bool]]:
    """Return the segments before and after the content of the user's turn that follows ``earlier``.

    Also return the indices of the messages before it, in the template's order, and whether the template trims the
    content on the left and on the right.
    """
    roles = [message["role"] for message in earlier] + ["user"]
    placeholders = [{"role": role, "content": f"\x1f\ue000{index}\ue001\x1f"} for index, role in enumerate(roles)]
    chunks = _PLACEHOLDER.split(encoder.render_chat(placeholders, open_answer=True))
    order = [int(number) for number in chunks[2::4]]
    counts = Counter(order)
    for index, role in enumerate(roles):
        if counts[index] != 1:
            raise ConfigError(
                f"the chat template wrote message {index} ({role}) {counts[index]} times, must be once; "
                f"it was given the roles {_format_roles(roles)}: leave that message out or use another chat template"
            )
    check_cancelled()
    trims = [(not left, not right) for left, right in zip(chunks[1::4], chunks[3::4], strict=True)]
    contents = [*(message["content"] for message in earlier), ""]
    segments = [chunks[0]]
    for number, trim, text in zip(order, trims, chunks[4::4], strict=True):
        segments += [*_trimmed([contents[number]], *trim), text]
    last = order.index(len(earlier))
    return segments[: 2 * last + 1], segments[2 * last + 2 :], order[:last], trims[last]


def _format_roles(roles: Sequence[str]) -> str:
    return ", ".join(roles) if len(roles) <= 20 else f"{', '.join(roles[:20])}, ... ({len(roles)} messages)"
