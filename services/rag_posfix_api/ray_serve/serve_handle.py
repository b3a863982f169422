"""The replicas behind a handle of Ray Serve, as the generator of the service sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, WorkerCrashedError
from ray.serve.exceptions import ReplicaUnavailableError

from rag_posfix.contracts.request import Chunk
from rag_posfix.errors import GenerationError, RagPosfixError
from rag_posfix_api.ray_serve.replicated import ReplicaLost
from rag_posfix_api.ray_serve.routed_request import RoutedRequest

_LOST = (RayActorError, WorkerCrashedError, NodeDiedError, ObjectLostError, ReplicaUnavailableError)
"""What Ray raises where a replica or its machine is gone, or the pieces that it had sent."""


class ServeReplicas:
    """Implements ``replicated.Replicas``. For threads without an event loop, such as those of the service's jobs.

    Args:
        handle: Handle of the deployment of ``GeneratorReplica``.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(stream=True, method_name="stream")

    def ask(self, request: RoutedRequest) -> Iterator[Chunk]:
        """Yield the answer of the replica that the router chooses; closing the iterator cancels the request.

        Raises:
            ReplicaLost: the replica is gone.
            RagPosfixError: what the replica raised.
        """
        pieces = None
        try:
            pieces = self._handle.remote(request)
            yield from pieces
        except GeneratorExit:
            if pieces is not None:
                pieces.cancel()
            raise
        except RagPosfixError:
            raise
        except Exception as error:  # Ray wraps what the replica raised in classes that it makes at run time
            raise _translated(error) from error


def _translated(error: Exception) -> RagPosfixError:
    cause = getattr(error, "cause", None)
    if isinstance(error, _LOST) or isinstance(cause, _LOST):
        return ReplicaLost("the replica was lost")
    if isinstance(cause, RagPosfixError):
        return cause
    reason = (str(cause or error).strip() or type(error).__name__).splitlines()[0]
    return GenerationError(f"a replica failed ({type(cause or error).__name__}: {reason})")
