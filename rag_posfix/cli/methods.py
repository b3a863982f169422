"""``rag-posfix methods``: what can be chosen, with papers and parameters."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer

from rag_posfix.cli.options import AsJson
from rag_posfix.cli.output import emit_json, out

__all__ = ["describe_mitigation", "methods"]


def describe_mitigation(cls: Any) -> dict[str, Any]:
    """Return the registry's facts of one mitigation class."""
    from rag_posfix.mitigations import MITIGATIONS
    from rag_posfix.parameters import parameters_of

    return {
        "name": cls.name,
        "aliases": list(MITIGATIONS.aliases(cls.name)),
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
    name: Annotated[str | None, typer.Argument(help="Show one mitigation in full.")] = None, as_json: AsJson = False
) -> None:
    """List mitigations, orders and rerankers."""
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
        _show(mitigations, ORDERS.names(), RERANKERS.names())


def _show(mitigations: list[dict[str, Any]], orders: tuple[str, ...], rerankers: tuple[str, ...]) -> None:
    from rich.table import Table

    table = Table("mitigation", "order-free", "what it does", "parameters", title="mitigations")
    for one in mitigations:
        parameters = ", ".join(f"{key}={value['default']}" for key, value in one["parameters"].items())
        table.add_row(one["name"], "yes" if one["order_invariant"] else "no", one["summary"], parameters)
    out().print(table)
    out().print(f"orders: {', '.join(orders)}", highlight=False)
    out().print(f"rerankers: {', '.join(rerankers)}", highlight=False)
