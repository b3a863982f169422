"""PDF files: paragraphs under headings, on their pages, without what is printed on every page."""

import zlib

import pytest

from benchmarks.end_to_end.files import pdf_of as printed_pdf
from rag_posfix.retrieval.ingest.ingest import read_documents, read_files
from rag_posfix.retrieval.ingest.readers import read_here
from tests.support.pdf_files import assemble_pdf, pdf_of

SENTENCE = "Pumps of this series are tested for nine hours\nbefore they leave the yard in Halden."


def text_of(path, pages):
    path.write_bytes(pdf_of(pages))
    return read_here(path).text


def test_words_that_are_broken_at_line_ends_are_whole(tmp_path):
    text = text_of(tmp_path / "a.pdf", ["The members voted on the new in-\nsurance, which the trea-\nsurer wanted."])
    assert text == "The members voted on the new insurance, which the treasurer wanted."


def test_a_heading_over_two_lines_is_one(tmp_path):
    large = "BT /F2 18 Tf 20 TL 50 800 Td (Rules for guests who stay in the) Tj T* (boathouse over night) Tj ET"
    small = " ".join(f"({line}) Tj T*" for line in f"{SENTENCE}\n{SENTENCE}\n{SENTENCE}".split("\n"))
    (tmp_path / "a.pdf").write_bytes(assemble_pdf([f"{large} BT /F1 11 Tf 14 TL 50 730 Td {small} ET"]))
    (document,) = read_documents(tmp_path)
    assert document.metadata["title"].endswith("Rules for guests who stay in the boathouse over night")
    assert document.page_content == " ".join([SENTENCE.replace("\n", " ")] * 3)


def test_a_passage_over_two_pages_says_where_each_begins(tmp_path):
    pages = [f"{SENTENCE}\nThe rent is due in May.", f"A late payment costs nine crowns.\n{SENTENCE}"]
    (tmp_path / "a.pdf").write_bytes(pdf_of(pages))
    (document,) = read_documents(tmp_path)
    assert (document.metadata["page"], document.metadata["pages"]) == (1, [1, 2])
    second = document.page_content[document.metadata["page_starts"][1] :]
    assert second.startswith("A late payment")


def test_a_sentence_that_goes_on_on_the_next_page_is_one_paragraph(tmp_path):
    text = text_of(tmp_path / "a.pdf", [f"{SENTENCE}\nThe rent is due on the", f"first of May.\n{SENTENCE}"])
    assert "The rent is due on the first of May." in text


@pytest.mark.parametrize("count", [3, 6])
def test_lines_on_most_pages_and_page_numbers_are_left_out(tmp_path, count):
    names = ("pier", "crane", "mill", "light", "shed", "yard")[:count]
    pages = [
        f"11/29/26, 9:09 AM Harbour guide\nThe {name} is old and it has a long story.\nIt was built in 18{n}1.\n"
        f"Norrvik harbour office\nharbour.example/guide {n}/{count}"
        for n, name in enumerate(names, start=1)
    ]
    text = text_of(tmp_path / "a.pdf", pages)
    assert "9:09" not in text
    assert "harbour.example" not in text
    assert text.count("Norrvik harbour office") == 1
    assert all(f"The {name} is old" in text and f"built in 18{n}1." in text for n, name in enumerate(names, start=1))


NAMES = ("pier", "crane", "mill", "light", "shed", "yard", "quay", "dock")


def numbered_text(tmp_path, line):
    """Return the text of a file of eight pages; ``line(n)`` is the last line of page n."""
    pages = [
        f"The {name} is old and has a long story.\nIt was built in 18{n}1.\n{line(n)}"
        for n, name in enumerate(NAMES, 1)
    ]
    return text_of(tmp_path / "a.pdf", pages)


@pytest.mark.parametrize(
    "line",
    [
        lambda n: f"{n} / 8",
        lambda n: f"- {n} -",
        lambda n: f"Seite {n} von 8",
        lambda n: ("i", "ii", "iii", "iv", "v", "vi", "vii", "viii")[n - 1],
        lambda n: f"Printed 11/29/26, 9:0{n} AM",
    ],
)
def test_page_numbers_and_times_of_print_are_left_out_however_they_are_written(tmp_path, line):
    text = numbered_text(tmp_path, line)
    assert all(f"in 18{n}1." in text and f"in 18{n}1. {line(n)}" not in text for n in range(1, 9))
    assert text.replace("\n\n", " ").split(" in 18")[-1] == "81."


