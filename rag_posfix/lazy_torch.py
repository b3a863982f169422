"""Torch, imported at its first use: methods are listed and their parameters checked without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            self.__dict__[name] = getattr(torch, name)  # found without this method from now on
            return self.__dict__[name]

    torch, Tensor = _Torch(), Any  # a tensor is a type of annotations alone
