"""A model on a server, and a question to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.generation.remote.connection import ServerLimits
from rag_posfix.generation.remote.generator import RemoteGenerator, open_remote
from tests.support.upstream import Answering, Reply, Upstream, upstream


def request_of(generator: RemoteGenerator, mitigation: str = "none", **sampling: Any) -> GenerationRequest:
    documents = [Document(page_content="The bridge opened in 1901.")]
    layout = Assembler(generator.encoder, 4096).assemble("When?", documents).layout
    return GenerationRequest(layout, MitigationChoice(mitigation), Sampling(**sampling))


@contextmanager
def asking(
    *replies: Reply | Answering, limits: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[tuple[RemoteGenerator, Upstream]]:
    """A generator of a server with these replies, which asks once unless ``limits`` say otherwise, and the server."""
    chosen = ServerLimits(**{"connect_seconds": 60, "read_seconds": 60, "retries": 0, **(limits or {})})
    with upstream(*replies) as server, closing(open_remote(server.model, limits=chosen, **options)) as generator:
        yield generator, server
