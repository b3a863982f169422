import io
import logging
import sys
import zipfile

import pytest

from rag_posfix.errors import ConfigError, RetrievalError
from rag_posfix.retrieval.ingest.ingest import read_documents
from rag_posfix.retrieval.ingest.passages import PassageSize
from rag_posfix.retrieval.ingest.readers import read_here, read_text
from rag_posfix.retrieval.ingest.structure import read_markup
from tests.support.pdf_files import pdf_of

PAGES = ["First page line one.\nLine two.", "", "Third page, which has\nmore words than fit."]


def test_a_pdf_file_becomes_passages_with_the_page_that_each_begins_on(tmp_path):
    path = tmp_path / "a.PDF"
    path.write_bytes(pdf_of(PAGES))
    documents = read_documents([path], size=PassageSize(words=6))
    text = read_text(path).text
    for document in documents:
        span = slice(document.metadata["start"], document.metadata["end"])
        assert text[span] == document.page_content
        assert document.metadata["source"] == str(path)
        assert "title" not in document.metadata
    pages = [(document.metadata["page"], document.page_content) for document in documents]
    assert pages == [
        (1, "First page line one. Line two."),
        (3, "Third page, which has more words"),
        (3, "than fit."),
    ]


def test_the_page_of_a_place_in_the_text(tmp_path):
    (tmp_path / "a.pdf").write_bytes(pdf_of(["one", "two"]))
    read = read_text(tmp_path / "a.pdf")
    assert read.text == "one\n\ntwo"
    assert [read.page_at(place) for place in (0, 4, 5, 9)] == [1, 1, 2, 2]
    (tmp_path / "a.txt").write_text("x")
    assert read_text(tmp_path / "a.txt").page_at(0) is None


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: b"no PDF", lambda data: data[:200]])
def test_a_damaged_pdf_file_is_named(tmp_path, damage):
    (tmp_path / "a.pdf").write_bytes(damage(pdf_of(PAGES)))
    with pytest.raises(RetrievalError, match=r"cannot read '.*a\.pdf' as PDF: ") as caught:
        read_documents([tmp_path])
    assert "\n" not in str(caught.value)


def test_an_encrypted_pdf_file_is_named(tmp_path):
    import pypdf

    (tmp_path / "plain.pdf").write_bytes(pdf_of(PAGES))
    writer = pypdf.PdfWriter(clone_from=tmp_path / "plain.pdf")
    writer.encrypt("secret", algorithm="RC4-128")
    writer.write(tmp_path / "a.pdf")
    with pytest.raises(
        RetrievalError,
        match=r"a\.pdf' as PDF: it is encrypted; leave the file out, or save it again without encryption$",
    ):
        read_text(tmp_path / "a.pdf")


@pytest.mark.parametrize(
    ("module", "suffix", "message"),
    [
        ("pypdf", ".pdf", r"pypdf .*\.\[pdf\]"),
        ("xberg", ".pdf", r"xberg .*\.\[pdf\]"),
        ("xberg", ".ipynb", r"xberg .*\.\[office\]"),
        ("docx", ".docx", r"python-docx .*\.\[docx\]"),
        ("pptx", ".pptx", r"python-pptx .*\.\[office\]"),
        ("openpyxl", ".xlsx", r"openpyxl .*\.\[office\]"),
    ],
)
def test_without_a_library_the_extra_is_named(tmp_path, monkeypatch, module, suffix, message):
    content = io.BytesIO()
    zipfile.ZipFile(content, "w").close()
    of_type = {".pdf": pdf_of(PAGES), ".ipynb": b"{}"}
    (tmp_path / f"a{suffix}").write_bytes(of_type.get(suffix, content.getvalue()))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=message):
        read_here(tmp_path / f"a{suffix}")


def test_an_html_file_becomes_passages_of_its_text_with_its_title(tmp_path, caplog):
    path = tmp_path / "a.html"
    path.write_bytes(b"<title>On rivers</title><p>The Tiber, \xe9.<p>The Seine.")
    with caplog.at_level(logging.WARNING):
        first, second = read_documents([path], size=PassageSize(words=3))
    assert (first.page_content, second.page_content) == ("The Tiber, \xe9.", "The Seine.")
    assert first.metadata == {"source": str(path), "start": 0, "end": 13, "title": "On rivers"}
    assert read_text(path).text[slice(second.metadata["start"], second.metadata["end"])] == "The Seine."
    assert "a.html: not UTF-8, read as cp1252" in caplog.text


