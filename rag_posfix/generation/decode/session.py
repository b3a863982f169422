"""A prompt that has been read, ready to be continued: next-token scores, advancing, scoring given answers."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rag_posfix.errors import ConfigError
from rag_posfix.generation.decode.question_scores import AnswerText, check_finite, write_candidates
from rag_posfix.generation.decode.token_attribution import AttributionTracker, can_attribute, holds_one_each
from rag_posfix.generation.model.sequence_batch import LoadedModel, SequenceBatch, forward_batches
from rag_posfix.generation.prefill.prefill import prefill_calibrated
from rag_posfix.generation.prefill.segments import KVLookup
from rag_posfix.patching.forward_context import Observer
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Draft, Plan, RowScores

# A full stop needs a space after it: "3.5" and "example.org" hold none. Chinese and Japanese sentences end without.
_END = re.compile(r"[.!?\u2026](?=\s)|[\u3002\uff01\uff1f\n]")
_WINDOW = 8
"""Tokens that are decoded at each step: a sentence end and the space after it are in neighbouring tokens."""


@dataclass(frozen=True, slots=True)
class FirstSentence:
    """The end of the first sentence of a growing answer. White space before the answer is no sentence.

    Attributes:
        decode: Tokens to text; None where there is no text, then the sentence never ends.
        last_tokens: The last ``_WINDOW`` tokens.
        is_over: Whether a sentence has ended.
    """

    decode: Callable[[Sequence[int]], str] | None = None
    last_tokens: tuple[int, ...] = ()
    is_over: bool = False

    def add(self, token: int) -> FirstSentence:
        """Return the state after one more token."""
        if self.decode is None or self.is_over:
            return self
        tokens = (*self.last_tokens, token)[-_WINDOW:]
        return FirstSentence(self.decode, tokens, _END.search(self.decode(tokens).lstrip()) is not None)


class Session:
    """One prompt under one plan.

    Not for several threads at once; several sessions may share a model.

    Args:
        text: What ends a candidate answer.
        kv_lookup: The passage KV store, for keys and values that need not be computed again; None computes all.

    Attributes:
        batches: Their rows, in order, are the plan's rows.
        cached_tokens: Tokens of the prompt that ``kv_lookup`` returned, in any row.
    """

    @torch.inference_mode()
    def __init__(
        self,
        loaded: LoadedModel,
        layout: Layout,
        plan: Plan,
        text: AnswerText | None = None,
        kv_lookup: KVLookup | None = None,
    ) -> None:
        started = time.perf_counter()
        layout = plan.layout or layout
        self._plan, groups = prefill_calibrated(loaded, layout, plan, kv_lookup)
        reusable = (layout.suffix.start, *layout.turn_starts)[-1]
        self.cached_tokens = min(reusable, *(group.cached_tokens for group in groups))
        self.batches = [group.batch for group in groups]
        self._log_probs = torch.cat([group.logits.float() for group in groups]).log_softmax(dim=-1)  # (R, V)
        self._question = torch.cat([group.question for group in groups])
        self._answer = torch.zeros_like(self._question)
        self._confidence = self._log_probs.amax(dim=-1)
        self._attention = torch.cat([group.passage_shares for group in groups])  # (R, N)
        self._weights: Tensor | None = None
        self._attribution: AttributionTracker | None = None
        self._sentence = FirstSentence(text.decode if text and self._plan.tracks_sentence else None)
        if plan.draft is not None:
            self._weigh_rows(plan.draft, text or AnswerText())
        self.prefill_seconds = time.perf_counter() - started

    @property
    def can_share_pass(self) -> bool:
        """Whether its next token may share a pass with the next tokens of other sessions."""
        return all(batch.can_share_pass for batch in self.batches)

    @torch.inference_mode()
    def next_log_probs(self, allowed: Tensor | None = None) -> Tensor:
        """Return the log-probabilities of the next token, (V,) float32.

        Args:
            allowed: Which tokens may be chosen, after the rows were combined; the scores of all others are -inf. Where
                the plan rules out all of them, they have the weighted mean of their rows' log-probabilities.

        Shapes:
            allowed: (at most V,) bool; tokens after its end are not allowed.
        """
        log_probs, weights = self._combine(self._log_probs, self._answer, self._sentence)
        if self._attribution is not None:
            self._attribution.weigh_rows(weights)
        if allowed is None:
            return log_probs
        excluded = functional.pad(~allowed, (0, log_probs.shape[0] - allowed.shape[0]), value=True)
        excluded = excluded.to(log_probs.device)
        masked = log_probs.masked_fill(excluded, float("-inf"))
        if bool(masked.isfinite().any()):
            return masked
        return (weights[:, None] * self._log_probs).sum(dim=0).masked_fill(excluded, float("-inf"))

    @torch.inference_mode()
    def attention(self) -> tuple[float, ...]:
        """Return each passage's share of the attention, rows weighted as the plan weights them. Sums to 1."""
        weights = self._combine(self._log_probs, self._answer, self._sentence)[1]
        mass = (weights[:, None] * self._attention).sum(dim=0)
        total, *shares = torch.cat((mass.sum()[None], mass)).tolist()  # read once
        return tuple(share / total for share in shares) if total > 0 else tuple(0.0 for _ in shares)

    @property
    def weighted(self) -> bool:
        """Whether the shares of ``attention`` are the weights of rows that hold one passage each."""
        return sum(batch.n_rows for batch in self.batches) > 1 and all(map(holds_one_each, self.batches))

    @torch.inference_mode()
    def attribute_tokens(self) -> None:
        """Track from now on which passages each token comes from. Call before the first token is chosen.

        No-op unless ``can_attribute``.
        """
        if self._attention.shape[1] and can_attribute(self.batches):
            self._attribution = AttributionTracker(self.batches, self._attention)

    def token_shares(self) -> list[tuple[float, ...]]:
        """Return each passage's share in every token whose log-probabilities were requested; empty if not tracked."""
        return [] if self._attribution is None else self._attribution.shares()

    def observers(self) -> list[Observer | None]:
        """Return what must receive the attention of the next token's forward pass in each batch."""
        return [None] * len(self.batches) if self._attribution is None else self._attribution.observers()

    @torch.inference_mode()
    def advance(self, token_id: int) -> None:
        """Append a generated token to every row."""
        observers = self.observers()
        self.accept(token_id, self._read(self.batches, [token_id], observers)[:, -1], observers)

    @torch.inference_mode()
    def accept(self, token_id: int, logits: Tensor, observers: Sequence[Observer | None] = ()) -> None:
        """Append a generated token whose forward pass ran elsewhere.

        The session's own batches are not advanced: from then on every token must come this way.

        ``logits`` are (R, V), in the model's dtype, ``observers`` the ``observers()`` after the pass.
        """
        self._answer = self._answer + self._log_probs[:, token_id]
        self._sentence = self._sentence.add(token_id)
        self._log_probs = logits.float().log_softmax(dim=-1)
        if self._attribution is not None:
            self._attribution.take(observers)

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Return the log-probability of each token of a given continuation; the session stays where it is.

        Cost: one forward pass over the continuation; a copy of the cache where layers do not keep all keys.

        Raises:
            ConfigError: the continuation is empty.
        """
        if not token_ids:
            raise ConfigError("cannot score an empty continuation; give at least one token")
        if len(token_ids) == 1:
            return self.score_from(token_ids, None)
        return self.score_from(token_ids, self._read([batch.branch() for batch in self.batches], token_ids[:-1]))

    @torch.inference_mode()
    def score_from(self, token_ids: Sequence[int], logits: Tensor | None) -> tuple[float, ...]:
        """Return what ``score`` returns, from the logits of a forward pass that ran elsewhere.

        Shapes:
            logits: (R, len(token_ids) - 1, V), those after each token but the last; None for a single token.
        """
        steps = [self._log_probs]
        if logits is not None:
            steps.extend(logits.float().log_softmax(dim=-1).unbind(dim=1))
        answer, sentence, scores = self._answer, self._sentence, []
        for log_probs, token in zip(steps, token_ids, strict=True):
            scores.append(check_finite(float(self._combine(log_probs, answer, sentence)[0][token])))
            answer, sentence = answer + log_probs[:, token], sentence.add(token)
        return tuple(scores)

    @torch.inference_mode()
    def read_given(self, token_ids: Sequence[int]) -> Tensor:
        """Append tokens that were not chosen here; return the scores that the next token had before each, (n, V).

        Cost: one forward pass; memory for n rows of V scores, twice.
        """
        observers = self.observers()
        logits = self._read(self.batches, token_ids, observers)
        *steps, self._log_probs = (self._log_probs, *logits.float().log_softmax(dim=-1).unbind(dim=1))
        scores = []
        for log_probs, token in zip(steps, token_ids, strict=True):
            scores.append(self._combine(log_probs, self._answer, self._sentence)[0])
            self._answer = self._answer + log_probs[:, token]
            self._sentence = self._sentence.add(token)
        if self._attribution is not None:
            self._attribution.take(observers)
        stacked = torch.stack(scores)
        check_finite(float(stacked.amax(dim=-1).sum()))
        return stacked

    def _read(
        self,
        batches: Sequence[SequenceBatch],
        tokens: Sequence[int],
        observers: Sequence[Observer | None] | None = None,
    ) -> Tensor:
        """Append tokens to every row. Returns (R, len(tokens), V)."""
        device = batches[0].loaded.device
        # A single token is written by the device itself; others are uploaded, once for all rows.
        uploaded = (
            torch.full((1, 1), tokens[0], device=device) if len(tokens) == 1 else torch.tensor([tokens], device=device)
        )
        ids = [uploaded.expand(batch.n_rows, -1) for batch in batches]
        return torch.cat(forward_batches(batches, ids, len(tokens), observers))

    def _weigh_rows(self, step: Draft, text: AnswerText) -> None:
        """Weigh the rows by the short answers that they write; rows of weight 0 are not read further."""
        candidates = write_candidates(self.batches, self._log_probs, self._question, step.max_tokens, text)
        weights = self.batches[0].loaded.spec.ranks.broadcast_decision(step.choose(candidates))
        is_kept = [weight > 0 for weight in weights.tolist()]  # read once
        counts = itertools.accumulate((batch.n_rows for batch in self.batches), initial=0)
        rows_of = [
            [row for row in range(stop - start) if is_kept[start + row]] for start, stop in itertools.pairwise(counts)
        ]
        self.batches = [
            batch if len(rows) == batch.n_rows else batch.select(rows)
            for batch, rows in zip(self.batches, rows_of, strict=True)
            if rows
        ]
        rows = torch.tensor([row for row, weight in enumerate(is_kept) if weight], device=weights.device)
        self._weights, self._log_probs, self._question = weights[rows], self._log_probs[rows], self._question[rows]
        self._answer, self._confidence = self._answer[rows], self._confidence[rows]
        self._attention = self._attention[rows]

    def _combine(self, log_probs: Tensor, answer: Tensor, sentence: FirstSentence) -> tuple[Tensor, Tensor]:
        if self._plan.combine is None:
            return log_probs[0], log_probs.new_ones(1)
        return self._plan.combine(
            RowScores(log_probs, self._question, answer, self._confidence, self._weights, not sentence.is_over)
        )
