"""Candidate answers: every row of a plan writes a short answer alone, and every row scores every answer.

Independent of the method; the rows stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rag_posfix.generation.model.sequence_batch import SequenceBatch, forward_batches
from rag_posfix.plan.plan import CandidateAnswers


@dataclass(frozen=True, slots=True)
class AnswerText:
    """How tokens of an answer are read: which of them end it, and their text.

    Attributes:
        eos_ids: Tokens that end an answer.
        decode: Tokens to text; None where there is no text, then answers are equal if their tokens are.
    """

    eos_ids: frozenset[int] = frozenset()
    decode: Callable[[Sequence[int]], str] | None = None

    def is_complete(self, token_ids: Sequence[int]) -> bool:
        """Return whether a short answer is over: its first line is complete."""
        return self.decode is not None and "\n" in self.decode(token_ids).lstrip()

    def key(self, token_ids: Sequence[int]) -> str | tuple[int, ...]:
        """Return a key that equal answers share: their words, without case, spaces and the final stop."""
        if self.decode is None:
            return tuple(token_ids)
        return " ".join(self.decode(token_ids).casefold().split()).rstrip(" .")


@torch.inference_mode()
def write_candidates(
    batches: Sequence[SequenceBatch], log_probs: Tensor, question: Tensor, max_tokens: int, text: AnswerText
) -> CandidateAnswers:
    """Return one greedy answer per row and its log-probability in every row.

    Cost: at most ``max_tokens`` steps of all rows, and one pass of all rows over each distinct answer.

    Shapes:
        log_probs: (R, V) of the next token after the prompt. question: (R,) log-probability of the question.
    """
    answers = _write(batches, log_probs, max_tokens, text)
    keys = [text.key(answer) for answer in answers]
    distinct = list(dict.fromkeys(answers))
    longest = max(map(len, distinct))
    padded = [(*answer, *(0,) * (longest - len(answer))) for answer in distinct]
    ids = torch.tensor(padded, dtype=torch.long, device=log_probs.device)  # one upload for all
    scored = {
        answer: _score(batches, log_probs, row[: len(answer)]) for answer, row in zip(distinct, ids, strict=True)
    }
    return CandidateAnswers(
        tokens=tuple(answers),
        log_probs=torch.stack([scored[answer] for answer in answers]),
        same=torch.tensor([[a == b for b in keys] for a in keys], device=log_probs.device),
        question=question,
    )


def _write(
    batches: Sequence[SequenceBatch], log_probs: Tensor, max_tokens: int, text: AnswerText
) -> list[tuple[int, ...]]:
    """Return each row's greedy answer, without what ends it."""
    running = [batch.branch() for batch in batches]
    answers: list[list[int]] = [[] for _ in log_probs]
    open_rows = set(range(len(answers)))
    for step in range(max_tokens):
        likeliest = batches[0].loaded.spec.ranks.broadcast_decision(log_probs.argmax(dim=-1))
        tokens: list[int] = likeliest.tolist()
        for row in sorted(open_rows):
            if tokens[row] not in text.eos_ids:
                answers[row].append(tokens[row])
            if tokens[row] in text.eos_ids or text.is_complete(answers[row]):
                open_rows.discard(row)
        if not open_rows or step + 1 == max_tokens:
            break
        log_probs = _step(running, likeliest[:, None])[:, -1]
    return [tuple(answer) for answer in answers]


def _score(batches: Sequence[SequenceBatch], log_probs: Tensor, ids: Tensor) -> Tensor:
    """Return the summed log-probability of one answer, (n,), in every row, (R,)."""
    if not len(ids):
        return log_probs.new_zeros(log_probs.shape[0])
    steps = log_probs[:, None]  # (R, 1, V)
    if len(ids) > 1:
        appended = ids[:-1].expand(log_probs.shape[0], -1)
        steps = torch.cat((steps, _step([batch.branch() for batch in batches], appended)), dim=1)  # (R, n, V)
    return steps.gather(2, ids[None, :, None].expand(steps.shape[0], -1, 1)).sum(dim=(1, 2))


def _step(batches: Sequence[SequenceBatch], tokens: Tensor) -> Tensor:
    """Append each row's own tokens and return the log-probabilities after each of them, (R, n, V) float32."""
    ids = torch.split(tokens, [batch.n_rows for batch in batches])
    return torch.cat(forward_batches(batches, ids, tokens.shape[1])).float().log_softmax(dim=-1)