def titles_and_texts(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    return [(d.metadata.get("title", ""), d.page_content) for d in read_documents([tmp_path / name])]


@pytest.mark.parametrize("divider", ["==========", "===", "-----"])
@pytest.mark.parametrize("name", ["faq.txt", "faq.md"])
def test_text_above_a_divider_is_no_heading(tmp_path, name, divider):
    entries = ["Q: How long in France?\nA: Six months.", "Leave in Spain lasts four months.", "Q: And here?\nA: Ten."]
    found = titles_and_texts(tmp_path, name, f"\n{divider}\n".join(entries) + "\n")
    assert {title for title, _ in found} == {"faq"}
    assert all(entry in found[0][1] for entry in entries)


def test_comments_of_a_shell_are_no_headings(tmp_path):
    script = "# install the pump\nsudo apt install pump\n\n# start it\n# as root\n./start --now\n"
    assert titles_and_texts(tmp_path, "steps.txt", script) == [("steps", script.strip())]
    script = "# set the port\nPORT=80\n\n# go\nmake run\n"
    assert titles_and_texts(tmp_path, "steps.txt", script) == [("steps", script.strip())]
    assert titles_and_texts(tmp_path, "a.txt", "# Leave\nSix months.\n\n# Pay\n\neuros\n") == [
        ("Leave", "Six months."), ("Pay", "euros"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "image",
    [
        "![p](data:image/png;base64,{})",
        "[p]: data:image/svg+xml;charset=utf-8;base64,{}",
        '<img src="data:image/gif;base64,{}">',
        "![p](DATA:image/png;base64,{})",
        "![p](data:image/png;base64,\n{}\nAAAA)",
    ],
)
def test_images_within_text_are_left_out(tmp_path, image):
    found = titles_and_texts(tmp_path, "a.md", f"Press the button.\n\n{image.format('iVBORw0KGgo' * 900)}\n\nWait.\n")
    assert len(found) == 1
    assert "iVBOR" not in found[0][1]
    assert found[0][1].startswith("Press the button.")
    assert found[0][1].endswith("Wait.")


@pytest.mark.parametrize(
    ("name", "title"),
    [("2024-05-01.md", "2024-05-01"), ("2024_05.md", "2024_05"), ("2024-W18.md", "2024-W18"), ("2024.md", "2024"),
     ("20240501.md", "20240501"), ("01.05.2024.md", "01.05.2024"), ("2024-Q2.md", "2024-Q2"), ("123.md", ""),
     ("20240501T0930.md", "20240501T0930"), ("2024-05-01_0930.md", "2024-05-01_0930"),
     ("2024-05-01 pump.md", "2024 05 01 pump")],
)  # fmt: skip
def test_the_date_of_a_note_is_its_title(tmp_path, name, title):
    assert titles_and_texts(tmp_path, name, "The pump leaks.\n") == [(title, "The pump leaks.")]


@pytest.mark.parametrize("encoding", ["utf-32", "utf-32-be", "utf-16-be"])
def test_text_in_utf_32_is_read(tmp_path, encoding):
    mark = "" if encoding == "utf-32" else "\ufeff"
    (tmp_path / "a.txt").write_bytes(f"{mark}Gr\u00fc\u00dfe".encode(encoding))
    (tmp_path / "b.html").write_bytes(f"{mark}<p>Gr\u00fc\u00dfe".encode(encoding))
    assert {document.page_content for document in read_documents([tmp_path])} == {"Gr\u00fc\u00dfe"}


@pytest.mark.parametrize("encoding", ["utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be"])
def test_text_in_wide_characters_without_a_mark_is_read_and_that_is_said(tmp_path, encoding):
    (tmp_path / "a.txt").write_bytes("Gr\u00fc\u00dfe aus Torvane\n".encode(encoding))
    read = read_text(tmp_path / "a.txt")
    assert (read.text, read.encoding_note) == (
        "Gr\u00fc\u00dfe aus Torvane\n", f"no byte order mark, read as {encoding}: a guess",
    )  # fmt: skip


def test_lines_in_two_encodings_are_read_in_their_own_and_those_that_end_with_carriage_returns(tmp_path):
    latin = "Das Café hat geöffnet.".encode("latin-1")
    (tmp_path / "a.txt").write_bytes("Grüße aus Tull.\nGrüße aus Halden.\n".encode() + latin)
    read = read_text(tmp_path / "a.txt")
    assert read.text == "Grüße aus Tull.\nGrüße aus Halden.\nDas Café hat geöffnet."
    assert str(read.encoding_note).startswith("1 lines are not UTF-8, read as cp1252: a guess")
    (tmp_path / "a.txt").write_bytes(b"# Fees\r\rOne berth costs 40 euros.\r")
    assert [document.metadata["title"] for document in read_documents([tmp_path])] == ["Fees"]


@pytest.mark.parametrize(
    "data", [b"\0\0\0\0", b"a\0b\0c\0\0\0\xd8\0", b"\x89PNG\0\0\0\rIHDR\0\0", b"a\0", b"\0", b"a\0bcd"]
)
def test_other_bytes_with_zeros_are_no_text(tmp_path, data):
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(RetrievalError, match="is binary, not text"):
        read_text(tmp_path / "a.txt")


SECTIONS = {
    "notes.markdown": "# Fees\n\nOne berth costs 40 euros.\n",
    "page.mdx": "# Fees\n\nOne berth costs 40 euros.\n",
    "guide.rst": "Fees\n====\n\nOne berth costs 40 euros.\n",
    "a.text": "FEES\n\nOne berth costs 40 euros.\n",
    "a.xhtml": "<html><body><h1>Fees</h1><p>One berth costs 40 euros.</p></body></html>",
}


@pytest.mark.parametrize("name", SECTIONS)
def test_other_suffixes_of_text_markdown_and_html_are_read_as_these(tmp_path, name):
    (tmp_path / name).write_text(SECTIONS[name])
    (document,) = read_documents([tmp_path])
    assert document.metadata["title"].casefold() == "fees"
    assert document.page_content.endswith("One berth costs 40 euros.")


MARKUP = {
    "a.rst": "====\nDock\n====\n\nOne.\n\n.. code-block:: python\n\n   # none\n   x\n\nFees\n~~~~\n\nTwo.\n\n"
    "Berths\n^^^^^^\n\nThree.\n\nCrew\n~~~~\n\nFour.\n",
    "a.adoc": "= Dock\n\nOne.\n\n----\n= none\n----\n\n== Fees\n\nTwo.\n\n=== Berths\n\nThree.\n\n== Crew\n\nFour.\n",
    "a.org": "#+TITLE: Dock\nOne.\n#+BEGIN_SRC sh\n* none\n#+END_SRC\n* TODO Fees :now:\nTwo.\n"
    "** Berths\nThree.\n* Crew\nFour.\n",
}


@pytest.mark.parametrize("name", MARKUP)
def test_headings_of_other_markups_are_sections_and_code_has_none(tmp_path, name):
    (tmp_path / name).write_text(MARKUP[name])
    documents = read_documents([tmp_path])
    titles = ["Dock", "Dock > Fees", "Dock > Fees > Berths", "Dock > Crew"]
    assert [document.metadata["title"] for document in documents] == titles
    assert [document.page_content.splitlines()[-1] for document in documents[1:]] == ["Two.", "Three.", "Four."]
    assert "One." in documents[0].page_content
    assert "none" in documents[0].page_content


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        ("adoc", "".join(f"{'-' * (4 + n)}\n" for n in range(1500))),
        ("org", "* T\ntext\n" * 3000 + "#+begin_x\n" * 3000),
        ("rst", "T\n====\n\n::\n\n   code\n\n" * 2000),
        ("adoc", "== T\n\n----\ncode\n----\n\n" * 2400),
        ("org", f"* T{' ' * 200_000}"),
        ("wiki", f"== T{' ' * 200_000}="),
    ],
)
def test_code_that_is_never_closed_and_thousands_of_headings_take_no_time(suffix, text):
    """Reading each again for each other one took a minute for 500 kB."""
    assert read_markup(text, f".{suffix}").text == text
