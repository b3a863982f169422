"""Hidden scaling: the hidden channel that encodes the position is scaled for queries and keys of the last token."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

from rag_posfix.errors import ConfigError
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation
from rag_posfix.parameters import Integer, Number
from rag_posfix.plan.bias_profile import read_channel_profile
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Capability, HiddenScale, ModelShape, Plan, RowPlan


def default_layers(n_layers: int) -> range:
    """Return the paper's layers 10 to 25 of 32, at the same depths of another model; at least one."""
    first = 10 * n_layers // 32
    return range(first, max(26 * n_layers // 32, first + 1))


@MITIGATIONS.register("hidden_scaling", aliases=("positional_hidden",))
@dataclass(frozen=True)
class HiddenScaling(Mitigation):
    """Scale one channel of the hidden state for the queries and keys of the last token.

    Causal attention encodes the position in the hidden state: one channel rises or falls steadily with the position,
    regardless of the text. Scaling this channel down in the last token's queries and keys removes a part of the
    position bias. The values, and so the content that is read, are unchanged.

    Source: Yu et al. (2024), Mitigate Position Bias via Scaling a Single Dimension (PositionalHidden),
        https://arxiv.org/abs/2406.02536
    Formula: x is the hidden state after the input norm of a layer, x' the same with channel p multiplied by s.
        q' = W_q x', k' = W_k x', v = W_v x. The last token reads softmax(q' K'^T / sqrt(d)) V; the tokens of the
        prompt before it read softmax(q K^T / sqrt(d)) V. Every generated token is the newest one. In layers
        ``first_layer`` to ``last_layer`` only.
    Differs from the paper: x' is never formed: W x' = W x + (s - 1) x_p W[:, p], which is the same. The layers are
        those of the paper at the same relative depth.
    Helps: models in which one channel rises or falls steadily with the position.
    Hurts: with the wrong channel or too strong a factor. Its authors expect little gain for models such as Qwen2.5.
    Cost: attention over the prompt once more, for its last token; 1.4 times the unmodified model's time in the paper.
    Limits: models whose queries and keys are linear in the normed hidden state. Needs a channel, which
        ``rag-posfix probe positional-dimensions`` finds. The answer depends on the order of the passages.

    Args:
        channel: Index of the hidden channel, from 0; required. On the command line, ``profile`` is a file of
            ``rag-posfix probe positional-dimensions`` with this and all of the following parameters.
        factor: Factor of the channel, -10 to 10; 1 changes nothing. The paper uses 0.5 to -1.
        first_layer: First layer, from 0; None is at 10/32 of the depth.
        last_layer: Last layer, included; None is at 25/32 of the depth.
    """

    name = "hidden_scaling"
    needs_calibration = True
    requires = frozenset({Capability.HIDDEN_CHANNEL})
    identity_parameters = MappingProxyType({"factor": 1.0})
    neutral_is_identity = True
    uses_last_prompt_token = True  # the prompt's last token is scaled, those before it are not
    example = MappingProxyType({"channel": 3})
    file_parameters = MappingProxyType({"profile": read_channel_profile})

    channel: Annotated[int | None, Integer(0)] = None
    factor: Annotated[float, Number(-10, 10)] = 0.0
    first_layer: Annotated[int | None, Integer(0)] = None
    last_layer: Annotated[int | None, Integer(0)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first_layer is not None and self.last_layer is not None and self.first_layer > self.last_layer:
            raise ConfigError(
                f"hidden_scaling: first_layer={self.first_layer} must not exceed last_layer={self.last_layer}"
            )

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return one row that scales the channel, or the plan that changes nothing for a factor of 1."""
        if self.channel is None:
            raise ConfigError(
                "hidden_scaling: channel=None must be a channel of the model; "
                "rag-posfix probe positional-dimensions --out DIR finds a channel and writes a profile"
            )
        if self.channel >= model.hidden_size:
            raise ConfigError(
                f"hidden_scaling: channel={self.channel} must be below {model.hidden_size}, the hidden size of this "
                "model; probe this model"
            )
        layers = self._layers(model.n_layers)
        if self.factor == 1.0:
            return Plan()
        return Plan(rows=(RowPlan(hidden_scale=HiddenScale(self.channel, self.factor, layers)),))

    def _layers(self, n_layers: int) -> range:
        usual = default_layers(n_layers)
        first = usual.start if self.first_layer is None else self.first_layer
        stop = usual.stop if self.last_layer is None else self.last_layer + 1
        if not first < stop <= n_layers:
            raise ConfigError(
                f"hidden_scaling: layers {first} to {stop - 1} must be within 0 to {n_layers - 1}, the layers of this "
                "model; give first_layer and last_layer"
            )
        return range(first, stop)
