"""An update that is stopped keeps its vectors, and two updates of one index at once do not lose data."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.index.storage import locked
from rag_posfix.retrieval.indexing import update_index
from tests.support.letter_embeddings import LetterEmbeddings

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def corpus(tmp_path):
    """Two steps of texts."""
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(f'{{"id": "{number}", "text": "text {number} abc"}}\n' for number in range(300)))
    return file


@contextmanager
def an_indexer(corpus, index, steps):
    """Another process that is in its n-th step; killed at the end."""
    command = [sys.executable, "-m", "tests.unit.retrieval.killed_indexer", str(corpus), str(index)]
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


def test_work_before_an_interruption_is_kept_and_continued(corpus, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        update_index([corpus], tmp_path / "index", Interrupting())
    assert not (tmp_path / "index").exists()
    rest = LetterEmbeddings()
    update = update_index([corpus], tmp_path / "index", rest)
    assert (update.embedded, update.continued, len(rest.texts)) == (44, 256, 44)
    fresh = update_index([corpus], tmp_path / "fresh", LetterEmbeddings())
    assert (fresh.embedded, fresh.continued) == (300, 0)
    found, expected = (
        FaissVectorStore.load(tmp_path / name, LetterEmbeddings()).similarity_search_with_score("text abc", 300)
        for name in ("index", "fresh")
    )
    assert found == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "fresh", "index"]


@pytest.mark.slow
def test_work_before_a_kill_is_kept_and_what_the_killed_process_left_is_removed(corpus, tmp_path):
    left = tmp_path / ".index.0123456789ab.partial"
    left.mkdir()
    (left / "vectors-0123456789ab.faiss").write_bytes(b"half")
    (tmp_path / ".other.0123456789ab.partial").mkdir()
    (tmp_path / ".index.2024.0123456789ab.partial").mkdir()  # of the index index.2024
    (tmp_path / ".index.backup.partial").mkdir()  # of another program
    with an_indexer(corpus, tmp_path / "index", steps=2):
        pass
    update = update_index([corpus], tmp_path / "index", LetterEmbeddings())
    assert (update.embedded, update.continued, update.manifest.count) == (44, 256, 300)
    names = sorted(path.name for path in tmp_path.iterdir())
    kept = [".index.2024.0123456789ab.partial", ".index.backup.partial", ".other.0123456789ab.partial"]
    assert names == [*kept, "corpus.jsonl", "index"]


def test_kept_vectors_of_another_model_or_of_damage_are_not_used(corpus, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        update_index([corpus], tmp_path / "index", Interrupting())
    assert update_index([corpus], tmp_path / "index", LetterEmbeddings("new:26")).continued == 0
    with pytest.raises(KeyboardInterrupt):
        update_index([corpus], tmp_path / "again", Interrupting())
    (tmp_path / ".again.embedded").write_bytes(b"no database" * 99)
    update = update_index([corpus], tmp_path / "again", LetterEmbeddings())
    assert (update.continued, update.embedded) == (0, 300)


@pytest.mark.slow
def test_a_second_indexer_is_told_about_the_first_and_neither_loses_data(corpus, tmp_path):
    with an_indexer(corpus, tmp_path / "index", steps=1) as first:
        message = rf"index.*' is being written by another process \(process {first.pid}\); wait until it ends"
        with pytest.raises(RetrievalError, match=message):
            update_index([corpus], tmp_path / "index", LetterEmbeddings())
        assert update_index([corpus], tmp_path / "other", LetterEmbeddings()).added == 300
    assert update_index([corpus], tmp_path / "index", LetterEmbeddings()).manifest.count == 300


def test_a_writer_may_enter_its_own_lock_again(tmp_path):
    with locked(tmp_path / "index"):
        with locked(tmp_path / "index"):
            pass
        assert (tmp_path / ".index.lock").exists(), "the inner block does not free it"
    assert list(tmp_path.iterdir()) == []
