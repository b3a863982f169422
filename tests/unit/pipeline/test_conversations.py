"""Conversations over the same passages: what is cached from the second turn on."""

from __future__ import annotations

import pytest
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.assembly.documents import content_key
from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.caching.disk import DiskTier
from rag_posfix.caching.kv.store import KVCodec, PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.contracts.request import Sampling
from rag_posfix.generation.engine import Engine
from rag_posfix.pipeline.build import build_pipeline
from rag_posfix.pipeline.pipeline import Defaults, Pipeline, Question
from rag_posfix.settings import Settings
from tests.support.pipelines import pipeline
from tests.support.tiny import loaded_model
from tests.support.toy_encoder import ToyEncoder

DOCUMENTS = [
    Document(page_content=f"{name} lies on the {river}. It is old, and its bridges are of stone.", id=name)
    for name, river in (("Rome", "Tiber"), ("Paris", "Seine"), ("Prague", "Moldau"), ("Vienna", "Danube"))
]
QUESTIONS = ("Where does Rome lie?", "And Paris?", "Is it old?", "Who built the bridges?", "And Prague?", "Why?")


@pytest.fixture(scope="module")
def loaded():
    return loaded_model(vocab_size=ToyEncoder.vocab_size, num_hidden_layers=2, max_position_embeddings=4096)


def conversation(loaded, mitigation, template=None, system=(), folder=None):
    """Ask six questions over the same passages; return the answers, the bytes of the slowest tier by turn, and all."""
    disk = [] if folder is None else [DiskTier(folder, KVCodec(), max_bytes=2**28)]
    store = PassageStore([MemoryTier(2**28), *disk])
    engine = Engine(loaded, ToyEncoder(), "tiny", "print", store)
    questions = Pipeline(
        engine,
        Assembler(engine.encoder, engine.context_window, template),
        passages=store,
        defaults=Defaults(MethodSpec(mitigation), order="original", sampling=Sampling(max_tokens=2, top_logprobs=2)),
    )
    history, answers, sizes = list(system), [], []
    for question in QUESTIONS:
        answers.append(questions.ask(Question(question, documents=DOCUMENTS, history=history)))
        assert store.flush()
        sizes.append(store.stats()["tiers"][-1]["bytes"])
        history += [{"role": "user", "content": question}, {"role": "assistant", "content": answers[-1].text}]
    return answers, sizes, questions


PASSAGE_TOKENS = sum(len(f"{document.page_content}\n\n") for document in DOCUMENTS)


@pytest.mark.parametrize("mitigation", ["default", "none", "passage_answers", "blended", "sorted_inter_document"])
@pytest.mark.slow
def test_passages_are_cached_from_the_second_turn_on_and_only_history_is_added(loaded, mitigation, tmp_path):
    answers, sizes, questions = conversation(loaded, mitigation, folder=tmp_path)
    cached = [answer.usage.cached_tokens for answer in answers]
    assert cached[0] == 0
    recomputed = 0.15 if mitigation == "blended" else 0.0
    assert min(cached[1:]) >= (0.9 - recomputed) * PASSAGE_TOKENS
    assert len(set(sizes)) == 1  # on disk: earlier turns are in memory alone
    for name in ("Bo", "Ann"):  # users with other system prompts
        history = [{"role": "system", "content": f"The user is {name}."}]
        answer = questions.ask(Question("Where does Rome lie?", documents=DOCUMENTS, history=history))
        assert answer.usage.cached_tokens == cached[1]
    assert questions.generator.passages.flush()
    assert questions.generator.passages.stats()["tiers"][-1]["bytes"] == sizes[0]


@pytest.mark.parametrize("mitigation", ["default", "none", "passage_answers", "sorted_inter_document"])
def test_a_turn_reads_the_turn_before_it_and_its_question(loaded, mitigation):
    answers, _, _ = conversation(loaded, mitigation)
    prompts = [answer.usage.prompt_tokens for answer in answers]
    read = [answer.usage.prompt_tokens - answer.usage.cached_tokens for answer in answers]
    for turn in range(2, 6):
        assert read[turn] < prompts[turn] - prompts[turn - 2]


