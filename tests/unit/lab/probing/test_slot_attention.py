import pytest
import torch

from rag_posfix.errors import ConfigError
from rag_posfix.generation.prefill.prefill import prefill
from rag_posfix.lab.probing.slot_attention import dummy_attention
from rag_posfix.plan.bias_profile import with_dummy
from rag_posfix.plan.plan import Plan
from tests.support.tiny import loaded_model, toy_layout

LOADED = loaded_model()
LAYOUTS = [toy_layout(seed=0), toy_layout((5, 8, 3, 6), seed=1)]


@torch.inference_mode()
def test_a_slot_gets_the_mean_attention_per_token_of_a_dummy_that_stands_there():
    found, done = dummy_attention(LOADED, LAYOUTS), []
    for slot in range(4):
        for number, layout in enumerate(LAYOUTS):
            group = prefill(LOADED, with_dummy(layout, slot), Plan())[0]
            expected = float(group.passage_attention[0, slot]) / len(layout.passages[slot])
            assert float(found[number, slot]) == pytest.approx(expected, rel=1e-4)
    assert torch.equal(dummy_attention(LOADED, LAYOUTS, lambda *counts: done.append(counts)), found)
    assert done == [(1, 2), (2, 2)]


@pytest.mark.parametrize("layouts", [[], [toy_layout((7,))], [toy_layout((7, 4)), toy_layout((7, 4, 3))]])
def test_prompts_that_cannot_be_averaged_are_refused(layouts):
    with pytest.raises(ConfigError, match="passages cannot be averaged"):
        dummy_attention(LOADED, layouts)
