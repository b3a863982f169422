"""``rag-posfix methods``: mitigations with aliases, papers and parameters; names of orders and rerankers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from rag_posfix.cli.options import AsJson
from rag_posfix.cli.output import emit_json, out
from rag_posfix.contracts.method_spec import MethodSpec

__all__ = ["describe_mitigation", "methods"]


def describe_mitigation(cls: Any) -> dict[str, Any]:
    """Return the JSON object of a mitigation: names, paper, requirements and parameters.

    Args:
        cls: A class of the registry ``MITIGATIONS``.
    """
    from rag_posfix.mitigations import MITIGATIONS
    from rag_posfix.parameters import parameters_of

    return {
        "name": cls.name,
        "aliases": list(MITIGATIONS.aliases(cls.name)),
        "presets": {preset: dict(parameters) for preset, parameters in MITIGATIONS.presets(cls.name).items()},
        "summary": (inspect.getdoc(cls) or "").split("\n", 1)[0],
        "paper": cls.paper,
        "deviations": list(cls.deviations),
        "order_invariant": cls.order_invariant,
        "needs_calibration": cls.needs_calibration,
        "training_free": cls.training_free,
        "requires": sorted(cls.requires),
        "parameters": {
            name: {"type": one.type, "default": one.default, "allowed": one.allowed}
            for name, one in parameters_of(cls).items()
        },
    }


def methods(
    name: Annotated[
        str | None, typer.Argument(help="Name or alias of one mitigation, to show its description.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List mitigations with their aliases and parameters, orders and rerankers."""
    from rag_posfix.assembly.orders import ORDERS
    from rag_posfix.mitigations import MITIGATIONS
    from rag_posfix.reranking import RERANKERS

    names = (name,) if name else MITIGATIONS.names()
    mitigations = [describe_mitigation(MITIGATIONS.get(one)) for one in names]
    if as_json:
        emit_json({"mitigations": mitigations, "orders": list(ORDERS.names()), "rerankers": list(RERANKERS.names())})
    elif name:
        out().print(inspect.getdoc(MITIGATIONS.get(name)) or "", markup=False, highlight=False)
    else:
        _show(mitigations)


def _show(mitigations: list[dict[str, Any]]) -> None:
    from rich.table import Column, Table

    from rag_posfix.assembly.orders import ORDERS
    from rag_posfix.reranking import RERANKERS

    table = Table(
        Column("mitigation (aliases)", no_wrap=True), "order-free", "what it does", "parameters", title="mitigations"
    )
    for one in mitigations:
        parameters = ", ".join(f"{key}={value['default']}" for key, value in one["parameters"].items())
        order_free = "yes" if one["order_invariant"] else "no"
        table.add_row(_with_aliases(one["name"], one["aliases"], "\n"), order_free, one["summary"], parameters)
    out().print(table)
    for one in mitigations:
        for preset, parameters in one["presets"].items():
            out().print(f"{preset}: {MethodSpec(one['name'], parameters).label}", highlight=False)
    for kind, registry in (("orders", ORDERS), ("rerankers", RERANKERS)):
        names = (_with_aliases(name, registry.aliases(name), " ") for name in registry.names())
        out().print(f"{kind}: {', '.join(names)}", highlight=False)


def _with_aliases(name: str, aliases: Sequence[str], separator: str) -> str:
    return f"{name}{separator}({', '.join(aliases)})" if aliases else name