@pytest.mark.parametrize("mitigation", ["default", "none", "passage_answers", "sorted_inter_document"])
@pytest.mark.slow
def test_an_answer_is_the_same_whether_earlier_turns_are_stored_or_not(loaded, mitigation):
    warm, _, _ = conversation(loaded, mitigation)
    _, _, questions = conversation(loaded, mitigation, system=[{"role": "system", "content": "Be kind."}])
    history = []
    for question, answer in zip(QUESTIONS[:-1], warm, strict=False):
        history += [{"role": "user", "content": question}, {"role": "assistant", "content": answer.text}]
    cold = questions.ask(Question(QUESTIONS[-1], documents=DOCUMENTS, history=history))
    assert cold.usage.cached_tokens < warm[-1].usage.cached_tokens
    assert (cold.text, cold.log_probs) == (warm[-1].text, warm[-1].log_probs)
    assert cold.log_probs


def test_without_a_store_earlier_turns_take_no_passes_of_their_own(loaded):
    engine = Engine(loaded, ToyEncoder(), "tiny", "print")
    defaults = Defaults(MethodSpec("default"), order="original", sampling=Sampling(max_tokens=1))
    questions = Pipeline(engine, Assembler(engine.encoder, engine.context_window), defaults=defaults)
    passes: list[int] = []
    handle = loaded.model.register_forward_pre_hook(lambda *_: passes.append(len(history)))
    for history in ([], [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "There."}] * 2):
        questions.ask(Question("Why?", documents=DOCUMENTS, history=history))
    handle.remove()
    assert passes.count(4) == passes.count(0) > 0


def test_deleted_passages_take_the_turns_behind_them_along(loaded):
    _, _, questions = conversation(loaded, "default")
    held = questions.generator.passages.stats()["bytes"]
    questions.invalidate(DOCUMENTS[:1])
    assert questions.generator.passages.memory_tags() == {content_key(document) for document in DOCUMENTS[1:]}
    assert questions.generator.passages.stats()["bytes"] < 0.9 * held


def test_with_history_first_passages_are_encoded_anew_in_every_turn(loaded):
    answers, sizes, _ = conversation(loaded, "default", PromptTemplate(history_first=True))
    assert max(answer.usage.cached_tokens for answer in answers) < 0.9 * PASSAGE_TOKENS
    assert sizes == sorted(set(sizes))


def test_a_change_of_the_fixed_instructions_is_a_miss(loaded):
    _, _, questions = conversation(loaded, "default")
    other = questions.with_template(PromptTemplate(instruction="Read these."))
    assert other.ask(Question("Why?", documents=DOCUMENTS)).usage.cached_tokens == 0
    assert other.ask(Question("Who?", documents=DOCUMENTS)).usage.cached_tokens >= PASSAGE_TOKENS


def test_the_order_cache_aware_remembers_the_passages_of_earlier_turns():
    questions = pipeline(order_invariant=False)
    question = Question("Why?", documents=DOCUMENTS[:2], order="cache_aware:bound=1")
    first = questions.ask(question)
    history = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": first.text}]
    again = Question("Who?", documents=DOCUMENTS[1::-1], order="cache_aware:bound=1", history=history)
    assert [d.id for d in questions.ask(again).documents] == [d.id for d in first.documents]


def test_the_setting_history_first_reaches_the_prompt(tmp_path):
    generator = pipeline().generator
    built = build_pipeline(Settings(cache_dir=tmp_path, history_first=True), generator=generator)
    history = [{"role": "system", "content": "Be kind."}]
    text = built.preview(Question("Why?", documents=DOCUMENTS, history=history)).text
    assert text.startswith("<|im_start|>system\nBe kind.<|im_end|>")
