"""What an object holds, for tests that a secret is not shown."""

from __future__ import annotations


def shown_by(thing: object) -> str:
    """Return the repr of an object and of all that it holds, through every object of this library."""
    seen: set[int] = set()
    parts: list[str] = []

    def show(one: object) -> None:
        if id(one) in seen:
            return
        seen.add(id(one))
        parts.append(repr(one))
        if type(one).__module__.startswith("rag_posfix"):
            for held in getattr(one, "__dict__", {}).values():
                show(held)

    show(thing)
    return "\n".join(parts)
