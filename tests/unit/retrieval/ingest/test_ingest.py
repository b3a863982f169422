import gzip
import json
import os
from pathlib import Path

import psutil
import pytest

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.indexing import update_index
from rag_posfix.retrieval.ingest.ingest import read_documents, read_files
from rag_posfix.retrieval.ingest.passages import PassageSize
from rag_posfix.retrieval.ingest.process import ReaderProcess
from tests.support.pdf_files import pdf_of
from tests.support.waiting import wait_until


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


# One bad file does not abort a folder: it is skipped, with the reason.


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "a.txt").write_text("good text")
    (folder / "b.txt").write_text("good text")
    (folder / "broken.pdf").write_bytes(b"%PDF-1.4 broken")
    (folder / "broken.jsonl").write_text('{"text": \n')
    (folder / "empty.md").write_text(" \n")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "program.txt").write_bytes(b"\x7fELF\x02\x01\x01\x00\x00text text text")
    (folder / "noise.txt").write_bytes(bytes(range(1, 256)) * 4)
    return folder


def test_every_skipped_file_is_named_with_its_reason(folder):
    read = read_files([folder], strict=False)
    assert [entry.document.page_content for entry in read.entries] == ["good text"]
    found = {skipped.file.rpartition("/")[2]: (skipped.kind, skipped.reason) for skipped in read.skipped}
    assert {name: kind for name, (kind, _) in found.items()} == {
        "b.txt": "duplicate", "broken.pdf": "unreadable", "broken.jsonl": "unreadable", "empty.md": "empty",
        "picture.png": "unsupported", "program.txt": "binary", "noise.txt": "binary",
    }  # fmt: skip
    assert found["b.txt"][1] == f"duplicate of {folder / 'a.txt'}"
    assert "broken.jsonl:1: not JSON" in found["broken.jsonl"][1]
    assert "'.png' is not one of" in found["picture.png"][1]
    assert "is binary, not text" in found["program.txt"][1]
    assert "not text in a known encoding" in found["noise.txt"][1]


def test_a_link_to_a_folder_is_named_and_not_followed(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "c.txt").write_text("other text")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "around").symlink_to(folder)
    read = read_files([folder], strict=False)
    assert [entry.document.page_content for entry in read.entries] == ["good text"]
    links = [skipped for skipped in read.skipped if "link to a folder" in skipped.reason]
    assert [link.file for link in links] == [str(folder / "around"), str(folder / "linked")]
    both = read_files([folder, folder / "linked"], strict=False)
    assert [entry.document.page_content for entry in both.entries] == ["good text", "other text"]


@pytest.mark.parametrize("name", ["broken.pdf", "broken.jsonl", "program.txt", "noise.txt", "picture.png"])
def test_strict_reading_raises_at_such_a_file(folder, name):
    with pytest.raises(RetrievalError, match=name):
        read_files([folder / name], strict=True)
    assert read_files([folder / name], strict=False).entries == ()


def test_a_path_that_is_missing_is_an_error_also_when_files_may_be_skipped(folder):
    with pytest.raises(RetrievalError, match="no such file or folder"):
        read_files([folder, folder / "typo"], strict=False)


def test_when_nothing_is_left_the_first_reason_is_told(folder, embeddings, tmp_path):
    with pytest.raises(RetrievalError, match=r"no documents in .*1 skipped, the first: .*broken\.pdf.*as PDF"):
        update_index([folder / "broken.pdf"], tmp_path / "index", embeddings, strict=False)


def test_an_unreadable_file_keeps_what_the_index_holds_of_it(folder, embeddings, tmp_path):
    (folder / "broken.jsonl").write_text('{"id": "first", "text": "fine"}\n')
    update_index([folder], tmp_path / "index", embeddings, strict=False)
    (folder / "broken.jsonl").write_text('{"id": "first", "te')
    update = update_index([folder], tmp_path / "index", embeddings, strict=False)
    assert (update.removed, update.unchanged) == (0, 2)
    assert "broken.jsonl" in {skipped.file.rpartition("/")[2] for skipped in update.skipped}
    (folder / "broken.jsonl").unlink()
    assert update_index([folder], tmp_path / "index", embeddings, strict=False).removed == 1


def test_rows_of_a_table_become_documents(tmp_path):
    (tmp_path / "a.csv").write_text('id,title,text,year\n7,Rivers,"The Tiber,\nin Rome",1999\n,,second,\n\n')
    first, second = read_documents([tmp_path / "a.csv"])
    assert (first.id, first.page_content) == ("7", "The Tiber,\nin Rome")
    assert first.metadata == {
        "source": str(tmp_path / "a.csv"),
        "title": "Rivers > year: 1999",
        "year": "1999",
        "row": 3,
    }
    assert (second.page_content, "year" in second.metadata) == ("second", False)


@pytest.mark.parametrize(
    ("table", "problem"),
    [("a,b\n1,2,3\n", r"a\.csv:2: 3 cells"), ('a\n"x', "not CSV")],
)
def test_a_malformed_table_is_named(tmp_path, table, problem):
    (tmp_path / "a.csv").write_text(table)
    with pytest.raises(RetrievalError, match=problem):
        read_documents([tmp_path])


