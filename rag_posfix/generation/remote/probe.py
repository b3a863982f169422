"""Probes a server once: what it says of probabilities, its context window, and its prefix cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rag_posfix.errors import UnsupportedModelError, UpstreamError
from rag_posfix.generation.remote.connection import Connection, Event
from rag_posfix.generation.remote.judge import Form, ServerJudge, usage_of

_TEXT = "The harbour froze in 1901, and ships waited for weeks until the ice broke. " * 24
_LIMITS = ("max_model_len", "context_length", "n_ctx", "n_ctx_train")
"""Where servers list the context window of a model: vLLM, hosted APIs, llama.cpp (in ``meta``)."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server gives.

    Attributes:
        judgements: How it says how likely an answer is.
        prompt_log_probs: Whether it gives the log-probabilities of a prompt.
        context_window: Token limit that it lists for the model; None if it lists none.
        cached_tokens: Tokens of a repeated prompt that it took from its prefix cache; None if it does not say.
    """

    judgements: Form
    prompt_log_probs: bool
    context_window: int | None
    cached_tokens: int | None


def probe(connection: Connection, judge: ServerJudge, model: str) -> ServerFacts:
    """Return what a server gives, from about six short requests.

    Raises:
        UpstreamError: the server cannot be reached, or refuses a plain request.
    """
    message = {"role": "user", "content": f"{_TEXT}\n\nDid the harbour freeze? Reply with Yes or No.\nReply:"}
    body = {"model": model, "messages": [message], "max_tokens": 1, "temperature": 0.0, "stream": False}
    for _ in range(2):  # the second finds the prompt in the cache
        (answer,) = connection.post_all("/chat/completions", [body], 1)
    try:
        text = "The harbour froze in 1901."
        judge.likelihood([(text, 4, len(text))])
        prompt_log_probs = True
    except UnsupportedModelError:
        prompt_log_probs = False
    return ServerFacts(judge.form([message]), prompt_log_probs, _context_window(connection, model), _cached(answer))


def _cached(answer: Event) -> int | None:
    usage = answer.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, Mapping) else None
    return usage_of(answer).cached_tokens if isinstance(details, Mapping) else None


def _context_window(connection: Connection, model: str) -> int | None:
    try:
        listed = connection.get("/models").get("data")
    except UpstreamError:
        return None
    entries = [entry for entry in listed if isinstance(entry, Mapping)] if isinstance(listed, list) else []
    own = [entry for entry in entries if entry.get("id") == model] or entries[:1]
    for entry in own:
        meta = entry.get("meta")
        for fields in (entry, meta if isinstance(meta, Mapping) else {}):
            for name in _LIMITS:
                if type(fields.get(name)) is int:
                    return int(fields[name])
    return None
