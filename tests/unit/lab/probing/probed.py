"""Subjects of probes that are small enough to read in milliseconds."""

from __future__ import annotations

import torch

from rag_posfix.lab.probing.norm_by_position import random_decoder
from rag_posfix.lab.probing.subject import LanguageModel, SmallDecoder
from tests.support.tiny_evaluation import tiny_engine


def tiny_model(context_window=180) -> LanguageModel:
    """Return a tiny random language model that reads bytes."""
    return LanguageModel(tiny_engine(context_window))


def small_decoder(encoding="nope", deviation=None, **parameters) -> SmallDecoder:
    """Return a small decoder with random weights."""
    return random_decoder(encoding, parameters, 0, deviation)


class FromStates:
    """A subject whose hidden states are given: a function of (layer, string number) that returns (T, width)."""

    n_heads, vocabulary, longest = 1, 100, 1000

    def __init__(self, states, n_layers, width):
        self.states, self.n_layers, self.width = states, n_layers, width
        self.read_so_far = 0

    def facts(self):
        return {"model": "given", "model_fingerprint": "x", "dtype": "float32", "device": "cpu"}

    def read(self, ids, watch=None, change=None, keep=1):
        for layer in range(self.n_layers):
            watch.states(layer, self.states(layer, self.read_so_far)[None])
        self.read_so_far += 1
        return torch.zeros(1, keep, self.vocabulary)
