"""What every mitigation is: a small frozen dataclass whose one config is to make a plan."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.errors import UnsupportedModelError
from rag_posfix.parameters import check_parameters, parameters_of
from rag_posfix.plan.bias_profile import FileReader
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.model_shape import Capability, ModelShape
from rag_posfix.plan.plan import Plan
from rag_posfix.registry import Registry

__all__ = ["MITIGATIONS", "Mitigation", "create"]


@dataclasses.dataclass(frozen=True)
class Mitigation(ABC):
    """A published correction, with its parameters as dataclass fields.

    Attributes:
        name: Registry name, equal to the file's name.
        paper: Where it comes from: authors, year, title, URL. Empty for the baseline.
        deviations: Where it departs from the paper, one sentence each.
        order_invariant: Whether the answer is the same for every order of the passages.
        needs_calibration: Whether something must be measured on the model first.
        training_free: Whether it works on stock weights.
        requires: What the model must let a plan change.
        neutral: Parameters at which a prompt of one passage, or of none, is read as the unmodified model reads it.
        neutral_is_identity: With the neutral parameters every prompt is, bit for bit.
        decides_at_prompt_end: Something is decided by the prompt's last token and kept for the whole generation, so
            that a prompt one token longer may decide otherwise.
        tells_key_heads_apart: Key/value heads are treated differently by how they compare with each other, so that
            the number of them matters.
        example: Parameters to try it with where it needs some.
        file_parameters: Parameters that the command line takes from a file: name -> what turns the path into values of
            parameters. The method itself never reads a file.
        holds_methods: The parameter that is a list of other mitigations, "" if there is none.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    deviations: ClassVar[tuple[str, ...]] = ()
    order_invariant: ClassVar[bool] = False
    needs_calibration: ClassVar[bool] = False
    training_free: ClassVar[bool] = True
    requires: ClassVar[frozenset[Capability]] = frozenset()
    neutral: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    neutral_is_identity: ClassVar[bool] = False
    decides_at_prompt_end: ClassVar[bool] = False
    tells_key_heads_apart: ClassVar[bool] = False
    example: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    file_parameters: ClassVar[Mapping[str, FileReader]] = MappingProxyType({})
    holds_methods: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Check types and ranges of the parameters. A subclass that checks more calls this first."""
        check_parameters(self, self.name)

    @abstractmethod
    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return what a generation over ``layout`` does differently on ``model``. Pure: same input, same plan."""

    @property
    def is_order_invariant(self) -> bool:
        """Whether the answer is the same for every order of the passages, with these parameters."""
        return self.order_invariant

    def needs(self) -> frozenset[Capability]:
        """Return what the model must let a plan change, with these parameters."""
        return self.requires

    def fingerprint(self) -> str:
        """Return a digest that changes with the method and with every parameter; part of every cache key."""
        fields = json.dumps(
            {name: getattr(self, name) for name in parameters_of(type(self))}, sort_keys=True, default=str
        )
        return hashlib.blake2b(f"{self.name}:{fields}".encode(), digest_size=16).hexdigest()

    def refusal(self, model: ModelShape) -> str | None:
        """Return why ``model`` cannot be served, or None if it can."""
        missing = sorted(self.needs() - model.capabilities)
        if not missing:
            return None
        reasons = dict.fromkeys(model.lacks[capability] for capability in missing if capability in model.lacks)
        why = f": {'; '.join(reasons)}" if reasons else ""
        return f"{self.name} needs {', '.join(missing)}, which this model does not offer{why}"

    def checked_plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return the plan, or refuse the model.

        Raises:
            UnsupportedModelError: the model lacks what the method needs.
        """
        reason = self.refusal(model)
        if reason is not None:
            raise UnsupportedModelError(f"{reason}; rag-posfix verify lists the methods that it supports")
        return self.plan(layout, model)


MITIGATIONS: Registry[type[Mitigation]] = Registry("mitigation")


def create(name: str, parameters: Mapping[str, Any] | None = None) -> Mitigation:
    """Return the mitigation called ``name``, which may be an alias, with ``parameters``.

    Raises:
        UnknownNameError: no such mitigation.
        ConfigError: an unknown parameter, or a value outside of what is allowed.
    """
    made: Mitigation = MITIGATIONS.create(MethodSpec(name, parameters or {}))
    return made
