"""``rag-posfix index`` on folders as they are: bad files, an interruption, and another indexer."""

from __future__ import annotations

import json

import pytest

from rag_posfix.retrieval.index.folder_lock import locked
from tests.support.command_line import command_line

pytestmark = pytest.mark.weights


@pytest.fixture
def run(capsysbinary, tmp_path, monkeypatch):
    monkeypatch.setenv("RAG_POSFIX_CACHE_DIR", str(tmp_path / "cache"))
    return command_line(capsysbinary)


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "good.txt").write_text("The bridge is 210 metres long.")
    (folder / "broken.pdf").write_bytes(b"%PDF-1.4 broken")
    (folder / "photo.txt").write_bytes(b"\xff\xd8\xff\xe0\x00\x10JFIF")
    for number in range(12):
        (folder / f"picture{number}.png").write_bytes(b"")
    return folder


def test_bad_files_are_listed_and_the_others_are_indexed(run, files, tmp_path):
    code, out, _ = run("index", files, "--out", tmp_path / "index")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("indexed 1 passages")
    assert lines[1] == "1 added, 0 changed, 0 unchanged, 0 removed"
    assert lines[2:] == [
        "skipped, cannot be read: 1 file",
        next(line for line in lines if line.startswith(f"  {files / 'broken.pdf'}: cannot read")),
        "skipped, not text: 1 file",
        f"  {files / 'photo.txt'}: '{files / 'photo.txt'}' is binary, not text; leave it out, or give the file its "
        "own suffix",
        "skipped, type not supported: 12 files",
        "  12 .png",
    ]
    found = json.loads(run("index", files, "--out", tmp_path / "index", "--json")[1])
    assert {one["kind"] for one in found["skipped"]} == {"unreadable", "binary", "unsupported"}
    assert len(found["skipped"]) == 14


def test_strict_stops_at_the_first_bad_file_and_writes_nothing(run, files, tmp_path):
    code, _, err = run("index", files, "--out", tmp_path / "index", "--strict")
    assert code == 1
    assert "broken.pdf' as PDF" in err
    assert not (tmp_path / "index").exists()


def test_an_interruption_says_in_one_line_what_is_kept_and_how_to_continue(run, files, tmp_path, monkeypatch):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("rag_posfix.retrieval.indexing.update_index", interrupted)
    code, out, err = run("index", files, "--out", tmp_path / "index")
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == (
        f"interrupted; the index '{tmp_path / 'index'}' is as it was, and computed vectors are kept: the same command "
        "continues"
    )


def test_a_second_indexer_of_a_folder_is_one_line(run, files, tmp_path):
    import threading

    held, done = threading.Event(), threading.Event()

    def other():
        with locked(tmp_path / "index"):
            held.set()
            done.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    held.wait(10)
    code, _, err = run("index", files, "--out", tmp_path / "index")
    done.set()
    thread.join()
    assert code == 1
    assert "is being written by another process" in err.splitlines()[-1]


def test_progress_bars_of_libraries_do_not_appear(run, files, tmp_path):
    _, _, err = run("index", files, "--out", tmp_path / "index")
    assert err == "loading the embeddings\n"


def test_what_is_missing_is_told_before_anything_is_loaded(run, tmp_path, monkeypatch):
    monkeypatch.setattr("rag_posfix.pipeline.build.build_embeddings", lambda *_, **__: pytest.fail("loaded"))
    code, _, err = run("index", tmp_path / "typo", "--out", tmp_path / "index")
    assert (code, "no such file or folder" in err) == (1, True)
