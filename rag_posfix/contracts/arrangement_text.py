"""Reads an arrangement from text: ``reranker/order/method``. Names are not looked up, and files are not read."""

from __future__ import annotations

from rag_posfix.contracts.method_spec import MethodSpec, parse_method, split_outside
from rag_posfix.errors import ConfigError

GIVEN_ORDER = "original"
"""The order of an arrangement that names none: passages stay as they are given."""


def read_reranker(text: str) -> MethodSpec:
    """Read ``name`` or ``name:parameter=value``; ``first+second`` is ``fused`` with these two scorers.

    Raises:
        ConfigError: text that cannot be read.
    """
    spec = parse_method(text.removeprefix("fused:") if "+" in text else text, "reranker", "top_n=5")
    if "+" not in spec.name:
        return spec
    return MethodSpec("fused", {"scorers": spec.name.split("+"), **spec.parameters})


def read_arrangement(text: str) -> tuple[MethodSpec | None, str, MethodSpec]:
    """Return reranker, order and mitigation of an arrangement; a method alone leaves the rest as given.

    An empty reranker is None, an empty order ``GIVEN_ORDER``.

    Raises:
        ConfigError: two parts or more than three, or a part that cannot be read.
    """
    parts = [part.strip() for part in split_outside(text, "/")]
    if len(parts) not in (1, 3) or not parts[-1]:
        raise ConfigError(
            f"arrangement {text[:200]!r} must be reranker/order/method, for example "
            "likelihood+embedding/reverse/none, or a method alone; put values with slashes into double quotes"
        )
    mitigation = parse_method(parts[-1], "mitigation", "experts=5")
    if len(parts) == 1:
        return None, GIVEN_ORDER, mitigation
    return read_reranker(parts[0]) if parts[0] else None, parts[1] or GIVEN_ORDER, mitigation
