"""Rerankers that ask the real SmolLM2: the passage that answers is found, in float32 as the stock model says it."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.demo_data import load_passages, load_questions
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.patching.install import stock_copy
from rag_posfix.pipeline.build import build_pipeline
from rag_posfix.pipeline.pipeline import Question
from rag_posfix.reranking import RERANKERS
from rag_posfix.reranking.build import RerankerModels, build_reranker
from rag_posfix.settings import CacheSettings, Settings
from tests.support.toy_encoder import ToyEncoder

pytestmark = [pytest.mark.weights, pytest.mark.slow]

QUESTIONS = load_questions()[:2]
PASSAGES = {passage.id: passage for passage in load_passages()}


def passages(question, count=4):
    return [PASSAGES[name] for name in (*question.distractors[: count - 1], question.gold)]


def made(engine, name, **parameters):
    return build_reranker(
        MethodSpec(name, parameters), RerankerModels(embeddings=lambda: None, generator=lambda: engine)
    )


@pytest.mark.parametrize("name", ["likelihood", "in_context"])
def test_the_passage_that_answers_comes_first(engine, name):
    for question in QUESTIONS:
        result = made(engine, name).compress_documents(passages(question), question.question)
        assert result[0].id == question.gold


def test_a_judge_of_its_own_scores_as_the_engine_of_that_model(float32_engine):
    asked, given = QUESTIONS[0].question, passages(QUESTIONS[0])
    settings = Settings(reranker="yes_no:model=smollm2", dtype="float32", cache=CacheSettings(enabled=False))
    with closing(build_pipeline(settings, generator=FakeGenerator(ToyEncoder()))) as pipeline:
        answer = pipeline.ask(Question(asked, documents=given))
    assert not answer.warnings
    assert pipeline.generator.model_id == "fake"
    expected = made(float32_engine, "yes_no").compress_documents(given, asked)
    scores = {document.id: document.score for document in answer.documents}
    assert scores == pytest.approx({one.id: one.metadata["relevance_score"] for one in expected}, abs=1e-5)
    assert len(set(scores.values())) == len(given)


@pytest.mark.parametrize("name", ["attention_sorting", "calibrated_attention", "listwise"])
def test_the_others_rank_all_of_them(engine, name):
    given = passages(QUESTIONS[0], 3)
    result = made(engine, name).compress_documents(given, QUESTIONS[0].question)
    assert sorted(one.id for one in result) == sorted(one.id for one in given)
    assert name in RERANKERS


def test_what_is_read_off_is_what_the_stock_model_says(float32_engine):
    engine, stock = float32_engine, stock_copy(float32_engine.loaded.model, float32_engine.loaded.spec)
    reranker = made(engine, "in_context")
    layouts = []
    original = engine.question_attention
    try:
        engine.question_attention = lambda given, *rest: layouts.extend(given) or original(given, *rest)
        short = [one.model_copy(update={"page_content": one.page_content[:80]}) for one in passages(QUESTIONS[0], 2)]
        reranker.compress_documents(short, QUESTIONS[0].question)
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
