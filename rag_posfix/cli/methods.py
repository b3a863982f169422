"""``rag-posfix methods``: mitigations with aliases, papers and parameters; names of orders and rerankers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from rag_posfix.cli.options import AsJson
from rag_posfix.cli.output import emit_json, out, table
from rag_posfix.contracts.method_spec import MethodSpec

FIRST_STAGES = {
    "dense": "Retrieves by embeddings: the passages whose vectors have the highest cosine with the question's.",
    "bm25": "Retrieves by words: Lucene's BM25 on title and text, without stemming. Needs no embedding model.",
    "hybrid": "Retrieves by embeddings and by words, and fuses both rankings by reciprocal rank.",
}
"""What ``--retriever`` takes."""


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
        str | None,
        typer.Argument(
            help="Name or alias of a mitigation, an order, a reranker or a first stage, to show its description."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List mitigations with their aliases and parameters, orders, rerankers and first stages."""
    from rag_posfix.assembly.orders import ORDERS
    from rag_posfix.mitigations import MITIGATIONS
    from rag_posfix.reranking import RERANKERS

    if name and not _is_mitigation(name):
        _show_other(name, as_json)
        return
    names = (name,) if name else MITIGATIONS.names()
    mitigations = [describe_mitigation(MITIGATIONS.get(one)) for one in names]
    if as_json:
        emit_json(
            {
                "mitigations": mitigations,
                "orders": list(ORDERS.names()),
                "rerankers": list(RERANKERS.names()),
                "first_stages": list(FIRST_STAGES),
            }
        )
    elif name:
        out().print(inspect.getdoc(MITIGATIONS.get(name)) or "", markup=False, highlight=False)
    else:
        _show(mitigations)


def _known(registry: Any) -> set[str]:
    return {one for name in registry.names() for one in (name, *registry.aliases(name))}


def _is_mitigation(name: str) -> bool:
    """Return whether a name is one of a mitigation, or of nothing else: then it is reported as such."""
    from rag_posfix.assembly.orders import ORDERS
    from rag_posfix.mitigations import MITIGATIONS
    from rag_posfix.reranking import RERANKERS

    return name in _known(MITIGATIONS) or name not in {*_known(ORDERS), *_known(RERANKERS), *FIRST_STAGES}


def _show_other(name: str, as_json: bool) -> None:
    """Print what an order, a reranker or a first stage is."""
    from rag_posfix.assembly.orders import ORDERS
    from rag_posfix.reranking import RERANKERS

    found = []
    for kind, registry in (("order", ORDERS), ("reranker", RERANKERS)):
        if name in _known(registry):
            found.append((kind, registry.resolve(name), inspect.getdoc(registry.get(name)) or ""))
    if name in FIRST_STAGES:
        found.append(("first stage", name, FIRST_STAGES[name]))
    if as_json:
        emit_json({"found": [{"kind": kind, "name": one, "description": text} for kind, one, text in found]})
        return
    for kind, one, text in found:
        out().print(f"{one} ({kind})\n\n{text}", markup=False, highlight=False, soft_wrap=True)


def _show(mitigations: list[dict[str, Any]]) -> None:

    from rag_posfix.assembly.orders import ORDERS
    from rag_posfix.reranking import RERANKERS

    shown = table("mitigation (aliases)", "order-free", "what it does", "parameters", title="mitigations")
    for one in mitigations:
        parameters = ", ".join(f"{key}={value['default']}" for key, value in one["parameters"].items())
        order_free = "yes" if one["order_invariant"] else "no"
        shown.add_row(_with_aliases(one["name"], one["aliases"], "\n"), order_free, one["summary"], parameters)
    out().print(shown)
    for one in mitigations:
        for preset, parameters in one["presets"].items():
            out().print(f"{preset}: {MethodSpec(one['name'], parameters).label}", highlight=False)
    for kind, registry in (("orders", ORDERS), ("rerankers", RERANKERS)):
        names = (_with_aliases(name, registry.aliases(name), " ") for name in registry.names())
        out().print(f"{kind}: {', '.join(names)}", highlight=False, soft_wrap=True)
    out().print(f"first stages: {', '.join(FIRST_STAGES)}", highlight=False, soft_wrap=True)


def _with_aliases(name: str, aliases: Sequence[str], separator: str) -> str:
    return f"{name}{separator}({', '.join(aliases)})" if aliases else name
