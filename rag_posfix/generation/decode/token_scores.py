"""Log-probabilities of chosen tokens, and of the tokens that were likeliest in their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rag_posfix.contracts.token_scores import LEAST, ScoredToken, TokenScore


def score_tokens(
    log_probs: Tensor, tokens: Sequence[int], starts: Sequence[int], n_top: int, data_of: Callable[[int], bytes]
) -> list[ScoredToken]:
    """Return tokens with their log-probabilities, in two reads from the device.

    Scores of rows that were combined need not sum to 1; the log-probabilities are those of the combined distribution:
    log softmax of the scores.

    Args:
        log_probs: The scores of all tokens in the place of each token.
        tokens: The tokens.
        starts: Characters before each token.
        n_top: Number of likeliest tokens, 0 for none.
        data_of: Returns the bytes of a token.

    Shapes:
        log_probs: (n, V) float32.
    """
    normal = log_probs.log_softmax(dim=-1)
    best = normal.topk(min(n_top, normal.shape[-1]), dim=-1)
    own = normal.gather(1, torch.tensor(tokens, device=normal.device)[:, None])
    values = torch.cat((own, best.values), dim=1).tolist()
    rows = zip(tokens, starts, values, best.indices.tolist(), strict=True)
    return [
        ScoredToken(
            _score(token, value, data_of),
            start,
            tuple(_score(other, score, data_of) for other, score in zip(others, scores, strict=True)),
        )
        for token, start, (value, *scores), others in rows
    ]


def _score(token: int, log_prob: float, data_of: Callable[[int], bytes]) -> TokenScore:
    return TokenScore(data_of(token), max(log_prob, LEAST))
