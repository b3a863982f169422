"""What the model will read for a question: text and token counts of each segment, and which are cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rag_posfix.assembly.assembler import Assembled
from rag_posfix.contracts.generator import TokenEncoder


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """A segment of a prompt.

    Attributes:
        kind: ``prefix`` (the tokens before the passages), ``passage``, or ``suffix`` (those after them).
        text: Its exact text, control tokens included.
        tokens: Number of its tokens.
        cached: Whether its keys and values are in the passage KV store.
        id: Id of the document of a passage, else None.
    """

    kind: Literal["prefix", "passage", "suffix"]
    text: str
    tokens: int
    cached: bool
    id: str | None = None


@dataclass(frozen=True, slots=True)
class PromptPreview:
    """The prompt of a question, which was not generated from.

    Attributes:
        segments: Prefix, passages in the order of the prompt, suffix.
        mitigation: Name of the mitigation.
        order: Name of the order.
        answer_cached: Whether the answer cache has the answer.
        dropped: Ids of documents that are not in the prompt, with the reason.
        warnings: What failed without failing the question, as in ``Answer``.
    """

    segments: tuple[PromptSegment, ...]
    mitigation: str
    order: str
    answer_cached: bool
    dropped: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The whole prompt."""
        return "".join(segment.text for segment in self.segments)

    @property
    def tokens(self) -> int:
        """Number of tokens of the prompt."""
        return sum(segment.tokens for segment in self.segments)

    @property
    def cached_tokens(self) -> int:
        """Number of tokens of cached segments."""
        return sum(segment.tokens for segment in self.segments if segment.cached)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object that ``rag-posfix prompt --json`` prints."""
        dropped = [{"id": identity, "reason": reason} for identity, reason in self.dropped]
        return asdict(self) | {"dropped": dropped, "tokens": self.tokens, "cached_tokens": self.cached_tokens}


def preview_prompt(
    assembled: Assembled,
    encoder: TokenEncoder,
    cached: Sequence[bool],
    mitigation: str,
    left_out: Sequence[tuple[str, str]],
    *,
    answer_cached: bool,
    warnings: tuple[str, ...] = (),
) -> PromptPreview:
    """Return the preview of an assembled prompt; ``cached`` is about the prefix and each passage, or empty.

    Args:
        left_out: Ids of the documents that were left out before, with the reason.
    """
    layout = assembled.layout
    flags = [*cached, False] if cached else [False] * (layout.n_passages + 2)
    kinds: list[Literal["prefix", "passage", "suffix"]] = ["prefix", *["passage"] * layout.n_passages, "suffix"]  # type: ignore[list-item]
    return PromptPreview(
        segments=tuple(
            PromptSegment(kind, encoder.decode(layout.tokens(span)), len(span), is_cached and len(span) > 0, identity)
            for kind, span, is_cached, identity in zip(
                kinds,
                (layout.prefix, *layout.passages, layout.suffix),
                flags,
                (None, *assembled.ids, None),
                strict=True,
            )
        ),
        mitigation=mitigation,
        order=assembled.order,
        answer_cached=answer_cached,
        dropped=(*((document.id, document.reason) for document in assembled.dropped), *left_out),
        warnings=warnings,
    )
