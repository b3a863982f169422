"""Base classes of position encodings: a frozen description, and the module that it builds for one decoder.

Letters of shapes: B sequences, H heads, T tokens, Tq queries, Tk keys, D channels of a head. Queries are the last Tq
of the Tk tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from rag_posfix.attention.causal import attend_causal
from rag_posfix.contracts.method_spec import MethodSpec, Parametrised
from rag_posfix.encodings.shape import DecoderShape
from rag_posfix.parameters import check_parameters
from rag_posfix.registry import Registry

Memory = Literal["linear", "per head", "per sequence"]
"""What attention keeps in memory: no T x T tensor (fused SDPA), one per head that all sequences share (SDPA with a
bias), or one per head and sequence (plain softmax, O(T^2))."""


class Positions(nn.Module):
    """What an encoding does in a decoder, with its learned parameters. This one does nothing: causal attention.

    A decoder has one such module for all its layers. Keys in the KV cache are those of the projection, before any
    encoding.
    """

    def embed(self, states: Tensor, start: int) -> Tensor:
        """Return token embeddings with what the encoding adds to them.

        Args:
            states: The embeddings.
            start: Place of the first of them in the sequence, from 0.

        Shapes:
            states: (B, T, width). returns: the same.
        """
        return states

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return causal attention with the encoding in it.

        Args:
            layer: The layer, from 0.
            query: Of the last Tq tokens.
            key: Of all tokens.
            value: Of all tokens.

        Shapes:
            query: (B, H, Tq, D). key, value: (B, H, Tk, D). returns: (B, H, Tq, D).
        """
        return attend_causal(query, key, value, query.shape[-1] ** -0.5)


@dataclass(frozen=True)
class Encoding(Parametrised, ABC):
    """A published position encoding, with its parameters as dataclass fields.

    Attributes:
        name: Registry name, equal to the name of the file.
        paper: Source: authors, year, title, URL.
        deviations: Differences from the paper, one sentence each.
        memory: What attention keeps in memory.
        causal: Whether a decoder can use it; False for one that belongs to an auto-encoder.
    """

    paper: ClassVar[str]
    deviations: ClassVar[tuple[str, ...]] = ()
    memory: ClassVar[Memory] = "linear"
    causal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check types and ranges of the parameters. A subclass that checks more calls this first."""
        check_parameters(self, self.name)

    @abstractmethod
    def build(self, shape: DecoderShape) -> Positions:
        """Return the module for a decoder of this shape, with its parameters at their start values.

        Raises:
            ConfigError: the encoding is not for decoders.
        """


ENCODINGS: Registry[type[Encoding]] = Registry("encoding")


def create_encoding(name: str, parameters: Mapping[str, Any] | None = None) -> Encoding:
    """Return the encoding with the name or alias ``name`` and ``parameters``.

    Raises:
        UnknownNameError: no such encoding.
        ConfigError: an unknown parameter, or a value out of range.
    """
    made: Encoding = ENCODINGS.create(MethodSpec(name, parameters or {}))
    return made
