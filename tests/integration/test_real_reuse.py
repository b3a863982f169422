"""The passage store on the real SmolLM2 in bfloat16: found, computed or some of both, the answer is the same."""

from __future__ import annotations

from contextlib import closing

import pytest

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.demo_data import load_passages, load_questions
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.passages.disk import DiskPassages
from rag_posfix.passages.memory import MemoryPassages
from rag_posfix.passages.store import PassageStore

pytestmark = pytest.mark.weights

APART = ["parallel_windows", "set_prompting", "parallel_encoding", "context_experts", "passage_answers"]
LEADING = ["none", "sorted_inter_document"]
QUESTIONS = load_questions()[:1]
PASSAGES = {passage.id: passage for passage in load_passages()}
CHARACTERS = 160
"""Of each passage, so that reading them all takes about as long as writing the answer."""


@pytest.fixture(scope="module")
def half():
    """The real model in bfloat16, whatever ``auto`` says of this machine."""
    from rag_posfix.generation.models import load_engine

    return load_engine(dtype="bfloat16")


def with_store(engine, *tiers):
    return Engine(engine.loaded, engine.encoder, engine.model_id, engine.fingerprint, passages=PassageStore(tiers))


def request(engine, question, name):
    documents = [
        PASSAGES[one].model_copy(update={"page_content": PASSAGES[one].page_content[:CHARACTERS]})
        for one in (question.gold, *question.distractors[:3])
    ]
    assembler = Assembler(engine.encoder, engine.context_window)
    layout = assembler.assemble(question.question, documents, order="original", max_new_tokens=12).layout
    return GenerationRequest(layout, MitigationChoice(name), Sampling(max_tokens=12))


@pytest.mark.parametrize("name", [*APART, *LEADING])
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.id)
def test_the_answer_is_the_same_whatever_the_store_holds(half, tmp_path, question, name):
    asked = request(half, question, name)
    everything, keys = asked.layout.suffix.start, asked.layout.keys
    answers = {}
    first = with_store(half, MemoryPassages(), DiskPassages(tmp_path, max_bytes=10**9))
    with closing(first.passages):
        answers["cold"] = first.generate(asked)
        answers["memory"] = first.generate(asked)
    second = with_store(half, DiskPassages(tmp_path, max_bytes=10**9))
    with closing(second.passages):
        answers["disk"] = second.generate(asked)
        assert second.passages.drop([keys[1], keys[3]]) > 0
        answers["mixed"] = second.generate(asked)
    found = {state: answer.usage.cached_tokens for state, answer in answers.items()}
    assert (found["cold"], found["memory"], found["disk"]) == (0, everything, everything)
    assert found["mixed"] < everything
    assert found["mixed"] > 0 or name == "sorted_inter_document", "whose passages are found together or not at all"
    assert {answer.token_ids for answer in answers.values()} == {answers["cold"].token_ids}, {
        state: answer.text for state, answer in answers.items()
    }
