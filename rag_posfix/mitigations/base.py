"""Base class of mitigations: frozen dataclasses that turn a prompt's layout into a ``Plan``."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from rag_posfix.contracts.method_spec import MethodSpec, Parametrised, named_method
from rag_posfix.errors import UnsupportedModelError
from rag_posfix.plan.bias_profile import FileReader
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Capability, ModelShape, Plan
from rag_posfix.registry import Registry


@dataclasses.dataclass(frozen=True)
class Mitigation(Parametrised, ABC):
    """A published correction of position bias, with its parameters as dataclass fields.

    Attributes:
        name: Registry name, equal to the name of the file.
        order_invariant: Whether the answer is the same for every order of the passages.
        needs_calibration: Whether a probe must measure the model first.
        training_free: Whether the method works with stock weights.
        requires: Capabilities that the method needs of the model.
        identity_parameters: Parameters with which a prompt of at most one passage is read as by the unmodified model.
        neutral_is_identity: Whether these parameters leave every prompt unmodified, bit for bit.
        uses_last_prompt_token: Whether the last token of the prompt decides something for the whole generation. A
            prompt with one more token may then be read differently.
        compares_kv_heads: Whether key/value heads are compared with each other, so that their number matters.
        example: Parameters for a trial run, for methods without usable defaults.
        file_parameters: Parameters that the command line reads from a file: name -> function from the path to values
            of parameters. The method itself never reads a file.
        supports_voting: Whether the answers of the rows may vote where the rows' probabilities cannot be pooled at
            every token, as on a server.
        nested_methods: Name of the parameter that is a list of other mitigations, "" if there is none.
    """

    order_invariant: ClassVar[bool] = False
    needs_calibration: ClassVar[bool] = False
    training_free: ClassVar[bool] = True
    requires: ClassVar[frozenset[Capability]] = frozenset()
    identity_parameters: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    neutral_is_identity: ClassVar[bool] = False
    uses_last_prompt_token: ClassVar[bool] = False
    compares_kv_heads: ClassVar[bool] = False
    example: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    file_parameters: ClassVar[Mapping[str, FileReader]] = MappingProxyType({})
    supports_voting: ClassVar[bool] = False
    nested_methods: ClassVar[str] = ""

    @abstractmethod
    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return what a generation over ``layout`` changes on ``model``. A pure function."""

    @property
    def is_order_invariant(self) -> bool:
        """Whether the answer is the same for every order of the passages, with these parameters."""
        return self.order_invariant

    def needs(self) -> frozenset[Capability]:
        """Return the capabilities that the method needs of the model, with these parameters."""
        return self.requires

    def fingerprint(self) -> str:
        """Return a digest that changes with the method and with every parameter; part of every cache key."""
        fields = json.dumps(self.parameters, sort_keys=True, default=str)
        return hashlib.blake2b(f"{self.name}:{fields}".encode(), digest_size=16).hexdigest()

    def refusal(self, model: ModelShape) -> str | None:
        """Return the reason why the method cannot run on ``model``, or None if it can."""
        missing = sorted(self.needs() - model.capabilities)
        if not missing:
            return None
        reasons = dict.fromkeys(model.lacks[capability] for capability in missing if capability in model.lacks)
        why = f": {'; '.join(reasons)}" if reasons else ""
        return f"{self.name} needs {', '.join(missing)}, which this model does not offer{why}"

    def checked_plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return the plan for a supported model.

        Raises:
            UnsupportedModelError: the model lacks a capability that the method needs.
        """
        reason = self.refusal(model)
        if reason is not None:
            raise UnsupportedModelError(f"{reason}; rag-posfix verify lists the methods that it supports")
        return self.plan(layout, model)


MITIGATIONS: Registry[type[Mitigation]] = Registry("mitigation", parse=named_method)


def create(name: str, parameters: Mapping[str, Any] | None = None) -> Mitigation:
    """Return the mitigation with the name or alias ``name`` and ``parameters``.

    Raises:
        UnknownNameError: no such mitigation.
        ConfigError: an unknown parameter, or a value out of range.
    """
    mitigation: Mitigation = MITIGATIONS.create(MethodSpec(name, parameters or {}))
    return mitigation
