"""A prompt that has been read, ready to be continued: next-token scores, advancing, scoring given answers."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError
from rag_posfix.generation.decode.drafts import AnswerText, draft_answers
from rag_posfix.generation.decode.token_attribution import TokenTrace, can_be_traced
from rag_posfix.generation.model.sequence_batch import LoadedModel, Rows, forward_together
from rag_posfix.generation.prefill.calibration_pass import read
from rag_posfix.generation.prefill.kv_reuse import Reuse
from rag_posfix.patching.call import Observer
from rag_posfix.plan.draft import Draft
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Plan, RowScores

__all__ = ["Session"]


class Session:
    """One prompt under one plan.

    Not for several threads at once; several sessions may share a model.

    Args:
        loaded: The model.
        layout: The prompt.
        plan: What is done differently.
        text: What ends an answer; used where the plan drafts.
        reuse: Keys and values that need not be computed again.

    Attributes:
        cached_tokens: Tokens of the prompt that were found in ``reuse``, whichever row they are read in.
    """

    @torch.inference_mode()
    def __init__(
        self,
        loaded: LoadedModel,
        layout: Layout,
        plan: Plan,
        text: AnswerText | None = None,
        reuse: Reuse | None = None,
    ) -> None:
        started = time.perf_counter()
        self._plan, groups = read(loaded, layout, plan, reuse)
        self.cached_tokens = min(group.cached_tokens for group in groups)
        self._groups = [group.rows for group in groups]
        self._log_probs = torch.cat([group.logits[:, -1].float() for group in groups]).log_softmax(dim=-1)  # (R, V)
        self._question = torch.cat([group.question for group in groups])
        self._answer = torch.zeros_like(self._question)
        self._confidence = self._log_probs.amax(dim=-1)
        self._attention = torch.cat([group.attention for group in groups])  # (R, N)
        self._weights: Tensor | None = None
        self._trace: TokenTrace | None = None
        if plan.draft is not None:
            self._draft(plan.draft, text or AnswerText())
        self.prefill_seconds = time.perf_counter() - started

    @property
    def groups(self) -> Sequence[Rows]:
        """The rows that it reads, in groups that advance together; in order they are the plan's rows."""
        return self._groups

    @property
    def joins(self) -> bool:
        """Whether its next token may be read in one pass with those of other sessions."""
        return all(rows.joins for rows in self._groups)

    @torch.inference_mode()
    def next_log_probs(self) -> Tensor:
        """Return the log-probabilities of the next token, (V,) float32."""
        log_probs, weights = self._combine(self._log_probs, self._answer)
        if self._trace is not None:
            self._trace.chosen_by(weights)
        return log_probs

    @torch.inference_mode()
    def attention(self) -> tuple[float, ...]:
        """Return each passage's share of the attention, rows weighted as the plan weights them. Sums to 1."""
        weights = self._combine(self._log_probs, self._answer)[1]
        mass = (weights[:, None] * self._attention).sum(dim=0)
        total = float(mass.sum())
        return tuple(float(share) / total for share in mass) if total > 0 else tuple(0.0 for _ in mass)

    @torch.inference_mode()
    def trace(self) -> None:
        """Follow from now on which passages each token comes from. Call before the first token is chosen.

        Does nothing where that cannot be told; see ``can_be_traced``.
        """
        if self._attention.shape[1] and can_be_traced(self._groups):
            self._trace = TokenTrace(self._groups, self._attention)

    def traced(self) -> list[tuple[float, ...]]:
        """Return each passage's share in every token whose log-probabilities were asked for; empty without a trace."""
        return [] if self._trace is None else self._trace.shares()

    def observers(self) -> list[Observer | None]:
        """Return what must receive the attention of the next token's forward pass in each group of rows."""
        return [None] * len(self._groups) if self._trace is None else self._trace.observers()

    @torch.inference_mode()
    def advance(self, token_id: int) -> None:
        """Append a generated token to every row."""
        observers = self.observers()
        self.accept(token_id, self._read(self._groups, [token_id], observers)[:, -1], observers)

    @torch.inference_mode()
    def accept(self, token_id: int, logits: Tensor, observers: Sequence[Observer | None] = ()) -> None:
        """Take a token as generated whose forward pass ran elsewhere, and what it says of the token after it.

        The session's own rows stay behind: once used, every further token must come this way.

        Args:
            token_id: The token.
            logits: Of the pass that read it.
            observers: Those of ``observers``, after the pass.

        Shapes:
            logits: (R, V), in the model's dtype.
        """
        self._answer = self._answer + self._log_probs[:, token_id]
        self._log_probs = logits.float().log_softmax(dim=-1)
        if self._trace is not None:
            self._trace.take(observers)

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
        return self.score_from(token_ids, self._read([rows.fork() for rows in self._groups], token_ids[:-1]))

    @torch.inference_mode()
    def score_from(self, token_ids: Sequence[int], logits: Tensor | None) -> tuple[float, ...]:
        """Return what ``score`` returns, from the logits of a forward pass that ran elsewhere.

        Shapes:
            logits: (R, len(token_ids) - 1, V), those after each token but the last; None for a single token.
        """
        steps = [self._log_probs]
        if logits is not None:
            steps.extend(logits.float().log_softmax(dim=-1).unbind(dim=1))
        answer, scores = self._answer, []
        for log_probs, token in zip(steps, token_ids, strict=True):
            scores.append(float(self._combine(log_probs, answer)[0][token]))
            answer = answer + log_probs[:, token]
        return tuple(scores)

    def _read(
        self, groups: Sequence[Rows], tokens: Sequence[int], observers: Sequence[Observer | None] | None = None
    ) -> Tensor:
        """Append tokens to every row. Returns (R, len(tokens), V)."""
        ids = [torch.tensor([list(tokens)] * rows.n_rows, device=rows.positions.device) for rows in groups]
        return torch.cat(forward_together(groups, ids, len(tokens), observers))

    def _draft(self, draft: Draft, text: AnswerText) -> None:
        """Weigh the rows by the short answers that they write; those of weight 0 are not read any further."""
        drafts = draft_answers(self._groups, self._log_probs, self._question, draft.max_tokens, text)
        weights = self._groups[0].loaded.spec.ranks.agree(draft.choose(drafts))
        counts = [rows.n_rows for rows in self._groups]
        kept = [part.nonzero().flatten().tolist() for part in torch.split(weights, counts)]
        if sum(map(len, kept)) < len(weights):
            self._groups = [
                rows if len(own) == rows.n_rows else rows.select(own)
                for rows, own in zip(self._groups, kept, strict=True)
                if own
            ]
        speaks = weights > 0
        self._weights, self._log_probs, self._question = (
            weights[speaks],
            self._log_probs[speaks],
            self._question[speaks],
        )
        self._answer, self._confidence = self._answer[speaks], self._confidence[speaks]
        self._attention = self._attention[speaks]

    def _combine(self, log_probs: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
        if self._plan.combine is None:
            return log_probs[0], log_probs.new_ones(1)
        return self._plan.combine(RowScores(log_probs, self._question, answer, self._confidence, self._weights))