def test_heads_of_odd_and_even_pages_stay_once(tmp_path):
    text = numbered_text(tmp_path, lambda n: "Harbour guide" if n % 2 else "Chapter on cranes")
    assert (text.count("Harbour guide"), text.count("Chapter on cranes")) == (1, 1)


def test_words_stay_apart_where_one_ends_with_f(tmp_path):
    page = "Harbour.\nThe pier is old and it has a long story of its own.\nIt was of its owner, out of it all."
    assert text_of(tmp_path / "a.pdf", [page]).split() == page.split()


def test_a_hyphen_at_the_end_of_a_line_before_a_capital_or_number_stays(tmp_path):
    text = text_of(
        tmp_path / "a.pdf", ["The plan of 2020-\n2024 is that of Franco-\nBritish crews and of half-\nboats."]
    )
    assert text == "The plan of 2020-2024 is that of Franco-British crews and of halfboats."
    lines = "2.1 Scope\nIt is paid within 9 days, for well-\nknown clients at once. Part AX-\n900 is excluded."
    assert "well-known clients at once. Part AX-900 is" in text_of(tmp_path / "b.pdf", [lines])


def test_a_page_number_before_the_last_lines_is_left_out(tmp_path):
    pages = []
    for n, name in enumerate(NAMES, 1):
        lines = [f"The {name} is old.", "Zone", "A", f"Page {n} of 8", "Fee", "Liv", f"Nine {name}s."]
        heights = range(750, 50, -100)
        pages.append(
            " ".join(f"BT /F1 11 Tf 50 {y} Td ({line}) Tj ET" for y, line in zip(heights, lines, strict=True))
        )
    (tmp_path / "a.pdf").write_bytes(assemble_pdf(pages))
    text = read_here(tmp_path / "a.pdf").text
    assert "Page" not in text
    assert all(f"Nine {name}s." in text for name in NAMES)


def test_page_numbers_in_running_heads_that_differ_are_left_out(tmp_path):
    heads = ["Chapter 1: Piers 5", "Chapter 1: Piers 6", "Chapter 2: Cranes 7", "Chapter 3: Mills 8"]
    pages = [
        f"{head}\nThe part number {n} of the story is told here.\nIt has {n} ends." for n, head in enumerate(heads)
    ]
    text = text_of(tmp_path / "a.pdf", pages)
    assert "Chapter" not in text
    assert all(f"It has {n} ends." in text for n in range(4))


def test_a_heading_with_the_number_of_its_page_stays_beside_the_page_number(tmp_path):
    pages = [f"{n} Rules for {name}s\nThe {name} is old.\nPage {n} of 8" for n, name in enumerate(NAMES, 1)]
    text = text_of(tmp_path / "a.pdf", pages)
    assert all(f"{n} Rules for {name}s" in text for n, name in enumerate(NAMES, 1))
    assert "Page" not in text


@pytest.mark.parametrize("count", [1, 2])
def test_what_a_browser_prints_around_a_page_or_two_is_left_out(tmp_path, count):
    pages = [
        f"11/29/26, 9:09 AM\nThe {name} is old.\nfile:///home/guide.html\n{n}/{count}"
        for n, name in enumerate(NAMES[:count], 1)
    ]
    assert text_of(tmp_path / "a.pdf", pages).split("\n\n") == [f"The {name} is old." for name in NAMES[:count]]


def lines_of(*lines):
    """Return a page of lines, each with its font and size."""
    heights = range(800, 0, -30)
    return " ".join(
        f"BT /{font} {size} Tf 50 {height} Td ({line}) Tj ET"
        for height, (line, font, size) in zip(heights, lines, strict=False)
    )


def test_clauses_keep_their_numbers_and_lines_in_bold_letters_are_headings(tmp_path):
    sentence = SENTENCE.replace("\n", " ")
    page = lines_of(("3. Scope", "F2", 11), (sentence, "F1", 11), ("7. Term", "F2", 11), (sentence, "F1", 11),
                    ("9\\) Pay the fee of the yard.", "F1", 11))  # fmt: skip
    (tmp_path / "a.pdf").write_bytes(assemble_pdf([page]))
    first, second = read_documents(tmp_path)
    assert (first.metadata["title"], first.page_content) == ("3. Scope", sentence)
    assert (second.metadata["title"], second.page_content) == ("7. Term", f"{sentence}\n\n9) Pay the fee of the yard.")


def test_a_first_heading_in_letters_of_the_size_of_others_is_not_above_them(tmp_path):
    names = ["Contents", "Lifts", "Piers"]
    pages = [lines_of((name, "F2", 18), (f"The {name} of the yard in Halden are old.", "F1", 11)) for name in names]
    (tmp_path / "a.pdf").write_bytes(assemble_pdf(pages))
    assert [document.metadata["title"] for document in read_documents(tmp_path)] == names


