"""MCP at ``/mcp``: the tools of ``rag_posfix.mcp`` as streamable HTTP without sessions, with keys and quotas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, ContextVar
from importlib.util import find_spec
from typing import Any, TypeVar

import anyio.to_thread
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from rag_posfix.contracts.answer import Answer
from rag_posfix.errors import missing_extra
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix_api.http.errors import RequestError
from rag_posfix_api.http.middleware import check_shape
from rag_posfix_api.runtime.service import Call, ReadyCall, Service

PATH = "/mcp"

T = TypeVar("T")

Handler = Callable[[Scope, Receive, Send], Any]
"""Answers one request, as ASGI."""

router = APIRouter(tags=["mcp"])


class _Backend:
    """Runs the tools for the caller of the request that is being answered."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def places(self) -> tuple[str, ...]:
        return ("index", "collection") if self._service.pipeline.indexes else ("collection",)

    @property
    def gives_text(self) -> bool:
        return self._service.limits.source_text

    async def run(self, work: Callable[[Pipeline], T], collection: str | None) -> T:
        service = self._service
        if collection is None:
            pipeline = service.pipeline
            return await _CALL.get().compute(lambda: work(pipeline))
        base, passages = service.collection_pipeline, service.collection(collection)
        return await _CALL.get().compute(lambda: work(base.with_retriever(passages.retriever(base.defaults.k))))

    def answered(self, answer: Answer) -> None:
        _CALL.get().record(answer)


class _Exchange(Response):
    """A response that the SDK's transport writes. Its body was read: ``call.receive`` then has the client's end."""

    def __init__(self, handler: Handler, body: bytes, call: Call) -> None:
        super().__init__()
        self._handler, self._body, self._call = handler, body, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""
        unread = [self._body]

        async def replay() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await asyncio.Event().wait()  # the job of a call looks for the end of the connection
            raise AssertionError

        token = _CALL.set(self._call)
        try:
            await self._handler(scope, replay, send)
        finally:
            _CALL.reset(token)


_CALL: ContextVar[Call] = ContextVar("rag_posfix_mcp_call")


class McpSessions:
    """The SDK's sessions of a running application, opened with the first message: importing the SDK takes seconds."""

    def __init__(self, service: Service, version: str) -> None:
        self._service, self._version = service, version
        self._lock = asyncio.Lock()
        self._running: asyncio.Task[None] | None = None
        self._handler: Handler | None = None

    async def handler(self) -> Handler:
        """Return what answers a message.

        Raises:
            RequestError: the SDK is not installed.
        """
        async with self._lock:
            if self._handler is None:
                if find_spec("mcp") is None:
                    raise RequestError(f"this service has no MCP: {missing_extra('mcp', 'mcp')}", code="unsupported")
                manager = await anyio.to_thread.run_sync(self._build)
                ready = asyncio.Event()
                # Not in the context of this request, whose caller is not that of the next one.
                self._running = asyncio.create_task(_run(manager, ready), context=Context())
                await ready.wait()
                self._handler = manager.handle_request
            return self._handler

    async def close(self) -> None:
        """End the sessions."""
        if self._running is not None:
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running

    def _build(self) -> Any:
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
        from mcp.server.transport_security import TransportSecuritySettings

        from rag_posfix.mcp.server import build_server

        return StreamableHTTPSessionManager(
            build_server(_Backend(self._service), self._version),
            json_response=True,
            stateless=True,
            # The middlewares limit the body, and check the host where that is needed.
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            max_request_body_size=self._service.limits.max_body_bytes,
        )


async def _run(manager: Any, ready: asyncio.Event) -> None:
    async with manager.run():
        ready.set()
        await asyncio.Event().wait()


@router.post(PATH, include_in_schema=False)
async def mcp(request: Request, call: ReadyCall) -> Response:
    """Answer one message of the Model Context Protocol."""
    sessions: McpSessions | None = getattr(request.app.state, "mcp", None)
    if sessions is None:
        raise RequestError("the service is starting; try again later", code="not_ready")
    body = await request.body()
    check_shape(body)
    return _Exchange(await sessions.handler(), body, call)
