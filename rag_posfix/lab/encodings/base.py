"""Position encodings: a frozen description, and the module that it builds for one decoder.

Letters of shapes: B sequences, H heads, T tokens, Tq queries, Tk keys, D channels of a head. Queries are the last Tq
of the Tk tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rag_posfix.attention.masks import attend_causal
from rag_posfix.contracts.method_spec import MethodSpec, Parametrised
from rag_posfix.errors import ConfigError
from rag_posfix.parameters import Integer, Number, check_parameters
from rag_posfix.registry import Registry


def distances(n_query: int, n_key: int, device: torch.device) -> Tensor:
    """Return i - j for query i and key j, where queries are the last of the tokens; below 0 for future keys.

    Shapes:
        returns: (Tq, Tk) int64.
    """
    index = torch.arange(n_key, device=device)
    return index[n_key - n_query :, None] - index


def hide_future(scores: Tensor) -> Tensor:
    """Return scores with -inf at future keys.

    Shapes:
        scores: (..., Tq, Tk). returns: the same.
    """
    future = distances(scores.shape[-2], scores.shape[-1], scores.device) < 0
    return scores.masked_fill(future, float("-inf"))


def attend_scores(scores: Tensor, value: Tensor) -> Tensor:
    """Return causal softmax(scores) V; the softmax is in float32.

    Cost: O(Tq Tk) memory per head and sequence.

    Shapes:
        scores: (B, H, Tq, Tk), scaled. value: (B, H, Tk, D). returns: (B, H, Tq, D).
    """
    return hide_future(scores.float()).softmax(dim=-1).to(value.dtype) @ value


def attend_with_bias(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Return causal softmax(Q K^T / sqrt(D) + bias) V.

    Cost: the bias, O(Tq Tk) memory per head, is shared by the sequences of a batch; scores are not kept.

    Shapes:
        query: (B, H, Tq, D). key, value: (B, H, Tk, D). bias: (H | 1, Tq, Tk). returns: (B, H, Tq, D).
    """
    mask = hide_future(bias).to(query.dtype)[None]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask)


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


Memory = Literal["linear", "per head", "per sequence"]
"""What attention keeps in memory: no T x T tensor (fused SDPA, or tiles), one per head that all sequences share (SDPA
with a bias), or one per head and sequence (plain softmax, O(T^2))."""


class Positions(nn.Module):
    """What an encoding does in a decoder, with its learned parameters. This one does nothing: causal attention.

    A decoder has one such module for all its layers. Keys in the KV cache are those of the projection, before any
    encoding.
    """

    def embed(self, states: Tensor, start: int) -> Tensor:
        """Return token embeddings with what the encoding adds to them.

        Shapes:
            states: (B, T, width). returns: the same.
        """
        return states

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return causal attention with the encoding in it.

        Shapes:
            query: (B, H, Tq, D). key, value: (B, H, Tk, D). returns: (B, H, Tq, D).
        """
        return attend_causal(query, key, value, query.shape[-1] ** -0.5)

    def finalize(self) -> None:
        """Turn into what the trained decoder has; training calls it before each step from ``final_from`` on."""


@dataclass(frozen=True)
class Encoding(Parametrised, ABC):
    """A published position encoding, with its parameters as dataclass fields.

    Attributes:
        name: Registry name, equal to the name of the file.
        memory: What attention keeps in memory.
        causal: Whether a decoder can use it; False for one that belongs to an auto-encoder.
    """

    memory: ClassVar[Memory] = "linear"
    causal: ClassVar[bool] = True

    @property
    def final_from(self) -> float:
        """Share of the training steps after which positions are those of the trained decoder, below 1."""
        return 0.0

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
    encoding: Encoding = ENCODINGS.create(MethodSpec(name, parameters or {}))
    return encoding