def test_a_word_file_is_read_with_its_tables_in_order(tmp_path):
    import docx

    written = docx.Document()
    written.add_paragraph("The lighthouse.")
    table = written.add_table(rows=1, cols=2)
    table.cell(0, 0).text, table.cell(0, 1).text = "height", "40 m"
    written.add_paragraph("The end.")
    written.save(tmp_path / "a.docx")
    (document,) = read_documents([tmp_path])
    assert document.page_content == "The lighthouse.\n\nheight\t40 m\n\nThe end."
    (tmp_path / "b.docx").write_bytes((tmp_path / "a.docx").read_bytes()[:300])
    with pytest.raises(RetrievalError, match=r"b\.docx' as a Word file"):
        read_documents([tmp_path])


def test_tracked_insertions_of_a_word_file_are_text_and_deletions_are_not(tmp_path):
    import docx
    from docx.oxml import parse_xml

    space = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    written = docx.Document()
    written.add_paragraph("The limit is ")
    paragraph = written.element.body[0]
    paragraph.append(parse_xml(f"<w:ins {space}><w:r><w:t>20 euros</w:t></w:r></w:ins>"))
    paragraph.append(parse_xml(f"<w:del {space}><w:r><w:delText>5 euros</w:delText></w:r></w:del>"))
    paragraph.append(parse_xml(f"<w:sdt {space}><w:sdtContent><w:r><w:t> a day.</w:t></w:r></w:sdtContent></w:sdt>"))
    written.save(tmp_path / "a.docx")
    assert read_documents([tmp_path])[0].page_content == "The limit is 20 euros a day."


def test_content_controls_and_tables_in_tables_of_a_word_file_are_text_and_its_contents_are_not(tmp_path):
    import docx
    from docx.oxml import parse_xml

    def control(text, properties=""):
        space = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
        return parse_xml(
            f"<w:sdt {space}>{properties}<w:sdtContent><w:p><w:r><w:t>{text}</w:t></w:r></w:p></w:sdtContent></w:sdt>"
        )

    written = docx.Document()
    written.add_paragraph("The form.")
    body = written.element.body
    contents = '<w:docPartObj><w:docPartGallery w:val="Table of Contents"/></w:docPartObj>'
    body.insert(0, control("The form 1", f"<w:sdtPr>{contents}</w:sdtPr>"))
    body.insert(2, control("Name: Ann.", "<w:sdtPr/>"))
    table = written.add_table(rows=1, cols=1)
    table.cell(0, 0).add_table(rows=1, cols=1).cell(0, 0).text = "Inner."
    written.save(tmp_path / "a.docx")
    (document,) = read_documents([tmp_path])
    assert document.page_content == "The form.\n\nName: Ann.\n\nInner."


def test_an_object_with_text_and_a_list_of_objects_is_one_record(tmp_path):
    page = {"title": "Reset", "body": "Press the button.", "comments": [{"author": "A", "message": "Thanks a lot."}]}
    (tmp_path / "a.json").write_text(json.dumps(page))
    (document,) = read_documents([tmp_path])
    assert "Press the button." in document.page_content
    ticket = {"description": "The pump stands.", "comments": [{"author": "A", "message": "Seen."}]}
    (tmp_path / "a.json").write_text(json.dumps(ticket))
    assert [document.page_content for document in read_documents([tmp_path])] == [
        "description: The pump stands.\ncomments.author: A\ncomments.message: Seen."
    ]
    for name, beside in (("description", ["description: All questions."]), ("message", [])):
        listed = {name: "All questions.", "items": [{"text": "First."}, {"text": "Second."}]}
        (tmp_path / "a.json").write_text(json.dumps(listed))
        assert [document.page_content for document in read_documents([tmp_path])] == [*beside, "First.", "Second."]


def test_rows_with_one_text_and_other_fields_are_distinct(tmp_path):
    (tmp_path / "a.csv").write_text("question,answer,product\nDogs?,Yes.,A1\nDogs?,Yes.,B2\nDogs?,Yes.,B2\n")
    assert [d.metadata["product"] for d in read_documents([tmp_path])] == ["A1", "B2"]


@pytest.mark.parametrize(
    ("fields", "text"), [("text=contents", "long"), ("text=text,text=contents", "short\n\ncontents: long")]
)
def test_a_text_field_that_is_asked_for_counts_before_the_others(tmp_path, fields, text):
    (tmp_path / "a.jsonl").write_text('{"text": "short", "contents": "long"}\n')
    assert read_documents([tmp_path], fields=[fields])[0].page_content == text


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("a.csv", "sep=;\nQuestion, short, or long;Answer\nDogs?;Yes, they may.\n"),
        ("a.tsv", "Question, short, or long\tAnswer\nDogs?\tYes, they may.\n"),
        ("a.csv", "Question;Answer;;\nDogs?;Yes, they may.;;\n"),
    ],
)
def test_the_delimiter_of_spreadsheets(tmp_path, name, table):
    (tmp_path / name).write_text(table)
    assert "Yes, they may." in read_documents([tmp_path])[0].page_content
    assert "Dogs?" in str(read_documents([tmp_path])[0])


def test_a_long_cell_of_a_table_is_read_whole(tmp_path):
    cell = "\n".join(f"line {number}" for number in range(20_000))  # longer than the limit of the csv module
    (tmp_path / "a.csv").write_text(f'id,text\n1,"{cell}"\n2,short\n')
    read = read_files([tmp_path], strict=False)
    assert {e.document.metadata["row"] for e in read.entries} == {20_001, 20_002}
    assert not [note for note in read.notes if note.kind == "rows"]


# Hostile and odd files and names: each costs itself alone, and is named.


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
