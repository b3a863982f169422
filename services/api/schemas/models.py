"""Models and health."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

__all__ = ["Health", "ModelList", "ModelObject"]


class ModelObject(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "rag-posfix"
    max_model_len: int


class ModelList(BaseModel):
    """The served models."""

    object: Literal["list"] = "list"
    data: list[ModelObject]


class Health(BaseModel):
    """A probe's answer."""

    status: str
