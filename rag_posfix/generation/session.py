"""A prompt that has been read, ready to be continued: next-token scores, advancing, scoring given answers."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from rag_posfix.attention.plan import Plan, RowScores
from rag_posfix.attention.spans import Layout
from rag_posfix.errors import ConfigError
from rag_posfix.generation.forward import LoadedModel
from rag_posfix.generation.survey import read

__all__ = ["Session"]


class Session:
    """One prompt under one plan.

    Not for several threads at once; several sessions may share a model.

    Args:
        loaded: The model.
        layout: The prompt.
        plan: What is done differently.
    """

    @torch.inference_mode()
    def __init__(self, loaded: LoadedModel, layout: Layout, plan: Plan) -> None:
        started = time.perf_counter()
        self._plan, groups = read(loaded, layout, plan)
        self._groups = [group.rows for group in groups]
        self._log_probs = torch.cat([group.logits[:, -1].float() for group in groups]).log_softmax(dim=-1)  # (R, V)
        self._question = torch.cat([group.question for group in groups])
        self._answer = torch.zeros_like(self._question)
        self._confidence = self._log_probs.amax(dim=-1)
        self._attention = torch.cat([group.attention for group in groups])  # (R, N)
        self.prefill_seconds = time.perf_counter() - started

    @torch.inference_mode()
    def next_log_probs(self) -> Tensor:
        """Return the log-probabilities of the next token, (V,) float32."""
        return self._combine(self._log_probs, self._answer)[0]

    @torch.inference_mode()
    def attention(self) -> tuple[float, ...]:
        """Return each passage's share of the attention, rows weighted as the plan weights them. Sums to 1."""
        weights = self._combine(self._log_probs, self._answer)[1]
        mass = (weights[:, None] * self._attention).sum(dim=0)
        total = float(mass.sum())
        return tuple(float(share) / total for share in mass) if total > 0 else tuple(0.0 for _ in mass)

    @torch.inference_mode()
    def advance(self, token_id: int) -> None:
        """Append a generated token to every row."""
        self._answer = self._answer + self._log_probs[:, token_id]
        logits = []
        for rows in self._groups:
            token = torch.full((rows.n_rows, 1), token_id, device=rows.positions.device)
            logits.append(rows.forward(token, rows.next_positions(), keep=1)[:, -1])
        self._log_probs = torch.cat(logits).float().log_softmax(dim=-1)

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Return the log-probability of each token of a given continuation; the session stays where it is.

        Cost: a copy of the cache and one forward pass over the continuation.

        Raises:
            ConfigError: the continuation is empty.
        """
        if not token_ids:
            raise ConfigError("cannot score an empty continuation; give at least one token")
        steps = [self._log_probs]
        if len(token_ids) > 1:
            given = torch.tensor([list(token_ids[:-1])], device=self._log_probs.device)
            logits = []
            for rows in (group.fork() for group in self._groups):
                count = given.shape[1]
                logits.append(rows.forward(given.expand(rows.n_rows, -1), rows.next_positions(count), keep=count))
            steps.extend(torch.cat(logits).float().log_softmax(dim=-1).unbind(dim=1))
        answer, scores = self._answer, []
        for log_probs, token in zip(steps, token_ids, strict=True):
            scores.append(float(self._combine(log_probs, answer)[0][token]))
            answer = answer + log_probs[:, token]
        return tuple(scores)

    def _combine(self, log_probs: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
        if self._plan.combine is None:
            return log_probs[0], log_probs.new_ones(1)
        return self._plan.combine(RowScores(log_probs, self._question, answer, self._confidence))
