import gzip
import json
import logging
from pathlib import Path

import pytest

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.ingest.ingest import read_documents, read_files
from rag_posfix.retrieval.ingest.passages import PassageSize


def write_lines(path, *records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def test_a_text_file_becomes_passages_with_exact_offsets(tmp_path):
    path = tmp_path / "notes.md"
    content = "\ufeffFirst päragraph.\r\n\r\nSecond 😀 one.\n\n\nThird."
    path.write_bytes(content.encode())
    documents = read_documents([path], size=PassageSize(words=2))
    assert [document.page_content for document in documents] == ["First päragraph.", "Second 😀", "one.\n\n\nThird."]
    for document in documents:
        span = slice(document.metadata["start"], document.metadata["end"])
        assert content.removeprefix("\ufeff")[span] == document.page_content
        assert document.metadata["source"] == str(path)


def test_a_line_becomes_a_document_with_its_id_title_and_metadata(tmp_path):
    path = write_lines(
        tmp_path / "corpus.jsonl",
        {"id": "a", "title": "T", "text": "one", "metadata": {"year": 1999}},
        {"_id": 7, "title": "", "contents": "two"},
        "",
        {"page_content": "three", "text": None, "metadata": {"source": "book"}},
    )
    first, second, third = read_documents([path])
    assert (first.id, first.page_content) == ("a", "one")
    assert first.metadata == {"source": str(path), "year": 1999, "title": "T"}
    assert (second.id, second.page_content, second.metadata) == ("7", "two", {"source": str(path)})
    assert (len(third.id), third.metadata["source"]) == (32, "book")


def test_a_folder_is_read_in_sorted_order_without_hidden_and_other_files(tmp_path):
    for name in ("b.txt", "a/z.TXT", ".hidden.txt", ".git/x.txt", "picture.png", "a/b.md"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"text of {name}")
    contents = [document.page_content for document in read_documents([tmp_path])]
    assert contents == ["text of a/b.md", "text of a/z.TXT", "text of b.txt"]


def test_ids_depend_on_the_content_only(tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("the same")
    here, there = read_documents([tmp_path / "here"]), read_documents([tmp_path / "there"])
    assert here[0].id == there[0].id
    assert len(read_documents([tmp_path / "here", tmp_path / "there"])) == 1


def test_equal_texts_under_different_given_ids_both_stay(tmp_path):
    path = write_lines(tmp_path / "c.jsonl", {"id": "a", "text": "same"}, {"id": "b", "text": "same"})
    assert [document.id for document in read_documents([path])] == ["a", "b"]


def test_an_id_with_two_contents_is_an_error_that_names_both_places(tmp_path):
    path = write_lines(
        tmp_path / "c.jsonl", {"id": "a", "text": "x"}, {"id": "a", "text": "x"}, {"id": "a", "text": "y"}
    )
    with pytest.raises(RetrievalError, match=r"'a' .*c\.jsonl:1 and .*c\.jsonl:3") as caught:
        read_documents([path])
    assert "\n" not in str(caught.value)


def test_lone_surrogates_nul_and_line_separators_are_survived(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_bytes(
        b'{"id": "a\\u0000", "text": "x\\ud800\\u0000y", "metadata": {"\\udc00": ["\\ud83d\\ude00"]}}\n'
        + '{"text": "one\u2028line"}\n'.encode()
    )
    first, second = read_documents([path])
    assert (first.id, first.page_content) == ("a\ufffd", "x\ufffd\ufffdy")
    assert first.metadata["\ufffd"] == ["😀"]
    assert second.page_content == "one\u2028line"


@pytest.mark.parametrize("name", ["bad.txt", "bad.jsonl"])
def test_latin_1_keeps_its_accents_and_the_guess_is_said(tmp_path, caplog, name):
    path = tmp_path / name
    path.write_bytes(b'{"text": "caf\xe9"}')
    with caplog.at_level(logging.WARNING):
        assert "caf\xe9" in read_documents([path])[0].page_content
    assert name in caplog.text
    assert "not UTF-8, read as cp1252: a guess" in caplog.text


def test_documents_without_text_are_left_out_with_a_warning(tmp_path, caplog):
    path = write_lines(tmp_path / "c.jsonl", {"id": "a", "text": " "}, {"id": "b", "text": "x"})
    assert [document.id for document in read_documents([path])] == ["b"]
    assert "left out 1" in caplog.text


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "x"', "not JSON"),
        ('{"text": NaN}', "no text"),
        ("[" * 100_000, "nested too deeply"),
        ("[1]", "a list, expected a JSON object"),
        ("{}", "no text"),
        ('{"text": 5}', "no text"),
        ('{"text": "x", "id": 1.5}', "id 1.5 must be"),
        ('{"text": "x", "id": true}', "id True must be"),
        ('{"text": "x", "title": 5}', "title 5 must be"),
    ],
)
def test_a_malformed_line_is_an_error_with_file_and_line(tmp_path, line, problem):
    path = write_lines(tmp_path / "c.jsonl", {"text": "fine"}, line)
    with pytest.raises(RetrievalError, match=rf"c\.jsonl:2: .*{problem}") as caught:
        read_documents([path])
    assert "\n" not in str(caught.value)


def test_an_unsupported_suffix_names_the_allowed_ones(tmp_path):
    (tmp_path / "a.dwg").write_bytes(b"")
    with pytest.raises(RetrievalError, match=r"'\.dwg' is not one of \.adoc, \.csv, .*\.xhtml, \.xlsm, \.xlsx"):
        read_documents([tmp_path / "a.dwg"])


def test_an_empty_corpus_is_an_error(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(RetrievalError, match="no documents in"):
        read_documents([tmp_path])
    with pytest.raises(RetrievalError, match="no documents in no path"):
        read_documents([])


def test_compressed_lines_are_read_like_others(tmp_path):
    lines = b'{"_id": "a", "title": "T", "text": "one"}\n{"_id": "b", "text": "two"}\n'
    (tmp_path / "c.JSONL.gz").write_bytes(gzip.compress(lines))
    first, second = read_documents([tmp_path])
    assert (first.id, first.metadata["title"], second.page_content) == ("a", "T", "two")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"x", mtime=0))
    with pytest.raises(RetrievalError, match=r"'\.gz' is not one of"):
        read_documents([tmp_path / "c.txt.gz"])


