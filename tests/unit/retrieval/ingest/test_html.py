import io
import time
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_posfix.retrieval.ingest.decoding import decode_html
from rag_posfix.retrieval.ingest.html import read_epub, read_html
from rag_posfix.retrieval.ingest.ingest import read_documents, read_files


def html_text(source):
    page = read_html(b"\xef\xbb\xbf" + source.replace("\0", "").encode("utf-8", "replace"))
    return page.title, page.text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("<p>One <b>bold</b>, <i>two</i></p>", "One bold, two"),
        ("<p>one<p>two", "one\n\ntwo"),
        ("<h1>Head</h1>text", "Head\n\ntext"),
        ("un<b>brok</b>en &amp; &#x41;&nbsp;B", "unbroken & A B"),
        ("a <span> b</span>c", "a bc"),
        ("<pre>  x\n    y</pre> z", "  x\n    y\n\nz"),
        ("<script>if (a < b) x('<p>no</p>')</script>yes<style>p {}</style>", "yes"),
        ("<noscript>no</noscript><template><p>no</p></template><svg><title>no</title></svg>yes", "yes"),
        (
            "<p>a</p><svg><title>no</title><g><text>June</text><text>8 mm</text></g></svg><p>b</p>",
            "a\n\nJune 8 mm\n\nb",
        ),
        ("before<!-- <p>no</p> -->after<!--> -->", "beforeafter"),
        ("<!--[if IE]>no<![endif]--><![if !IE]>yes<![endif]>", "yes"),
        ("a <![CDATA[b]]> c <!unknown> <?php x ?>d", "a c d"),
        ("<p>a < b and x <", "a < b and x <"),
        ("<p>cut off <a href='x", "cut off"),
        ("</p></div>closed too often", "closed too often"),
        ("<nav><a>Start</a></nav><p>yes<footer>Imprint</footer>", "yes"),
        ("<SCRIPT>no</SCRIPT ><P>yes", "yes"),
        ("", ""),
    ],
)
def test_a_page_becomes_what_a_reader_sees(source, text):
    assert html_text(source)[1] == text


@pytest.mark.parametrize(
    ("source", "title", "text"),
    [
        ("<html><head><title> A\n title </title></head><body>x", "A title", "x"),
        ("<title>T</title><p>no head", "T", "no head"),
        ("<head><title>T</title><meta charset=x><p>no body", "T", "no body"),
        ("<title>T &amp; U</title><svg><title>drawing</title></svg>x<title>second</title>", "T & U", "x"),
        ("<p>none", "", "none"),
    ],
)
def test_the_first_title_of_the_page_is_its_title(source, title, text):
    assert html_text(source) == (title, text)


@pytest.mark.parametrize(
    ("data", "text", "problem"),
    [
        ("é".encode(), "é", None),
        (b"\xef\xbb\xbf<meta charset=latin-1>" + "é".encode(), "<meta charset=latin-1>é", None),
        ("é".encode("utf-16"), "é", None),
        (b'<meta charset="ISO-8859-1">\xe9\x93', '<meta charset="ISO-8859-1">é\u201c', None),
        (b"<meta http-equiv=x content='text/html; charset=koi8-r'>\xc1", None, None),
        (b"<meta charset=utf-16>abc", "<meta charset=utf-16>abc", None),
        (b"caf\xe9", "caf\xe9", "not UTF-8, read as cp1252: a guess"),
        (b"<meta charset=utf-8>\xe9", "<meta charset=utf-8>\ufffd", "not utf-8"),
        (b"<meta charset=klingon>a", "<meta charset=klingon>a", "unknown charset 'klingon'"),
        (b"<meta charset=rot13>a", "<meta charset=rot13>a", "unknown charset 'rot13'"),
    ],
)
def test_the_encoding_is_what_the_file_says(data, text, problem):
    found, why = decode_html(data)
    assert text is None or found == text
    assert text is not None or found.endswith("а")  # noqa: RUF001 - a Cyrillic letter
    assert (why is None) == (problem is None)
    assert problem is None or problem in why


pieces = st.lists(
    st.sampled_from(
        ["<", ">", "<!--", "-->", "<![", "<p>", "</p>", "<pre>", "<svg>", "</svg>", "<script>", "</script>", "&", "&#",
         "&lt;", "<title>", "</title>", "'", '"', "<a b='", "x", " ", "\n", "<head>", "<body>", "</", "<?", "<!"]
    ),
    max_size=30,
).map("".join)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(source=st.one_of(pieces, st.text()))
def test_any_text_can_be_read_and_holds_no_wide_gaps_outside_of_pre(source):
    title, text = html_text(source)
    assert "<script" not in text
    assert title == " ".join(title.split())
    if "<pre" not in source.lower():
        assert "\n\n\n" not in text
        assert text == text.strip()


