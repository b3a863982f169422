"""The size of a small decoder, which its encoding needs as well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from rag_posfix.errors import ConfigError
from rag_posfix.parameters import Integer, Number, check_parameters


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The size of a small decoder.

    Attributes:
        vocabulary: Number of token ids.
        layers: Number of layers.
        heads: Number of attention heads of a layer; each has its own keys and values.
        width: Channels of a hidden state; a multiple of twice the heads.
        inner: Channels of the feed-forward part of a layer.
        norm: "pre" normalises what a part of a layer reads, "post" what it has added to (as in the counting task of
            the CoPE paper).
        dropout: Share of channels that are set to 0 in training, below 1.

    Raises:
        ConfigError: a value is out of range, or ``width`` is no multiple of twice ``heads``.
    """

    vocabulary: Annotated[int, Integer(2)]
    layers: Annotated[int, Integer(1)] = 2
    heads: Annotated[int, Integer(1)] = 4
    width: Annotated[int, Integer(2)] = 64
    inner: Annotated[int, Integer(1)] = 256
    norm: Literal["pre", "post"] = "pre"
    dropout: Annotated[float, Number(0, 0.9)] = 0.0

    def __post_init__(self) -> None:
        check_parameters(self, "decoder")
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"decoder: width={self.width} must be a multiple of twice heads={self.heads}, so that the channels of "
                f"a head pair up; try width={2 * self.heads * max(1, round(self.width / (2 * self.heads)))}"
            )

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.width // self.heads
