"""What can be wrong is told before a model is loaded, and a cached answer needs none."""

from __future__ import annotations

import json

import pytest

from rag_posfix.retrieval.faiss_store import FaissVectorStore
from tests.support.command_line import cache_with_models, command_line
from tests.support.letter_embeddings import LetterEmbeddings


@pytest.fixture
def run(capsysbinary, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("RAG_POSFIX_CACHE_DIR", str(cache_with_models(tmp_path_factory.mktemp("cache"))))
    return command_line(capsysbinary)


@pytest.fixture
def loads_nothing(monkeypatch):
    def loaded(*_arguments, **_options):
        pytest.fail("something was loaded before the error was told")

    for name in ("build_pipeline", "build_engine", "build_embeddings"):
        monkeypatch.setattr(f"rag_posfix.pipeline.build.{name}", loaded)
    monkeypatch.setattr("rag_posfix_api.server.run", loaded)
    monkeypatch.setattr("rag_posfix.generation.load.load_engine", loaded)


@pytest.fixture
def index(tmp_path):
    store = FaissVectorStore.from_texts(["aaa", "bbb"], LetterEmbeddings())
    store.save(tmp_path / "my.index")
    return tmp_path / "my.index"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["ask", " ", "--index", "INDEX"], "the question is empty"),
        (["ask", "x", "--index", "MISSING"], "there is no folder 'MISSING'; check its name, or make an index with"),
        (["ask", "x", "--index", "INDEX", "--order", "revers"], "Did you mean 'reverse'"),
        (["ask", "x", "--index", "INDEX", "--reranker", "likelyhood"], "Did you mean 'likelihood'"),
        (["serve", "--index", "MISSING", "--port", "0"], "there is no folder 'MISSING'"),
        (["eval", "positions", "--data", "x", "--out", "FILE/out"], "'FILE' is a file; give a folder"),
        (["probe", "positional-dimensions", "--out", "FILE"], "'FILE' is a file; give a folder"),
    ],
)
def test_it_is_told_before_anything_is_loaded(run, loads_nothing, index, tmp_path, options, part):
    (tmp_path / "files").mkdir()
    (tmp_path / "file").write_text("")
    places = {
        "INDEX": str(index), "MISSING": str(tmp_path / "missing"), "FILES": str(tmp_path / "files"),
        "FILE": str(tmp_path / "file"), "OUT": str(tmp_path / "new.index"),
    }  # fmt: skip

    def filled(text):
        for name in ("MISSING", "FILES", "FILE", "INDEX", "OUT"):
            text = text.replace(name, places[name])
        return text

    code, out, err = run(*map(filled, options))
    assert (code, out) == (1, "")
    assert filled(part) in err
    assert len(err.splitlines()) == 1


def test_an_index_with_a_cut_file_is_told_before_anything_is_loaded(run, loads_nothing, index):
    next(index.glob("documents-*")).write_bytes(b"")
    code, _, err = run("serve", "--index", index, "--port", "0")
    assert (code, "damaged" in err) == (1, True)


def test_a_cached_answer_is_given_without_the_model(run, tiny, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("The Maravel lighthouse was designed by Ilse Korvanth.")
    assert run("index", tmp_path / "a.txt", "--out", tmp_path / "my.index")[0] == 0
    monkeypatch.setenv("RAG_POSFIX_KEEP_ON_DISK", "true")
    asked = ["ask", "Who designed the lighthouse?", "--index", tmp_path / "my.index", "--max-tokens", "2", "--json"]
    first = json.loads(run(*asked)[1])
    monkeypatch.setattr("rag_posfix.pipeline.build.load_engine", lambda *_, **__: pytest.fail("loaded"))
    code, out, _ = run(*asked)
    second = json.loads(out)
    assert (code, second["cached"], second["answer"]) == (0, True, first["answer"])
    assert first["cached"] is False