def test_the_second_line_of_a_heading_in_smaller_letters_is_no_paragraph(tmp_path):
    lines = "BT /F2 18 Tf 50 800 Td (Rules for guests who stay in the) Tj ET BT /F2 17 Tf 50 778 Td (boathouse) Tj ET"
    small = " ".join(f"({line}) Tj T*" for line in f"{SENTENCE}\n{SENTENCE}".split("\n"))
    (tmp_path / "a.pdf").write_bytes(assemble_pdf([f"{lines} BT /F1 11 Tf 14 TL 50 730 Td {small} ET"]))
    (document,) = read_documents(tmp_path)
    assert document.metadata["title"].endswith("Rules for guests who stay in the boathouse")


def test_numbers_at_the_ends_of_pages_that_do_not_count_pages_stay(tmp_path):
    years = (1871, 1883, 1902, 1950)
    text = text_of(tmp_path / "a.pdf", [f"The story of the year is told.\n{SENTENCE}\n{year}" for year in years[:2]])
    assert all(str(year) in text for year in years[:2])


def test_pages_without_text_are_counted(tmp_path):
    (tmp_path / "a.pdf").write_bytes(pdf_of(["One.", "", "Three.", ""]))
    read = read_files(tmp_path)
    assert [(note.kind, note.message) for note in read.notes] == [
        ("lost", "2 of 4 pages have no text: pages 2, 4; scanned?")
    ]


def test_a_damaged_page_costs_that_page_and_is_named(tmp_path):
    pages = [f"BT /F1 12 Tf 50 800 Td (Page {name} of the book.) Tj ET" for name in ("one", "two", "three")]
    whole = assemble_pdf(pages)
    packed = zlib.compress(pages[1].encode())
    damaged = whole.replace(
        f"<< /Length {len(pages[1])} >>\nstream\n{pages[1]}".encode(),
        f"<< /Length {len(packed)} /Filter /FlateDecode >>\nstream\n".encode() + b"\xff" * len(packed),
    )
    (tmp_path / "a.pdf").write_bytes(damaged)
    read = read_files(tmp_path)
    text = " ".join(entry.document.page_content for entry in read.entries)
    assert ("Page one" in text, "Page two" in text, "Page three" in text) == (True, False, True)
    assert [note.message for note in read.notes] == ["page 2 unreadable: damaged"]


def test_the_values_of_a_filled_form_are_text(tmp_path):
    field = "<< /FT /Tx /T (boat) /V (Kermoal) /Type /Annot /Subtype /Widget /Rect [50 700 200 720] >>"
    whole = pdf_of(["Application for a mooring\nName of boat:"]).replace(
        b"/Type /Catalog", b"/Type /Catalog /AcroForm 9 0 R"
    )
    whole = whole.replace(b"/Type /Page ", b"/Type /Page /Annots [8 0 R] ")
    more = f"8 0 obj\n{field}\nendobj\n9 0 obj\n<< /Fields [8 0 R] >>\nendobj\n".encode()
    (tmp_path / "a.pdf").write_bytes(whole.replace(b"xref\n", more + b"xref\n", 1))
    (document,) = read_documents(tmp_path)
    assert document.page_content == "Application for a mooring Name of boat:\n\nboat: Kermoal"
    assert document.metadata["page"] == 1


@pytest.mark.parametrize("step", ["Step", "Lesson"])
def test_lines_with_numbers_that_are_none_of_pages_stay(tmp_path, step):
    pages = [
        f"{step} {n}\nThe {name} is cleaned.\nTotal of the day: {n}{n} euros" for n, name in enumerate("abcde", 1)
    ]
    text = text_of(tmp_path / "a.pdf", pages)
    assert all(f"{step} {n}" in text and f"day: {n}{n} euros" in text for n in range(1, 6))


def test_an_outline_counts_before_large_letters(tmp_path):
    import pypdf

    (tmp_path / "plain.pdf").write_bytes(printed_pdf([f"Pumps\n\nSafety\n\n{SENTENCE}\n\nTools\n\n{SENTENCE}"]))
    writer = pypdf.PdfWriter(clone_from=tmp_path / "plain.pdf")
    writer.add_outline_item(title="Tools", page_number=0)
    writer.write(tmp_path / "a.pdf")
    read = read_here(tmp_path / "a.pdf")
    assert [block.headings for block in read.blocks if "Halden" in read.text[block.start : block.end]] == [
        (),
        ("Tools",),
    ]