@pytest.mark.parametrize("piece", ["<", "<!--", "<a ", "<a b='", "<script>", "<![CDATA[", "&", "</", "<div>", "<svg>"])
def test_time_grows_with_the_length_and_not_faster(piece):
    started = time.process_time()
    html_text(piece * 50_000)
    assert time.process_time() - started < 10


# Web pages: words outside of navigation are text, or a note counts those that are left out.


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
        ("<div><span>Monday</span><span>8 to 12</span></div>", "Monday 8 to 12"),
        ("<p><a href='a'>Docks</a><a href='b'>Tides</a></p>", "Docks Tides"),
        ("<p><span>A</span><span>X</span>-<span>90</span><span>.5</span></p>", "AX-90.5"),
        ("<p>un<span>load</span>ing, <b>1</b><b>2</b></p>", "unloading, 12"),
        ("<img src='a.png' alt='Map: exit at the north gate'>", "Map: exit at the north gate"),
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


PARTS = [
    ("<div>Loose words here.<p>And more.</p>Tail words.</div>", "Loose words here.\n\nAnd more.\n\nTail words."),
    ("<span>Spanned words.</span>", "Spanned words."),
    ("<h3><button>Refunds?</button></h3><div hidden><p>In ten days.</p></div>", "In ten days."),
    ("<button>Parking?</button><div style='display:none'>Sixty places.</div>", "Parking?\n\nSixty places."),
    ("<ul><li><a href=a>Crane rules</a></li><li><a href=b>Pier rules</a></li></ul>", "- Crane rules\n- Pier rules"),
    ("<ol start=5><li>Fifth<ul><li>Inner</li></ul>end</li><li>Sixth</li></ol>", "5. Fifth\n- Inner\nend\n6. Sixth"),
    ("<aside>Closed at flood.</aside>", "Closed at flood."),
    ("<form>Boat <input value=Kermoal><input type=hidden value=x1><select><option>Raft</select></form>",
     "Boat Kermoal\nRaft"),
    ("<figure><figcaption>The <b>crane</b> of pier nine.</figcaption></figure>", "The crane of pier nine."),
    ("<p>un<b>brok</b>en <em>slanted</em></p>", "unbroken slanted"),
    ("<p># 1</p><p>1. one</p><p>&gt; x</p>", "# 1\n\n1. one\n\n> x"),
    ("<dl><dt>Water</dt><dd>Two crowns</dd></dl>", "Water\nTwo crowns"),
    ("<p>10<sup>-3</sup> m, the 1<sup>st</sup><sup>[4]</sup></p>", "10\u207b\u00b3 m, the 1st[4]"),
    ("<p>one<br>two<br><br>three</p>", "one\ntwo\n\nthree"),
    ("<table><tr><th>Boat<th>Day<th>Price<tr><td rowspan=2>Canoe<td>Mon<td>9<tr><td>Sun<td>a|b</table>",
     "| Boat | Day | Price |\n|---|---|---|\n| Canoe | Mon | 9 |\n| Canoe | Sun | a|b |"),
    ("<table><tr><td colspan=2>Fees<td>Day<tr><td>1<td>2<td>Mon</table>", "| Fees | Fees | Day |\n|---|---|"),
    ("<table><tr><td><ul><li>Left menu</ul><td><table><tr><td>a<td>b<tr><td>1<td>2</table></table>",
     "- Left menu\n\n| a | b |\n|---|---|\n| 1 | 2 |"),
    ("<article><p>News.</p><footer>By Anna</footer></article>", "News.\n\nBy Anna"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "text"), PARTS)
def test_each_part_of_a_page_is_its_text(tmp_path, part, text):
    assert text in text_of(tmp_path, part)


@pytest.mark.parametrize(("part", "text"), PARTS)
def test_each_part_of_an_e_book_is_its_text(part, text):
    chapters = {"OEBPS/a b.xhtml": f"<h1>One</h1>{part}", "text/b.xhtml": "<p>Two</p>"}
    hrefs = ("a%20b.xhtml", "../text/b.xhtml", "gone.xhtml")
    items = "".join(f'<item id="c{number}" href="{href}"/>' for number, href in enumerate(hrefs))
    book = io.BytesIO()
    with zipfile.ZipFile(book, "w") as archive:
        archive.writestr("META-INF/container.xml", '<a xmlns="u"><rootfile full-path="OEBPS/c.opf"/></a>')
        references = "".join(f'<itemref idref="c{number}"/>' for number in range(3))
        archive.writestr("OEBPS/c.opf", f'<package xmlns="p">{items}{references}</package>')
        for name, page in chapters.items():
            archive.writestr(name, page)
    read = read_epub(book.getvalue())
    assert text in read.text
    assert read.text.endswith("Two")
    assert read.losses == ("the chapter 'OEBPS/gone.xhtml' is missing",)


