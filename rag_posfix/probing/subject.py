"""What a probe needs of a model: token ids in; hidden states, attention and logits out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from rag_posfix.plan.plan import HiddenScale, MaskFunction

ByLayer = Callable[[int, Tensor], None]


@dataclass(frozen=True, slots=True, eq=False)
class Watch:
    """What a probe receives while a model reads. Each is called with the layer, from 0, and a tensor; None: not asked.

    Attributes:
        states: The residual stream as it enters the layer, (B, T, width).
        inputs: What the layer's attention reads: the residual stream after the layer's first norm, (B, T, width).
        weights: Attention probabilities of all heads, (B, H, T, T) float32, one layer at a time.
        attended: What attention returns before its output projection, (B, H, T, D).
    """

    states: ByLayer | None = None
    inputs: ByLayer | None = None
    weights: ByLayer | None = None
    attended: ByLayer | None = None

    @property
    def attention(self) -> bool:
        """Whether attention is computed the plain way, so that it can be watched."""
        return self.weights is not None or self.attended is not None


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """What a probe changes in one pass; None changes nothing.

    Attributes:
        positions: Position ids, (T,), in place of 0, 1, 2 and so on.
        mask: Which key each query sees, in place of the causal mask.
        scores: Returns other attention scores, given the layer and (B, H, T, T) float32 scores that are scaled and
            masked.
        hidden_scale: A hidden channel to scale for the queries and keys of the newest tokens, as the method
            ``hidden_scaling`` does.
        prompt_length: Tokens of the prompt, with ``hidden_scale``: the last of them and all after it are newest.
    """

    positions: Tensor | None = None
    mask: MaskFunction | None = None
    scores: Callable[[int, Tensor], Tensor] | None = None
    hidden_scale: HiddenScale | None = None
    prompt_length: int = 1

    @property
    def attention(self) -> bool:
        """Whether attention is computed the plain way, so that it can be changed."""
        return self.mask is not None or self.scores is not None


class Subject(Protocol):
    """A model that can be probed: a loaded language model, or a small decoder of ``rag_posfix.encodings``."""

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        ...

    @property
    def n_heads(self) -> int:
        """Number of query heads of a layer."""
        ...

    @property
    def width(self) -> int:
        """Channels of a hidden state."""
        ...

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        ...

    @property
    def longest(self) -> int:
        """The largest number of tokens that a probe may read at a time."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """Return what a record says of the model: ``model``, ``model_fingerprint``, ``dtype``, ``device``."""
        ...

    def read(self, ids: Tensor, watch: Watch = ..., change: Change = ..., keep: int = 1) -> Tensor:
        """Return the logits of the last ``keep`` tokens, (B, keep, vocabulary) float32; the watch receives the rest.

        Args:
            ids: (B, T) token ids without padding.
        """
        ...
