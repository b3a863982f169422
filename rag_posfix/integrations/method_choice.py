"""Checks a method by name before a model is loaded, for the adapters. Torch is imported when it is called."""

from __future__ import annotations

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.errors import missing_extra


def checked_method(spec: MethodSpec) -> MethodSpec:
    """Return ``spec`` if it names a mitigation with valid parameters.

    Raises:
        UnknownNameError: no mitigation has this name; the message suggests similar names.
        ConfigError: a parameter is unknown or out of range, or torch is not installed.
    """
    try:
        from rag_posfix.mitigations import MITIGATIONS
    except ImportError as error:
        raise missing_extra(error.name or "torch", "local") from error
    MITIGATIONS.check(spec)
    return spec
