"""Random tokens, and what hidden states are on the mean over them: content averages out, positions stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError
from rag_posfix.probing.subject import Subject, Watch

__all__ = ["check_length", "random_strings", "states_of"]


def check_length(subject: Subject, tokens: int, fewest: int = 2) -> None:
    """Check that a model reads so many tokens at a time.

    Raises:
        ConfigError: it does not.
    """
    if not fewest <= tokens <= subject.longest:
        raise ConfigError(
            f"strings of tokens={tokens} cannot be probed; give {fewest} to {subject.longest}, the context of this model"
        )


def random_strings(
    subject: Subject, strings: int, tokens: int, seed: int, progress: Callable[[int, int], None] | None = None
) -> Iterator[Tensor]:
    """Yield strings of random tokens, each (1, tokens); the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for done in range(strings):
        yield torch.randint(0, subject.vocabulary, (1, tokens), generator=generator)
        if progress is not None:
            progress(done + 1, strings)


def states_of(
    subject: Subject, strings: int, tokens: int, seed: int, progress: Callable[[int, int], None] | None = None
) -> Iterator[Tensor]:
    """Yield the residual stream that enters each layer, (L, tokens, width) float32 on the CPU, string by string."""
    for ids in random_strings(subject, strings, tokens, seed, progress):
        found = torch.zeros(subject.n_layers, tokens, subject.width)

        def keep(layer: int, states: Tensor, found: Tensor = found) -> None:
            found[layer] = states[0].float().cpu()

        subject.read(ids, Watch(states=keep))
        yield found
