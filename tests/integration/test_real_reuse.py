"""The passage store on the real SmolLM2 in bfloat16: found, computed or some of both, the answer is the same."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.caching.disk import DiskTier
from rag_posfix.caching.kv.store import KVCodec, PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.demo_data import load_passages, load_questions
from rag_posfix.generation.batching.scheduler import generate_batch
from rag_posfix.generation.engine import Engine

pytestmark = [pytest.mark.weights, pytest.mark.slow]

METHODS = ("parallel_encoding", "none")
"""One that reads passages apart, and one whose passages lead a prompt; the others on a small model."""
NEW_TOKENS = 4
QUESTIONS = load_questions()[:2]
PASSAGES = {passage.id: passage for passage in load_passages()}
CHARACTERS = 40
"""Of each passage, so that reading them all takes about as long as writing the answer."""


@pytest.fixture(scope="module")
def half():
    """The real model in bfloat16, whatever ``auto`` says of this machine."""
    from rag_posfix.generation.load import load_engine

    return load_engine(dtype="bfloat16")


def with_store(engine, *tiers):
    return Engine(engine.loaded, engine.encoder, engine.model_id, engine.fingerprint, passages=PassageStore(tiers))


def request(engine, question, name):
    documents = [
        PASSAGES[one].model_copy(update={"page_content": PASSAGES[one].page_content[:CHARACTERS]})
        for one in (question.gold, *question.distractors[:2])
    ]
    assembler = Assembler(engine.encoder, engine.context_window)
    layout = assembler.assemble(question.question, documents, order="original", max_new_tokens=NEW_TOKENS).layout
    return GenerationRequest(layout, MitigationChoice(name), Sampling(max_tokens=NEW_TOKENS))


def sessions_of(half, asked, folder):
    """Read one prompt with nothing in the store, all of it in memory, all on disk, and the third passage gone."""
    first = with_store(half, MemoryTier(), DiskTier(folder, KVCodec(), max_bytes=10**9))
    with closing(first.passages):
        cold, warm = [first.open(asked.layout, asked.mitigation, NEW_TOKENS) for _ in range(2)]
    second = with_store(half, DiskTier(folder, KVCodec(), max_bytes=10**9))
    with closing(second.passages):
        disk = second.open(asked.layout, asked.mitigation, NEW_TOKENS)
        assert second.passages.drop([asked.layout.keys[2]]) > 0
        return cold, warm, disk, second.open(asked.layout, asked.mitigation, NEW_TOKENS)


@pytest.mark.parametrize("name", METHODS)
def test_the_answer_is_the_same_whatever_the_store_holds(half, tmp_path, monkeypatch, name):
    monkeypatch.setattr("rag_posfix.plan.layout.READ_TOGETHER", 1)  # the passages are short: runs of their own
    asked = request(half, QUESTIONS[METHODS.index(name)], name)
    sessions = sessions_of(half, asked, tmp_path)
    everything, gone = asked.layout.suffix.start, asked.layout.passages[2]
    mixed = gone.start if name == "none" else everything - len(gone)
    assert [session.cached_tokens for session in sessions] == [0, everything, everything, mixed]
    cold, warm, disk, _ = (session.next_log_probs() for session in sessions)
    assert torch.equal(warm, cold)
    assert torch.equal(disk, cold)
    # Together: a step of four answers takes little longer than one of a single answer.
    answers = generate_batch(half, sessions, [asked] * len(sessions))
    assert {answer.token_ids for answer in answers} == {answers[0].token_ids}, [answer.text for answer in answers]
    assert len(answers[0].token_ids) == NEW_TOKENS
