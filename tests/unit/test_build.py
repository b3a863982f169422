"""A pipeline as it is put together: what is deleted from its index is forgotten everywhere."""

from __future__ import annotations

from contextlib import closing

import pytest
from langchain_core.documents import Document

from rag_posfix import build as module
from rag_posfix.build import build_pipeline
from rag_posfix.errors import ConfigError
from rag_posfix.generation.engine import Engine
from rag_posfix.pipeline import Question
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.settings import PassageStoreSettings, Settings
from tests.support.tiny import loaded_model
from tests.support.toy_encoder import ToyEncoder
from tests.unit.retrieval.letters import LetterEmbeddings

DOCUMENTS = [
    Document(id="rome", page_content="Rome lies on the Tiber.", metadata={"title": "Rome", "relevance_score": "high"}),
    Document(id="paris", page_content="Paris lies on the Seine, and is larger."),
    Document(id="bread", page_content="Bread is baked in ovens."),
]


@pytest.fixture(scope="module")
def loaded():
    return loaded_model(vocab_size=ToyEncoder.vocab_size, num_hidden_layers=2)


@pytest.fixture
def pipeline(loaded, tmp_path, monkeypatch):
    """A pipeline on an index of three documents; its caches are in memory and on disk."""
    monkeypatch.setattr(module, "SentenceEmbeddings", lambda _name: LetterEmbeddings())
    index = FaissVectorStore(LetterEmbeddings())
    index.add_documents(DOCUMENTS)
    index.save(tmp_path / "index")
    settings = Settings(
        cache_dir=tmp_path / "cache", max_tokens=2, passages=PassageStoreSettings(disk_bytes=10_000_000)
    )
    engine = Engine(loaded, ToyEncoder(), "tiny", "print")
    with closing(build_pipeline(settings, index=tmp_path / "index", generator=engine)) as built:
        yield built


def ask(pipeline, names, *, use_cache=True):
    """Ask about documents as the index has them, whether it still has them or not."""
    documents = [
        Document(id=one.id, page_content=one.page_content, metadata={"title": one.metadata.get("title")})
        for one in DOCUMENTS
        if one.id in names
    ]
    return pipeline.ask(Question("Which river?", documents, use_cache=use_cache))


def found(pipeline, names):
    """How many tokens of a question about these documents need not be read."""
    assert pipeline.passages.flush()
    return ask(pipeline, names, use_cache=False).usage.cached_tokens


def test_the_second_question_reads_nothing_that_the_first_has_read(pipeline):
    first = pipeline.ask("Which bread?")
    assert sorted(document.id for document in first.documents) == ["bread", "paris", "rome"]
    assert (first.cached, first.usage.cached_tokens) == (False, 0)
    second = pipeline.ask("Which river?")
    suffix = len("Question: Which river?\nAnswer:") + len(".\n.assistant\n")  # the dots are control tokens
    assert second.usage.cached_tokens == second.usage.prompt_tokens - suffix
    assert ask(pipeline, ["rome", "paris", "bread"]).cached is True


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_what_is_gone_from_the_index_is_gone_from_both_caches(pipeline, how):
    store = pipeline.retriever.store
    for names in (["paris", "bread"], ["rome", "bread"], ["bread"]):
        assert ask(pipeline, names).cached is False
    everything = found(pipeline, ["rome", "paris", "bread"])
    kept = found(pipeline, ["paris", "bread"])
    rome = len("Rome\nRome lies on the Tiber.\n\n")
    assert everything == kept + rome
    if how == "deleted":
        store.delete(["rome", "nobody has this"])
    else:
        store.add_documents([Document(id="rome", page_content="Rome lies on seven hills.")])
    held = [tier["entries"] for tier in pipeline.passages.stats()["tiers"]]
    assert held == [3, 3], "the prefix and the other two, in memory and on disk"
    assert ask(pipeline, ["paris", "bread"]).cached is True
    assert ask(pipeline, ["bread"]).cached is True
    assert ask(pipeline, ["rome", "bread"]).cached is False
    assert found(pipeline, ["paris", "bread"]) == kept


def test_an_index_that_is_emptied_leaves_nothing_but_the_words_around_it(pipeline):
    assert found(pipeline, ["rome", "paris", "bread"]) == 0
    assert found(pipeline, ["rome", "paris", "bread"]) > 0
    pipeline.retriever.store.delete()
    assert pipeline.passages.stats()["tiers"][1]["entries"] == 1
    assert found(pipeline, ["rome", "paris", "bread"]) == len("?user\n") + len(pipeline.assembler.template.opening)


def test_a_document_that_was_read_cut_is_forgotten_like_any_other(pipeline):
    long = Document(id="long", page_content="secret " * 200)
    pipeline.retriever.store.add_documents([long])
    assert pipeline.ask(Question("Who?", [long])).usage.prompt_tokens == pipeline.generator.context_window - 2
    assert pipeline.passages.stats()["tiers"][0]["entries"] == 2, "the prefix and the document"
    pipeline.retriever.store.delete(["long"])
    assert pipeline.passages.stats()["tiers"][0]["entries"] == 1


def test_the_profile_of_the_settings_is_that_of_the_order(loaded, tmp_path):
    file = tmp_path / "slots.json"
    file.write_text('{"profile": [0.1, 0.2, 0.9]}')
    engine = Engine(loaded, ToyEncoder(), "tiny", "print")
    settings = Settings(order="profile", profile=file, cache_dir=tmp_path / "cache", max_tokens=2)
    with closing(build_pipeline(settings, generator=engine)) as built:
        documents = [one.model_copy(update={"metadata": {"relevance_score": 0.5}}) for one in DOCUMENTS]
        answer = built.ask(Question("Which river?", documents))
    assert [document.id for document in answer.documents] == ["bread", "paris", "rome"]
    assert answer.order == "profile"


def test_an_order_that_cannot_be_made_is_told_before_the_model_is_loaded():
    with pytest.raises(ConfigError, match="needs the measured value of each slot"):
        build_pipeline(Settings(model="/nowhere", order="profile"))


def test_the_budget_of_the_settings_is_that_of_the_prompts(loaded, tmp_path):
    engine = Engine(loaded, ToyEncoder(), "tiny", "print")
    settings = Settings(passage_tokens=14, overflow="truncate", cache_dir=tmp_path / "cache", max_tokens=2)
    with closing(build_pipeline(settings, generator=engine)) as built:
        assert built.ask(Question("Which?", DOCUMENTS[1:])).usage.prompt_tokens > 0
        made = built.assembler.assemble("Which?", DOCUMENTS[1:])
    assert [len(span) for span in made.layout.passages] == [14, 14]
    with pytest.raises(ConfigError, match="say how many a passage may have"):
        build_pipeline(Settings(model="/nowhere", passage_shrink=0.5))
