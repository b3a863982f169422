"""The MCP server of one pipeline on stdin and stdout, for the agent that started the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mcp.server.stdio import stdio_server

from rag_posfix.cancellation import run_until_cancelled
from rag_posfix.contracts.answer import Answer
from rag_posfix.mcp.server import build_server
from rag_posfix.pipeline.pipeline import Pipeline

T = TypeVar("T")


class PipelineBackend:
    """Runs the tools on one pipeline, whose passages are all for the one caller."""

    gives_text = True

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    @property
    def places(self) -> tuple[str, ...]:
        return ("index",) if self._pipeline.indexes else ()

    async def run(self, work: Callable[[Pipeline], T], collection: str | None) -> T:
        return await run_until_cancelled(lambda: work(self._pipeline))

    def answered(self, answer: Answer) -> None:
        """Count nothing: nobody else uses the process."""


async def serve_stdio(pipeline: Pipeline, version: str) -> None:
    """Serve until stdin ends. Nothing else may write to stdout."""
    server = build_server(PipelineBackend(pipeline), version)
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())
