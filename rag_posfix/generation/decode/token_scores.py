"""Log-probabilities of chosen tokens, of the likeliest tokens in their places, and of the tokens of a prompt."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rag_posfix.contracts.request import LEAST, GenerationRequest, MitigationChoice, ScoredToken, TokenScore
from rag_posfix.errors import ConfigError
from rag_posfix.generation.decode.session import Session
from rag_posfix.plan.layout import Layout


def score_tokens(
    log_probs: Tensor, tokens: Sequence[int], starts: Sequence[int], n_top: int, data_of: Callable[[int], bytes]
) -> list[ScoredToken]:
    """Return tokens with their log-probabilities, in two reads from the device.

    Scores of rows that were combined need not sum to 1; the log-probabilities describe the combined distribution:
    log softmax of the scores.

    Args:
        starts: Characters before each token.
        n_top: Number of likeliest tokens, 0 for none.
        data_of: Returns the bytes of a token.

    Shapes:
        log_probs: (n, V) float32, the scores of all tokens at the position of each token.
    """
    normal = log_probs.log_softmax(dim=-1)
    best = normal.topk(min(n_top, normal.shape[-1]), dim=-1)
    chosen = normal.gather(1, torch.tensor(tokens, device=normal.device)[:, None])
    values = torch.cat((chosen, best.values), dim=1).tolist()
    rows = zip(tokens, starts, values, best.indices.tolist(), strict=True)
    return [
        ScoredToken(
            _score(token, value, data_of),
            start,
            tuple(_score(top_token, score, data_of) for top_token, score in zip(top_tokens, scores, strict=True)),
        )
        for token, start, (value, *scores), top_tokens in rows
    ]


def _score(token: int, log_prob: float, data_of: Callable[[int], bytes]) -> TokenScore:
    return TokenScore(data_of(token), max(log_prob, LEAST))


SCORES_AT_ONCE = 1 << 24
"""Scores that are held at the same time: 64 MiB in float32."""


def open_scored(
    open_session: Callable[[Layout, MitigationChoice, int, str], Session],
    request: GenerationRequest,
    data_of: Callable[[int], bytes],
) -> tuple[Session, list[ScoredToken]]:
    """Return the session that has read a request's prompt, and the tokens of the prompt with their log-probabilities.

    Formula: log p(t_i | t_0 ... t_{i-1}) for i >= 1; the first token has none.
    Cost: one pass over the prompt, in parts of ``SCORES_AT_ONCE`` scores; the output layer runs on every token.

    Raises:
        ConfigError: the prompt has passages.
        PromptTooLongError: prompt and answer exceed the context window.
    """
    layout, sampling = request.layout, request.sampling
    if layout.n_passages:
        raise ConfigError(
            f"prompt_scored needs a prompt without passages, and this one has {layout.n_passages}; leave them out"
        )
    first, remaining = layout.token_ids[:1], layout.token_ids[1:]
    session = open_session(Layout.plain(first), request.mitigation, len(remaining) + sampling.max_tokens, request.salt)
    starts = _starts([data_of(token) for token in layout.token_ids])
    scored = [ScoredToken(TokenScore(data_of(first[0]), None), 0)]
    step = max(1, SCORES_AT_ONCE // session.next_log_probs().shape[0])
    for start in range(0, len(remaining), step):
        tokens = remaining[start : start + step]
        log_probs = session.read_given(tokens)
        token_starts = starts[start + 1 : start + 1 + len(tokens)]
        scored += score_tokens(log_probs, tokens, token_starts, sampling.top_logprobs or 0, data_of)
    return session, scored


def _starts(token_bytes: Sequence[bytes]) -> list[int]:
    """Return the number of characters before each token's bytes. A character begins with its first byte."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    starts, length = [], 0
    for data in token_bytes:
        starts.append(length)
        length += len(decoder.decode(data))
    return starts
