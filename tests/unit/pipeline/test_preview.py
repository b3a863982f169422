"""The prompt of a question without an answer, and templates on their way to it."""

from __future__ import annotations

import pytest
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate

from rag_posfix import PosfixRAG, RagPosfixChatModel
from rag_posfix.assembly.assembler import Assembler
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.contracts.request import PromptTemplate, Sampling
from rag_posfix.generation.batching.scheduler import BatchingGenerator
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.pipeline.build import build_pipeline
from rag_posfix.pipeline.pipeline import Defaults, Pipeline, Question
from rag_posfix.settings import Settings
from tests.support.pipelines import BREAD, PARIS, ROME, memory_cache, pipeline
from tests.support.tiny import loaded_model
from tests.support.toy_encoder import ToyEncoder

PROMPT = ChatPromptTemplate([("human", "Read.\n\n{context}\nQ: {question}")])


@pytest.fixture(scope="module")
def loaded():
    return loaded_model(vocab_size=ToyEncoder.vocab_size, num_hidden_layers=2)


def engine_pipeline(loaded, mitigation):
    engine = Engine(loaded, ToyEncoder(), "tiny", "print", PassageStore([MemoryTier(2**26)]))
    defaults = Defaults(MethodSpec(mitigation), order="original", sampling=Sampling(max_tokens=2))
    return Pipeline(engine, Assembler(engine.encoder, engine.context_window), defaults=defaults)


@pytest.mark.parametrize(
    ("mitigation", "new_question"),
    [
        ("passage_answers", (True, True, False, True)),  # each passage is found by itself
        ("none", (True, True, False, False)),  # what follows a new passage is new
        ("cache_blend", (True, True, False, True)),
        ("calibrated_attention", (True, True, False, False)),
    ],
)
def test_a_preview_says_which_segments_the_next_answer_finds_in_the_store(
    loaded, monkeypatch, mitigation, new_question
):
    monkeypatch.setattr("rag_posfix.plan.layout.READ_TOGETHER", 1)  # the passages are short: runs of their own
    questions = engine_pipeline(loaded, {"cache_blend": "blended"}.get(mitigation, mitigation))
    first = Question("Who?", documents=[ROME, PARIS])
    preview = questions.preview(first)
    assert [segment.cached for segment in preview.segments] == [False] * 4
    assert [segment.kind for segment in preview.segments] == ["prefix", "passage", "passage", "suffix"]
    questions.ask(first)
    assert [segment.cached for segment in questions.preview(first).segments] == [True, True, True, False]
    second = questions.preview(Question("When?", documents=[ROME, BREAD, PARIS]))
    assert tuple(segment.cached for segment in second.segments[:-1]) == new_question


def test_a_preview_is_the_prompt_by_segment_and_generates_nothing(loaded):
    questions = engine_pipeline(loaded, "none")
    title = Document(page_content="Ann.", metadata={"title": "T"}, id="t")
    preview = questions.preview(Question("Who?", documents=[title, title]))
    assert preview.text == (
        f"<|im_start|>user\n{PromptTemplate().opening}T\nAnn.\n\nQuestion: Who?\nAnswer:<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert [segment.id for segment in preview.segments] == [None, "t", None]
    assert preview.segments[1].tokens == len("T\nAnn.\n\n")
    assert preview.dropped == (("t", "duplicate"),)
    data = preview.to_dict()
    assert (data["tokens"], data["cached_tokens"], data["answer_cached"]) == (preview.tokens, 0, False)
    assert data["segments"][1]["text"] == "T\nAnn.\n\n"
    assert questions.generator.passages.stats()["tiers"][0]["entries"] == 0


def test_a_preview_with_batching_sees_the_store_and_without_a_store_nothing(loaded):
    engine = Engine(loaded, ToyEncoder(), "tiny", "print", PassageStore([MemoryTier(2**26)]))
    batching = BatchingGenerator(engine)
    try:
        batched = engine_pipeline(loaded, "none").with_generator(batching)
        batched.ask(Question("Who?", documents=[ROME]))
        assert batched.preview(Question("Why?", documents=[ROME])).segments[1].cached
    finally:
        batching.close()
    bare = engine_pipeline(loaded, "none").with_generator(Engine(loaded, ToyEncoder(), "tiny", "print"))
    assert bare.preview(Question("Why?", documents=[ROME])).cached_tokens == 0


def test_a_preview_says_whether_the_answer_is_cached():
    questions = pipeline(cache=memory_cache())
    question = Question("Who?", documents=[ROME])
    assert questions.preview(question).answer_cached is False
    questions.ask(question)
    assert questions.preview(question).answer_cached is True


def test_a_question_has_a_template_of_its_own_and_its_answer_a_key_of_its_own():
    questions = pipeline(cache=memory_cache())
    own = Question("Who?", documents=[ROME], template=PromptTemplate(instruction="Read."))
    assert questions.preview(own).text.startswith("<|im_start|>user\nRead.\n\nRome")
    questions.ask(Question("Who?", documents=[ROME]))
    assert questions.ask(own).cached is False
    assert questions.ask(own).cached is True


def test_a_pipeline_is_built_with_the_template_of_the_settings_or_of_the_call(tmp_path):
    generator = FakeGenerator(ToyEncoder(), 8192)
    settings = Settings(cache_dir=tmp_path, template="full")
    for options, opening in (({}, "Answer the question using"), ({"template": PROMPT}, "Read.\n\nRome")):
        with_template = build_pipeline(settings, generator=generator, **options)
        assert opening in with_template.preview(Question("Who?", documents=[ROME])).text
    full = build_pipeline(settings, generator=generator)
    assert "full sentences" in full.preview(Question("Who?", documents=[ROME])).text


def test_langchain_classes_take_a_prompt_of_langchain():
    rag = PosfixRAG(pipeline=pipeline(), template=PROMPT)
    assert rag.pipeline.preview(Question("Who?", documents=[ROME])).text.endswith(
        "Rome lies on the Tiber. It is old.\n\nQ: Who?<|im_end|>\n<|im_start|>assistant\n"
    )
    model = RagPosfixChatModel(generator=FakeGenerator(ToyEncoder(), 8192), mitigation="none", template=PROMPT)
    plain = RagPosfixChatModel(generator=FakeGenerator(ToyEncoder(), 8192), mitigation="none")
    tokens = [m.invoke("Who?", documents=[ROME]).usage_metadata["input_tokens"] for m in (model, plain)]
    assert tokens[1] - tokens[0] == len(PromptTemplate().opening + "Question: \nAnswer:") - len("Read.\n\nQ: ")
    assert model.asdict() != plain.asdict()  # so that langchain's cache keeps their answers apart
