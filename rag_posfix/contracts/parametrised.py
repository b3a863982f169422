"""Base of registered dataclasses whose fields are their parameters, and which are told as ``name:parameter=value``."""

from __future__ import annotations

from typing import Any, ClassVar

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.parameters import parameters_of


class Parametrised:
    """Base of registered dataclasses whose fields are their parameters.

    Attributes:
        name: Name in the registry of its kind.
    """

    name: ClassVar[str]

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters by name."""
        return {name: getattr(self, name) for name in parameters_of(type(self))}

    @property
    def label(self) -> str:
        """Name and the parameters that differ from their defaults, as ``parse_method`` reads them."""
        known = parameters_of(type(self))
        changed = {name: value for name, value in self.parameters.items() if value != known[name].default}
        return MethodSpec(self.name, changed).label
