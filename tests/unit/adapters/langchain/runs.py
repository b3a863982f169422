"""Records langchain runs: name, kind, parent, and how each ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler


@dataclass
class Run:
    name: str
    kind: str
    parent: UUID | None
    given: Any
    outcome: Any = None
    error: BaseException | None = None
    tokens: list[str] = field(default_factory=list)


class Runs(BaseCallbackHandler):
    run_inline = True

    def __init__(self) -> None:
        self.by_id: dict[UUID, Run] = {}

    def _start(self, kind):
        def start(serialized, given, *, run_id, parent_run_id=None, name=None, **_):
            self.by_id[run_id] = Run(name, kind, parent_run_id, given)

        return start

    def _end(self, outcome, *, run_id, **_):
        self.by_id[run_id].outcome = outcome

    def _error(self, error, *, run_id, **_):
        self.by_id[run_id].error = error

    def __getattribute__(self, name):
        if name.startswith("on_") and name.endswith("_start"):
            return self._start(name.removeprefix("on_").removesuffix("_start"))
        if name.startswith("on_") and name.endswith("_end"):
            return self._end
        if name.startswith("on_") and name.endswith("_error"):
            return self._error
        return super().__getattribute__(name)

    def on_llm_new_token(self, token, *, run_id, **_):
        self.by_id[run_id].tokens.append(token)

    def tree(self) -> list[tuple[str, str, str | None]]:
        """Return (name, kind, name of the parent) in the order they started."""
        return [
            (run.name, run.kind, self.by_id[run.parent].name if run.parent in self.by_id else None)
            for run in self.by_id.values()
        ]

    def named(self, name: str) -> Run:
        (found,) = [run for run in self.by_id.values() if run.name == name]
        return found
