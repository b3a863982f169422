"""The base of request bodies: a value of another JSON type is refused, not converted."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["RequestModel"]


class RequestModel(BaseModel):
    """A part of a request. As the schema says, ``"1"`` is no number, ``1`` no truth value and ``1.0`` no integer."""

    model_config = ConfigDict(strict=True)
