"""Which replica a question is sent to: the overlap of its passages with what each holds, against the queue there.

Pure functions on plain data. The order of the passages is never looked at, so it cannot change the choice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

QUEUE_WEIGHT = 0.25
"""Share of a question's passages that outweighs one request in the queue: with all of them, four requests."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that a question could be sent to.

    Attributes:
        name: Its name.
        queue: Requests that it works on or that wait there.
        held: The marks of the passages that it holds.
    """

    name: str
    queue: int = 0
    held: Collection[int] = frozenset()


def overlap(passages: Mapping[int, int], held: Collection[int]) -> float:
    """Return the share of the tokens of a question's passages that a replica holds, in [0, 1]; 0 without passages.

    Args:
        passages: Number of tokens of each passage, by mark.
        held: The marks of the passages that the replica holds.
    """
    total = sum(passages.values())
    return sum(tokens for mark, tokens in passages.items() if mark in held) / total if total else 0.0


def score(passages: Mapping[int, int], candidate: Candidate, queue_weight: float = QUEUE_WEIGHT) -> float:
    """Return how well a replica suits a question: overlap - queue_weight * queue. Rounded, so that equals tie."""
    return round(overlap(passages, candidate.held) - queue_weight * candidate.queue, 9)


def ranked(
    passages: Mapping[int, int], candidates: Sequence[Candidate], queue_weight: float = QUEUE_WEIGHT
) -> list[Candidate]:
    """Return the replicas, the best first: by score, then by the shorter queue.

    Where both are equal, a hash of the replica's name and of the passages decides (rendezvous hashing): questions
    about other passages are spread over the replicas, and routers that know nothing of each other choose the same one.

    Args:
        passages: Number of tokens of each passage, by mark.
        queue_weight: Share of the passages that outweighs one request in the queue, >= 0.
    """
    asked = ",".join(map(str, sorted(passages)))

    def key(one: Candidate) -> tuple[float, int, bytes]:
        drawn = hashlib.blake2b(f"{one.name}:{asked}".encode(), digest_size=8).digest()
        return -score(passages, one, queue_weight), one.queue, drawn

    return sorted(candidates, key=key)
