"""A generator that writes given answers next to a chat template with tools, and tools in the form of every API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.contracts.request import Chunk, Generation, GenerationRequest, Usage
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.generation.model.tokenizer import Tokenizer
from rag_posfix.pipeline.pipeline import Pipeline
from tests.support.tool_models import QWEN, stock_tool_tokenizer

PARAMETERS: dict[str, Any] = {
    "type": "object", "properties": {"lit": {"type": "boolean"}}, "required": ["lit"], "additionalProperties": False,
}  # fmt: skip
"""Of both tools: few tokens write them, whatever the model."""
NAMES = ("lamp", "horn")
OPENAI_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "Of a lighthouse.", "parameters": PARAMETERS}}
    for name in NAMES
]
FLAT_TOOLS: list[Any] = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in NAMES]
ANTHROPIC_TOOLS: list[Any] = [{"name": name, "input_schema": PARAMETERS} for name in NAMES]

LAMP = '<tool_call>\n{"name": "lamp", "arguments": {"lit": true}}\n</tool_call>'
HORN = LAMP.replace("lamp", "horn").replace("true", "false")


class Scripted(FakeGenerator):
    """Writes ``answer``, three characters a piece, and keeps the prompts."""

    def __init__(self, answer: str) -> None:
        super().__init__(Tokenizer(stock_tool_tokenizer(QWEN)), 2048)
        self.answer = answer
        self.prompts: list[str] = []

    def generate(self, request: GenerationRequest) -> Generation:
        self.prompts.append(self.encoder.decode(request.layout.token_ids))
        tokens = tuple(range(len(self.answer)))
        usage = Usage(len(request.layout.token_ids), len(tokens))
        return Generation(self.answer, tokens, "stop", usage, (0.0,) * request.layout.n_passages)

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer of ``generate``."""
        generation = self.generate(request)
        for start in range(0, len(self.answer), 3):
            yield Chunk(self.answer[start : start + 3])
        yield Chunk("", generation)


def scripted(answer: str, **parts: Any) -> tuple[Scripted, Pipeline]:
    """Return such a generator, and a pipeline of it."""
    generator = Scripted(answer)
    return generator, Pipeline(generator, Assembler(generator.encoder, generator.context_window), **parts)
