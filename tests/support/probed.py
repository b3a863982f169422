"""Subjects of probes that are small enough to read in milliseconds."""

from __future__ import annotations

from rag_posfix.probing.language_model import LanguageModel
from rag_posfix.probing.norm_by_position import random_decoder
from rag_posfix.probing.small_decoder import SmallDecoder
from tests.support.tiny_evaluation import tiny_engine

__all__ = ["small_decoder", "tiny_model"]


def tiny_model(context_window=180) -> LanguageModel:
    """Return a tiny random language model that reads bytes."""
    return LanguageModel(tiny_engine(context_window))


def small_decoder(encoding="nope", deviation=None, **parameters) -> SmallDecoder:
    """Return a small decoder with random weights."""
    return random_decoder(encoding, parameters, 0, deviation)
