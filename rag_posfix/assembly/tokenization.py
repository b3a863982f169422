"""Tokenises a chat prompt as the model's own tokenizer would, with the token span of every segment.

The chat template is rendered with placeholders instead of message contents; where it writes something else for the
true contents, its own rendering is used. Text of the template is encoded with control tokens, contents without, so no
content can add a turn. The text before the passages, each passage and the text after them are encoded whole, each
between constant text: the tokens of a passage depend on the passage alone, and equal the joined text's tokens wherever
a token ends on either side of the passage. A blank line nearly always does so.

Selects the passages that fit into a token budget, and cuts long ones. Knows tokens, not documents.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from rag_posfix.assembly.templates import (
    BLANK_LINE,
    PromptTemplate,
    merge_messages,
    probe_passages,
    rewritten_pieces,
    warn_once,
    written_contents,
)
from rag_posfix.cancellation import check_cancelled
from rag_posfix.contracts.generator import ChatMessage, TokenEncoder
from rag_posfix.errors import ConfigError, PromptTooLongError
from rag_posfix.parameters import shown
from rag_posfix.plan.layout import Layout, Span, Turn
from rag_posfix.text import REPLACEMENT, clean_text, content_hash

FEWEST_TOKENS = 4
"""A passage is never cut to fewer text tokens than this."""

_BACKTRACK = 16
"""Upper bound of the tokens of one character in a byte-level vocabulary, and so of the distance to a boundary."""


_SENTENCE_END = re.compile(
    r"""[.!?\u2026\u3002\uff01\uff1f]["'\u201d\u2019\u00bb)\]]*(?=\s|$)"""
    r"|[\u3002\uff01\uff1f](?=\S)"  # Chinese and Japanese marks are not followed by a space
)

Overflow = Literal["drop", "truncate", "error"]
"""What happens to a passage that exceeds its limit."""


