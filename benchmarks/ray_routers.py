"""A router to compare with, for ``benchmarks.ray_routing``: every request to the next replica."""

from __future__ import annotations

from itertools import count

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

__all__ = ["RoundRobinRouter"]


class RoundRobinRouter(RequestRouter):
    """Takes the replicas by turns; one whose queue is full is passed over."""

    def initialize_state(self) -> None:
        """Begin with the first replica."""
        self._turns = count()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas, each a rank of its own, from the next one on."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        replicas = sorted(candidate_replicas, key=lambda one: str(one.replica_id))
        first = next(self._turns) % max(1, len(replicas))
        return [[one] for one in replicas[first:] + replicas[:first]]
