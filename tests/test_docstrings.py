"""What users meet by name is documented: exported names, registered methods, and HTTP routes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest

import rag_posfix
from rag_posfix.assembly.orders import ORDERS
from rag_posfix.lab.encodings import ENCODINGS
from rag_posfix.lab.probing import PROBES
from rag_posfix.lab.tasks import TASKS
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.reranking import RERANKERS
from tests.support.pages import DOCS


def undocumented(name: str, value: Any) -> Iterator[str]:
    """Yield the name, and those of the public methods and properties of a class, that have no docstring."""
    if (inspect.isclass(value) or inspect.isfunction(value)) and not inspect.getdoc(value):
        yield name
    if inspect.isclass(value) and value.__module__.startswith("rag_posfix"):
        for attribute, member in vars(value).items():
            documented = isinstance(member, property | classmethod | staticmethod) or inspect.isfunction(member)
            if documented and not attribute.startswith("_") and not inspect.getdoc(getattr(value, attribute)):
                yield f"{name}.{attribute}"


@pytest.mark.parametrize("name", rag_posfix.__all__)
def test_every_exported_name_has_a_docstring(name: str) -> None:
    assert list(undocumented(name, getattr(rag_posfix, name))) == []


@pytest.mark.parametrize("registry", [MITIGATIONS, ORDERS, RERANKERS, PROBES, ENCODINGS, TASKS], ids=lambda r: r.kind)
def test_every_registered_class_has_a_docstring(registry: Any) -> None:
    assert [name for name, cls in registry.items() if not inspect.getdoc(cls)] == []


def test_every_route_has_a_description() -> None:
    paths = json.loads((DOCS / "openapi.json").read_text("utf-8"))["paths"]  # which is that of the service
    operations = {(path, verb): operation for path, verbs in paths.items() for verb, operation in verbs.items()}
    assert len(operations) > 30
    assert [name for name, operation in operations.items() if not operation.get("description")] == []