@pytest.mark.parametrize("data", [b"not gzip", gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:-20]])
def test_a_damaged_compressed_file_is_named(tmp_path, data):
    (tmp_path / "c.jsonl.gz").write_bytes(data)
    with pytest.raises(RetrievalError, match=r"cannot unpack '.*c\.jsonl\.gz': .*cut off or not gzip"):
        read_documents([tmp_path])


def test_a_compressed_file_that_unpacks_to_far_more_than_it_is_is_refused(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b" " * (17 * 2**20)))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}' + b" " * (15 * 2**20)))
    read = read_files(tmp_path, strict=False)
    assert [entry.document.page_content for entry in read.entries] == ["x"]
    assert [(skipped.kind, "unpacks to more than 16,777,216" in skipped.reason) for skipped in read.skipped] == [
        ("unreadable", True)
    ]


@pytest.mark.parametrize("corpus", ["corpus.jsonl", "corpus.jsonl.gz"])
@pytest.mark.parametrize("questions", ["queries.jsonl", "qrels"])
def test_of_a_beir_folder_only_the_corpus_is_read(tmp_path, corpus, questions):
    folder = tmp_path / "data" / "scifact"
    (folder / "qrels").mkdir(parents=True)
    line = b'{"_id": "4983", "title": "Microstructure", "text": "Alterations.", "metadata": {}}\n'
    (folder / corpus).write_bytes(gzip.compress(line) if corpus.endswith(".gz") else line)
    if questions == "queries.jsonl":
        (folder / questions).write_text('{"_id": "1", "text": "A claim."}\n')
        (folder / "qrels").rmdir()
    else:
        (folder / "qrels" / "notes.txt").write_text("query-id corpus-id score")
    (tmp_path / "data" / "beside.txt").write_text("kept")
    found = read_documents([tmp_path])
    assert [document.page_content for document in found] == ["kept", "Alterations."]
    assert found[1].metadata["title"] == "Microstructure"


def test_a_folder_with_a_corpus_and_no_questions_is_an_ordinary_one(tmp_path):
    write_lines(tmp_path / "corpus.jsonl", {"text": "one"})
    write_lines(tmp_path / "more.jsonl", {"text": "two"})
    assert len(read_documents([tmp_path])) == 2


def test_entries_name_all_files_that_contain_the_document_and_progress_counts_files(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text("same" if name != "b" else "other")
    seen = []
    found = read_files([tmp_path], progress=lambda done, total: seen.append((done, total))).entries
    assert [[Path(file).name for file in entry.files] for entry in found] == [["a.txt", "c.txt"], ["b.txt"]]
    assert found[0].document.metadata["source"].endswith("a.txt")
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_equal_sections_of_two_files_keep_their_titles_and_copies_of_a_file_do_not(tmp_path):
    for name, pay in (("germany", "Euros."), ("france", "Also euros."), ("germany copy", "Euros.")):
        (tmp_path / f"{name}.md").write_text(f"## Leave\n\nSix months, paid.\n\n## Pay\n\n{pay}\n")
    titles = {document.metadata["title"] for document in read_documents([tmp_path])}
    assert titles == {"germany copy > Leave", "germany copy > Pay", "france > Leave", "france > Pay"}


def test_front_matter_has_texts_and_lists_and_a_rule_is_none(tmp_path):
    (tmp_path / "a.md").write_text(
        "---\ntitle: >-\n  Parental\n  leave\nyear: 1999\ndate: 2024-01-02\nacl:\n  - staff\n  - board\n"
        "tags: [a, b]\nowner: {name: Ann}\n---\nSix months.\n"
    )
    (tmp_path / "b.md").write_text("---\nThis text stands between two rules.\n\n---\nMore text.\n")
    (tmp_path / "c.md").write_text("---\ntitle: Rome: a guide\n---\nThe Tiber.\n")
    (tmp_path / "d.md").write_text('+++\ntitle = "Tides"\ndate = 2024-01-02\ntags = ["a", "b"]\n+++\nTwice a day.\n')
    first, *rest, last = read_documents([tmp_path])
    assert (last.page_content, last.metadata["title"]) == ("Twice a day.", "Tides")
    assert (last.metadata["date"], last.metadata["tags"]) == ("2024-01-02", ["a", "b"])
    stated = {name: value for name, value in first.metadata.items() if name not in ("source", "start", "end")}
    assert stated == {
        "title": "Parental leave", "year": "1999", "date": "2024-01-02", "acl": ["staff", "board"], "tags": ["a", "b"],
    }  # fmt: skip
    assert "between two rules" in rest[0].page_content
    assert rest[-1].metadata["title"] == "Rome: a guide"
