"""An index that is replaced while it is searched: by another version, or by none."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding

from rag_posfix.contracts.retrieval import SearchQuery, current_of, retrieve_query
from rag_posfix.pipeline.retrievers_and_servers import open_retriever
from rag_posfix.retrieval import indexing
from rag_posfix.retrieval.bm25 import BM25Index, BM25Retriever
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.index.documents import searchable_text
from rag_posfix.retrieval.index.storage import read_manifest
from rag_posfix.retrieval.indexing import FollowedIndex
from rag_posfix.settings import Settings
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.subprocesses import run_python
from tests.unit.retrieval.index_files import data_file

OLD, NEW = ("bridge of iron", "harbour of ice"), ("bridge of iron", "zeppelin of gas")


def write(folder: Path, texts: tuple[str, ...], embeddings: LetterEmbeddings | None = None) -> Path:
    store = FaissVectorStore.from_texts(list(texts), embeddings or LetterEmbeddings(), ids=list(texts))
    store.save(folder, bm25=BM25Index.build(searchable_text(document) for document in store.documents()))
    return folder


def opened(folder: Path, retriever: str = "hybrid") -> FollowedIndex:
    settings = Settings(retriever=retriever, cache_dir=folder.parent)
    index, store = open_retriever(settings, folder, LetterEmbeddings(), follows=True)  # type: ignore[arg-type]
    assert isinstance(index, FollowedIndex)
    assert store is None, "a store that cannot be changed is not watched for changes"
    return index


def ids_of(retriever, question: str = "zeppelin harbour") -> set[str]:
    return {str(document.id) for document in retrieve_query(retriever, SearchQuery(question), 5, None)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "index", OLD)


def deleted_files(folder: Path) -> list[str]:
    """The files of a folder that this process has open or mapped and that are deleted."""
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "(deleted)" in line]
    handles = []
    for entry in os.scandir("/proc/self/fd"):
        try:
            handles.append(os.readlink(entry.path))
        except OSError:
            continue
    return [name for name in (*mapped, *handles) if f"{folder}/" in name and "(deleted)" in name]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="/proc of Linux is needed")
@pytest.mark.parametrize("retriever", ["dense", "bm25", "hybrid"])
def test_a_question_keeps_its_version_and_the_files_close_with_the_last_question(folder: Path, retriever: str):
    index = opened(folder, retriever)
    question = current_of(index)
    assert index.reload() is False
    first = index.version.name
    write(folder, NEW)
    assert index.reload() is True
    assert index.version.name != first
    assert index.version.manifest == read_manifest(folder)
    assert "zeppelin of gas" in ids_of(current_of(index))
    assert "harbour of ice" not in ids_of(current_of(index))
    assert "zeppelin of gas" in {str(document.id) for document in index.retrieve("zeppelin", 5)}
    assert "harbour of ice" in ids_of(question), "the files of the old version were closed too early"
    assert deleted_files(folder)
    del question
    assert not deleted_files(folder)


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": "rag-posf')


def damage_version(folder: Path) -> None:
    fields = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**fields, "version": 99}))


def truncate(folder: Path, role: str) -> None:
    path = data_file(folder, role)
    path.write_bytes(path.read_bytes()[:-7])


def flip(folder: Path, role: str) -> None:
    path = data_file(folder, role)
    content = bytearray(path.read_bytes())
    content[-9] ^= 0xFF
    path.write_bytes(content)


DAMAGE = {
    "manifest": damage_manifest,
    "version": damage_version,
    "vectors": lambda folder: truncate(folder, "vectors"),
    "documents": lambda folder: flip(folder, "documents"),
    "words": lambda folder: data_file(folder, "bm25_texts").unlink(),
    "all": shutil.rmtree,
    "model": lambda folder: write(folder, NEW, LetterEmbeddings("another:26")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_version_that_cannot_be_read_leaves_the_version_before(folder: Path, tmp_path: Path, damage: str, caplog):
    """The new version comes by ``rename``, as a copy would: a damaged file is never one that is served."""
    index = opened(folder)
    before = index.version
    new = write(tmp_path / "new", NEW)
    DAMAGE[damage](new)
    folder.rename(tmp_path / "old")
    if new.exists():
        new.rename(folder)
    assert index.reload(force=False) is False
    assert index.version is before
    assert index.failure
    assert index.failure in caplog.text
    assert "harbour of ice" in ids_of(current_of(index))
    since = index.failing_since
    assert index.reload() is False
    assert index.failing_since == since
    shutil.rmtree(folder, ignore_errors=True)
    write(folder, NEW)
    assert index.reload(force=False) is True
    assert index.failure is None
    assert "zeppelin of gas" in ids_of(current_of(index))


class CountedLoads:
    """Opens a followed index, and counts how often its folder is read."""

    def __init__(self, folder: Path) -> None:
        self.count = 0
        self.before_return: list = []
        settings = Settings(retriever="bm25", cache_dir=folder.parent)

        def load():
            self.count += 1
            retriever, _ = open_retriever(settings, folder, LetterEmbeddings(), mmap=True)  # type: ignore[arg-type]
            if self.before_return:
                self.before_return.pop(0)()
            return retriever

        self.index = FollowedIndex(folder, load)


def test_a_version_that_arrives_file_by_file_is_served_when_it_is_complete(folder: Path, tmp_path: Path):
    """The manifest comes first, as with a copy in the order of names; each state is tried once."""
    loads = CountedLoads(folder)
    new = write(tmp_path / "new", NEW)
    for file in folder.iterdir():
        file.unlink()
    # The search by words reads no vectors.
    files = sorted(new.iterdir(), key=lambda file: (file.name != "manifest.json", file.name.startswith("bm25")))
    for file in files[:-1]:
        shutil.copy(file, folder)
        assert loads.index.reload(force=False) is False
        tried = loads.count
        assert loads.index.reload(force=False) is False
        assert loads.count == tried, "files that did not change were read again"
        assert loads.index.failure
        assert ids_of(current_of(loads.index), "harbour") == {"harbour of ice"}
    shutil.copy(files[-1], folder)
    assert loads.index.reload(force=False) is True
    assert ids_of(current_of(loads.index), "zeppelin") == {"zeppelin of gas"}


def test_a_failure_that_no_file_shows_is_tried_again_later(folder: Path, monkeypatch):
    loads = CountedLoads(folder)
    write(folder, NEW)

    def fail():
        raise MemoryError("no memory")

    loads.before_return.append(fail)
    assert loads.index.reload(force=False) is False
    assert loads.index.failure == "MemoryError: no memory"
    assert loads.index.reload(force=False) is False
    assert loads.index.failure, "it is not tried at every look"
    monkeypatch.setattr(indexing.time, "monotonic", lambda: 1e12)
    assert loads.index.reload(force=False) is True


def test_parts_of_two_versions_are_never_served_together(folder: Path):
    """The folder is replaced while it is read: what was read is read again."""
    loads = CountedLoads(folder)
    write(folder, NEW)
    newest = ("airship of gas", *NEW)
    loads.before_return.append(lambda: write(folder, newest))
    assert loads.index.reload() is True
    assert loads.count == 3
    assert loads.index.version.manifest == read_manifest(folder)
    assert ids_of(current_of(loads.index), "airship") == {"airship of gas"}


def test_a_program_reads_an_index_that_is_replaced_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """``ask`` beside a scheduled ``index``: the words of the version that it began with are deleted."""
    replaced, load = [], BM25Retriever.load

    def load_late(path: Path, **options: Any) -> BM25Retriever:
        if not replaced:
            replaced.append(write(folder, NEW))
        return load(path, **options)

    monkeypatch.setattr(BM25Retriever, "load", load_late)
    settings = Settings(retriever="hybrid", cache_dir=folder.parent)
    retriever, store = open_retriever(settings, folder, LetterEmbeddings())  # type: ignore[arg-type]
    assert replaced
    assert store is not None
    assert {str(document.id) for document in store.documents()} == set(NEW)
    assert ids_of(retriever, "zeppelin") == set(NEW)


def test_an_index_that_is_replaced_all_the_time_leaves_the_version_before(folder: Path):
    loads = CountedLoads(folder)
    write(folder, NEW)
    loads.before_return += [lambda: write(folder, NEW)] * 5
    assert loads.index.reload() is False
    assert "was replaced 5 times while it was read" in str(loads.index.failure)
    assert ids_of(current_of(loads.index), "harbour") == {"harbour of ice"}


def test_two_reloads_at_once_read_the_new_version_once(folder: Path):
    loads = CountedLoads(folder)
    write(folder, NEW)
    reading, go_on = threading.Event(), threading.Event()

    def wait():
        reading.set()
        assert go_on.wait(60)

    loads.before_return.append(wait)
    results = []
    threads = [threading.Thread(target=lambda: results.append(loads.index.reload())) for _ in range(2)]
    threads[0].start()
    assert reading.wait(60)
    threads[1].start()
    assert ids_of(current_of(loads.index), "harbour") == {"harbour of ice"}, "questions wait for a reload"
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [False, True]
    assert loads.count == 2


def test_a_link_to_another_folder_is_followed(tmp_path: Path):
    """As Kubernetes and releases switch folders."""
    for name, texts in (("one", OLD), ("two", NEW)):
        write(tmp_path / name, texts)
    link = tmp_path / "current"
    link.symlink_to("one")
    index = opened(link)
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(link)
    assert index.reload(force=False) is True
    assert "zeppelin of gas" in ids_of(current_of(index))


MEMORY = """
    import sys
    from pathlib import Path
    from langchain_core.embeddings import DeterministicFakeEmbedding
    from rag_posfix.contracts.retrieval import current_of
    from rag_posfix.pipeline.retrievers_and_servers import open_retriever
    from rag_posfix.settings import Settings

    def anonymous():
        '''kB of memory that no other process can share.'''
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))

    settings, folder = Settings(retriever="hybrid"), Path(sys.argv[1])
    embeddings, before, opened = DeterministicFakeEmbedding(size=384), 0, []
    for name in ("small", "large"):
        before = anonymous()
        opened.append(open_retriever(settings, folder / name, embeddings, follows=sys.argv[2] == "True")[0])
        current_of(opened[-1]).retrieve("word 7", 5)
    print(anonymous() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="/proc of Linux is needed")
@pytest.mark.slow
def test_a_followed_index_is_memory_that_processes_share(tmp_path: Path):
    """The vectors alone have 15 MB; ids and keys in memory remain, and the words of the search by words."""
    embeddings = DeterministicFakeEmbedding(size=384)
    for name, count in (("small", 10), ("large", 10_000)):
        store = FaissVectorStore(embeddings, kind="flat")
        texts = [f"word {number} " + "and some more text of a passage " * 5 for number in range(count)]
        vectors = np.random.default_rng(1).standard_normal((count, 384), dtype=np.float32)
        store.add_vectors([Document(text, id=str(number)) for number, text in enumerate(texts)], vectors)
        store.save(tmp_path / name, bm25=BM25Index.build(texts))
    loaded, mapped = (int(run_python(MEMORY, tmp_path, follows)) for follows in (False, True))
    assert loaded > 15_000
    assert mapped < loaded / 2
