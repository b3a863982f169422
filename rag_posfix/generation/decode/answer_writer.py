"""One answer as it is written: which token comes next, what text it makes, and when it ends."""

from __future__ import annotations

import time

from torch import Tensor

from rag_posfix.contracts.request import FinishReason, Generation, GenerationRequest, TokenSource, Usage
from rag_posfix.generation.decode.sampling import Sampler
from rag_posfix.generation.decode.session import Session
from rag_posfix.generation.decode.text_stream import TextStream
from rag_posfix.generation.model.tokenizer import Tokenizer

__all__ = ["AnswerWriter"]


class AnswerWriter:
    """Writes one answer. Runs no model: whoever holds the session hands in log-probabilities and advances it.

    Args:
        encoder: The engine's tokenizer.
        session: A session that has just read the request's prompt.
        request: What is answered.

    Attributes:
        sampler: Chooses its tokens.
        done: Whether the answer is complete.
    """

    def __init__(self, encoder: Tokenizer, session: Session, request: GenerationRequest) -> None:
        self._request = request
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
        self._finish: FinishReason = "length"
        self._started = time.perf_counter()
        self._seconds = 0.0
        self.done = False

    @property
    def last(self) -> int:
        """The token that was written last."""
        return self._ids[-1]

    def write(self, log_probs: Tensor) -> str:
        """Choose a token and return the text that is certain now; check ``done`` afterwards.

        Shapes:
            log_probs: (V,) float32.
        """
        return self.accept(self.sampler.choose(log_probs))

    def accept(self, token: int) -> str:
        """Take a token that ``sampler`` chose and return the text that is certain now; check ``done`` afterwards."""
        self._ids.append(token)
        new = ""
        if token in self._eos_ids:
            self._finish, self.done = "stop", True
        else:
            new = self._text.push(token)
            self.done = self._text.stopped or len(self._ids) >= self._request.sampling.max_tokens
        self._ends.append(len(self._text.text))
        self._seconds = time.perf_counter() - self._started
        return new

    def end(self) -> tuple[str, Generation]:
        """Return the text that was held back, and the whole answer. Call once, when ``done``."""
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
        )
        return rest, generation

    def _sources(self) -> tuple[TokenSource, ...]:
        """Return which passages each token comes from. The last one brings what was held back."""
        if not self._request.traced:
            return ()
        written = len(self._text.text)
        ends = [min(end, written) for end in self._ends[:-1]] + [written]
        return tuple(TokenSource(end, shares) for end, shares in zip(ends, self._session.token_shares(), strict=False))
