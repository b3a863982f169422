"""Collections whose folder cannot be listed for a moment, has other files, or could not be made."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document

from rag_posfix.errors import RetrievalError
from rag_posfix_api.collections.store import Collections
from rag_posfix_api.http.errors import RequestError
from tests.services.durable_stores import full_disk
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.tenants import Tenants


@contextmanager
def unlisted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder cannot be listed meanwhile, by any call of Python."""
    scandir, listdir = os.scandir, os.listdir

    def failing(list_folder: Callable[[Any], Any]) -> Callable[..., Any]:
        def fail(path: Any = ".") -> Any:
            if Path(path) == folder:
                raise OSError(errno.EACCES, "Permission denied")
            return list_folder(path)

        return fail

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", failing(scandir))
        patched.setattr(os, "listdir", failing(listdir))
        yield


def test_a_collection_whose_folder_cannot_be_listed_is_not_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    collections, letters = Collections(tmp_path, 10, 1000), LetterEmbeddings()
    collections.create("acme", "one", letters)
    one = collections.get("acme", "one", letters, lambda gone: None)
    one.put([Document(id="a", page_content="text")])
    with unlisted(one.folder, monkeypatch):
        with pytest.raises(RequestError, match="cannot write"):
            collections.create("acme", "one", letters)
        for read in (one.documents, lambda: collections.info("acme", "one")):
            with pytest.raises(RequestError, match="cannot read"):
                read()
        assert collections.of("acme") == []
    with unlisted(one.folder.parent, monkeypatch), pytest.raises(RequestError, match="cannot read"):
        collections.of("acme")
    assert [info.name for info in collections.of("acme")] == ["one"]
    assert [document.id for document in one.documents()] == ["a"]
    assert len(list(one.folder.glob("documents-*.sqlite"))) == 1


def test_a_folder_with_other_files_is_not_taken_for_a_new_collection(tmp_path: Path):
    collections = Collections(tmp_path, 10, 1000)
    folder = tmp_path / "acme" / "one"
    folder.mkdir(parents=True)
    (folder / "documents.sqlite.old").write_text("documents")
    with pytest.raises(RequestError, match=r"has files and no collection \(documents.sqlite.old"):
        collections.create("acme", "one", LetterEmbeddings())
    assert (folder / "documents.sqlite.old").read_text() == "documents"
    assert collections.of("acme") == []


def test_two_files_of_a_collection_are_damage(tmp_path: Path):
    collections, letters = Collections(tmp_path, 10, 1000), LetterEmbeddings()
    collections.create("acme", "one", letters)
    one = collections.get("acme", "one", letters, lambda gone: None)
    (path,) = one.folder.glob("documents-*.sqlite")
    shutil.copy(path, path.with_name("documents-0.sqlite"))
    for read in (one.documents, lambda: collections.create("acme", "one", letters)):
        with pytest.raises(RetrievalError, match="has 2 files"):
            read()
    assert collections.failures.counts["read"] == 1


def test_a_collection_that_could_not_be_created_leaves_nothing_and_fails_no_longer(tmp_path: Path):
    collections, letters = Collections(tmp_path, 10, 1000), LetterEmbeddings()
    for name in ("one", "two"):
        with full_disk(0), pytest.raises(RequestError, match="cannot write"):
            collections.create("acme", name, letters)
    assert collections.failures.counts == {"write": 2, "read": 0}
    assert collections.failures.describe() is None
    assert [path.name for path in (tmp_path / "acme").iterdir()] == []
    collections.create("acme", "one", letters)


def test_a_read_that_fails_says_that_it_was_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    client = Tenants(tmp_path).client("acme")
    assert client.post("/v1/collections", json={"name": "one"}).status_code == 201
    with unlisted(tmp_path / "collections" / "acme" / "one", monkeypatch):
        response = client.post("/v1/collections/one/search", json={"query": "text"})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (500, "not_read")
    assert "could not be read" in error["message"]
    assert "change" not in error["message"]
