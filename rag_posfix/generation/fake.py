"""A generator without weights: deterministic, instant, for tests of everything around a model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate

from rag_posfix.contracts.generator import Generator, TokenEncoder
from rag_posfix.contracts.request import (
    Chunk,
    FinishReason,
    Generation,
    GenerationRequest,
    MitigationChoice,
    MitigationInfo,
    Sampling,
    ScoredToken,
    TokenScore,
    Usage,
    named_stop,
)
from rag_posfix.errors import PromptTooLongError

_WORDS = re.compile(r"\s*\S+\s*")


class FakeGenerator(Generator):
    """Answers with the first sentence of the passage that shares the most words with the question.

    Which passage that is depends on content alone, so the answer does not depend on order. Applies
    ``max_tokens`` (one token a word) and stop strings; ignores sampling otherwise. Every token has the
    log-probability log 1/2, and made-up alternatives.

    Args:
        context_window: Token limit of prompt and answer together.
        order_invariant: What ``describe`` returns for every mitigation.
    """

    model_id, fingerprint = "fake", "fake-1"
    capabilities = frozenset({"log_probs"})

    def __init__(self, encoder: TokenEncoder, context_window: int = 8192, *, order_invariant: bool = True) -> None:
        self.encoder, self.context_window = encoder, context_window
        self._order_invariant = order_invariant

    def describe(self, choice: MitigationChoice) -> MitigationInfo:
        """Check a mitigation as the engine does; all are as order-invariant as the constructor says."""
        from rag_posfix.mitigations import create

        method = create(choice.name, choice.parameters)
        return MitigationInfo(method.name, method.fingerprint(), self._order_invariant)

    def generate(self, request: GenerationRequest) -> Generation:
        layout, sampling = request.layout, request.sampling
        if len(layout.token_ids) + sampling.max_tokens > self.context_window:
            raise PromptTooLongError(
                f"the prompt takes {len(layout.token_ids)} tokens and max_tokens={sampling.max_tokens} more, but the "
                f"context window is {self.context_window}; use fewer or shorter passages, or lower max_tokens"
            )
        question = self.encoder.decode(layout.tokens(layout.question))
        passages = [self.encoder.decode(layout.tokens(span)) for span in layout.texts]
        words_asked = set(re.findall(r"\w+", question.lower()))
        shared = [len(words_asked & set(re.findall(r"\w+", passage.lower()))) for passage in passages]
        chosen = max(range(len(passages)), key=lambda i: (shared[i], layout.keys[i]), default=None)
        text = f"No passages for: {question}" if chosen is None else passages[chosen].split(". ")[0]
        scored = _scored(text, sampling)
        finish: FinishReason = "stop"
        stop_string: str | None = None
        for stop in (*sampling.stop, *request.cues):
            text, found, _ = text.partition(stop)
            stop_string = found or stop_string
        words = _WORDS.findall(text)
        if len(words) > sampling.max_tokens:
            text, finish, stop_string = "".join(words[: sampling.max_tokens]), "length", None
        total = sum(shared) or len(shared)
        return Generation(
            text=text,
            token_ids=tuple(range(min(len(words), sampling.max_tokens))),
            finish_reason=finish,
            usage=Usage(len(layout.token_ids), min(len(words), sampling.max_tokens)),
            attention=tuple((count if sum(shared) else 1) / total for count in shared),
            timings={"prefill": 0.0, "decode": 0.0},
            log_probs=scored[: min(len(words), sampling.max_tokens)],
            prompt_log_probs=self._scored_prompt(request) if request.prompt_scored else (),
            stop_string=named_stop(stop_string, sampling),
        )

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer of ``generate`` word by word."""
        generation = self.generate(request)
        for index, word in enumerate(_WORDS.findall(generation.text)):
            yield Chunk(word, log_probs=generation.log_probs[index : index + 1])
        yield Chunk("", generation)

    def _scored_prompt(self, request: GenerationRequest) -> tuple[ScoredToken, ...]:
        texts = [self.encoder.decode([token]) for token in request.layout.token_ids]
        first, *following = _scored_pieces(texts, request.sampling.top_logprobs or 0)
        return (ScoredToken(TokenScore(first.token.data, None), 0), *following)


def _scored(text: str, sampling: Sampling) -> tuple[ScoredToken, ...]:
    return () if sampling.top_logprobs is None else _scored_pieces(_WORDS.findall(text), sampling.top_logprobs)


def _scored_pieces(texts: Sequence[str], n_top: int) -> tuple[ScoredToken, ...]:
    starts = accumulate(map(len, texts), initial=0)
    scored = []
    for text, start in zip(texts, starts, strict=False):
        alternatives = [TokenScore(f"other{rank}".encode(), -math.log(2) * (rank + 1)) for rank in range(1, n_top)]
        token = TokenScore(text.encode(), -math.log(2))
        scored.append(ScoredToken(token, start, (token, *alternatives)[:n_top]))
    return tuple(scored)
