"""``rag-posfix mcp``: search and ask as tools of an agent, on stdin and stdout."""

from __future__ import annotations

from contextlib import closing

from rag_posfix import __version__
from rag_posfix.cli.options import Index, check_answer_fits, check_searchable, with_settings
from rag_posfix.cli.output import status
from rag_posfix.settings import Settings


@with_settings(
    "mitigation", "reranker", "order", "k", "retriever", "min_relevance", "allow_ungrounded", "max_tokens", "template",
    "model", "adapter", "device", "profile",
)  # fmt: skip
def mcp(settings: Settings, index: Index = None) -> None:
    """Serve search and ask as MCP tools of an agent, on stdio.

    An agent starts this command and talks to it on stdin and stdout. The model is loaded with the first question. A
    running service has the same tools at /mcp.
    """
    check_searchable(index, settings)
    check_answer_fits(settings)
    import asyncio

    from rag_posfix.mcp.server import serve_stdio
    from rag_posfix.pipeline.build import build_pipeline, resolve_methods

    methods = resolve_methods(settings)
    with status("loading the embeddings and the tokenizer"):
        pipeline = build_pipeline(settings, index=index, deferred=True, methods=methods)
    with closing(pipeline):
        asyncio.run(serve_stdio(pipeline, __version__))
