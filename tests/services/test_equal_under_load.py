"""An answer is the same alone, among others, and with its passages in another order: over HTTP, in half precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.equal_under_load import METHODS, compare_loads, demo_bodies
from rag_posfix.assembly.assembler import Assembler
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.batch_invariance import rows_for
from rag_posfix.pipeline.pipeline import Pipeline
from tests.support.attending import use_products
from tests.support.serving import serving
from tests.support.tiny import loaded_model
from tests.support.toy_encoder import ToyEncoder

QUESTIONS = {torch.bfloat16: 16, torch.float32: 8}
"""By dtype; float32 too, because some processors compute bfloat16 row by row and show nothing."""


@pytest.fixture(params=[(torch.bfloat16, "on"), (torch.float32, "on"), (torch.float32, "blocks")], ids=str)
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """The address of a service whose random model writes bytes, and how many questions it is asked."""
    use_products(monkeypatch)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    encoder: Any = ToyEncoder()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    loaded = loaded_model(vocab_size=ToyEncoder.vocab_size, max_position_embeddings=4096, **sizes)
    dtype, setting = request.param
    model = loaded.model.to(dtype)
    loaded = replace(loaded, model=model, pass_rows=rows_for(setting, model))
    with closing(PassageStore([MemoryTier(2**26)])) as store:
        engine = Engine(loaded, encoder, "fake", "print", store)
        pipeline = Pipeline(engine, Assembler(encoder, 4096))
        with serving(pipeline, max_queue=8) as address:
            yield address, QUESTIONS[dtype]
    torch.set_num_threads(before)


@pytest.mark.slow
def test_no_answer_and_no_score_depends_on_the_load(served: tuple[str, int]) -> None:
    url, questions = served
    bodies = demo_bodies(questions, passages=3)
    for body in bodies:
        body["documents"] = [{**document, "text": document["text"][:60]} for document in body["documents"]]
    rows = list(compare_loads(url, bodies, METHODS.split(","), (3, 8), new_tokens=4))
    assert [(row["different_answers"], row["different_scores"]) for row in rows] == [(0, 0)] * 8
