"""Methods that let passages read each other never hold a tensor of prompt length times prompt length."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.mitigations import create
from tests.support.tiny import loaded_model, toy_layout

LAYOUT = toy_layout((120,) * 5, prefix=10, suffix=20)
SQUARE = len(LAYOUT.token_ids) ** 2  # 630 x 630; the largest activation of the tiny model is 630 x 131


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for found in out if isinstance(out, tuple | list) else (out,):
            if isinstance(found, torch.Tensor):
                # A view of one number is not held as a square.
                self.size = max(self.size, found.untyped_storage().nbytes() // found.element_size())
        return out


def largest(name, parameters=None):
    loaded = loaded_model(max_position_embeddings=1024)
    plan = create(name, parameters).checked_plan(LAYOUT, loaded.spec.shape)
    with Largest() as seen:
        Session(loaded, LAYOUT, plan)
    return seen.size


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("sorted_inter_document", None),
        ("inter_document", None),
        ("parallel_windows", {"windows": 2}),
        ("parallel_windows", None),
        ("parallel_encoding", None),
        ("shifted_rotary", {"threshold": 200, "window": 50}),
        ("none", None),
    ],
)
def test_no_tensor_of_prompt_length_squared_is_held(name, parameters):
    assert largest(name, parameters) < SQUARE


def test_a_mask_would_be_noticed():
    # Two windows spelled out as a mask: the hook hands the model a (T, T) matrix.
    loaded = loaded_model(max_position_embeddings=1024)
    from rag_posfix.attention.masks import windows_mask, windows_of
    from rag_posfix.plan.plan import Plan, RowPlan

    plan = Plan(rows=(RowPlan(mask=windows_mask(LAYOUT, windows_of(LAYOUT, 2))),))
    with Largest() as seen:
        Session(loaded, LAYOUT, plan)
    assert seen.size >= SQUARE
