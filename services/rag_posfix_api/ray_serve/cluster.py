"""What talks to Ray Serve: the router of questions, and the replicas behind a handle."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, WorkerCrashedError
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.metrics import Gauge
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from rag_posfix.contracts.request import Chunk
from rag_posfix.errors import GenerationError, RagPosfixError
from rag_posfix_api.ray_serve.routing import QUEUE_WEIGHT, RecentRoutes, ReplicaLost, RoutedRequest, Sketches, ranked

_LOST = (RayActorError, WorkerCrashedError, NodeDiedError, ObjectLostError, ReplicaUnavailableError)
"""What Ray raises where a replica or its machine is gone, or the pieces that it had sent."""


class OverlapRouter(RequestRouter):
    """Ranks the replicas of a deployment by the overlap of a question's passages with their sketches.

    A replica whose queue is full is passed over for the next one. Passages that were sent to a replica in the last
    seconds count as held, until its sketch has them. A request that is not a ``RoutedRequest`` goes to the shortest
    queue.
    """

    def initialize_state(
        self, queue_weight: float = QUEUE_WEIGHT, max_age_seconds: float = 30.0, remembered_seconds: float = 10.0
    ) -> None:
        """Take the parameters: ``request_router_kwargs`` of the deployment.

        Args:
            queue_weight: Share of a question's passages that outweighs one request in the queue.
            max_age_seconds: An older sketch counts as empty. Clocks of the machines are compared.
            remembered_seconds: How long a replica counts as holding the passages sent to it: a few periods of
                the sketches.
        """
        self._queue_weight = queue_weight
        self._sketches = Sketches(max_age_seconds)
        self._recent = RecentRoutes(remembered_seconds)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas, one per rank, the best first."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # otherwise full queues are polled without a pause
        current_time = time.time()
        replicas = {_name(replica.replica_id): replica for replica in candidate_replicas}
        passages, names = _passages(pending_request), list(replicas)
        stats = {name: replica.routing_stats for name, replica in replicas.items()}
        held = self._sketches.held(stats, passages, current_time)
        held |= self._recent.held(names, list(passages), current_time)
        queues = [self.replica_queue_len_cache.get(each.replica_id) or 0 for each in replicas.values()]
        return [[replicas[names[row]]] for row in ranked(passages, names, queues, held, self._queue_weight)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember the passages that were sent to the replica."""
        self._recent.add(_name(replica_id), _passages(pending_request), time.time())


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.to_full_id_str())


def _passages(pending: PendingRequest | None) -> Mapping[int, int]:
    routed = next(iter(pending.args), None) if pending is not None else None
    return routed.passages if isinstance(routed, RoutedRequest) else {}


class ReplicaGauges:
    """Exports the counts of a replica as ``ray_rag_posfix_replica_NAME``, at the metrics port of its node.

    Ray adds the labels ``application``, ``deployment`` and ``replica``.
    """

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}  # made in the replica, whose labels they take

    def __call__(self, counts: Mapping[str, float]) -> None:
        """Set the gauges to ``counts``."""
        for name, value in counts.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(f"rag_posfix_replica_{name}", f"{name} of a replica of the model.")
            self._gauges[name].set(value)


class ServeReplicas:
    """Implements ``replicas.Replicas``. For threads without an event loop, such as the service's jobs.

    Args:
        handle: Handle of the deployment of ``GeneratorReplica``.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(stream=True, method_name="stream")

    def ask(self, request: RoutedRequest) -> Iterator[Chunk]:
        """Yield the answer of the replica that the router chooses; closing the iterator cancels the request.

        Raises:
            ReplicaLost: the replica is gone.
            RagPosfixError: an error of the replica.
        """
        chunks = None
        try:
            chunks = self._handle.remote(request)
            yield from chunks
        except GeneratorExit:
            if chunks is not None:
                chunks.cancel()
            raise
        except Exception as error:  # Ray wraps the replica's error in classes that it makes at run time, of ours too
            if isinstance(error, RagPosfixError) and not hasattr(error, "cause"):
                raise
            raise _translate_error(error) from error


def _translate_error(error: Exception) -> RagPosfixError:
    cause = getattr(error, "cause", None)
    if isinstance(error, _LOST) or isinstance(cause, _LOST):
        return ReplicaLost("the replica was lost")
    if isinstance(cause, RagPosfixError):
        return cause
    reason = (str(cause or error).strip() or type(error).__name__).splitlines()[0]
    return GenerationError(f"a replica failed ({type(cause or error).__name__}: {reason})")
