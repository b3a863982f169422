import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_posfix.retrieval.ingest.decoding import decode_html
from rag_posfix.retrieval.ingest.html import read_html


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
