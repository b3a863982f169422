"""Random tokens, and hidden states on them: on the mean over strings content averages out and positions stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError
from rag_posfix.probing.subject import Subject, Watch


def check_length(subject: Subject, tokens: int, fewest: int = 2) -> None:
    """Check that a model reads so many tokens at a time."""
    if not fewest <= tokens <= subject.longest:
        raise ConfigError(
            f"strings of tokens={tokens} cannot be probed; give {fewest} to {subject.longest}, the context of this "
            "model"
        )


def random_strings(
    subject: Subject,
    strings: int,
    tokens: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
    words: int | None = None,
) -> Iterator[Tensor]:
    """Yield strings of random tokens, each (1, tokens); the same for the same seed.

    Args:
        words: Each string has at most so many different tokens, drawn for it, so that strings differ in their content
            as texts do; None draws every token from the whole vocabulary.
    """
    generator = torch.Generator().manual_seed(seed)
    for done in range(strings):
        if words is None:
            yield torch.randint(0, subject.vocabulary, (1, tokens), generator=generator)
        else:
            known = torch.randint(0, subject.vocabulary, (words,), generator=generator)
            yield known[torch.randint(0, words, (1, tokens), generator=generator)]
        if progress is not None:
            progress(done + 1, strings)


def states_of(
    subject: Subject,
    strings: int,
    tokens: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
    words: int | None = None,
) -> Iterator[Tensor]:
    """Yield the residual stream that enters each layer, (L, tokens, width) float32 on the CPU, string by string.

    Args: as ``random_strings``.
    """
    for ids in random_strings(subject, strings, tokens, seed, progress, words):
        found = torch.zeros(subject.n_layers, tokens, subject.width)

        def keep(layer: int, states: Tensor, found: Tensor = found) -> None:
            found[layer] = states[0].float().cpu()

        subject.read(ids, Watch(states=keep))
        yield found