@pytest.mark.parametrize(
    ("part", "title"),
    [
        ("<h2>Fees<a class='headerlink' href='#fees'>\xb6</a></h2>", "Harbour > Fees"),
        ("<h2>Fees</h2><span class='mw-editsection'>[<a>edit</a>]</span>", "Harbour > Fees"),
        ("<p><strong>Is it open?</strong></p>", "Harbour > Is it open?"),
        ("<details><summary>Old way</summary>", "Harbour > Old way"),
        ("<p>It costs:</p><p><b>Nine crowns</b></p>", "Harbour"),
        ("<p><b>1,250.50 EUR</b></p>", "Harbour"),
        ("<p><b>Note</b> this</p>", "Harbour"),
        ("<table><tr><td><b>Boat</b></td></tr></table>", "Harbour"),
    ],
)
def test_paragraphs_in_bold_letters_are_headings_and_marks_beside_headings_are_none(tmp_path, part, title):
    page = f"<title>Harbour</title><div class='skipToContent_x1'>Skip</div>{part}<p>Nine boats lie there.</p>"
    (tmp_path / "a.html").write_text(page)
    document = read_documents([tmp_path])[-1]
    assert (document.metadata["title"], "Nine boats" in document.page_content) == (title, True)
    assert not any(word in document.page_content for word in ("edit", "Skip", "\xb6"))


@pytest.mark.parametrize(
    "contents",
    [
        '<a xmlns="n"><navPoint><navLabel><text>Two\n lamps</text></navLabel><content src="b.xhtml"/></navPoint></a>',
        '<html xmlns="h"><nav><a href="../text/b.xhtml#x">Two <i>lamps</i></a></nav></html>',
    ],
)
def test_a_chapter_without_a_heading_has_its_name_in_the_contents(contents):
    kind = 'properties="nav"' if "nav>" in contents else 'media-type="application/x-dtbncx+xml"'
    items = f'<item id="n" href="toc" {kind}/><item id="a" href="a.xhtml"/><item id="b" href="b.xhtml"/>'
    book = io.BytesIO()
    with zipfile.ZipFile(book, "w") as archive:
        archive.writestr("META-INF/container.xml", '<a xmlns="u"><rootfile full-path="text/c.opf"/></a>')
        archive.writestr("text/c.opf", f'<package xmlns="p">{items}<itemref idref="a"/><itemref idref="b"/></package>')
        archive.writestr("text/toc", contents)
        archive.writestr("text/a.xhtml", "<h1>One</h1><p>The mill<a role='doc-noteref' href='#n'>1</a> is old.")
        archive.writestr("text/b.xhtml", "<p>The lamp burns.")
    read = read_epub(book.getvalue())
    assert [(block.headings, read.text[block.start : block.end]) for block in read.blocks] == [
        (("One",), "The mill\xb9 is old."),
        (("Two lamps",), "The lamp burns."),
    ]


def test_footers_of_pages_and_menus_by_role_or_class_are_left_out_and_counted(tmp_path):
    found = text_of(
        tmp_path, "<div class='x main-menu'><div>Go home</div>now</div><div role=navigation>Up</div><p>Yes.</p>"
    )
    assert "Yes." in found
    assert not any(word in found for word in ("home", "now", "Up", "Imprint"))
    (note,) = read_files([tmp_path]).notes
    assert note.message.startswith("left out 5 words of its footer")


@pytest.mark.parametrize("span", ["colspan", "rowspan"])
def test_a_table_of_cells_over_very_many_others_costs_no_more_than_its_text(span):
    cells = f"<td {span}=1000>x</td>" * 200
    assert read_html(f"<table><tr>{cells}</tr><tr>{cells}</tr></table>".encode()).text.count("x") == 400


@pytest.mark.parametrize(
    ("label", "encoding", "word"),
    [
        ("gb2312", "gb18030", "镕基"),
        ("shift_jis", "cp932", "髙橋"),
        ("iso-8859-9", "cp1254", "“Işık”"),  # noqa: RUF001
        ("tis-620", "cp874", "เรือ…"),
        ("latin1", "cp1252", "€"),
        ("x-x-big5", "big5hkscs", "嘅"),
        ("csisolatin5", "cp1254", "“Işık”"),  # noqa: RUF001
        ("iso-8859-8-i", "iso8859-8", "שלום"),
        ("euc-jp", "euc_jis_2004", "灯台①"),
        ("koi8", "koi8_r", "Маяк"),
        ("x-mac-ukrainian", "mac_cyrillic", "Маяк"),
    ],
)
def test_a_label_is_read_as_browsers_read_it(tmp_path, label, encoding, word):
    (tmp_path / "a.html").write_bytes(f"<meta charset={label}><p>{word} 1".encode(encoding))
    read = read_files([tmp_path])
    assert read.entries[0].document.page_content == f"{word} 1"
    assert not read.notes


def test_the_encoding_of_an_xml_declaration_counts(tmp_path):
    (tmp_path / "a.html").write_bytes("<?xml version='1.0' encoding='shift_jis'?><html><p>髙橋</html>".encode("cp932"))
    (document,) = read_documents([tmp_path])
    assert document.page_content == "髙橋"
