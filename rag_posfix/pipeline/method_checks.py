"""Checks methods where they are named. Names of mitigations and of their parameters are known without torch."""

from __future__ import annotations

import ast
import dataclasses
import functools
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rag_posfix.assembly.orders import ORDERS, create_order
from rag_posfix.contracts.method_spec import MethodSpec, named_method
from rag_posfix.registry import Registry, entry_points_of

_MITIGATIONS = Path(__file__).parents[1] / "mitigations"


def check_method(kind: str, method: Any) -> None:
    """Check the name and the parameters of a method; parameters that are files are left to those who read them.

    Torch is imported only for parameters of a mitigation.

    Raises:
        UnknownNameError: no method of the kind has this name.
        ConfigError: an unknown parameter, or a value outside of its range.
    """
    spec = named_method(method, kind)
    if kind == "order":
        file_parameters = getattr(ORDERS.get(spec.name), "file_parameters", {})
        if spec.parameters and not file_parameters.keys() & spec.parameters.keys():
            create_order(method)
    elif kind == "reranker":
        from rag_posfix.reranking import RERANKERS

        _check_spec(spec, RERANKERS)
    else:
        _check_mitigation(spec)


def _check_mitigation(spec: MethodSpec) -> None:
    if "rag_posfix.mitigations" not in sys.modules:
        declared = declared_mitigations()
        if spec.name in declared or not entry_points_of("mitigation"):
            entry = declared.get(spec.name)
            if not entry.files & spec.parameters.keys():
                declared.check(spec)
            if not spec.parameters or find_spec("torch") is None:
                return
    from rag_posfix.mitigations import MITIGATIONS

    _check_spec(spec, MITIGATIONS)


def _check_spec(spec: MethodSpec, registry: Registry[Any]) -> None:
    name, parameters = registry.expand(spec)
    entry = registry.get(name)
    nested = getattr(entry, "nested_methods", "")  # whose parameters may be files too
    if nested not in parameters and not getattr(entry, "file_parameters", {}).keys() & parameters.keys():
        registry.check(spec)


@functools.cache
def declared_mitigations() -> Registry[Any]:
    """Return a registry of the packaged mitigations, read from their source: names, parameters and no behaviour.

    Importing the methods imports torch, which takes seconds; a misspelt name is reported at once.
    """
    registry: Registry[Any] = Registry("mitigation", has_plugins=False)
    for file in sorted(_MITIGATIONS.glob("*.py")):
        tree = ast.parse(file.read_text("utf-8"))
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        for node in classes.values():
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "MITIGATIONS.register":
                    options = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
                    registry.register(ast.literal_eval(call.args[0]), **options)(_declared_class(node, classes))
    return registry


def _declared_class(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Any:
    """Return a dataclass with the fields of a declared class, each optional and of any type.

    ``files`` are its parameters that are read from files.
    """
    fields = [(name, Any, dataclasses.field(default=None)) for name in _declared_fields(node, classes)]
    files = frozenset(_declared_keys(node, classes, "file_parameters"))
    return dataclasses.make_dataclass(node.name, fields, namespace={"files": files})


def _bodies(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[ast.stmt]:
    """Yield the statements of a class and of its base classes in the same file, the bases' first."""
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _bodies(classes[base.id], classes)
    yield from node.body


def _declared_fields(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[str]:
    return [
        statement.target.id
        for statement in _bodies(node, classes)
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and "ClassVar" not in ast.unparse(statement.annotation)
    ]


def _declared_keys(node: ast.ClassDef, classes: dict[str, ast.ClassDef], name: str) -> dict[str, str]:
    """Return a mapping that a class declares, with texts as values; values that are code are empty."""
    for statement in _bodies(node, classes):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            pairs = next((part for part in ast.walk(statement) if isinstance(part, ast.Dict)), ast.Dict([], []))
            return {
                str(ast.literal_eval(key)): str(value.value) if isinstance(value, ast.Constant) else ""
                for key, value in zip(pairs.keys, pairs.values, strict=True)
                if key is not None
            }
    return {}
