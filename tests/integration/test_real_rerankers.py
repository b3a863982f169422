"""Rerankers that ask the real SmolLM2: the passage that answers is found, in float32 as the stock model says it."""

from __future__ import annotations

import pytest
import torch

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.demo_data import load_passages, load_questions
from rag_posfix.patching.install import stock_copy
from rag_posfix.reranking.build import RerankerModels, build_reranker

pytestmark = [pytest.mark.weights, pytest.mark.slow]

QUESTION = load_questions()[0]
PASSAGES = {passage.id: passage for passage in load_passages()}


def passages(question, count=4):
    return [PASSAGES[name] for name in (*question.distractors[: count - 1], question.gold)]


def made(engine, name, **parameters):
    return build_reranker(
        MethodSpec(name, parameters), RerankerModels(embeddings=lambda: None, generator=lambda: engine)
    )


@pytest.mark.parametrize("name", ["likelihood", "in_context"])
def test_the_passage_that_answers_comes_first(engine, name):
    result = made(engine, name).compress_documents(passages(QUESTION), QUESTION.question)
    assert result[0].id == QUESTION.gold


def test_what_is_read_off_is_what_the_stock_model_says(float32_engine):
    engine, stock = float32_engine, stock_copy(float32_engine.loaded.model, float32_engine.loaded.spec)
    reranker = made(engine, "in_context")
    layouts = []
    original = engine.question_attention
    try:
        engine.question_attention = lambda given, *rest: layouts.extend(given) or original(given, *rest)
        short = [one.model_copy(update={"page_content": one.page_content[:80]}) for one in passages(QUESTION, 2)]
        reranker.compress_documents(short, QUESTION.question)
    finally:
        del engine.question_attention
    found = engine.question_attention(layouts)
    stock.set_attn_implementation("eager")
    for layout, paid in zip(layouts, found, strict=True):
        with torch.no_grad():
            output = stock(torch.tensor([layout.token_ids]), output_attentions=True)
        expected = torch.stack(output.attentions)[:, 0, :, layout.suffix.start :].mean(dim=2).sum(dim=(0, 1))
        for one, span in zip(paid, layout.passages, strict=True):
            assert one == pytest.approx(expected[span.slice].tolist(), abs=2e-3, rel=1e-3)
