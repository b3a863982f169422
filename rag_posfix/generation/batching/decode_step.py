"""One decode step of several answers: which answers share it, and which of them a failure ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from rag_posfix.errors import GenerationError
from rag_posfix.generation.batching.request_handle import RunningRequest
from rag_posfix.generation.batching.session_batch import advance_batch
from rag_posfix.generation.decode.sampling import choose_together

_log = logging.getLogger(__name__)


def decode_step(running: Sequence[RunningRequest]) -> list[RunningRequest]:
    """Advance every answer by one token and return those that go on, in order.

    An answer that advances alone fails alone. What fails in the shared pass fails every answer in it: which of
    them were advanced is unknown.
    """
    shared = [one for one in running if one.session.can_share_pass]
    groups = [shared] if shared else []
    groups += [[one] for one in running if one not in shared]
    failed = [one for group in groups if not _advance(group) for one in group]
    return _write([one for one in running if one not in failed])


def _advance(group: Sequence[RunningRequest]) -> bool:
    """Run one step of answers that share it; return whether it went well."""
    try:
        advance_batch([one.session for one in group], [one.token for one in group])
    except Exception as error:
        if len(group) == 1:
            group[0].handle.fail(error)
            return False
        _log.error("a step that %d answers shared failed: %s", len(group), type(error).__name__)
        for one in group:
            one.handle.fail(_shared_failure(error, len(group)))
        return False
    return True


def _write(running: Sequence[RunningRequest]) -> list[RunningRequest]:
    """Choose one token of each answer, all in one read from the device; return the answers that go on."""
    scored: list[tuple[RunningRequest, Tensor]] = []
    for one in running:
        try:
            scored.append((one, one.session.next_log_probs()))
        except Exception as error:
            one.handle.fail(error)
    try:
        tokens = choose_together([one.sampler for one, _ in scored], [scores for _, scores in scored])
    except Exception as error:
        for one, _ in scored:
            one.handle.fail(error if len(scored) == 1 else _shared_failure(error, len(scored)))
        return []
    return [one for (one, scores), token in zip(scored, tokens, strict=True) if _accept(one, token, scores)]


def _accept(one: RunningRequest, token: int, log_probs: Tensor) -> bool:
    """Deliver one token; return whether the answer goes on."""
    try:
        return one.accept(token, log_probs)
    except Exception as error:
        one.handle.fail(error)
        return False


def _shared_failure(error: Exception, count: int) -> GenerationError:
    """Return an error of its own for each answer: an exception that several threads raise mixes their tracebacks."""
    failure = GenerationError(
        f"a step that {count} answers shared failed with {type(error).__name__}; ask again, and lower max_running if "
        "memory is short"
    )
    failure.__cause__ = error
    return failure.with_traceback(error.__traceback__)
