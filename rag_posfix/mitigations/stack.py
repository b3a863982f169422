"""Several mitigations at once, where their plans change different things."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rag_posfix.errors import ConfigError
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation, create
from rag_posfix.plan.compose import compose
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.model_shape import Capability, ModelShape
from rag_posfix.plan.plan import Plan

__all__ = ["Stack"]


@MITIGATIONS.register("stack")
@dataclass(frozen=True)
class Stack(Mitigation):
    """Lay several methods over each other, for example head scaling over sorted passages.

    Methods that change different fields of a plan (positions per layer, positions per head, the RoPE base, who attends
    to whom, which rows are read) go together; methods that change the same one are refused, both named.

    Source: this library; each method has its own.
    Formula: the union of the plans' fields; a plan with several rows gives each row what the other plans give theirs.
    Differs from the paper: no paper stacks them.
    Helps: where two corrections act on different causes: an order-free reading whose far positions are also drawn
        nearer.
    Hurts: every method takes the model a step away from what it was trained on; two steps may be too many.
    Cost: that of the methods together. Passages cannot be encoded once and reused where a method that is decided by
        the whole prompt (head_scaling) is in the stack.
    Limits: those of each method. Conflicts are found when a prompt is planned.

    Args:
        methods: Names, or JSON objects ``{"name": ..., parameter: value}``; at least one.
    """

    name: ClassVar[str] = "stack"
    paper: ClassVar[str] = ""
    order_invariant: ClassVar[bool] = True
    neutral: ClassVar[Mapping[str, Any]] = {"methods": ["none"]}
    neutral_is_identity: ClassVar[bool] = True
    decides_at_prompt_end: ClassVar[bool] = True
    tells_key_heads_apart: ClassVar[bool] = True

    methods: tuple[Any, ...] = ("head_scaling", "sorted_inter_document")

    def __post_init__(self) -> None:
        given = self.methods
        if isinstance(given, str) or not isinstance(given, list | tuple) or not given:
            raise ConfigError(
                f"stack: methods={given!r} must be a list of one method or more, for example "
                'methods=["head_scaling","sorted_inter_document"]'
            )
        object.__setattr__(self, "methods", tuple(_plain(method) for method in given))
        for method in self._members():
            if isinstance(method, Stack):
                raise ConfigError("stack: a stack cannot hold a stack; list its methods instead")

    @property
    def is_order_invariant(self) -> bool:
        """One method that reads passages in an order of its own is enough: the others never see the caller's."""
        return any(method.is_order_invariant for method in self._members())

    def needs(self) -> frozenset[Capability]:
        """Return what any of the methods needs."""
        return frozenset().union(*(method.needs() for method in self._members()))

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return the plans laid over each other.

        Raises:
            PlanConflictError: two methods change the same field.
        """
        return compose([(method.name, method.plan(layout, model)) for method in self._members()])

    def _members(self) -> list[Mitigation]:
        members = []
        for text in self.methods:
            parameters = dict(json.loads(text))
            members.append(create(parameters.pop("name"), parameters))
        return members


def _plain(method: Any) -> str:
    """Return a method and its parameters as canonical JSON: frozen, comparable, and part of the fingerprint."""
    if isinstance(method, str) and not method.startswith("{"):
        method = {"name": method}
    elif isinstance(method, str):
        method = json.loads(method)
    if not isinstance(method, Mapping) or not isinstance(method.get("name"), str):
        raise ConfigError(f'stack: {method!r} must be a name, or {{"name": ..., parameter: value}}')
    return json.dumps(dict(method), sort_keys=True)
