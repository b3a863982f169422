"""The MCP server: lists its tools, checks arguments, calls a backend, and writes results for models and programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from langchain_core.documents import Document
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListResourcesResult,
    ListResourceTemplatesResult,
    ListToolsResult,
    PaginatedRequestParams,
    ReadResourceRequestParams,
    ReadResourceResult,
    ResourceTemplate,
    TextContent,
    TextResourceContents,
    Tool,
    ToolAnnotations,
)

from rag_posfix.cancellation import run_until_cancelled
from rag_posfix.contracts.answer import Answer, Question
from rag_posfix.contracts.retrieval import (
    Retriever,
    combine_filters,
    current_of,
    matches,
    parse_filter,
    retrieve_matching,
)
from rag_posfix.errors import ConfigError, RagPosfixError, UnknownNameError
from rag_posfix.mcp.forms import (
    URI_TEMPLATES,
    AskInput,
    AskOutput,
    Place,
    SearchInput,
    SearchOutput,
    answer_output,
    describe_source,
    found_passage,
    read_arguments,
    read_uri,
    schema_of,
)
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.retrieval.base import passage_by_id
from rag_posfix.text import visible

T = TypeVar("T")

INSTRUCTIONS = (
    "Answers questions from the documents of this server. `ask` retrieves passages and lets a model answer from them, "
    "whatever their order; `search` returns the passages themselves. Cite the sources of a result."
)
_ONLY_READS = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)


class Backend(Protocol):
    """What the tools run on."""

    @property
    def places(self) -> tuple[str, ...]:
        """Which fields of ``Place`` name something here: ``index``, ``collection``."""
        ...

    @property
    def gives_text(self) -> bool:
        """Whether results may have the text of passages."""
        ...

    async def run(self, work: Callable[[Pipeline], T], collection: str | None) -> T:
        """Return the result of ``work``, run in a worker thread with the pipeline of the caller, on a collection."""
        ...

    def answered(self, answer: Answer) -> None:
        """Count an answer."""
        ...


def build_server(backend: Backend, version: str) -> Server[Any]:
    """Return the server of a backend: the tools ``search`` and ``ask``, and a resource for each passage."""

    async def list_tools(context: ServerRequestContext[Any], _: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=_tools(backend))

    async def call_tool(context: ServerRequestContext[Any], call: CallToolRequestParams) -> CallToolResult:
        tool = {"search": _search, "ask": _ask}.get(call.name)
        if tool is None:
            raise MCPError(INVALID_PARAMS, f"unknown tool {call.name[:100]!r}; use search or ask")
        try:
            return await tool(backend, call.arguments or {})
        except RagPosfixError as error:  # for the model, which may try again with other arguments
            return CallToolResult(content=[TextContent(type="text", text=str(error))], is_error=True)

    async def list_templates(
        context: ServerRequestContext[Any], _: PaginatedRequestParams | None
    ) -> ListResourceTemplatesResult:
        templates = [
            ResourceTemplate(name=meaning.rstrip("."), uri_template=uri, description=meaning, mime_type="text/plain")
            for uri, meaning in URI_TEMPLATES.items()
            if all(f"{{{name}}}" not in uri or name in backend.places for name in ("index", "collection"))
        ]
        return ListResourceTemplatesResult(resource_templates=templates)

    async def list_resources(
        context: ServerRequestContext[Any], _: PaginatedRequestParams | None
    ) -> ListResourcesResult:
        return ListResourcesResult(resources=[])  # too many to list; results of tools have their addresses

    async def read_resource(context: ServerRequestContext[Any], read: ReadResourceRequestParams) -> ReadResourceResult:
        try:
            document = await _read(backend, str(read.uri))
        except RagPosfixError as error:
            raise MCPError(INVALID_PARAMS, str(error)) from error
        contents = TextResourceContents(uri=read.uri, mime_type="text/plain", text=visible(document.page_content))
        return ReadResourceResult(contents=[contents])

    return Server(
        "rag-posfix", version=version, instructions=INSTRUCTIONS, on_list_tools=list_tools, on_call_tool=call_tool,
        on_list_resources=list_resources, on_list_resource_templates=list_templates, on_read_resource=read_resource,
    )  # fmt: skip


def _left_out(backend: Backend) -> tuple[str, ...]:
    return tuple(name for name in ("index", "collection") if name not in backend.places)


def _tools(backend: Backend) -> list[Tool]:
    left_out = _left_out(backend)
    return [
        Tool(
            name="search",
            description="Find passages of the documents, best first, with their sources.",
            input_schema=schema_of(SearchInput, left_out), output_schema=schema_of(SearchOutput),
            annotations=_ONLY_READS,
        ),
        Tool(
            name="ask",
            description="Answer a question from the documents, with the passages that the answer is from.",
            input_schema=schema_of(AskInput, left_out), output_schema=schema_of(AskOutput),
            annotations=_ONLY_READS,
        ),
    ]  # fmt: skip


async def _search(backend: Backend, arguments: Mapping[str, Any]) -> CallToolResult:
    request: SearchInput = read_arguments(SearchInput, arguments, _left_out(backend))

    def work(pipeline: Pipeline) -> list[Document]:
        metadata_filter = combine_filters(pipeline.defaults.filter, request.filter)
        k = request.k or pipeline.defaults.k
        return retrieve_matching(_retriever(pipeline, request), request.query, k, metadata_filter)

    hits = await backend.run(work, request.collection)
    output = SearchOutput(passages=[found_passage(hit, request, with_text=backend.gives_text) for hit in hits])
    blocks = [
        "\n".join(filter(None, (describe_source(number, passage), passage.text)))
        for number, passage in enumerate(output.passages, start=1)
    ]
    return _result("\n\n".join(blocks) or "no passage was found", output)


async def _ask(backend: Backend, arguments: Mapping[str, Any]) -> CallToolResult:
    request: AskInput = read_arguments(AskInput, arguments, _left_out(backend))
    question = Question(request.question, k=request.k, filter=request.filter, index=request.index)
    answer = await backend.run(lambda pipeline: pipeline.ask(question), request.collection)
    backend.answered(answer)
    output = answer_output(answer, request, with_text=backend.gives_text)
    sources = [describe_source(number, source) for number, source in enumerate(output.sources, start=1)]
    return _result(
        "\n".join([output.answer, *(["", "Sources:", *sources] if sources else []), *output.warnings]), output
    )


def _result(text: str, output: SearchOutput | AskOutput) -> CallToolResult:
    data = output.model_dump(mode="json")
    return CallToolResult(content=[TextContent(type="text", text=visible(text))], structured_content=data)


async def _read(backend: Backend, uri: str) -> Document:
    """Return the passage of an address, if the caller may read it."""
    place, passage_id = read_uri(uri)
    for name in _left_out(backend):
        if getattr(place, name) is not None:
            raise ConfigError(f"uri={uri!r}: this server has no {name}; use the addresses that tools return")
    if not backend.gives_text:
        raise ConfigError("this server does not give the text of passages; ask it questions")

    def work(pipeline: Pipeline) -> Document | None:
        document = passage_by_id(_retriever(pipeline, place), passage_id)
        allowed = pipeline.defaults.filter
        visible_here = document is not None and (not allowed or matches(parse_filter(allowed), document.metadata))
        return document if visible_here else None

    document = await backend.run(work, place.collection)
    if document is None:
        raise UnknownNameError(f"no passage has the address {uri!r}; use the addresses that tools return")
    return document


def _retriever(pipeline: Pipeline, place: Place) -> Retriever:
    if place.index is not None and place.index not in pipeline.indexes:
        raise UnknownNameError(
            f"no index is called {place.index!r}; use one of {', '.join(pipeline.indexes) or 'none'}"
        )
    retriever = pipeline.retriever if place.index is None else pipeline.indexes[place.index]
    if retriever is None:
        raise ConfigError("this server has no index to search; name an index or a collection")
    return current_of(retriever)


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
