"""``rag-posfix index`` on folders as they are: bad files, an interruption, and another indexer."""

from __future__ import annotations

import json

import pytest

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


@pytest.mark.slow
def test_bad_files_are_listed_and_the_others_are_indexed(run, files, tmp_path):
    code, out, _ = run("index", files, "--out", tmp_path / "index")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("indexed 1 passage in ")
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


def test_progress_bars_of_libraries_do_not_appear(run, files, tmp_path):
    _, _, err = run("index", files, "--out", tmp_path / "index")
    assert err == "loading the embeddings\n"


def test_what_is_missing_is_told_before_anything_is_loaded(run, tmp_path, monkeypatch):
    monkeypatch.setattr("rag_posfix.pipeline.build.build_embeddings", lambda *_, **__: pytest.fail("loaded"))
    code, _, err = run("index", tmp_path / "typo", "--out", tmp_path / "index")
    assert (code, "no such file or folder" in err) == (1, True)


def test_explain_prints_the_passages_as_they_are_read_and_loads_nothing(run, tmp_path, monkeypatch):
    monkeypatch.setattr("rag_posfix.pipeline.build.build_embeddings", lambda *_, **__: pytest.fail("loaded"))
    guide = tmp_path / "travel_policy.md"
    guide.write_text("# Benefits in Germany\n\nFourteen months.\n\n# Benefits in France\n\nSix months.\n")
    code, out, _ = run("index", "--explain", guide)
    assert code == 0
    assert out.splitlines() == [
        f"[1] {guide}",
        "travel policy > Benefits in Germany",
        "Fourteen months.",
        "",
        f"[2] {guide}",
        "travel policy > Benefits in France",
        "Six months.",
        "",
    ]
    data = json.loads(run("index", "--explain", guide, "--json")[1])
    assert [passage["metadata"]["title"] for passage in data["passages"]] == [
        "travel policy > Benefits in Germany",
        "travel policy > Benefits in France",
    ]


def test_passages_have_at_most_the_tokens_that_are_asked_for(run, tmp_path):
    from rag_posfix import SentenceEmbeddings

    (tmp_path / "a.txt").write_text(" ".join(f"Donaudampfschiff number {n} arrives." for n in range(30)))
    _, out, err = run("index", "--explain", tmp_path / "a.txt", "--passage-tokens", 40, "--overlap", 12, "--json")
    texts = [passage["text"] for passage in json.loads(out)["passages"]]
    count = SentenceEmbeddings().count_tokens
    assert all(12 < count(text) <= 40 for text in texts)
    assert all(texts[n].rpartition("Donau")[2] in texts[n + 1] for n in range(len(texts) - 1))
    _, _, err = run("index", "--explain", tmp_path / "a.txt", "--passage-tokens", 300)
    assert "the embedding model reads 256 tokens" in err


def test_fields_encodings_and_bad_rows_are_said_and_may_be_chosen(run, tmp_path):
    tickets = tmp_path / "tickets.jsonl"
    tickets.write_text('{"subject": "Lamp", "body": "Dark.", "remark": "Old."}\n{"subject": \n')
    (tmp_path / "menu.txt").write_bytes(b"Caf\xe9 au lait")
    _, out, _ = run("index", tmp_path, "--out", tmp_path / "index")
    assert out.splitlines()[1:] == [
        "fields of records:",
        f"  {tickets}: text: all fields, one line each; title: subject",
        "encodings:",
        f"  {tmp_path / 'menu.txt'}: not UTF-8, read as cp1252: a guess; check its accents, or save it in UTF-8",
        "records left out:",
        f"  {tickets}:2: not JSON (Expecting value: line 1 column 13 (char 12)); each line must be one JSON object",
    ]
    data = json.loads(run("index", tmp_path, "--explain", "--field", "remark,title=body", "--json")[1])
    assert [(one["metadata"].get("title"), one["text"]) for one in data["passages"]] == [
        ("menu", "Caf\xe9 au lait"),
        ("Dark.", "Old."),
    ]


def test_without_a_folder_or_explain_the_usage_is_told(run, tmp_path):
    code, _, err = run("index", tmp_path)
    assert (code, "--out" in err) == (2, True)
