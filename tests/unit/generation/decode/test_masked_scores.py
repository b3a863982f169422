"""Scores of allowed tokens alone: those of the combined distribution, pooled rows included."""

from __future__ import annotations

import pytest
import torch

from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.generation.engine import Engine
from tests.support.number_encoder import NumberEncoder
from tests.support.tiny import VOCABULARY, loaded_model, toy_layout


@pytest.fixture(scope="module")
def tiny():
    return Engine(loaded_model(), NumberEncoder(eos_ids={2}), "tiny", "print")


@pytest.mark.parametrize("method", ["none", "context_experts", "committee"])
def test_allowed_tokens_keep_the_combined_score_and_all_others_have_none(tiny, method):
    session = tiny.open(toy_layout(), MitigationChoice(method))
    free = session.next_log_probs()
    allowed = torch.zeros(VOCABULARY - 5, dtype=torch.bool)  # shorter than the scores, as masks of tokenizers may be
    allowed[[7, 50, 99]] = True
    masked = session.next_log_probs(allowed)
    assert masked.isfinite().nonzero().flatten().tolist() == [7, 50, 99]
    torch.testing.assert_close(masked[[7, 50, 99]], free[[7, 50, 99]], rtol=0, atol=0)
