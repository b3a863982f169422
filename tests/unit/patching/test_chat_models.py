"""Tiny copies of chat models that people run: how each loads, and its default answer in every order of passages."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.chat_models import CHAT_MODELS, tiny_model
from benchmarks.keep_record import RESULTS
from benchmarks.models import examine
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.evaluation.record import read_head
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.patching.install import prepare
from tests.support.tiny import toy_layout
from tests.support.toy_encoder import ToyEncoder

RECORDED = read_head(RESULTS / "models.json")["summary"]["chat_models"]
TOKENS = 3


def test_the_record_has_every_chat_model():
    assert list(RECORDED) == list(CHAT_MODELS)
    assert len(CHAT_MODELS) >= 20


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_a_tiny_copy_loads_as_the_table_says(name):
    found = examine(name)
    for field in ("reading", "reason", "methods", "in_windows", "structure"):
        assert found.get(field) == RECORDED[name].get(field), field


@pytest.mark.parametrize("name", CHAT_MODELS)
@pytest.mark.slow
def test_the_default_answer_is_the_same_in_every_order_of_passages(name):
    model = tiny_model(CHAT_MODELS[name].config())
    engine = Engine(LoadedModel(model, prepare(model)), ToyEncoder(), name, name)
    layout = toy_layout((7, 4, 9), relevance=(0.9, 0.2, 0.4))
    answers, last = set(), []
    for order in itertools.permutations(range(3)):
        session, answer = engine.open(layout.select(order), MitigationChoice("default"), TOKENS), []
        for _ in range(TOKENS):
            last.append(session.next_log_probs())
            answer.append(int(last[-1].argmax()))
            session.advance(answer[-1])
        answers.add(tuple(answer))
    assert len(answers) == 1
    for step in range(TOKENS):
        first, *others = last[step::TOKENS]
        assert all(float((other - first).abs().max()) < 1e-4 for other in others)
