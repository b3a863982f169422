"""Web pages: words outside of navigation are text, or a note counts those that are left out."""

import pytest

from rag_posfix.retrieval.ingest.ingest import read_documents, read_files

PROSE = "".join(
    f"<p>Paragraph {n} tells how the harbour was built and is run by the council with {n} boats and few people.</p>"
    for n in range(6)
)


def text_of(tmp_path, part, name="a.html"):
    """Return the text of a page with some prose and ``part``."""
    page = f"<html><head><title>Harbour</title></head><body><main><article><h1>Harbour</h1>{PROSE}{part}{PROSE}"
    (tmp_path / name).write_text(f"{page}</article></main><footer>Imprint</footer></body></html>")
    return "\n\n".join(document.page_content for document in read_documents([tmp_path / name]))


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("<p>Open until <time datetime='2026-06-30'>30 June</time> only.</p>", "Open until 30 June only."),
        ("<p><label>Fee:</label> <output>41</output> crowns.</p>", "Fee: 41 crowns."),
        ("<p>The area is 40 m<sup>2</sup> of H<sub>2</sub>O.</p>", "40 m\u00b2 of H2O."),
        ("<p>Set lock_file_name to 2*3*4 if 5 &lt; 6.</p>", "Set lock_file_name to 2*3*4 if 5 < 6."),
        (
            "<figure><img src='a.png'><figcaption>The crane of pier nine.</figcaption></figure>",
            "The crane of pier nine.",
        ),
        ("<aside><p>The slipway is closed at flood.</p></aside>", "The slipway is closed at flood."),
        ("<section><p>News.</p><footer><p>Valid until July.</p></footer></section>", "Valid until July."),
        ("<form><fieldset><legend>Mooring costs thirty crowns</legend></fieldset></form>", "thirty crowns"),
    ],
)
def test_words_of_the_page_are_text(tmp_path, part, text):
    found = text_of(tmp_path, part)
    assert text in found
    assert "Imprint" not in found


def test_the_caption_of_a_table_stands_above_it(tmp_path):
    table = (
        "<table><caption>Prices of 2026</caption><tr><th>Boat</th><th>Price</th></tr><tr><td>Canoe</td><td>9</td></tr>"
    )
    found = text_of(tmp_path, f"{table}</table>")
    assert found.index("Prices of 2026") < found.index("Boat")
    assert "Prices" not in next(line for line in found.splitlines() if "Boat" in line)


def test_words_that_are_left_out_are_counted(tmp_path):
    text_of(tmp_path, "<div>Loose words here.<p>And more.</p></div>")
    read = read_files([tmp_path])
    found = "\n".join(entry.document.page_content for entry in read.entries)
    missing = sum(word not in found for word in ("Loose", "words", "here"))
    said = [note.message for note in read.notes]
    assert bool(missing) == any("left out" in message and "words outside navigation" in message for message in said)


@pytest.mark.parametrize(
    ("label", "encoding", "word"),
    [
        ("gb2312", "gb18030", "镕基"),
        ("GBK", "gb18030", "镕"),
        ("shift_jis", "cp932", "髙橋"),
        ("euc-kr", "cp949", "펲시"),
        ("big5", "big5hkscs", "嘅"),
        ("iso-8859-9", "cp1254", "“Işık”"),  # noqa: RUF001
        ("tis-620", "cp874", "เรือ…"),
        ("latin1", "cp1252", "€"),
    ],
)
def test_a_label_is_read_as_browsers_read_it(tmp_path, label, encoding, word):
    (tmp_path / "a.html").write_bytes(f"<meta charset={label}><p>{word} 1".encode(encoding))
    read = read_files([tmp_path])
    assert read.entries[0].document.page_content == f"{word} 1"
    assert not read.notes
