"""The protocol of a generator whose answers are written step by step from outside, several together."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.generation.decode.session import Session
from rag_posfix.generation.model.tokenizer import Tokenizer
from rag_posfix.plan.layout import Layout


@runtime_checkable
class SteppedGenerator(Generator, Protocol):
    """A generator whose answers can be written step by step from outside, several together. The engine is one."""

    @property
    def encoder(self) -> Tokenizer:
        """The tokenizer, which also knows what ends an answer."""
        ...

    def open(
        self, layout: Layout, mitigation: MitigationChoice | None = None, max_tokens: int = 1, salt: str = ""
    ) -> Session:
        """Read a prompt and return the session that continues it."""
        ...
