"""The indexes of the service whose folders are followed: when they are reloaded, and which of them cannot be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import anyio
import anyio.to_thread

from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.retrieval.followed_index import FollowedIndex


class ServedIndexes:
    """The indexes of a pipeline; ``pipeline`` returns None before it is loaded.

    Args:
        check_seconds: How often ``follow`` looks at the folders; 0 for never.
    """

    def __init__(self, pipeline: Callable[[], Pipeline | None], check_seconds: float) -> None:
        self._pipeline = pipeline
        self._check_seconds = check_seconds
        self._wanted = asyncio.Event()

    def by_name(self) -> dict[str, FollowedIndex]:
        """Return the indexes that follow a folder; that of questions without a name is ``""``."""
        pipeline = self._pipeline()
        retrievers = {} if pipeline is None else {"": pipeline.retriever, **pipeline.indexes}
        return {name: index for name, index in retrievers.items() if isinstance(index, FollowedIndex)}

    def reload(self, *, force: bool = True) -> set[str]:
        """Serve the versions in the folders; return the names of the indexes with a new one."""
        return {name for name, index in self.by_name().items() if index.reload(force=force)}

    def reload_soon(self) -> None:
        """Let ``follow`` reload the indexes at once. To be called in its event loop."""
        self._wanted.set()

    async def follow(self) -> None:
        """Serve each new version in the folders, until the task is cancelled."""
        self._wanted = asyncio.Event()  # of this event loop
        while True:
            with anyio.move_on_after(self._check_seconds or None):
                await self._wanted.wait()
            force = self._wanted.is_set()
            self._wanted.clear()
            await anyio.to_thread.run_sync(partial(self.reload, force=force), abandon_on_cancel=True)

    def describe_failing(self) -> str | None:
        """Return which indexes have a version that is not served, and since when, without paths; None if none has."""
        lines = [
            f"{f'index {name}' if name else 'the index'} cannot be renewed since "
            f"{index.failing_since:%Y-%m-%dT%H:%M:%SZ}: the version before is served, see the server's log"
            for name, index in self.by_name().items()
            if index.failure is not None
        ]
        return "; ".join(lines) or None
