"""The token spans of each part of a prompt. Uses no text, tokenizer or tensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rag_posfix.errors import ConfigError

READ_TOGETHER = 512
"""A plain prompt is read and stored in runs of at least this many tokens. A forward pass reads all weights, however
few its tokens are, and few tokens do not fill matrix units. Longer runs are reused by fewer prompts."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``start`` to ``stop``, the last one excluded."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ConfigError(f"span [{self.start}, {self.stop}) must satisfy 0 <= start <= stop")

    def __len__(self) -> int:
        return self.stop - self.start

    def shifted(self, offset: int) -> Span:
        """Return the span ``offset`` tokens further on."""
        return Span(self.start + offset, self.stop + offset)

    @property
    def slice(self) -> slice:
        """The span as a slice."""
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of the chat that a prompt is.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or ``tool``.
        content: The tokens of its content, without those of the chat template.
    """

    role: str
    content: Span


@dataclass(frozen=True, slots=True)
class Layout:
    """A tokenised prompt and the spans of its segments.

    The prompt is prefix, passages, suffix, without gaps: ``prefix`` starts at 0, each passage starts where the
    one before it ends, and ``suffix`` ends with the prompt. A passage's segment holds its heading, its text and
    the separator after it; ``texts`` gives the text alone. A span inside of prefix, passage or suffix holds every
    token with a character of its part: the first may begin with the space before it, the last may hold the white space
    behind it.

    Attributes:
        token_ids: The whole prompt.
        prefix: Chat template and instructions before the passages.
        passages: One segment per passage, in the order of the prompt.
        texts: The document text inside each segment.
        suffix: Question, end of the turn, and the opening of the answer. Never empty.
        question: The question inside the suffix.
        keys: A content hash of each passage; equal text, equal key. Methods that do not depend on order sort by it.
        relevance: One score in (0, 1] per passage, or None where nothing scored them.
        turns: The messages of the chat, for generators that apply a chat template of their own. One of the
            user's holds the passages; the last one holds the question and may be the same. Empty if the prompt is not
            known as messages.
    """

    token_ids: tuple[int, ...]
    prefix: Span
    passages: tuple[Span, ...]
    texts: tuple[Span, ...]
    suffix: Span
    question: Span
    keys: tuple[str, ...]
    relevance: tuple[float, ...] | None = None
    turns: tuple[Turn, ...] = ()

    def __post_init__(self) -> None:
        bounds = [self.prefix, *self.passages, self.suffix]
        offset = 0
        for span in bounds:
            if span.start != offset:
                raise ConfigError(f"layout segments must touch: expected a start of {offset}, got {span}")
            offset = span.stop
        if offset != len(self.token_ids) or not len(self.suffix):
            raise ConfigError(f"layout must cover its {len(self.token_ids)} tokens and end in a suffix, got {offset}")
        counts = {len(self.passages), len(self.texts), len(self.keys)}
        if self.relevance is not None:
            counts.add(len(self.relevance))
        if self.turns and not self._are_consistent(self.turns):
            raise ConfigError(
                "a turn of a layout must hold the passages, from the prefix to the suffix, and the user's last turn "
                f"must hold the question, got {self.turns}"
            )
        if len(counts) != 1:
            raise ConfigError(f"layout needs one text, key and relevance per passage, got counts {sorted(counts)}")

    @classmethod
    def plain(cls, token_ids: Sequence[int]) -> Layout:
        """Return the layout of a prompt without passages: all of it is suffix and question.

        Raises:
            ConfigError: there is no token.
        """
        full_span = Span(0, len(token_ids))
        return cls(tuple(token_ids), Span(0, 0), (), (), full_span, full_span, ())

    def _are_consistent(self, turns: tuple[Turn, ...]) -> bool:
        place = self._passages_turn(turns)
        asked = [turn.content for turn in turns if turn.role == "user"]  # tools may follow
        last = (asked or [turns[-1].content])[-1]
        holds_question = last.start <= self.question.start and self.question.stop <= last.stop <= self.suffix.stop
        return place is not None and turns[place].content.start <= self.prefix.stop and holds_question

    def _passages_turn(self, turns: tuple[Turn, ...]) -> int | None:
        """Return the index of the turn with the passages: the first that reaches into the suffix."""
        return next((i for i, turn in enumerate(turns) if turn.content.stop >= self.suffix.start), None)

    @property
    def n_passages(self) -> int:
        """How many passages the prompt holds."""
        return len(self.passages)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Where runs of whole passages end: after how many tokens, ascending, each once.

        A run ends with the prefix or passage that brings it to ``READ_TOGETHER`` tokens; the last one, which may be
        shorter, ends with the last passage. Other ends depend only on what is before them, so prompts that begin with
        the same passages begin with the same runs.
        """
        ends, start = [], 0
        for span in (self.prefix, *self.passages):
            if span.stop - start >= READ_TOGETHER:
                ends.append(span.stop)
                start = span.stop
        return (*ends, self.suffix.start) if start < self.suffix.start else tuple(ends)

    @property
    def turn_starts(self) -> tuple[int, ...]:
        """Where the user's turns behind the passages start: the token before each content, ascending."""
        starts = (turn.content.start - 1 for turn in self.turns if turn.role == "user")
        return tuple(start for start in starts if start > self.suffix.start)

    def tokens(self, span: Span) -> tuple[int, ...]:
        """Return the token ids of ``span``."""
        return self.token_ids[span.slice]

    def select(self, passages: Sequence[int]) -> Layout:
        """Return the layout of the same prompt with only ``passages``, in this order; a passage may be repeated.

        Raises:
            ConfigError: an index is outside of the layout.
        """
        if not set(passages) <= set(range(self.n_passages)):
            raise ConfigError(f"passages {tuple(passages)} must be within 0..{self.n_passages - 1}")
        ids = list(self.tokens(self.prefix))
        segments, texts = [], []
        for index in passages:
            segment, text = self.passages[index], self.texts[index]
            shift = len(ids) - segment.start
            segments.append(Span(segment.start + shift, segment.stop + shift))
            texts.append(Span(text.start + shift, text.stop + shift))
            ids.extend(self.tokens(segment))
        shift = len(ids) - self.suffix.start
        ids.extend(self.tokens(self.suffix))
        return Layout(
            token_ids=tuple(ids),
            prefix=self.prefix,
            passages=tuple(segments),
            texts=tuple(texts),
            suffix=Span(self.suffix.start + shift, self.suffix.stop + shift),
            question=Span(self.question.start + shift, self.question.stop + shift),
            keys=tuple(self.keys[i] for i in passages),
            relevance=None if self.relevance is None else tuple(self.relevance[i] for i in passages),
            turns=self._turns_with(shift),
        )

    def cut(self, removed: Sequence[Span]) -> Layout:
        """Return the layout without some tokens of its passages; their keys stay.

        Raises:
            ConfigError: a token outside of the passages is to be removed.
        """
        gone = {index for span in removed for index in range(span.start, span.stop)}
        if gone and not self.prefix.stop <= min(gone) <= max(gone) < self.suffix.start:
            raise ConfigError(f"tokens {list(removed)} must be in the passages {list(self.passages)}")
        before = list(itertools.accumulate((index not in gone for index in range(len(self.token_ids))), initial=0))

        def moved(span: Span) -> Span:
            return Span(before[span.start], before[span.stop])

        return replace(
            self,
            token_ids=tuple(token for index, token in enumerate(self.token_ids) if index not in gone),
            prefix=moved(self.prefix),
            passages=tuple(map(moved, self.passages)),
            texts=tuple(map(moved, self.texts)),
            suffix=moved(self.suffix),
            question=moved(self.question),
            turns=tuple(Turn(turn.role, moved(turn.content)) for turn in self.turns),
        )

    def _turns_with(self, shift: int) -> tuple[Turn, ...]:
        """Return the turns with the suffix ``shift`` tokens further on."""
        place = self._passages_turn(self.turns)
        if place is None:
            return self.turns
        turn = self.turns[place]
        return (
            *self.turns[:place],
            Turn(turn.role, Span(turn.content.start, turn.content.stop + shift)),
            *(Turn(later.role, later.content.shifted(shift)) for later in self.turns[place + 1 :]),
        )

    def canonical_order(self) -> tuple[int, ...]:
        """Return passage indices in an order that depends on their content alone, never on the prompt's order.

        Of equal passages with different relevance the more relevant one comes first.
        """
        relevance = self.relevance or (0.0,) * self.n_passages
        return tuple(
            sorted(range(self.n_passages), key=lambda i: (self.keys[i], self.tokens(self.passages[i]), -relevance[i]))
        )

    def ranked(self) -> tuple[int, ...]:
        """Return passage indices by descending relevance; equal ones, or all without relevance, by content."""
        relevance = self.relevance or (0.0,) * self.n_passages
        return tuple(sorted(self.canonical_order(), key=lambda i: -relevance[i]))
