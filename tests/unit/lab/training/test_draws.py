"""What a run of training draws: the order of samples, and the place of the gold passages."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest

from rag_posfix.lab.training.data.make_data import Sample
from rag_posfix.lab.training.data.pairs import Segment
from rag_posfix.lab.training.loop import TrainingRun
from rag_posfix.lab.training.prompts import PromptMaker
from tests.support.tiny import loaded_model
from tests.support.tiny_training import OBJECTIVES, SETTINGS
from tests.support.toy_encoder import ToyEncoder

PROMPTS = PromptMaker(ToyEncoder(), 1024)
SAMPLES = [Sample(number, "Who?", ("I",), (Segment("", "I do."),), (0,)) for number in range(8)]


def turns(seed):
    """Return the numbers of the samples of three turns."""
    run = TrainingRun(OBJECTIVES["in2"], SAMPLES, (), dataclasses.replace(SETTINGS, seed=seed), PROMPTS)
    return [tuple(run.sample(number).id for number in range(start, start + 8)) for start in (0, 8, 16)]


def test_each_turn_has_all_samples_in_an_order_of_its_own_that_the_seed_decides():
    assert [sorted(turn) for turn in turns(0)] == [list(range(8))] * 3
    assert turns(0) == turns(0)
    assert len({*turns(0), *turns(1)}) == 6


@pytest.mark.parametrize(("share", "best"), [(0.0, 0), (0.5, 1), (1.0, 2)])
def test_distillation_draws_every_place_but_the_best(share, best):
    # Two of four passages are gold: their places are 0, 1 and 2.
    passages = tuple(Segment("", text) for text in ("Rye.", "Oats.", "It is I.", "I do."))
    sample = Sample(0, "Who?", ("I",), passages, (2, 3))
    tokens = [tuple(PROMPTS.make(sample.move_gold(place)).layout.token_ids) for place in range(3)]
    loaded, drawn = loaded_model(), set()
    for seed in range(20):
        elsewhere, anchor = OBJECTIVES["distill"].terms(loaded, PROMPTS, sample, Random(seed), share)
        assert tuple(anchor.prompt.prompt) == tokens[best]
        assert elsewhere.teacher_prompt is anchor.teacher_prompt is anchor.prompt
        drawn.add(tokens.index(tuple(elsewhere.prompt.prompt)))
    assert drawn == {0, 1, 2} - {best}
