"""What a plan measures before it decides: which tokens are read, what is measured, and what is run."""

import dataclasses

import pytest
import torch

from rag_posfix.errors import PlanConflictError, PromptTooLongError
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.prefill.prefill import passage_attention, prefill, prefill_calibrated
from rag_posfix.plan.bias_profile import with_dummy
from rag_posfix.plan.plan import CalibrationPass, Plan, RowPlan
from tests.support.tiny import toy_layout

LAYOUT = toy_layout()
DUMMIES = [with_dummy(LAYOUT, slot) for slot in range(4)]
T = len(LAYOUT.token_ids)


@torch.inference_mode()
def test_what_is_measured_is_the_mean_attention_per_token(loaded):
    found, _ = passage_attention(loaded, [LAYOUT, *DUMMIES])
    assert found.shape == (5, 4)
    for row, layout in zip(found, [LAYOUT, *DUMMIES], strict=True):
        group = prefill(loaded, layout, Plan())[0]
        for passage, span in enumerate(layout.passages):
            expected = float(group.passage_attention[0, passage]) / len(span)
            assert float(row[passage]) == pytest.approx(expected, rel=1e-4)
    assert 0 < float(group.passage_attention.sum()) < 1  # prefix and suffix get the rest


@torch.inference_mode()
def test_only_what_differs_from_the_prompt_is_read_again(loaded, passes):
    passage_attention(loaded, [*DUMMIES, LAYOUT], base=4)
    differ = [next(i for i in range(T) if d.token_ids[i] != LAYOUT.token_ids[i]) for d in DUMMIES]
    assert passes == [T, *(T - i for i in differ)]
    assert differ == [span.start for span in LAYOUT.passages]


@torch.inference_mode()
def test_a_prompt_that_is_measured_twice_is_read_again_from_its_last_token(loaded, passes):
    found, _ = passage_attention(loaded, [LAYOUT, dataclasses.replace(LAYOUT)])
    assert passes == [T, 1]
    assert torch.allclose(found[0], found[1], rtol=1e-4)


@torch.inference_mode()
def test_a_continued_reading_reads_the_last_token_again(loaded, passes):
    plan = Plan(calibration=CalibrationPass((LAYOUT,), lambda measured: Plan(), continue_from=0))
    decided, groups = prefill_calibrated(loaded, LAYOUT, plan)
    assert passes == [T, 1]
    assert decided.calibration is None
    plain = prefill(loaded, LAYOUT, Plan())[0]
    assert torch.allclose(groups[0].logits, plain.logits, atol=1e-5)
    assert torch.allclose(groups[0].passage_shares, plain.passage_shares, atol=1e-5)


def test_without_continuing_the_decided_plan_reads_the_prompt_itself(loaded, passes):
    reverse = Plan(rows=(RowPlan(passages=(3, 2, 1, 0)),))
    seen = []

    def decide(measured):
        seen.append(measured)
        return reverse

    found = Session(loaded, LAYOUT, Plan(calibration=CalibrationPass((LAYOUT, DUMMIES[2]), decide)))
    assert passes == [T, T - LAYOUT.passages[2].start, T]
    assert seen[0].shape == (2, 4)
    expected = Session(loaded, LAYOUT, reverse)
    assert torch.equal(found.next_log_probs(), expected.next_log_probs())
    assert found.attention() == expected.attention()


def test_several_rows_cannot_continue_one_reading(loaded):
    rows = Plan(rows=(RowPlan(), RowPlan()), combine=lambda scores: (scores.log_probs[0], scores.question))
    plan = Plan(calibration=CalibrationPass((LAYOUT,), lambda measured: rows, continue_from=0))
    with pytest.raises(PlanConflictError, match="a calibration pass decided on 2 rows"):
        Session(loaded, LAYOUT, plan)


def test_a_survey_of_nothing_is_refused():
    with pytest.raises(PlanConflictError, match="reads 0 prompts"):
        CalibrationPass((), lambda measured: Plan())


def test_a_surveyed_prompt_must_fit_the_context_window(loaded, monkeypatch):
    class Encoder:
        eos_ids = frozenset()

    class CalibratesOnALongPrompt:
        def checked_plan(self, layout, shape):
            return Plan(calibration=CalibrationPass((toy_layout((600,)),), lambda measured: Plan()))

    monkeypatch.setattr("rag_posfix.generation.engine.create", lambda name, parameters: CalibratesOnALongPrompt())
    engine = Engine(loaded, Encoder(), "tiny", "print")
    with pytest.raises(PromptTooLongError, match="takes 613 tokens"):
        engine.open(LAYOUT)
