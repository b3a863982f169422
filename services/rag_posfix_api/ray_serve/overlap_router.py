"""Ray Serve's router that sends a question to the replica that holds its passages' keys and values."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from rag_posfix_api.ray_serve.recent_routes import RecentRoutes
from rag_posfix_api.ray_serve.routed_request import RoutedRequest
from rag_posfix_api.ray_serve.scoring import QUEUE_WEIGHT, Candidate, ranked
from rag_posfix_api.ray_serve.sketch import Sketch


class OverlapRouter(RequestRouter):
    """Ranks the replicas of a deployment by the overlap of a question's passages with their sketches.

    A replica whose queue is full is passed over for the next one. What was sent to a replica in the last seconds
    counts as held, until its sketch says so. A request that is no ``RoutedRequest`` goes to the shortest queue.
    """

    def initialize_state(
        self, queue_weight: float = QUEUE_WEIGHT, max_age_seconds: float = 30.0, remembered_seconds: float = 10.0
    ) -> None:
        """Take the parameters: ``request_router_kwargs`` of the deployment.

        Args:
            queue_weight: Share of a question's passages that outweighs one request in the queue.
            max_age_seconds: An older sketch counts as empty. Clocks of the machines are compared.
            remembered_seconds: How long a replica counts as holding what was sent to it: a few periods of
                the sketches.
        """
        self._queue_weight = queue_weight
        self._max_age_seconds = max_age_seconds
        self._recent = RecentRoutes(remembered_seconds)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas, each a rank of its own, the best first."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # otherwise full queues are asked without a pause
        now = time.time()
        replicas = {_name(one.replica_id): one for one in candidate_replicas}
        candidates = [self._candidate(name, one, now) for name, one in replicas.items()]
        return [[replicas[one.name]] for one in ranked(_passages(pending_request), candidates, self._queue_weight)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember which passages the replica reads now."""
        self._recent.add(_name(replica_id), _passages(pending_request), time.time())

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the replicas that there are now, and forget the others."""
        super().update_replicas(replicas)
        self._recent.keep_only(_name(one.replica_id) for one in replicas)

    def _candidate(self, name: str, replica: RunningReplica, now: float) -> Candidate:
        sketch = Sketch.from_stats(replica.routing_stats, now, self._max_age_seconds)
        queue = self.replica_queue_len_cache.get(replica.replica_id)
        return Candidate(name, queue or 0, sketch.marks | self._recent.marks(name, now))


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.to_full_id_str())


def _passages(pending: PendingRequest | None) -> Mapping[int, int]:
    routed = next(iter(pending.args), None) if pending is not None else None
    return routed.passages if isinstance(routed, RoutedRequest) else {}
