"""What a generator has that a scheduler can drive. Imported without torch: a service asks it of every generator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rag_posfix.contracts.generator import Generator

if TYPE_CHECKING:
    from rag_posfix.contracts.request import MitigationChoice
    from rag_posfix.generation.decode.answer_writer import Session
    from rag_posfix.generation.model.tokenizer import Tokenizer
    from rag_posfix.plan.layout import Layout
    from rag_posfix.plan.plan import Plan


@runtime_checkable
class SteppedGenerator(Generator, Protocol):
    """A generator that a caller can advance step by step, several answers together; for example the engine."""

    @property
    def encoder(self) -> Tokenizer: ...

    def open(
        self,
        layout: Layout,
        mitigation: MitigationChoice | None = None,
        max_tokens: int = 1,
        salt: str = "",
    ) -> Session:
        """Read a prompt and return the session that continues it."""
        ...


@runtime_checkable
class PlanningGenerator(Generator, Protocol):
    """A generator that checks a prompt without reading it; for example the engine."""

    def plan(self, layout: Layout, choice: MitigationChoice, max_tokens: int) -> Plan:
        """Return what a mitigation does with a prompt. Runs no model."""
        ...
