"""Every probe of a language model on the device: the measurements of the CPU."""

import inspect

import pytest

from rag_posfix.generation.decode.question_scores import question_attention_by_head
from rag_posfix.lab.probing import PROBES
from rag_posfix.lab.probing.retrieval_heads import probe_retrieval_heads
from rag_posfix.lab.probing.slot_attention import dummy_attention
from rag_posfix.lab.probing.subject import LanguageModel
from tests.support.tiny import toy_layout
from tests.support.tiny_evaluation import EXAMPLES
from tests.support.twin_engines import TOLERANCE, tiny_engine_on

pytestmark = pytest.mark.slow

PARAMETERS = {
    "attention-edit": {"pairs": 3, "prompts": 1},
    "attention-mass": {"pairs": 3, "rounds": 1},
    "bias-at-init": {"strings": 2, "tokens": 32, "seeds": 1},
    "causal-perturbation": {"first": 20, "last": 40, "shift": 8, "tokens": 64, "strings": 2, "pairs": 3},
    "hidden-geometry": {"contexts": 3, "tokens": 24, "words": 2},
    "norm-by-position": {"strings": 3, "tokens": 24},
    "positional-dimensions": {"strings": 2, "tokens": 64, "top": 2, "pairs": 2, "prompts": 4},
    "positional-vectors": {"strings": 2, "tokens": 24},
    "rope-waveform": {"context": 32, "bases": 2, "candidates": 3},
    "score-advantage": {"strings": 2, "farthest": 8},
    "word-counting": {"limit": 2},
}
FROM_DATA = {"retrieval-heads", "slot-attention"}


def probed(device: str, name: str) -> object:
    """Return what a probe measures of a model on a device."""
    record = PROBES.get(name)(**PARAMETERS[name]).run(LanguageModel(tiny_engine_on(device, layers=2)))
    head = {name: value for name, value in record.head.items() if name not in ("device", "environment")}
    return [head, list(record.rows)]


def retrieval_heads(device: str) -> object:
    record = probe_retrieval_heads(tiny_engine_on(device, layers=2), EXAMPLES, documents=4, keep=3)
    return [record.head["heads"], record.head["gains"], record.head["held_out"]]


def slot_attention(device: str) -> object:
    return dummy_attention(tiny_engine_on(device, layers=2).loaded, [toy_layout(), toy_layout(seed=1)])


def by_head(device: str) -> object:
    return question_attention_by_head(tiny_engine_on(device, layers=2).loaded, [toy_layout()])


def test_every_probe_is_run():
    assert {*PARAMETERS, *FROM_DATA} == set(PROBES.names())
    assert all(not inspect.isabstract(PROBES.get(name)) for name in PROBES.names())


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_probe_measures_on_the_device_what_it_measures_on_the_cpu(on_both, name):
    assert on_both(probed, name).difference <= TOLERANCE


@pytest.mark.parametrize("action", [retrieval_heads, slot_attention, by_head])
def test_prompts_are_measured_on_the_device_as_on_the_cpu(on_both, action):
    assert on_both(action).difference <= TOLERANCE
