"""Renders log-probabilities of tokens as OpenAI's chat completions and completions have them."""

from __future__ import annotations

from collections.abc import Sequence

from rag_posfix.contracts.token_scores import LEAST, ScoredToken, TokenScore
from rag_posfix_api.dialects.openai.completion_schemas import CompletionLogProbs
from rag_posfix_api.dialects.openai.schemas import AnswerTokenLogProb, ChoiceLogProbs, TokenLogProb

__all__ = ["chat_log_probs", "completion_log_probs"]


def chat_log_probs(scored: Sequence[ScoredToken], end: int | None = None) -> ChoiceLogProbs:
    """Return the tokens of an answer's text, without those that end the answer.

    Args:
        scored: The generated tokens.
        end: Length of the answer, or None while it is being written.
    """
    return ChoiceLogProbs(
        content=[
            AnswerTokenLogProb(
                **_fields(one.token), top_logprobs=[TokenLogProb(**_fields(other)) for other in one.top]
            )
            for one in scored
            if end is None or one.start < end
        ]
    )


def completion_log_probs(scored: Sequence[ScoredToken], offset: int = 0, *, alternatives: bool) -> CompletionLogProbs:
    """Return the tokens of a completion, the one that ends it included.

    As in OpenAI's API, the alternatives of a token always hold the token itself, and the first token of a prompt has
    neither log-probability nor alternatives.

    Args:
        scored: The tokens.
        offset: Characters of the text before the first token.
        alternatives: Whether there are alternatives: ``logprobs`` is above 0.
    """
    return CompletionLogProbs(
        tokens=[_written(one.token, "bytes:") for one in scored],
        token_logprobs=[one.token.log_prob for one in scored],
        top_logprobs=[_alternatives(one) for one in scored] if alternatives else None,
        text_offset=[offset + one.start for one in scored],
    )


def _alternatives(one: ScoredToken) -> dict[str, float] | None:
    if one.token.log_prob is None:
        return None
    found: dict[str, float] = {}
    for score in (*one.top, one.token):  # of two tokens with one text, the likelier one
        found.setdefault(_written(score, "bytes:"), _number(score))
    return found


def _fields(score: TokenScore) -> dict[str, object]:
    return {"token": _written(score), "logprob": _number(score), "bytes": list(score.data)}


def _number(score: TokenScore) -> float:
    return LEAST if score.log_prob is None else score.log_prob


def _written(score: TokenScore, mark: str = "") -> str:
    r"""Return the text of a token; bytes that are no complete characters as ``\xNN``, after ``mark``."""
    return mark + "".join(f"\\x{byte:02x}" for byte in score.data) if score.text is None else score.text
