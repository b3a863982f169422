"""A question to a model on a server."""

from __future__ import annotations

from typing import Any

from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.generation.remote.generator import RemoteGenerator


def request_of(generator: RemoteGenerator, mitigation: str = "none", **sampling: Any) -> GenerationRequest:
    documents = [Document(page_content="The bridge opened in 1901.")]
    layout = Assembler(generator.encoder, 4096).assemble("When?", documents).layout
    return GenerationRequest(layout, MitigationChoice(mitigation), Sampling(**sampling))
