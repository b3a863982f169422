"""An index is built from files and brought up to date: only new texts are embedded, and searches find what they find
in an index that is built from the same files."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rag_posfix.contracts.retrieval import SimilarityRange
from rag_posfix.errors import ConfigError, RetrievalError
from rag_posfix.retrieval.base import PACKAGED_SIMILARITY, PassageRetriever
from rag_posfix.retrieval.bm25 import BM25Retriever
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.index import storage
from rag_posfix.retrieval.index.file_formats import BM25_ROLES
from rag_posfix.retrieval.index.storage import locked, read_manifest
from rag_posfix.retrieval.indexing import FOREIGN_QUESTIONS, build_index, calibrate_index, update_index
from rag_posfix.retrieval.ingest.ingest import read_documents
from rag_posfix.retrieval.ingest.passages import PassageSize
from tests.support.letter_embeddings import LetterEmbeddings


def test_files_become_an_index_with_progress(embeddings, tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(f"paragraph {number}" for number in range(300)))
    seen = []
    manifest = build_index(
        [tmp_path / "a.txt"],
        tmp_path / "index",
        embeddings,
        progress=lambda done, total: seen.append((done, total)),
        size=PassageSize(words=2),
    )
    assert manifest.count == 300
    assert seen == [(256, 300), (300, 300)]
    assert len(FaissVectorStore.load(tmp_path / "index", embeddings)) == 300


def test_a_folder_that_cannot_be_used_is_refused_before_anything_is_read(embeddings, tmp_path):
    (tmp_path / "mine.bin").write_bytes(b"")
    with pytest.raises(RetrievalError, match="exists and is not an index"):
        build_index([tmp_path / "missing.txt"], tmp_path, embeddings)


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "more").mkdir(parents=True)
    (folder / "a.txt").write_text("abc abd")
    (folder / "b.md").write_text("bbb")
    (folder / "more" / "c.jsonl").write_text(
        '{"id": "one", "title": "T", "text": "ccc"}\n{"id": "two", "text": "cab"}\n'
    )
    return folder


def counts(update):
    return update.added, update.changed, update.unchanged, update.removed, update.embedded


def everything(folder):
    """What searches find in an index, by vectors and by words, with scores and metadata."""
    store = FaissVectorStore.load(folder, LetterEmbeddings())
    words = BM25Retriever.load(folder)
    return [
        (store.similarity_search_with_score(question, 50), words.retrieve(question, 50))
        for question in ("abc", "cab", "ccc bbb", "d")
    ]


def test_a_first_time_everything_is_added_and_a_second_time_nothing_is_done(corpus, embeddings, tmp_path):
    first = update_index([corpus], tmp_path / "index", embeddings)
    assert counts(first) == (4, 0, 0, 0, 4)
    names = sorted(path.name for path in (tmp_path / "index").iterdir())
    embeddings.texts.clear()
    second = update_index([corpus], tmp_path / "index", embeddings)
    assert counts(second) == (0, 0, 4, 0, 0)
    assert (second.removed_documents, second.manifest) == ((), first.manifest)
    assert embeddings.texts == []
    assert sorted(path.name for path in (tmp_path / "index").iterdir()) == names


def test_only_what_is_new_is_embedded_and_what_is_gone_is_told(corpus, embeddings, tmp_path):
    update_index([corpus], tmp_path / "index", embeddings)
    (corpus / "a.txt").unlink()
    (corpus / "d.txt").write_text("ddd")
    (corpus / "more" / "c.jsonl").write_text(
        '{"id": "one", "title": "T", "text": "ccd"}\n{"id": "two", "text": "cab"}\n'
    )
    embeddings.texts.clear()
    seen = []
    update = update_index([corpus], tmp_path / "index", embeddings, progress=lambda *at: seen.append(at))
    assert sorted(embeddings.texts) == ["T\nccd", "ddd"]
    assert seen == [(2, 2)]
    assert counts(update) == (1, 1, 2, 1, 2)
    assert sorted(document.page_content for document in update.removed_documents) == ["abc abd", "ccc"]
    build_index([corpus], tmp_path / "fresh", embeddings)
    assert everything(tmp_path / "index") == everything(tmp_path / "fresh")


def test_what_came_from_other_paths_stays(corpus, embeddings, tmp_path):
    update_index([corpus], tmp_path / "index", embeddings)
    shutil.rmtree(corpus / "more")
    (corpus / "more").mkdir()
    (corpus / "more" / "d.txt").write_text("ddd")
    (corpus / "a.txt").unlink()
    update = update_index([corpus / "more"], tmp_path / "index", embeddings)
    assert counts(update) == (1, 0, 2, 2, 1)
    held = {document.page_content for document in FaissVectorStore.load(tmp_path / "index", embeddings).documents()}
    assert held == {"abc abd", "bbb", "ddd"}, "a.txt was not asked about"


def test_paths_may_be_written_in_another_way(corpus, embeddings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    update_index(["corpus"], "index", embeddings)
    (corpus / "a.txt").unlink()
    update = update_index([corpus / "more" / ".."], "index", embeddings)
    assert (update.added, update.removed, update.embedded) == (0, 1, 0)


def test_a_passage_in_two_files_stays_until_both_are_gone(corpus, embeddings, tmp_path):
    copy = corpus / "more" / "a.txt"  # of another name it would have another title
    copy.write_text("abc abd")
    update_index([corpus], tmp_path / "index", embeddings)
    (corpus / "a.txt").unlink()
    update = update_index([corpus], tmp_path / "index", embeddings)
    assert (update.removed, update.embedded, update.removed_documents) == (0, 0, ())
    build_index([corpus], tmp_path / "fresh", embeddings)
    assert everything(tmp_path / "index") == everything(tmp_path / "fresh"), "with the copy as the source"
    copy.unlink()
    assert update_index([corpus], tmp_path / "index", embeddings).removed == 1


def test_a_vector_is_taken_from_any_document_with_the_text(corpus, embeddings, tmp_path):
    update_index([corpus], tmp_path / "index", embeddings)
    (corpus / "more" / "c.jsonl").write_text('{"id": "1", "title": "T", "text": "ccc"}\n{"id": "2", "text": "cab"}\n')
    update = update_index([corpus], tmp_path / "index", embeddings)
    assert counts(update) == (2, 0, 2, 2, 0)
    build_index([corpus], tmp_path / "fresh", embeddings)
    assert everything(tmp_path / "index") == everything(tmp_path / "fresh")


def test_new_metadata_of_an_old_text_is_kept_without_embedding(corpus, embeddings, tmp_path):
    update_index([corpus], tmp_path / "index", embeddings)
    (corpus / "more" / "c.jsonl").write_text(
        '{"id": "one", "title": "T", "text": "ccc", "metadata": {"year": 1}}\n{"id": "two", "text": "cab"}\n'
    )
    update = update_index([corpus], tmp_path / "index", embeddings)
    assert counts(update) == (0, 1, 3, 0, 0)
    assert update.removed_documents == ()
    found = FaissVectorStore.load(tmp_path / "index", embeddings).similarity_search("ccc", 9, filter={"year": 1})
    assert [document.id for document in found] == ["one"]


def test_an_id_of_another_document_from_elsewhere_is_refused_and_the_index_stays(corpus, embeddings, tmp_path):
    update_index([corpus], tmp_path / "index", embeddings)
    (tmp_path / "other.jsonl").write_text('{"id": "two", "text": "another"}\n')
    message = r"id 'two' belongs .*other\.jsonl and, from an earlier indexing, in .*c\.jsonl"
    with pytest.raises(RetrievalError, match=message):
        update_index([tmp_path / "other.jsonl"], tmp_path / "index", embeddings)
    assert read_manifest(tmp_path / "index").count == 4


def test_documents_that_came_from_no_file_stay(corpus, embeddings, tmp_path):
    update_index([corpus], tmp_path / "index", embeddings)
    store = FaissVectorStore.load(tmp_path / "index", embeddings)
    store.add_texts(["by hand"], [{"source": str(corpus / "a.txt")}], ids=["mine"])
    store.save(tmp_path / "index")
    (corpus / "a.txt").unlink()
    update = update_index([corpus], tmp_path / "index", embeddings)
    assert (update.removed, update.unchanged) == (1, 4)
    assert set(BM25_ROLES) <= set(update.manifest.files), "what a plain save leaves out"


def test_the_last_document_does_not_go(corpus, embeddings, tmp_path):
    update_index([corpus / "a.txt"], tmp_path / "index", embeddings)
    (corpus / "a.txt").write_text(" ")
    with pytest.raises(RetrievalError, match="no documents in"):
        update_index([corpus / "a.txt"], tmp_path / "index", embeddings)
    assert read_manifest(tmp_path / "index").count == 1


def test_another_model_is_refused_and_a_rebuild_takes_it(corpus, embeddings, tmp_path):
    update_index([corpus], tmp_path / "index", embeddings)
    with pytest.raises(RetrievalError, match=r"built with embedding model 'letters:26', not 'new:26'.*--rebuild"):
        update_index([corpus], tmp_path / "index", LetterEmbeddings("new:26"))
    (corpus / "a.txt").write_text("abe")
    update = update_index([corpus], tmp_path / "index", LetterEmbeddings("new:26"), rebuild=True)
    assert counts(update) == (4, 0, 0, 1, 4)
    assert [document.page_content for document in update.removed_documents] == ["abc abd"]


def test_a_rebuild_does_not_mind_a_damaged_index(corpus, embeddings, tmp_path):
    update_index([corpus], tmp_path / "index", embeddings)
    for path in (tmp_path / "index").glob("documents-*"):
        path.write_bytes(b"")
    with pytest.raises(RetrievalError, match="damaged"):
        update_index([corpus], tmp_path / "index", embeddings)
    assert update_index([corpus], tmp_path / "index", embeddings, rebuild=True).added == 4


file_texts = st.text(alphabet="abcd \n", min_size=1, max_size=12).filter(str.strip)
states = st.dictionaries(st.sampled_from(["a.txt", "b.txt", "c.md"]), file_texts, min_size=1)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=st.lists(states, min_size=1, max_size=4))
def test_whatever_the_history_searches_find_what_they_find_in_a_fresh_index(tmp_path_factory, history):
    root = tmp_path_factory.mktemp("history")
    (root / "corpus").mkdir()
    for number, state in enumerate(history):
        for file in (root / "corpus").iterdir():
            file.unlink()
        for name, text in state.items():
            (root / "corpus" / name).write_text(text)
        update_index([root / "corpus"], root / "index", LetterEmbeddings())
        build_index([root / "corpus"], root / f"fresh-{number}", LetterEmbeddings())
        assert everything(root / "index") == everything(root / f"fresh-{number}")


def test_words_of_an_older_index_are_counted_again(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("青石镇的产假为六个月。", encoding="utf-8")
    write = storage.write_bm25_files

    def write_older(index, paths):
        index.words_version = 1
        index.words = {word[0]: row for word, row in index.words.items()}  # a character is a word
        write(index, paths)

    monkeypatch.setattr(storage, "write_bm25_files", write_older)
    build_index(tmp_path / "a.txt", tmp_path / "index", LetterEmbeddings())
    monkeypatch.undo()
    (document,) = BM25Retriever.load(tmp_path / "index").invoke("产假有多长?")
    assert document.page_content == "青石镇的产假为六个月。"
    assert "产假" in BM25Retriever.load(tmp_path / "index").statistics().words


def test_an_index_below_the_files_is_not_read_as_files(embeddings, tmp_path):
    (tmp_path / "a.md").write_text("old price")
    update_index([tmp_path], tmp_path / "my.index", embeddings)
    (tmp_path / "a.md").write_text("new price")
    update = update_index([tmp_path], tmp_path / "my.index", embeddings)
    assert (update.added, update.removed) == (1, 1)
    assert [d.page_content for d in read_documents([tmp_path])] == ["new price"]


def test_a_folder_that_cannot_be_listed_keeps_what_the_index_holds_of_it(corpus, embeddings, tmp_path, monkeypatch):
    update_index([corpus], tmp_path / "index", embeddings)
    real = os.scandir

    def scandir(path):
        if str(path).endswith("more"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    update = update_index([corpus], tmp_path / "index", embeddings, strict=False)
    assert (update.removed, update.unchanged) == (0, 4)
    assert [(file.file, file.kind) for file in update.skipped] == [(str(corpus / "more"), "unreadable")]


# An update that is stopped keeps its vectors, and two updates of one index at once do not lose data.


ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def two_steps(tmp_path):
    """Two steps of texts."""
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(f'{{"id": "{number}", "text": "text {number} abc"}}\n' for number in range(300)))
    return file


@contextmanager
def an_indexer(two_steps, index, steps):
    """Another process that is in its n-th step; killed at the end."""
    command = [sys.executable, "-m", "tests.unit.retrieval.killed_indexer", str(two_steps), str(index)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            for _ in range(steps):
                assert process.stdout.readline() == "step\n"
            yield process
        finally:
            process.kill()


class Interrupting(LetterEmbeddings):
    def embed_documents(self, texts):
        if self.texts:
            raise KeyboardInterrupt
        return super().embed_documents(texts)


def test_work_before_an_interruption_is_kept_and_continued(two_steps, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        update_index([two_steps], tmp_path / "index", Interrupting())
    assert not (tmp_path / "index").exists()
    rest = LetterEmbeddings()
    update = update_index([two_steps], tmp_path / "index", rest)
    assert (update.embedded, update.continued, len(rest.texts)) == (44, 256, 44)
    fresh = update_index([two_steps], tmp_path / "fresh", LetterEmbeddings())
    assert (fresh.embedded, fresh.continued) == (300, 0)
    found, expected = (
        FaissVectorStore.load(tmp_path / name, LetterEmbeddings()).similarity_search_with_score("text abc", 300)
        for name in ("index", "fresh")
    )
    assert found == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "fresh", "index"]


@pytest.mark.slow
def test_work_before_a_kill_is_kept_and_what_the_killed_process_left_is_removed(two_steps, tmp_path):
    left = tmp_path / ".index.0123456789ab.partial"
    left.mkdir()
    (left / "vectors-0123456789ab.faiss").write_bytes(b"half")
    (tmp_path / ".other.0123456789ab.partial").mkdir()
    (tmp_path / ".index.2024.0123456789ab.partial").mkdir()  # of the index index.2024
    (tmp_path / ".index.backup.partial").mkdir()  # of another program
    with an_indexer(two_steps, tmp_path / "index", steps=2):
        pass
    update = update_index([two_steps], tmp_path / "index", LetterEmbeddings())
    assert (update.embedded, update.continued, update.manifest.count) == (44, 256, 300)
    names = sorted(path.name for path in tmp_path.iterdir())
    kept = [".index.2024.0123456789ab.partial", ".index.backup.partial", ".other.0123456789ab.partial"]
    assert names == [*kept, "corpus.jsonl", "index"]


def test_kept_vectors_of_another_model_or_of_damage_are_not_used(two_steps, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        update_index([two_steps], tmp_path / "index", Interrupting())
    assert update_index([two_steps], tmp_path / "index", LetterEmbeddings("new:26")).continued == 0
    with pytest.raises(KeyboardInterrupt):
        update_index([two_steps], tmp_path / "again", Interrupting())
    (tmp_path / ".again.embedded").write_bytes(b"no database" * 99)
    update = update_index([two_steps], tmp_path / "again", LetterEmbeddings())
    assert (update.continued, update.embedded) == (0, 300)


@pytest.mark.slow
def test_a_second_indexer_is_told_about_the_first_and_neither_loses_data(two_steps, tmp_path):
    with an_indexer(two_steps, tmp_path / "index", steps=1) as first:
        message = rf"index.*' is being written by another process \(process {first.pid}\); wait until it ends"
        with pytest.raises(RetrievalError, match=message):
            update_index([two_steps], tmp_path / "index", LetterEmbeddings())
        assert update_index([two_steps], tmp_path / "other", LetterEmbeddings()).added == 300
    assert update_index([two_steps], tmp_path / "index", LetterEmbeddings()).manifest.count == 300


def test_a_writer_may_enter_its_own_lock_again(tmp_path):
    with locked(tmp_path / "index"):
        with locked(tmp_path / "index"):
            pass
        assert (tmp_path / ".index.lock").exists(), "the inner block does not free it"
    assert list(tmp_path.iterdir()) == []


# The similarities of an index to questions that have nothing to do with it.


class Angles(Embeddings):
    """Embeds a number as the vector whose cosine with any other text is that number in hundredths."""

    identity = "angles"

    def __init__(self, model="angles"):
        self.model = model

    def embed_documents(self, texts):
        return [[1.0, 0.0] for _ in texts]

    def embed_query(self, text):
        cosine = int(text) / 100
        return [cosine, math.sqrt(1 - cosine**2)]


QUESTIONS = [str(number) for number in range(21)]
# Best similarities 0, .01, ..., .20: 25 % quantile .05, median .10, 95 % quantile .19, so clear = 2 * .19 - .10.
EXPECTED = SimilarityRange(low=0.05, clear=0.28)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").write_text("The lamp is lit.", "utf-8")
    update_index([tmp_path / "files"], tmp_path / "index", Angles())
    return tmp_path


def test_the_range_is_that_of_the_quantiles_and_stays_with_the_index(folder):
    assert FaissVectorStore.load(folder / "index", Angles()).similarity is None
    assert calibrate_index(folder / "index", Angles(), QUESTIONS) == EXPECTED
    (folder / "files" / "b.txt").write_text("The lamp is out.", "utf-8")
    assert update_index([folder / "files"], folder / "index", Angles()).added == 1
    store = FaissVectorStore.load(folder / "index", Angles())
    assert PassageRetriever(store=store).similarity_range() == EXPECTED
    assert json.loads((folder / "index" / "manifest.json").read_text())["similarity"] == {"low": 0.05, "clear": 0.28}


def test_an_index_that_answers_the_questions_leaves_more_to_the_judge(folder):
    assert calibrate_index(folder / "index", Angles(), [*QUESTIONS[:10], *["90"] * 3]).clear == 1.0


def test_the_packaged_model_has_a_range_without_calibration():
    store = FaissVectorStore(Angles("minilm"))
    store.add_documents([Document(page_content="a")])
    assert PassageRetriever(store=store).similarity_range() == PACKAGED_SIMILARITY
    chosen = SimilarityRange(0.1, 0.2)
    assert PassageRetriever(store=store, similarity=chosen).similarity_range() == chosen


def test_few_questions_and_a_missing_index_are_errors(folder):
    assert len(set(FOREIGN_QUESTIONS)) == len(FOREIGN_QUESTIONS) >= 30
    with pytest.raises(ConfigError, match="3 foreign questions are given; at least 10 are needed"):
        calibrate_index(folder / "index", Angles(), QUESTIONS[:3])
    with pytest.raises(RetrievalError, match="there is no folder"):
        calibrate_index(folder / "other", Angles(), QUESTIONS)
