"""One bad file does not abort a folder: it is skipped, with the reason."""

import json

import pytest

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.indexing import update_index
from rag_posfix.retrieval.ingest.ingest import read_documents, read_files


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
