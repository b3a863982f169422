"""What PromQL expressions ask of the metrics of a service."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import promql_parser
from prometheus_client import CollectorRegistry

ADDED_BY_PROMETHEUS = {"instance", "job"}
"""Labels that every scraped sample gets."""


@dataclass(frozen=True)
class Exposed:
    """The samples of a registry.

    Attributes:
        labels: The names of the labels of each sample.
        closed: The allowed values of labels that have a closed list.
    """

    labels: Mapping[str, frozenset[str]]
    closed: Mapping[str, frozenset[str]]


def exposed_by(registry: CollectorRegistry, closed: Mapping[str, frozenset[str]]) -> Exposed:
    """Return what a registry exposes. A metric without samples is not in it: make something happen first."""
    labels: dict[str, frozenset[str]] = {}
    for family in registry.collect():
        for sample in family.samples:
            labels[sample.name] = labels.get(sample.name, frozenset()) | frozenset(sample.labels)
    return Exposed(labels, closed)


def problems(expression: str, exposed: Exposed) -> list[str]:
    """Return what an expression asks for that is not exposed: metrics, labels, and values of closed lists.

    Raises ValueError if it is no PromQL.
    """
    parsed = promql_parser.parse(expression)
    return [*_unknown_in_selectors(parsed, exposed), *_unknown_in_groups(parsed, exposed)]


def _selectors(expression: promql_parser.Expr) -> list[promql_parser.VectorSelector]:
    found: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(expression, visit)
    return found


def _unknown_in_selectors(expression: promql_parser.Expr, exposed: Exposed) -> Iterator[str]:
    for selector in _selectors(expression):
        if selector.name not in exposed.labels:
            yield f"metric {selector.name!r} does not exist"
            continue
        known = exposed.labels[selector.name] | ADDED_BY_PROMETHEUS
        for matcher in selector.matchers.matchers:
            if matcher.name not in known:
                yield f"{selector.name} has no label {matcher.name!r}"
            for value in re.split(r"\|", matcher.value) if matcher.name in exposed.closed else ():
                if value not in exposed.closed[matcher.name]:
                    yield f"{selector.name}: {matcher.name} is never {value!r}"


def _unknown_in_groups(expression: promql_parser.Expr, exposed: Exposed) -> Iterator[str]:
    groups: list[promql_parser.AggregateExpr] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            groups.append(node)

    promql_parser.walk(expression, visit)
    for group in groups:
        for selector in _selectors(group.expr):
            known = exposed.labels.get(selector.name or "", frozenset()) | ADDED_BY_PROMETHEUS
            for label in group.modifier.labels:
                if label not in known:
                    yield f"{selector.name} has no label {label!r} to group by"