@dataclass(frozen=True, slots=True)
class PassageBudget:
    """A token limit for each passage, by its relevance rank, and what happens to a longer passage.

    Source: the dynamic budget of LongLLMLingua (2024), section 4.3, https://arxiv.org/abs/2310.06839: it keeps the
        fraction clip((1 - 2 k / K) d + t, 0, 1) of the document of rank k.
    Formula: limit(r) = floor(tokens (1 + shrink (1 - 2 r / (K - 1)))), r = 0 .. K - 1; limit(K - 1) for later ranks.
        K is the number of passages of ``tokens`` tokens that fit into the whole budget, at most the number of
        passages. The best passage may have (1 + shrink) ``tokens``, the last (1 - shrink) ``tokens``, all together K
        times ``tokens``.
    Differs from the paper: the limit is a number of tokens instead of a fraction, and nothing is compressed: a longer
        passage is left out or cut. Limits follow the rank, not the position, so that a passage has the same text in
        every order.

    Attributes:
        tokens: Average limit of a passage, heading and separator included; None for no limit per passage.
        shrink: How much the limit falls from the best to the last rank, 0 to 1.
        overflow: ``drop`` leaves a longer passage out, ``truncate`` cuts it at the end of a sentence, or between two
            characters if no sentence ends within the limit, ``error`` raises. ``drop`` cuts the most relevant passage
            instead of leaving it out.
    """

    tokens: int | None = None
    shrink: float = 0.0
    overflow: Overflow = "drop"

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise ConfigError(f"passage budget: tokens={self.tokens} must be >= 1, or None for no limit")
        if not 0.0 <= self.shrink <= 1.0:
            raise ConfigError(f"passage budget: shrink={self.shrink} must be between 0 and 1")
        if self.tokens is None and self.shrink:
            raise ConfigError(f"passage budget: shrink={self.shrink} needs tokens; say how many a passage may have")
        if self.overflow not in get_args(Overflow):
            raise ConfigError(
                f"passage budget: overflow={self.overflow!r} must be one of {', '.join(get_args(Overflow))}"
            )

    def limits(self, count: int, budget: int) -> Callable[[int], int]:
        """Return a function from a rank to the token limit of its passage."""
        tokens = self.tokens
        if tokens is None:
            return lambda rank: budget
        last = max(min(count, budget // tokens) - 1, 0)

        def limit(rank: int) -> int:
            slope = 1 - 2 * min(rank, last) / last if last else 0.0
            return math.floor(tokens * (1 + self.shrink * slope) + 1e-9)

        return limit


@dataclass(frozen=True, slots=True)
class Selection:
    """The passages that a budget keeps, by relevance rank; 0 is the most relevant passage.

    Attributes:
        selected: Ranks of the selected passages, ascending.
        cut: Ranks of selected passages that were cut.
        too_long: With ``overflow="error"``, the first rank that is too long, and its limit; else None.
    """

    selected: tuple[int, ...]
    cut: tuple[int, ...] = ()
    too_long: tuple[int, int] | None = None


def select_passages(
    sizes: Iterable[int],
    budget: int,
    smallest: int = 1,
    *,
    limit: Callable[[int], int] | None = None,
    overflow: Overflow = "drop",
    cut: Callable[[int, int], int] = lambda rank, allowed: allowed,
) -> Selection:
    """Select the most relevant passages that fit together.

    A passage that does not fit and is not cut is skipped; a shorter passage of lower rank may still fit.

    Args:
        sizes: Number of tokens of each passage, the most relevant first. Consumed only as far as needed, so that
            passages may be tokenised lazily.
        budget: Token limit of all kept passages together.
        smallest: Lower bound of the size of a passage: with fewer tokens left, the search ends.
        limit: Token limit of the passage of a rank; no limit if None.
        overflow: What happens to a passage that does not fit.
        cut: Cuts the passage of a rank to at most the given number of tokens and returns its new size; 0 if it cannot.
    """
    selected: list[int] = []
    shortened: list[int] = []
    left = budget
    for rank, size in enumerate(sizes):
        allowed = left if limit is None else min(left, limit(rank))
        if size <= allowed:
            selected.append(rank)
            left -= size
        elif overflow == "error":
            return Selection(tuple(selected), too_long=(rank, allowed))
        elif overflow == "truncate" or rank == 0:
            new_size = cut(rank, allowed)
            if new_size:
                selected.append(rank)
                shortened.append(rank)
            left -= new_size
            if allowed == left + new_size:  # the passage was cut to the remaining budget
                break
        if left < smallest:
            break
    return Selection(tuple(selected), tuple(shortened))


def truncate_at_sentence(
    token_ids: Sequence[int], limit: int, decode: Callable[[Sequence[int]], str]
) -> tuple[int, ...]:
    """Return the longest prefix of ``token_ids`` of at most ``limit`` tokens that ends with a sentence.

    A sentence ends with a full stop, a question or an exclamation mark before white space or the end of the text. If
    none ends within the limit, or only after fewer than ``FEWEST_TOKENS`` tokens, do what ``truncate`` does.

    Raises:
        PromptTooLongError: ``limit`` is below ``FEWEST_TOKENS``.
    """
    cut = truncate(token_ids, limit, decode)
    if len(cut) == len(token_ids):
        return cut
    text = decode(cut)
    beyond = decode(token_ids[: len(cut) + _BACKTRACK])  # distinguishes "3." at a sentence's end from "3.5"
    for match in reversed(list(_SENTENCE_END.finditer(beyond))):
        if match.end() > len(text):
            continue
        low = _count_min_tokens(cut, match.end(), decode)
        if low >= FEWEST_TOKENS and decode(cut[:low]).rstrip() == text[: match.end()]:
            return cut[:low]
    return cut


def _count_min_tokens(token_ids: Sequence[int], length: int, decode: Callable[[Sequence[int]], str]) -> int:
    """Return the smallest number of tokens whose text has at least ``length`` complete characters."""
    low, high = 0, len(token_ids)
    while low < high:
        middle = (low + high) // 2
        n_complete = len(decode(token_ids[:middle]).rstrip(REPLACEMENT))  # without an incomplete character
        low, high = (low, middle) if n_complete >= length else (middle + 1, high)
    return low


def truncate(token_ids: Sequence[int], limit: int, decode: Callable[[Sequence[int]], str]) -> tuple[int, ...]:
    """Return the longest prefix of ``token_ids`` of at most ``limit`` tokens that ends between two characters.

    Raises:
        PromptTooLongError: ``limit`` is below ``FEWEST_TOKENS``.
    """
    if limit >= len(token_ids):
        return tuple(token_ids)
    if limit < FEWEST_TOKENS:
        raise PromptTooLongError(
            f"{max(limit, 0)} tokens are left for the text of the most relevant passage, which has {len(token_ids)}; "
            f"at least {FEWEST_TOKENS} are needed: raise budget_tokens or the tokens of a passage, lower "
            "max_new_tokens, or shorten the question or the title"
        )
    beyond = ""
    # Up to the next boundary between characters: with a cut one, some decoders lose the whole run of bytes before it.
    for end in range(limit, limit + _BACKTRACK + 1):
        beyond = decode(token_ids[:end])
        if not beyond.endswith(REPLACEMENT):
            break
    for stop in range(limit, max(limit - _BACKTRACK, 0), -1):
        if beyond.startswith(decode(token_ids[:stop])):
            return tuple(token_ids[:stop])
    return tuple(token_ids[:limit])


PROMPT_VERSION = 2
"""Raised with a change of the token ids of prompts. 2: those of the stock model; 1: passages and question apart."""

RELEVANCE_FLOOR = 0.01
"""Scores are clipped to [this, 1] in a layout, because methods divide by them. A missing score becomes this."""

# No chat template writes these characters; U+001F is white space, which one that trims messages removes. Contents are
# never rendered, so they cannot contain a placeholder.
_PLACEHOLDER = re.compile("(\x1f?)\ue000([0-9]+)\ue001(\x1f?)")

# Characters of control tokens, placeholders and JSON strings: names and ids are written with the template's text.
_NO_NAME = re.compile('[<>\\[\\]{}"\\\\\x00-\x1f\ue000\ue001]')

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
        earlier: The messages in ``prefix``; some chat templates write one behind the message with the passages, which
            is not listed.
        content_start: Where the content of the user's message with the passages begins in ``prefix``.
        content_stop: Where it ends in ``suffix``.
        later: The messages in ``suffix``, the last with the question; none if the passages are in its message.
    """

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    question: Span
    earlier: tuple[Turn, ...]
    content_start: int
    content_stop: int
    later: tuple[Turn, ...] = ()

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
            texts.append(passage.text.shifted(start))
        suffix_start = len(ids)
        ids += self.suffix
        return Layout(
            token_ids=tuple(ids),
            prefix=Span(0, len(self.prefix)),
            passages=tuple(passage_spans),
            texts=tuple(texts),
            suffix=Span(suffix_start, len(ids)),
            question=self.question.shifted(suffix_start),
            keys=tuple(passage.key for passage in passages),
            relevance=_clip_relevance([passage.relevance for passage in passages]),
            turns=(
                *self.earlier,
                Turn("user", Span(self.content_start, suffix_start + self.content_stop)),
                *(Turn(turn.role, turn.content.shifted(suffix_start)) for turn in self.later),
            ),
        )

    def with_passages_in_suffix(self, passages: Sequence[TokenizedPassage]) -> Layout:
        """Return the layout of the same tokens as text without passages: read whole, and kept in no store."""
        layout = self.with_passages(passages)
        suffix = Span(layout.prefix.stop, len(layout.token_ids))
        return replace(layout, passages=(), texts=(), keys=(), relevance=None, suffix=suffix)


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
    return ids[start:end], [span.shifted(-start) for span in inner]


@dataclass(frozen=True, slots=True)
class _Message:
    """A message of the prompt; its content is the joined pieces, ``fields`` are those of calls and their results."""

    role: str
    pieces: tuple[str, ...]
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The messages of a prompt: which message and piece the passages precede, and which are the question."""

    messages: tuple[_Message, ...]
    split: tuple[int, int]
    question: tuple[int, int]
    has_passages: bool = True


@dataclass(frozen=True, slots=True)
class _Rendered:
    """Text of the chat template, alternating with pieces of contents: these are at odd indices.

    Attributes:
        segments: The texts.
        starts: Index in ``segments`` of the first piece of each message, in the order of the chat template.
        split: Index of the piece that the passages precede.
    """

    segments: list[str]
    starts: dict[int, int]
    split: int


def tokenize_prompt(
    encoder: TokenEncoder,
    template: PromptTemplate,
    question: str,
    *,
    history: Sequence[ChatMessage] = (),
    tool_turns: Sequence[ChatMessage] = (),
    has_passages: bool = True,
) -> TokenizedPrompt:
    """Render the chat template and tokenise the prompt except its passages.

    Passages are in the first turn of the user: the system messages and turns of ``history`` follow them, so that the
    tokens before passages are the same in every turn and for every user. With ``template.history_first`` they are in
    the last turn.

    Cost: linear in the characters and in the number of messages.

    Args:
        encoder: The generator's tokenizer.
        template: The text of the user's turns.
        history: Earlier messages; if the last is by the user, it is joined to this turn.
        tool_turns: Messages behind the question: calls of tools and their results.
        has_passages: False for a prompt without passages: the user's turn is the question alone.

    Raises:
        ConfigError: the chat template loses or repeats a message, or a message is malformed.
    """
    system: list[ChatMessage] = [{"role": "system", "content": template.system}] if template.system else []
    question, with_tools = clean_text(question), encoder.has_tools
    after, _ = _split_lead(merge_messages(tool_turns, with_tools=with_tools))
    if has_passages and not template.history_first:
        merged = merge_messages(history, with_tools=with_tools)
        return _tokenize(encoder, _passages_first(template, question, system, merged, after), template.separator)
    earlier, lead = _split_lead(merge_messages([*system, *history], with_tools=with_tools))
    pieces: tuple[str, ...] = (lead, question)
    if has_passages:
        pieces = (lead, template.opening, template.question_prefix, question, template.answer_cue)
    place = len(earlier)
    messages = (*earlier, _Message("user", pieces), *after)
    asked = (place, 3 if has_passages else 1)
    chat = _Conversation(messages, (place, 2 if has_passages else 1), asked, has_passages)
    return _tokenize(encoder, chat, template.separator)


def _split_lead(merged: Sequence[ChatMessage]) -> tuple[tuple[_Message, ...], str]:
    """Return the messages before the user's turn, and the text of the user that is joined to it."""
    earlier, lead = list(merged), ""
    if earlier and earlier[-1]["role"] == "user":
        lead = earlier.pop()["content"] + BLANK_LINE
    names = ("tool_calls", "tool_call_id", "name")
    messages = (
        _Message(message["role"], (message["content"],), {name: message[name] for name in names if name in message})
        for message in earlier
    )
    return tuple(messages), lead


def _passages_first(
    template: PromptTemplate,
    question: str,
    system: Sequence[ChatMessage],
    merged: Sequence[ChatMessage],
    after: Sequence[_Message],
) -> _Conversation:
    """Return the conversation with the passages in its first turn of the user.

    Behind the passages are the system message of ``merged``, and then all turns as they were asked: the prompt of a
    turn continues the prompt of the turn before it.
    """
    first = [_Message("system", (message["content"],)) for message in system]
    earlier, lead = _split_lead(merged)
    caller = ""
    if earlier and earlier[0].role == "system":
        caller, earlier = earlier[0].pieces[0] + BLANK_LINE, earlier[1:]
    prefix, cue = template.question_prefix, template.answer_cue
    turns = [_Message("user", (prefix, *turn.pieces, cue)) if turn.role == "user" else turn for turn in earlier]
    turns.append(_Message("user", (lead, prefix, question, cue)))
    opening: tuple[str, ...] = (template.opening, caller)
    if turns[0].role == "user":
        opening = (*opening, *turns.pop(0).pieces)
    messages = (*first, _Message("user", opening), *turns)
    asked = (len(messages) - 1, len(messages[-1].pieces) - 2)
    return _Conversation((*messages, *after), (len(first), 1), asked)


def _tokenize(encoder: TokenEncoder, chat: _Conversation, separator: str) -> TokenizedPrompt:
    rendered = _render(encoder, chat)
    segments, split = rendered.segments, rendered.split
    if chat.has_passages:
        prefix, spans = _encode_between(encoder, segments[:split], after=_FOLLOWER)
        suffix, spans_after = _encode_between(encoder, ["", *segments[split:]], before=separator or BLANK_LINE)
        spans_after = spans_after[1:]
    else:
        ids, spans = encoder.encode_parts(segments)
        start = spans[split].start
        prefix, suffix = ids[:start], ids[start:]
        spans, spans_after = spans[:split], [span.shifted(-start) for span in spans[split:]]

    def span_of(number: int) -> Span:
        """Return the span of a content in its part of the prompt; of that with the passages, what is in the suffix."""
        start = rendered.starts[number]
        indices = range(start, start + 2 * len(chat.messages[number].pieces), 2)
        in_suffix = [spans_after[i - split] for i in indices if i >= split]
        contents = in_suffix or [spans[i] for i in indices]
        return Span(contents[0].start, max(span.stop for span in contents))

    numbers, place = sorted(rendered.starts), chat.split[0]
    asked, piece = chat.question
    return TokenizedPrompt(
        prefix=tuple(prefix),
        suffix=tuple(suffix),
        question=spans_after[rendered.starts[asked] + 2 * piece - split],
        earlier=tuple(
            Turn(chat.messages[n].role, span_of(n)) for n in numbers if n < place and rendered.starts[n] < split
        ),
        content_start=spans[rendered.starts[place]].start,
        content_stop=span_of(place).stop,
        later=tuple(Turn(chat.messages[n].role, span_of(n)) for n in numbers if n > place),
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


def _render(encoder: TokenEncoder, chat: _Conversation) -> _Rendered:
    """Fill the chat template with the messages; contents that the template trims are trimmed.

    The content with the passages is trimmed at its ends alone, not next to the passages.
    """
    messages, (place, piece) = chat.messages, chat.split
    written, contents = _placeholders(messages)
    rendered = encoder.render_chat(written, open_answer=True).replace("\\u001f", "")  # as JSON writes a margin
    rendered = _as_template_writes(encoder, chat, written, rendered, contents)

    def unquoted(match: re.Match[str]) -> str:
        """Return the arguments of a call without quotes; a result of a tool that is written in quotes is escaped."""
        number = int(match[1])
        if number >= len(messages):
            return match[0][1:-1]
        contents[number] = tuple(json.dumps(piece, ensure_ascii=False)[1:-1] for piece in contents[number])
        return match[0]

    chunks = _PLACEHOLDER.split(re.sub('"\ue000([0-9]+)\ue001"', unquoted, rendered))
    order = [int(number) for number in chunks[2::4]]
    counts = Counter(order)
    for number in range(len(contents)):
        needed = number >= len(messages) or bool(written[number]["content"])
        if counts[number] != needed:
            roles = _format_roles([message.role for message in messages])
            what = f"message {number} ({messages[number].role})" if number < len(messages) else "arguments of a call"
            raise ConfigError(
                f"the chat template wrote {what} {counts[number]} times, must be once; "
                f"it was given the roles {roles}: leave that message out or use another chat template"
            )
    check_cancelled()
    segments, starts = [chunks[0]], {}
    for number, left, right, text in zip(order, chunks[1::4], chunks[3::4], chunks[4::4], strict=True):
        pieces = contents[number]
        if number < len(messages):
            starts[number] = len(segments)
        if number == place and chat.has_passages:
            trimmed = [*_trimmed(pieces[:piece], not left, False), *_trimmed(pieces[piece:], False, not right)]
        else:
            trimmed = _trimmed(pieces, not left, not right)
        segments += [segment for content in trimmed for segment in (content, "")][:-1]
        segments.append(text)
    return _Rendered(segments, starts, starts[place] + 2 * piece)


def _as_template_writes(
    encoder: TokenEncoder,
    chat: _Conversation,
    written: Sequence[ChatMessage],
    rendered: str,
    contents: list[tuple[str, ...]],
) -> str:
    """Return the rendering around the true contents, which a template may test and change, with placeholders in it.

    ``contents`` become what the template writes of them. Results of tools and arguments of calls stay placeholders.
    """
    numbers = [n for n, message in enumerate(written) if message["content"] and message["role"] != "tool"]
    whole = {number: clean_text("".join(contents[number])) for number in numbers}

    def fill(match: re.Match[str]) -> str:
        content = whole.get(int(match[2]))
        return match[0] if content is None else "".join(_trimmed([content], not match[1], not match[3]))

    messages = [*written]
    for number, content in whole.items():
        messages[number] = {**written[number], "content": content}
    filled, (place, piece) = _PLACEHOLDER.sub(fill, rendered), chat.split
    found = written_contents(encoder, messages, numbers, filled)
    if chat.has_passages:
        offset = len(clean_text("".join(contents[place][:piece])))
        probe_passages(encoder, messages, place, offset, filled if found is None else found[0])
    if found is None:
        return rendered
    text, spans = found
    changed: dict[int, list[str]] = {}
    for number, span in zip(numbers, spans, strict=True):
        split = piece if number == place and chat.has_passages else None
        pieces = rewritten_pieces([clean_text(each) for each in contents[number]], split, text[span.slice])
        if pieces is None:
            warn_once(encoder)
            return rendered
        changed[number] = pieces
    for number, span in zip(reversed(numbers), reversed(spans), strict=True):
        text = f"{text[: span.start]}\x1f\ue000{number}\ue001\x1f{text[span.stop :]}"
        contents[number] = tuple(changed[number])
    return text


def _placeholders(messages: Sequence[_Message]) -> tuple[list[ChatMessage], list[tuple[str, ...]]]:
    """Return the messages with placeholders, and the pieces of each: of the messages, then of arguments of calls."""
    contents = [message.pieces for message in messages]
    written: list[ChatMessage] = []
    for index, message in enumerate(messages):
        margin = "" if message.role == "tool" else "\x1f"  # JSON would escape it
        content = f"{margin}\ue000{index}\ue001{margin}"
        fields = dict(message.fields)
        _check_names(fields, index)
        if "tool_calls" in fields:
            content = content if any(message.pieces) else ""
            calls = json.loads(fields["tool_calls"])
            for call in calls:
                contents.append((clean_text(call["function"]["arguments"]),))
                call["function"]["arguments"] = f"\ue000{len(contents) - 1}\ue001"
            fields["tool_calls"] = json.dumps(calls)
        written.append({"role": message.role, "content": content, **fields})
    return written, contents


def _check_names(fields: Mapping[str, str], index: int) -> None:
    """Raise for a name or an id of a call that the chat template might not write as text."""
    calls = json.loads(fields.get("tool_calls", "[]"))
    names = [fields.get("name"), fields.get("tool_call_id")]
    names += [name for call in calls for name in (call.get("id"), call["function"]["name"])]
    for name in names:
        if isinstance(name, str) and _NO_NAME.search(name):
            raise ConfigError(
                f"message {index}: the name or id of a call is {shown(name)}; take out brackets, quotes, backslashes "
                "and control characters"
            )


def _format_roles(roles: Sequence[str]) -> str:
    return ", ".join(roles) if len(roles) <= 20 else f"{', '.join(roles[:20])}, ... ({len(roles)} messages)"
