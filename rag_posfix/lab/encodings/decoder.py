"""A small decoder that takes any position encoding: forward, generation, and its files. Training is not its business.

Runs on torch alone; safetensors holds the weights.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.errors import ConfigError
from rag_posfix.lab.encodings.base import ENCODINGS, DecoderShape, Encoding, Positions

KeysValues = tuple[tuple[Tensor, Tensor], ...]
"""Keys and values of each layer, (B, H, T, D), as they are projected: encodings work on them in every step."""

WEIGHTS, CONFIG = "model.safetensors", "config.json"


class _Layer(nn.Module):
    """Attention and a feed-forward part, each with a residual connection and a norm."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.heads, self.norm_first = shape.heads, shape.norm == "pre"
        self.project = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.feed = nn.Sequential(nn.Linear(shape.width, shape.inner), nn.GELU(), nn.Linear(shape.inner, shape.width))
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(2))
        self.drop = nn.Dropout(shape.dropout)

    def forward(
        self, index: int, positions: Positions, states: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        read = self.norms[0](states) if self.norm_first else states
        attended, kv = self._attend(index, positions, read, past)
        states = states + self.drop(attended)
        if not self.norm_first:
            states = self.norms[0](states)
        states = states + self.drop(self.feed(self.norms[1](states) if self.norm_first else states))
        return states if self.norm_first else self.norms[1](states), kv

    def _attend(
        self, index: int, positions: Positions, states: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        split = self.project(states).unflatten(-1, (3, self.heads, -1))  # (B, T, 3, H, D)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        if past is not None:
            key, value = torch.cat((past[0], key), dim=2), torch.cat((past[1], value), dim=2)
        attended = positions.attend(index, query, key, value)  # (B, H, T, D)
        return self.out(attended.transpose(1, 2).flatten(2)), (key, value)


class Decoder(nn.Module):
    """A causal language model with tied embeddings and one position encoding.

    Weights are drawn from torch's global generator, as those of all torch layers; seed it inside
    ``torch.random.fork_rng``.

    Args:
        encoding: The position encoding.
        shape: Sizes.

    Raises:
        ConfigError: the encoding is not for decoders, or does not fit the shape.
    """

    def __init__(self, encoding: Encoding, shape: DecoderShape) -> None:
        super().__init__()
        self.encoding, self.shape = encoding, shape
        self.positions = encoding.build(shape)
        self.embedding = nn.Parameter(torch.randn(shape.vocabulary, shape.width) * shape.width**-0.5)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.drop = nn.Dropout(shape.dropout)

    def forward(
        self,
        ids: Tensor,
        past: KeysValues | None = None,
        positions: Positions | None = None,
        on_states: Callable[[int, Tensor], None] | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Return the logits of the next token at each place, and the keys and values of all tokens so far.

        Args:
            ids: The tokens after those of ``past``.
            past: What an earlier call returned.
            positions: What is read with in place of the decoder's own encoding; for probes, which wrap it.
            on_states: Called with each layer, from 0, and the hidden states that enter it, (B, T, width).

        Shapes:
            ids: (B, T). returns: (B, T, vocabulary).
        """
        start = 0 if past is None else past[0][0].shape[2]
        encoded = positions or self.positions
        states = self.drop(encoded.embed(self.embedding[ids], start))  # (B, T, width)
        kv = []
        for index, layer in enumerate(self.layers):
            if on_states is not None:
                on_states(index, states)
            states, pair = layer(index, encoded, states, None if past is None else past[index])
            kv.append(pair)
        return linear(self.norm(states), self.embedding), tuple(kv)

    def layer_input(self, layer: int, states: Tensor) -> Tensor:
        """Return what the attention of a layer reads of the states that enter it: with norm "pre", the normed ones.

        Shapes:
            states: (B, T, width). returns: the same.
        """
        block: Any = self.layers[layer]
        read: Tensor = block.norms[0](states) if block.norm_first else states
        return read

    @torch.inference_mode()
    def generate(
        self, ids: Tensor, new_tokens: int, *, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return the tokens that follow, one after the other, with the keys and values of earlier ones kept.

        Args:
            ids: The prompt, at least one token.
            new_tokens: How many tokens to generate.
            temperature: 0 takes the most likely token; above, tokens are drawn from softmax(logits / temperature).
            generator: For drawing.

        Shapes:
            ids: (B, T). returns: (B, new_tokens).

        Raises:
            ConfigError: the prompt is empty, a number is below 0, or tokens are to be drawn without a generator.
        """
        if not ids.shape[1] or new_tokens < 0 or temperature < 0 or (temperature > 0 and generator is None):
            raise ConfigError(
                f"cannot generate new_tokens={new_tokens} at temperature={temperature} after {ids.shape[1]} tokens; "
                "it takes a prompt of at least one token, numbers of 0 or more, and above temperature 0 a generator"
            )
        training = self.training
        self.eval()
        written = [ids[:, :0]]
        past: KeysValues | None = None
        step = ids
        for _ in range(new_tokens):
            logits, past = self(step, past)
            step = _sample(logits[:, -1], temperature, generator)
            written.append(step)
        self.train(training)
        return torch.cat(written, dim=1)

    def save(self, folder: Path) -> None:
        """Write ``model.safetensors`` and ``config.json`` to a folder, which is made.

        Raises:
            ConfigError: the folder cannot be written.
        """
        from safetensors.torch import save_file

        config = {
            "encoding": {"name": self.encoding.name, "parameters": self.encoding.parameters},
            "shape": dataclasses.asdict(self.shape),
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file({name: states.contiguous() for name, states in self.state_dict().items()}, folder / WEIGHTS)
            (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        except OSError as error:
            raise ConfigError(f"cannot save a decoder in {folder}: {error.strerror}; choose another folder") from error


def load_decoder(folder: Path, device: torch.device | str = "cpu") -> Decoder:
    """Return the decoder that ``Decoder.save`` wrote to a folder.

    Raises:
        ConfigError: a file is missing or damaged, or weights and config do not fit each other.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text("utf-8"))
        weights = load_file(folder / WEIGHTS, device=str(device))
        spec = MethodSpec(config["encoding"]["name"], config["encoding"]["parameters"])
        shape = DecoderShape(**config["shape"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(
            f"{folder} holds no decoder that can be loaded ({error}); give a folder with the {CONFIG} and {WEIGHTS} "
            "of Decoder.save"
        ) from error
    decoder = Decoder(ENCODINGS.create(spec), shape).to(device)
    try:
        decoder.load_state_dict(weights)
    except RuntimeError as error:
        raise ConfigError(f"{folder / WEIGHTS} does not fit {folder / CONFIG}: {error}") from error
    return decoder


def _sample(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """Return the next token of each sequence, (B, 1)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
