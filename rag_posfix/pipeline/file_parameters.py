"""Reads the parameters that the command line and the settings give as files. No other code reads a method's file.

Methods take values only. ``name:profile=PATH`` becomes ``name`` with the values of the file, before the method is
created. Requests to the service are not processed here, so a client cannot make the server read a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rag_posfix.assembly.orders import ORDERS
from rag_posfix.contracts.method_spec import MethodSpec, parse_method
from rag_posfix.errors import ConfigError
from rag_posfix.registry import Registry


def with_file_parameters(spec: MethodSpec, registry: Registry[Any]) -> MethodSpec:
    """Return ``spec`` without alias and preset, with file parameters replaced by the values of their files.

    Methods in the parameters of ``spec`` (``stack``) are processed in the same way.

    Args:
        registry: The registry of its kind; its classes declare the file parameters.

    Raises:
        UnknownNameError: no such name.
        ConfigError: a file cannot be read, or has a parameter that is also given directly.
    """
    name, values = registry.expand(spec)
    entry = registry.get(name)
    parameters = _with_values(name, values, getattr(entry, "file_parameters", {}))
    nested = getattr(entry, "nested_methods", "")
    if nested and isinstance(parameters.get(nested), list | tuple):
        parameters[nested] = [_member(member, registry) for member in parameters[nested]]
    return MethodSpec(name, parameters)


def order_with_values(order: str) -> str:
    """Return an order as text, with file parameters replaced by the values of their files.

    Raises:
        UnknownNameError: no order has this name.
        ConfigError: a file cannot be read.
    """
    spec = with_file_parameters(parse_method(order, "order", "slots=[0.4,0.2,0.4]"), ORDERS)
    return ":".join([spec.name, *(f"{name}={json.dumps(value)}" for name, value in spec.parameters.items())])


def _with_values(name: str, values: Mapping[str, Any], readers: Mapping[str, Any]) -> dict[str, Any]:
    parameters = dict(values)
    for key, read_file in readers.items():
        if not isinstance(parameters.get(key), str):  # the values themselves, or nothing
            continue
        path = parameters.pop(key)
        file_values = read_file(path)
        duplicates = ", ".join(parameter for parameter in file_values if parameter in parameters)
        if duplicates:
            raise ConfigError(f"{name}: {key}={path!r} gives {duplicates} already; leave out one of the two")
        parameters.update(file_values)
    return parameters


def _member(member: Any, registry: Registry[Any]) -> Any:
    """Return an entry of a list of methods with the values of its files; any other entry is returned unchanged."""
    fields = member
    if isinstance(member, str) and member.startswith("{"):
        try:
            fields = json.loads(member)
        except ValueError:
            return member
    if not isinstance(fields, Mapping) or not isinstance(fields.get("name"), str):
        return member
    spec = MethodSpec(fields["name"], {key: value for key, value in fields.items() if key != "name"})
    spec = with_file_parameters(spec, registry)
    return {"name": spec.name, **spec.parameters}
