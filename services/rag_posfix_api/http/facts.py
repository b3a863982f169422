"""The fields of a request's log line: numbers and registry names, never text of a client or a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request


@dataclass(slots=True)
class Facts:
    """The fields of a log line that the route sets.

    Attributes:
        mitigation: Name of the mitigation.
        order: Name of the order.
        cache: ``hit``, ``miss`` or ``off``.
        documents: Number of documents in the request.
        tokens: Tokens by kind.
        timings: Seconds by stage.
        error: Code of the error, if there was one.
        key: Id of the API key, which is not the key.
    """

    mitigation: str | None = None
    order: str | None = None
    cache: str | None = None
    documents: int | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    key: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of the log line that are known."""
        named = {
            "mitigation": self.mitigation,
            "order": self.order,
            "cache": self.cache,
            "documents": self.documents,
            "error": self.error,
            "key": self.key,
        }
        tokens = {f"{kind}_tokens": count for kind, count in self.tokens.items()}
        stages = {stage: round(seconds, 6) for stage, seconds in self.timings.items()}
        known = {name: value for name, value in named.items() if value is not None} | tokens
        return known | {"stage_seconds": stages} if stages else known


def facts_of(request: Request) -> Facts:
    """Return the facts of ``request``."""
    found = getattr(request.state, "facts", None)
    if not isinstance(found, Facts):
        found = request.state.facts = Facts()
    return found


async def _facts(request: Request) -> Facts:
    return facts_of(request)


RequestFacts = Annotated[Facts, Depends(_facts)]
"""The facts of the request, to be filled in."""
