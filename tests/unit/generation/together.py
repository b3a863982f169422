"""Generates several answers with shared decode steps, as the evaluation does."""

from __future__ import annotations

from collections.abc import Sequence

from rag_posfix.contracts.request import Generation, GenerationRequest
from rag_posfix.generation.batching.scheduler import generate_batch, in_batches
from rag_posfix.generation.engine import Engine


def generate_together(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Generation]:
    """Return the whole answer to each request: prompts are prefilled one by one and decoded in batches."""
    opened = ((engine.open(r.layout, r.mitigation, r.sampling.max_tokens), r) for r in requests)
    generations: list[Generation] = []
    for batch in in_batches(opened, lambda pair: pair[0]):
        generations += generate_batch(engine, [session for session, _ in batch], [request for _, request in batch])
    return generations
