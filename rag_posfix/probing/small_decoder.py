"""A small decoder of ``rag_posfix.encodings`` as the subject of probes, with any encoding."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rag_posfix.encodings import Decoder, Positions
from rag_posfix.errors import UnsupportedModelError
from rag_posfix.probing.subject import Change, Watch

LONGEST = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class SmallDecoder:
    """A small decoder that probes read. Implements ``Subject``.

    Attention probabilities are what the encoding returns for the identity matrix as values, since attention is linear
    in its values. That holds for every encoding.

    Attributes:
        decoder: The decoder.
        name: Its name in records.
    """

    decoder: Decoder
    name: str = "decoder"

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return self.decoder.shape.layers

    @property
    def n_heads(self) -> int:
        """Number of heads of a layer."""
        return self.decoder.shape.heads

    @property
    def width(self) -> int:
        """Channels of a hidden state."""
        return self.decoder.shape.width

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.decoder.shape.vocabulary

    @property
    def longest(self) -> int:
        """The number of learned positions, or a number that nothing reaches."""
        return int(self.decoder.encoding.parameters.get("max_positions", LONGEST))

    def facts(self) -> Mapping[str, Any]:
        """Return name, encoding, digest of the weights, dtype and device."""
        weights = self.decoder.embedding
        digest = hashlib.sha256(weights.detach().cpu().numpy().tobytes()).hexdigest()[:16]
        return {
            "model": self.name,
            "encoding": self.decoder.encoding.label,
            "model_fingerprint": digest,
            "dtype": str(weights.dtype).removeprefix("torch."),
            "device": str(weights.device),
        }

    @torch.inference_mode()
    def read(self, ids: Tensor, watch: Watch = Watch(), change: Change = Change(), keep: int = 1) -> Tensor:  # noqa: B008
        """Read tokens in one pass; see ``Subject.read``."""
        if change.positions is not None or change.attention or change.hidden_scale is not None:
            raise UnsupportedModelError(
                f"positions, mask and scores of a small decoder belong to its encoding "
                f"({self.decoder.encoding.label}) and cannot be changed; give a language model with --model"
            )
        positions = _Watched(self.decoder.positions, watch) if watch.attention else None

        def enters(layer: int, states: Tensor) -> None:
            if watch.states is not None:
                watch.states(layer, states)
            if watch.inputs is not None:
                watch.inputs(layer, self.decoder.layer_input(layer, states))

        logits, _ = self.decoder(ids.to(self.decoder.embedding.device), positions=positions, on_states=enters)
        last: Tensor = logits[:, -keep:].float()
        return last


class _Watched(Positions):
    """The positions of a decoder, watched."""

    def __init__(self, own: Positions, watch: Watch) -> None:
        super().__init__()
        self.own, self.watch = own, watch

    def embed(self, states: Tensor, start: int) -> Tensor:
        return self.own.embed(states, start)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended = self.own.attend(layer, query, key, value)
        if self.watch.weights is not None:
            unit = torch.eye(key.shape[2], dtype=value.dtype, device=value.device)
            self.watch.weights(layer, self.own.attend(layer, query, key, unit.expand(*key.shape[:2], -1, -1)).float())
        if self.watch.attended is not None:
            self.watch.attended(layer, attended)
        return attended


def holds_decoder(folder: Path) -> bool:
    """Return whether a folder holds a decoder that ``Decoder.save`` wrote, such as one of ``rag-posfix lab run``."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and {"encoding", "shape"} <= config.keys()
