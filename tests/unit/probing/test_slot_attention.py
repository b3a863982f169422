import pytest
import torch

from rag_posfix.errors import ConfigError
from rag_posfix.generation.prefill.prefill import prefill
from rag_posfix.plan.bias_profile import with_dummy
from rag_posfix.plan.plan import Plan
from rag_posfix.probing.slot_attention import mean_dummy_attention
from tests.support.tiny import loaded_model, toy_layout

LOADED = loaded_model()
LAYOUTS = [toy_layout(seed=0), toy_layout((5, 8, 3, 6), seed=1)]


@torch.inference_mode()
def test_a_slot_gets_the_mean_attention_per_token_of_a_dummy_that_stands_there():
    found, done = mean_dummy_attention(LOADED, LAYOUTS), []
    for slot in range(4):
        each = []
        for layout in LAYOUTS:
            group = prefill(LOADED, with_dummy(layout, slot), Plan())[0]
            each.append(float(group.passage_attention[0, slot]) / len(layout.passages[slot]))
        assert found[slot] == pytest.approx(sum(each) / 2, rel=1e-4)
    assert mean_dummy_attention(LOADED, LAYOUTS, lambda *counts: done.append(counts)) == found
    assert done == [(1, 2), (2, 2)]


@pytest.mark.parametrize("layouts", [[], [toy_layout((7,))], [toy_layout((7, 4)), toy_layout((7, 4, 3))]])
def test_prompts_that_cannot_be_averaged_are_refused(layouts):
    with pytest.raises(ConfigError, match="passages cannot be averaged"):
        mean_dummy_attention(LOADED, layouts)
