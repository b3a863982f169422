"""One answer as it is written: which token comes next, what text it makes, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from rag_posfix.contracts.request import Chunk, FinishReason, Generation, GenerationRequest, TokenSource, Usage
from rag_posfix.contracts.token_scores import ScoredToken
from rag_posfix.generation.decode.sampling import Sampler
from rag_posfix.generation.decode.session import Session
from rag_posfix.generation.decode.text_stream import TextStream
from rag_posfix.generation.decode.token_scores import score_tokens
from rag_posfix.generation.model.tokenizer import Tokenizer


class AnswerWriter:
    """Writes one answer. Runs no model: whoever holds the session hands in log-probabilities and advances it.

    Args:
        encoder: The engine's tokenizer.
        session: A session that has just read the request's prompt.
        prompt: The tokens of the prompt with their log-probabilities, if the request asked for them.

    Attributes:
        sampler: Chooses its tokens.
        done: Whether the answer is complete.
    """

    def __init__(
        self, encoder: Tokenizer, session: Session, request: GenerationRequest, prompt: Sequence[ScoredToken] = ()
    ) -> None:
        self._encoder = encoder
        self._request = request
        self._prompt = tuple(prompt)
        self._session = session
        if request.traced:
            session.attribute_tokens()
        self._eos_ids = encoder.eos_ids
        self._prefill_seconds = session.prefill_seconds
        self._attention = session.attention()
        self._cached_tokens = session.cached_tokens
        self.sampler = Sampler(request.sampling)
        self._text = TextStream(encoder.decode_answer, request.sampling.stop)
        self._ids: list[int] = []
        self._ends: list[int] = []
        self._scored: list[ScoredToken] = []
        self._sent_characters = 0
        self._sent_tokens = 0
        self._finish: FinishReason = "length"
        self._started = time.perf_counter()
        self._seconds = 0.0
        self.done = False

    @property
    def last(self) -> int:
        """The token that was written last."""
        return self._ids[-1]

    def write(self, log_probs: Tensor) -> Chunk:
        """Choose a token and return the text that is certain now, maybe none; check ``done`` afterwards.

        Shapes:
            log_probs: (V,) float32.
        """
        return self.accept(self.sampler.choose(log_probs), log_probs)

    def accept(self, token: int, log_probs: Tensor) -> Chunk:
        """Take a token that ``sampler`` chose from ``log_probs``; return as ``write``."""
        n_top = self._request.sampling.top_logprobs
        if n_top is not None:
            start = len(self._text.text)
            self._scored += score_tokens(log_probs[None], [token], [start], n_top, self._encoder.token_bytes)
        self._ids.append(token)
        new = ""
        if token in self._eos_ids:
            self._finish, self.done = "stop", True
        else:
            new = self._text.push(token)
            self.done = self._text.stopped or len(self._ids) >= self._request.sampling.max_tokens
        self._ends.append(len(self._text.text))
        self._seconds = time.perf_counter() - self._started
        return Chunk(new, log_probs=self._begun_in(new))

    def end(self) -> Chunk:
        """Return the text that was held back, with the whole answer. Call once, when ``done``."""
        rest = self._text.finish()
        if self._text.stopped:  # a stop string may stand in what was held back
            self._finish = "stop"
        generation = Generation(
            text=self._text.text,
            token_ids=tuple(self._ids),
            finish_reason=self._finish,
            usage=Usage(
                prompt_tokens=len(self._request.layout.token_ids),
                completion_tokens=len(self._ids),
                cached_tokens=self._cached_tokens,
            ),
            attention=self._attention,
            sources=self._sources(),
            timings={"prefill": self._prefill_seconds, "decode": self._seconds},
            log_probs=tuple(self._scored),
            prompt_log_probs=self._prompt,
        )
        return Chunk(rest, generation, tuple(self._scored[self._sent_tokens :]))

    def _begun_in(self, new: str) -> tuple[ScoredToken, ...]:
        """Return the tokens whose text begins in what was sent, and that were not returned before."""
        self._sent_characters += len(new)
        first = self._sent_tokens
        while self._sent_tokens < len(self._scored) and self._scored[self._sent_tokens].start < self._sent_characters:
            self._sent_tokens += 1
        return tuple(self._scored[first : self._sent_tokens])

    def _sources(self) -> tuple[TokenSource, ...]:
        """Return which passages each token comes from. The last one brings what was held back."""
        if not self._request.traced:
            return ()
        written = len(self._text.text)
        ends = [min(end, written) for end in self._ends[:-1]] + [written]
        return tuple(TokenSource(end, shares) for end, shares in zip(ends, self._session.token_shares(), strict=False))
