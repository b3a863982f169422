"""Hostile and odd files and names: each costs itself alone, and is named."""

import os
from pathlib import Path

import psutil
import pytest

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.indexing import update_index
from rag_posfix.retrieval.ingest.ingest import read_documents, read_files
from rag_posfix.retrieval.ingest.process import ReaderProcess
from tests.support.pdf_files import pdf_of
from tests.support.waiting import wait_until


@pytest.fixture
def reader():
    readers = []

    def start(**limits):
        readers.append(ReaderProcess(**limits))
        return readers[-1]

    yield start
    for one in readers:
        one.close()


@pytest.mark.slow
def test_a_reading_process_that_ended_leaves_no_zombie_and_the_next_file_is_read(tmp_path, reader):
    page, started = tmp_path / "a.html", reader()
    page.write_text("<p>One page.")
    before = set(psutil.Process().children())
    started.read(page)
    (child,) = set(psutil.Process().children()) - before
    child.terminate()
    assert "One page." in started.read(page).text  # it may end just when it is asked
    wait_until(lambda: not child.is_running())  # a zombie counts as running
    assert "One page." in started.read(page).text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"seconds": 0.05}, "reading it takes more than 0.05 seconds; leave the file out"),
        ({"memory": 2**24}, "of memory; leave the file out"),
    ],
)
def test_a_file_above_a_limit_is_named_and_the_next_is_read(tmp_path, reader, limits, reason):
    (tmp_path / "a.pdf").write_bytes(pdf_of(["One."]))
    limited = reader(**limits)
    for _ in range(2):
        with pytest.raises(RetrievalError, match=rf"cannot read '.*a\.pdf'.*{reason}"):
            limited.read(tmp_path / "a.pdf")
    assert reader().read(tmp_path / "a.pdf").text == "One."


@pytest.mark.slow
def test_a_closed_process_starts_again_and_relative_paths_are_those_of_the_caller(tmp_path, monkeypatch, reader):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.html").write_text(f"<p>This is {name}.")
    one = reader()
    for name in ("one", "two"):
        monkeypatch.chdir(tmp_path / name)
        assert one.read(Path("a.html")).text == f"This is {name}."
        one.close()


def test_a_tag_with_attributes_without_end_is_refused(tmp_path):
    for mark in ("x", "'>'", '"<p>"', ""):
        attributes = " ".join(f"a{number}={mark}" if mark else f"a{number}" for number in range(1500))
        (tmp_path / "a.html").write_text(f"<p>Before.</p><p {attributes}>Text.</p>")
        with pytest.raises(RetrievalError, match=r"a\.html' as .html file: a tag has more than 1,000 attributes"):
            read_documents(tmp_path)
    (tmp_path / "a.html").write_text(f"<p>Before.</p><img src='data:image/png;base64,{'A' * 60_000}'><p>After.</p>")
    assert read_documents(tmp_path)[0].page_content == "Before.\n\nAfter."


def odd_name(folder, name):
    path = os.path.join(os.fsencode(folder), name)
    try:
        with open(path, "wb") as file:
            file.write(b"The lamp is dark.")
    except OSError:
        pytest.skip("the file system takes names in UTF-8 alone")
    return path


def test_a_name_that_is_not_utf_8_is_read_and_named(tmp_path, embeddings):
    (tmp_path / "files").mkdir()
    odd_name(tmp_path / "files", b"caf\xe9.txt")
    odd_name(tmp_path / "files", b"caf\xe9.png")
    odd_name(tmp_path / "files", b"caf\xe9.pdf")
    update = update_index([tmp_path / "files"], tmp_path / "index", embeddings, strict=False)
    assert update.added == 1
    assert {(skipped.kind, skipped.file.rpartition("/")[2]) for skipped in update.skipped} == {
        ("unsupported", "caf\ufffd.png"), ("unreadable", "caf\ufffd.pdf"),
    }  # fmt: skip
    for skipped in update.skipped:
        assert skipped.reason.encode()
    (document,) = read_documents([tmp_path / "files"], strict=False)
    assert document.metadata["source"].endswith("caf\ufffd.txt")
    assert document.metadata["title"].encode()


def test_a_link_out_of_the_folder_is_named_and_not_followed(tmp_path):
    inside = tmp_path / "files"
    inside.mkdir()
    (tmp_path / "secret.txt").write_text("A secret.")
    (inside / "a.txt").write_text("Public text.")
    (inside / "out.txt").symlink_to(tmp_path / "secret.txt")
    (inside / "up.txt").symlink_to(inside / ".." / "secret.txt")
    (inside / "in.txt").symlink_to(inside / "a.txt")
    read = read_files([inside], strict=False)
    assert [entry.document.page_content for entry in read.entries] == ["Public text."]
    assert {(skipped.file.rpartition("/")[2], skipped.kind) for skipped in read.skipped} == {
        ("out.txt", "unreadable"),
        ("up.txt", "unreadable"),
        ("in.txt", "duplicate"),
    } or {skipped.file.rpartition("/")[2] for skipped in read.skipped} == {"out.txt", "up.txt", "a.txt"}
    assert "a link out of the folder" in next(skipped.reason for skipped in read.skipped if "out.txt" in skipped.file)
    (tmp_path / "door").symlink_to(inside)
    assert len(read_files([tmp_path / "door", inside / "out.txt"], strict=False).entries) == 2
