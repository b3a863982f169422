"""A generator without weights: deterministic, instant, for tests of everything around a model."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rag_posfix.contracts.generator import TokenEncoder
from rag_posfix.contracts.request import (
    Chunk,
    FinishReason,
    Generation,
    GenerationRequest,
    MitigationChoice,
    MitigationInfo,
    Usage,
)
from rag_posfix.errors import PromptTooLongError

__all__ = ["FakeGenerator"]

_WORDS = re.compile(r"\s*\S+\s*")


class FakeGenerator:
    """Answers with the first sentence of the passage that shares the most words with the question.

    Which passage that is depends on content alone, so the answer does not depend on order. Implements ``Generator``;
    applies ``max_tokens`` (one token a word) and stop strings; ignores sampling otherwise.

    Args:
        encoder: A tokenizer.
        context_window: Most tokens that prompt and answer may have together.
        order_invariant: What it says of every mitigation.
    """

    def __init__(self, encoder: TokenEncoder, context_window: int = 8192, *, order_invariant: bool = True) -> None:
        self._encoder = encoder
        self._window = context_window
        self._order_invariant = order_invariant

    @property
    def model_id(self) -> str:
        """Name of the model."""
        return "fake"

    @property
    def fingerprint(self) -> str:
        """Identity for cache keys."""
        return "fake-1"

    @property
    def context_window(self) -> int:
        """Most tokens that prompt and answer may have together."""
        return self._window

    @property
    def encoder(self) -> TokenEncoder:
        """The tokenizer given."""
        return self._encoder

    def describe(self, choice: MitigationChoice) -> MitigationInfo:
        """Return what the name says; mitigations are checked as the engine checks them."""
        from rag_posfix.mitigations import create

        method = create(choice.name, choice.parameters)
        return MitigationInfo(method.name, method.fingerprint(), self._order_invariant)

    def generate(self, request: GenerationRequest) -> Generation:
        """Return the whole answer."""
        layout, sampling = request.layout, request.sampling
        if len(layout.token_ids) + sampling.max_tokens > self._window:
            raise PromptTooLongError(
                f"the prompt takes {len(layout.token_ids)} tokens and max_tokens={sampling.max_tokens} more, but the "
                f"context window is {self._window}; use fewer or shorter passages, or lower max_tokens"
            )
        question = self._encoder.decode(layout.tokens(layout.question))
        passages = [self._encoder.decode(layout.tokens(span)) for span in layout.texts]
        asked = set(re.findall(r"\w+", question.lower()))
        shared = [len(asked & set(re.findall(r"\w+", passage.lower()))) for passage in passages]
        chosen = max(range(len(passages)), key=lambda i: (shared[i], layout.keys[i]), default=None)
        text = f"No passages for: {question}" if chosen is None else passages[chosen].split(". ")[0]
        finish: FinishReason = "stop"
        for stop in sampling.stop:
            text = text.split(stop)[0]
        words = _WORDS.findall(text)
        if len(words) > sampling.max_tokens:
            text, finish = "".join(words[: sampling.max_tokens]), "length"
        total = sum(shared) or len(shared)
        return Generation(
            text=text,
            token_ids=tuple(range(min(len(words), sampling.max_tokens))),
            finish_reason=finish,
            usage=Usage(len(layout.token_ids), min(len(words), sampling.max_tokens)),
            attention=tuple((count if sum(shared) else 1) / total for count in shared),
            timings={"prefill": 0.0, "decode": 0.0},
        )

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer of ``generate`` word by word."""
        generation = self.generate(request)
        for word in _WORDS.findall(generation.text):
            yield Chunk(word)
        yield Chunk("", generation)
