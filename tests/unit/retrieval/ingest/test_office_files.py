"""Word files, slides, workbooks, notebooks and e-books: everything with words is text, under its own heading."""

import json
import zipfile
from email.message import EmailMessage

import pytest

from rag_posfix.retrieval.ingest.ingest import read_documents, read_files
from rag_posfix.retrieval.ingest.readers import read_here

SPACE = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
MATHS = 'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'


def sections(path):
    """Return the headings and the text of each block of a file."""
    read = read_here(path)
    return [(" > ".join(block.headings), read.text[block.start : block.end]) for block in read.blocks]


def xml(source):
    from docx.oxml import parse_xml

    name = source[1:].split(">")[0].split()[0].rstrip("/")
    return parse_xml(source.replace(f"<{name}", f"<{name} {SPACE} {MATHS}", 1))


@pytest.fixture
def word(tmp_path):
    """Write a Word file of lines, each with the XML of its properties or None, and return its sections."""
    import docx

    document = docx.Document()

    def write(*lines):
        for text, properties in lines:
            document.add_paragraph(text)
            if properties is not None:
                document.element.body[-2].get_or_add_pPr().append(xml(properties))
        document.save(tmp_path / "a.docx")
        return sections(tmp_path / "a.docx")

    write.document = document
    return write


LEVELS = (
    '<w:lvl w:ilvl="0"><w:start w:val="1"/><w:numFmt w:val="decimal"/><w:lvlText w:val="%1."/></w:lvl>'
    '<w:lvl w:ilvl="1"><w:start w:val="1"/><w:numFmt w:val="decimal"/><w:lvlText w:val="%1.%2"/></w:lvl>'
    '<w:lvl w:ilvl="2"><w:start w:val="3"/><w:numFmt w:val="lowerRoman"/><w:lvlText w:val="(%3)"/></w:lvl>'
    '<w:lvl w:ilvl="3"><w:start w:val="1"/><w:numFmt w:val="bullet"/><w:lvlText w:val="o"/></w:lvl>'
)


def test_clauses_have_the_numbers_that_word_shows(word):
    numbering = word.document.part.numbering_part.element
    numbering.insert(0, xml(f'<w:abstractNum w:abstractNumId="77">{LEVELS}</w:abstractNum>'))
    numbering.append(xml('<w:num w:numId="77"><w:abstractNumId w:val="77"/></w:num>'))
    restart = '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="7"/></w:lvlOverride>'
    numbering.append(xml(f'<w:num w:numId="78"><w:abstractNumId w:val="77"/>{restart}</w:num>'))

    def numbered(level, number=77):
        return f'<w:numPr><w:ilvl w:val="{level}"/><w:numId w:val="{number}"/></w:numPr>'

    found = word(
        ("Rent", numbered(0)),
        ("It is due in May.", numbered(1)),
        ("A paragraph between.", None),
        ("Notice", numbered(0)),
        ("Half a year.", numbered(1)),
        ("in writing", numbered(2)),
        ("by post", numbered(2)),
        ("with a stamp", numbered(3)),
        ("One year.", numbered(1)),
        ("Appendix", numbered(0, 78)),
    )
    assert found == [
        ("", "1. Rent\n1.1 It is due in May."),
        ("", "A paragraph between."),
        (
            "",
            "2. Notice\n2.1 Half a year.\n(iii) in writing\n(iv) by post\n- with a stamp\n2.2 One year.\n7. Appendix",
        ),
    ]


@pytest.mark.parametrize(
    "style",
    [
        '<w:name w:val="Nadpis [1]"/><w:pPr><w:outlineLvl w:val="0"/></w:pPr>',
        '<w:name w:val="Kapitel"/><w:basedOn w:val="Heading1"/>',
        '<w:name w:val="heading 1"/>',
        '<w:name w:val="\u00dcberschrift 1"/>',
        '<w:name w:val="\u6807\u9898 1"/>',
    ],
)
def test_a_style_is_a_heading_by_its_outline_level_or_that_of_the_style_it_is_based_on(word, style):
    word.document.styles.element.append(xml(f'<w:style w:type="paragraph" w:styleId="Own">{style}</w:style>'))
    own = '<w:pStyle w:val="Own"/>'
    found = word(("Germany", own), ("Fourteen months.", None), ("France", '<w:outlineLvl w:val="0"/>'), ("Six.", None))
    assert found == [("Germany", "Fourteen months."), ("France", "Six.")]


def test_paragraphs_in_bold_letters_are_headings_where_text_follows(word):
    lines = ("Is it open?", "From eight on.", "Total due:", "Nine crowns", "Pay at once.", "Signed")
    word(*((line, None) for line in lines))
    for paragraph in word.document.paragraphs[::2] + word.document.paragraphs[3:4]:
        paragraph.runs[0].bold = paragraph.text != "Pay at once."
    assert word() == [("Is it open?", line) for line in lines[1:]]


def test_a_table_with_headings_lays_a_page_out_and_a_comment_is_text(word):
    table = word.document.add_table(rows=1, cols=2)
    for cell, name in zip(table.row_cells(0), ("Crane", "Pier"), strict=True):
        cell.paragraphs[0].text = "Numbered list"
        cell.paragraphs[0].style = "List Number"
        cell.add_paragraph(name, style="Heading 2")
        cell.add_paragraph(f"The {name.lower()} is old.")
    word.document.add_comment(table.cell(0, 1).paragraphs[2].runs, text="Ask Orla.", author="Bo", initials="B")
    assert word() == [
        ("", "1. Numbered list"), ("Crane", "The crane is old."), ("Crane", "2. Numbered list"),
        ("Pier", "The pier is old."), ("Pier", "Ask Orla."),
    ]  # fmt: skip


def test_a_second_line_in_the_style_of_titles_is_text(word):
    word.document.add_heading("Lease", 0)
    word.document.add_heading("of the shed", 0)
    assert word(("It is let.", None)) == [("", "of the shed"), ("", "It is let.")]


def test_raised_digits_of_a_word_file_stay_raised(tmp_path):
    import docx

    document = docx.Document()
    paragraph = document.add_paragraph("40 m")
    paragraph.add_run("2").font.superscript = True
    paragraph.add_run(" on the 3")
    paragraph.add_run("rd").font.superscript = True
    document.save(tmp_path / "a.docx")
    assert [text for _, text in sections(tmp_path / "a.docx")] == ["40 m\u00b2 on the 3rd"]


def test_text_boxes_footnotes_headers_and_equations_are_text_once(word):
    box = "<w:txbxContent><w:p><w:r><w:t>Never above 63 degrees.</w:t></w:r></w:p></w:txbxContent>"
    compatible = "http://schemas.openxmlformats.org/markup-compatibility/2006"
    choice = (
        f'<w:r><mc:AlternateContent xmlns:mc="{compatible}"><mc:Choice>{box}</mc:Choice><mc:Fallback>{box}'
        "</mc:Fallback></mc:AlternateContent></w:r>"
    )
    square = "<m:sSup><m:e><m:r><m:t>r</m:t></m:r></m:e><m:sup><m:r><m:t>2</m:t></m:r></m:sup></m:sSup>"
    ratio = "<m:f><m:num><m:r><m:t>a+b</m:t></m:r></m:num><m:den><m:r><m:t>c</m:t></m:r></m:den></m:f>"
    word.document.sections[0].header.paragraphs[0].text = "Draft of May"
    word.document.sections[0].footer.paragraphs[0].text = "7"
    word.document.add_paragraph("The area is ")
    paragraph = word.document.element.body[-2]
    paragraph.append(xml(f"<m:oMath>{square}<m:r><m:t>=</m:t></m:r>{ratio}</m:oMath>"))
    paragraph.append(xml(choice))
    paragraph.append(xml('<w:r><w:t xml:space="preserve"> today.</w:t></w:r>'))
    note = f'<w:footnotes {SPACE}><w:footnote w:id="2"><w:p><w:r><w:t>But on Sundays.</w:t></w:r></w:p></w:footnote>'
    relation = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/footnotes"
    from docx.opc.packuri import PackURI
    from docx.opc.part import Part

    kind = "application/vnd.openxmlformats-officedocument.wordprocessingml.footnotes+xml"
    part = Part(PackURI("/word/footnotes.xml"), kind, f"{note}</w:footnotes>".encode(), word.document.part.package)
    word.document.part.relate_to(part, relation)
    paragraph.append(xml('<w:r><w:footnoteReference w:id="2"/></w:r>'))
    assert [text for _, text in word()] == [
        "Draft of May", "The area is r^2=(a+b)/c today.", "Never above 63 degrees.", "But on Sundays.",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        ('<m:nary><m:naryPr><m:chr m:val="\u2211"/></m:naryPr><m:sub><m:r><m:t>i=1</m:t></m:r></m:sub><m:sup><m:r>'
         "<m:t>n</m:t></m:r></m:sup><m:e><m:r><m:t>a</m:t></m:r></m:e></m:nary>", "\u2211_(i=1)^n a"),
        ("<m:nary><m:e><m:r><m:t>x</m:t></m:r></m:e></m:nary>", "\u222b x"),
        ("<m:func><m:fName><m:r><m:t>f</m:t></m:r></m:fName><m:e><m:d><m:e><m:r><m:t>x</m:t></m:r></m:e><m:e><m:r><m:t>y"
         "</m:t></m:r></m:e></m:d></m:e></m:func>", "f(x, y)"),
    ],
)  # fmt: skip
def test_an_equation_is_on_one_line(word, formula, text):
    word.document.add_paragraph("")
    word.document.element.body[-2].append(xml(f"<m:oMath>{formula}</m:oMath>"))
    assert word() == [("", text)]


def test_a_table_of_a_word_file_is_one_and_merged_cells_count_for_each_row(word):
    table = word.document.add_table(rows=4, cols=3)
    rows = [["Rates", "", ""], ["City", "Day", "Rate"], ["Rome", "Mon", "3|a"], ["", "Sun", "*4*"]]
    for number, row in enumerate(rows):
        for column, text in enumerate(row):
            table.cell(number, column).text = text
    table.cell(0, 0).merge(table.cell(0, 2))
    table.cell(2, 0).merge(table.cell(3, 0))
    assert [text for _, text in word()] == [
        "Rates",
        "| City | Day | Rate |\n| --- | --- | --- |\n| Rome | Mon | 3|a |\n| Rome | Sun | *4* |",
    ]


def test_a_slide_has_its_own_title_or_none_and_its_number(tmp_path):
    import pptx
    from pptx.util import Inches

    place = (Inches(1), Inches(1), Inches(4), Inches(1))
    slides = pptx.Presentation()

    def add(layout, title=None):
        slide = slides.slides.add_slide(slides.slide_layouts[layout])
        if title:
            slide.shapes.title.text = title
        return slide

    add(1, "Germany").placeholders[1].text = "Fourteen months."
    add(6).shapes.add_textbox(*place).text_frame.text = "Spain: four months."
    third = add(6)
    third.shapes.add_group_shape().shapes.add_textbox(*place).text_frame.text = "In a group."
    third.notes_slide.notes_text_frame.text = "Say hello."
    table = add(5, "Prices").shapes.add_table(2, 2, *place).table
    for number, row in enumerate([["Boat", "Price"], ["Canoe", "a_b"]]):
        for column, text in enumerate(row):
            table.cell(number, column).text = text
    slides.save(tmp_path / "a.pptx")
    documents = read_documents(tmp_path / "a.pptx")
    assert [(d.metadata.get("title"), d.metadata["page"], d.page_content) for d in documents] == [
        ("Germany", 1, "Fourteen months."),
        (None, 2, "Spain: four months."),
        (None, 3, "In a group.\n\nSay hello."),
        ("Prices", 4, "| Boat | Price |\n| --- | --- |\n| Canoe | a_b |"),
    ]


def test_a_merged_cell_of_a_slide_counts_for_each_row(tmp_path):
    import pptx
    from pptx.util import Inches

    slides = pptx.Presentation()
    table = slides.slides.add_slide(slides.slide_layouts[6]).shapes.add_table(3, 2, *[Inches(1)] * 4).table
    for number, row in enumerate([["Boat", "Day"], ["Canoe", "Mon"], ["", "Sun"]]):
        for column, text in enumerate(row):
            table.cell(number, column).text = text
    table.cell(1, 0).merge(table.cell(2, 0))
    slides.save(tmp_path / "a.pptx")
    assert [text for _, text in sections(tmp_path / "a.pptx")] == [
        "| Boat | Day |\n| --- | --- |\n| Canoe | Mon |\n| Canoe | Sun |"
    ]


def test_a_chart_of_a_slide_is_a_table_of_its_values(tmp_path):
    import pptx
    from pptx.chart.data import CategoryChartData
    from pptx.enum.chart import XL_CHART_TYPE
    from pptx.util import Inches

    data = CategoryChartData()
    data.categories = ["East", "West"]
    data.add_series("Sales", (19.5, 21))
    slides = pptx.Presentation()
    slide = slides.slides.add_slide(slides.slide_layouts[5])
    chart = slide.shapes.add_chart(XL_CHART_TYPE.COLUMN_CLUSTERED, *[Inches(1)] * 4, data).chart
    chart.chart_title.text_frame.text = "Boats sold"
    slides.save(tmp_path / "a.pptx")
    assert [text for _, text in sections(tmp_path / "a.pptx")] == [
        "Boats sold",
        "|  | East | West |\n| --- | --- | --- |\n| Sales | 19.5 | 21 |",
    ]


@pytest.fixture
def book():
    import openpyxl

    return openpyxl.Workbook()


def test_a_title_above_a_sheet_is_no_header_and_merged_cells_count_for_each_row(tmp_path, book):
    sheet = book.active
    sheet.title = "Rates"
    rows = (["Season 2026"], ["Boat", "Day", "Price"], ["Canoe", "Mon", 9], [None, "Sun", 12], ["Raft", "Mon", 4])
    for row in rows:
        sheet.append(row)
    sheet.merge_cells("A1:C1")
    sheet.merge_cells("A3:A4")
    book.save(tmp_path / "a.xlsx")
    assert sections(tmp_path / "a.xlsx") == [
        (
            "Rates > Season 2026",
            "| Boat | Day | Price |\n| --- | --- | --- |\n| Canoe | Mon | 9 |\n| Canoe | Sun | 12 |\n"
            "| Raft | Mon | 4 |",
        )
    ]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (
            [["Name", "Phone"], ["Ilse", 111], [], [], ["Ships"], ["Ship", "Length"], ["Venn", 30]],
            [("Sheet", "| Name | Phone |\n| --- | --- |\n| Ilse | 111 |"),
             ("Sheet > Ships", "| Ship | Length |\n| --- | --- |\n| Venn | 30 |")],
        ),
        (
            [["Name", "Phone"], ["Ilse", 111], [], ["Per", 222], [], ["North"], ["Ann", 333]],
            [("Sheet", "| Name | Phone |\n| --- | --- |\n| Ilse | 111 |\n| Per | 222 |\n| North |  |\n| Ann | 333 |")],
        ),
        ([["Ships"], [], ["Ship", "Length"], ["Venn", 30]],
         [("Sheet > Ships", "| Ship | Length |\n| --- | --- |\n| Venn | 30 |")]),
    ],
)  # fmt: skip
def test_a_second_table_of_a_sheet_has_its_own_header_and_empty_rows_divide_none(tmp_path, book, rows, expected):
    for row in rows:
        book.active.append(row)
    book.save(tmp_path / "a.xlsx")
    assert sections(tmp_path / "a.xlsx") == expected


def test_a_header_of_merged_cells_counts_for_each_column(tmp_path, book):
    for row in (["Boat", 2025, None, 2026], [None, "Mon", "Sun", "Mon", "Sun"], ["Canoe", 1, 2, 3, 4]):
        book.active.append(row)
    for cells in ("A1:A2", "B1:C1", "D1:E1"):
        book.active.merge_cells(cells)
    book.save(tmp_path / "a.xlsx")
    assert sections(tmp_path / "a.xlsx") == [
        ("Sheet", "| Boat | 2025 | 2025 | 2026 | 2026 |\n| --- | --- | --- | --- | --- |\n"
        "| Boat | Mon | Sun | Mon | Sun |\n| Canoe | 1 | 2 | 3 | 4 |")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("number", "form", "text"),
    [
        (0.25, "0%", "25%"),
        (0.07, "0.0%", "7%"),
        (1, "0.00%;[Red]-0.00%", "100%"),
        (25, '0"%"', "25%"),
        (3, r"0\%", "3%"),
        (5.5, '0.00 "EUR"', "5.5 EUR"),
        (1250, "#,##0.00\\ [$\u20ac-407]", "1250 \u20ac"),
        (-7, "$#,##0_);[Red]($#,##0)", "-$7"),
        (12_000, '#,##0,"k"', "12k"),
        (3, '"Q"0', "Q3"),
        (4, "0.00", "4"),
        (1, '"yes";;"no"', "1"),  # a text in place of the number
    ],
)
def test_a_number_has_the_unit_that_a_reader_sees(tmp_path, book, number, form, text):
    book.active.append(["Discount", "Year"])
    book.active.append([number, 2026])
    book.active["A2"].number_format = form
    book.save(tmp_path / "a.xlsx")
    assert sections(tmp_path / "a.xlsx") == [("Sheet", f"| Discount | Year |\n| --- | --- |\n| {text} | 2026 |")]


def test_comments_on_cells_are_said(tmp_path, book):
    from openpyxl.comments import Comment

    book.active.append(["Rope", 5])
    book.active["A1"].comment = Comment("only blue", "a")
    book.save(tmp_path / "a.xlsx")
    assert read_here(tmp_path / "a.xlsx").losses == ("1 comments on cells are left out",)


def test_a_formula_of_several_cells_without_a_value_is_said(tmp_path, book):
    from openpyxl.worksheet.formula import ArrayFormula

    book.active.append(["a", "b"])
    book.active.append([1, ArrayFormula("B2:B2", "=SUM(A2:A2*2)")])
    book.save(tmp_path / "a.xlsx")
    read = read_here(tmp_path / "a.xlsx")
    assert "| 1 | =SUM(A2:A2*2) |" in read.text
    assert read.losses[0].startswith("1 formulas have no stored value")


def test_formulas_without_values_and_hidden_sheets_are_said(tmp_path, book):
    for row in (["Item", "Price", "Twice"], ["Pump", 60, "=B2*2"], ["Rope", 5, "=B3*2"]):
        book.active.append(row)
    hidden = book.create_sheet("Costs")
    hidden.append(["secret", "9"])
    hidden.sheet_state = "hidden"
    book.save(tmp_path / "a.xlsx")
    read = read_files(tmp_path)
    text = "\n".join(entry.document.page_content for entry in read.entries)
    assert "| Pump | 60 | =B2*2 |" in text
    assert "secret" in text
    assert [(note.kind, note.message.partition(";")[0]) for note in read.notes] == [
        ("lost", "the sheet 'Costs' is hidden"),
        ("lost", "2 formulas have no stored value"),
    ]


def test_printed_results_of_a_notebook_are_text_and_pictures_are_not(tmp_path):
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["The total is 5312.\n"]},
        {"output_type": "execute_result", "execution_count": 1, "metadata": {}, "data": {"text/plain": ["42"]}},
        {"output_type": "display_data", "metadata": {}, "data": {"image/png": "iVBORw0KGgo" * 50}},
        {"output_type": "error", "ename": "E", "evalue": "bad", "traceback": ["\x1b[0;31mE\x1b[0m: bad"]},
    ]
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["# Catch\n", "\n", "We *count* `lock_file_name`.\n"]},
        {"cell_type": "code", "metadata": {}, "execution_count": 1, "source": ["print(total)"], "outputs": outputs},
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}))
    found = sections(tmp_path / "a.ipynb")
    assert {headings for headings, _ in found} == {"Catch"}
    assert [text for _, text in found][:4] == ["We count lock_file_name.", "print(total)", "The total is 5312.", "42"]
    assert "iVBOR" not in str(found)
    assert "\x1b" not in str(found)


def test_results_in_markdown_or_html_alone_and_notebooks_of_version_3_are_text(tmp_path):
    shown = [{"text/markdown": "Nine **boats**", "text/plain": "<IPython>"}, {"text/html": ["<p>Ten", " rafts</p>"]}]
    outputs = [{"output_type": "display_data", "metadata": {}, "data": data} for data in shown]
    cells = [{"cell_type": "code", "metadata": {}, "execution_count": 1, "source": "show()", "outputs": outputs}]
    (tmp_path / "a.ipynb").write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}))
    assert [text for _, text in sections(tmp_path / "a.ipynb")] == ["show()", "Nine **boats**", "Ten rafts"]
    old = [
        {"cell_type": "heading", "level": 2, "source": ["Catch"]},
        {"cell_type": "code", "input": ["show()"], "outputs": [
            {"output_type": "stream", "stream": "stdout", "text": ["9917\n"]},
            {"output_type": "pyout", "text": ["4444"]},
        ]},
    ]  # fmt: skip
    (tmp_path / "b.ipynb").write_text(json.dumps({"nbformat": 3, "metadata": {}, "worksheets": [{"cells": old}]}))
    assert sections(tmp_path / "b.ipynb") == [("Catch", "show()"), ("Catch", "9917"), ("Catch", "4444")]


PACKAGE = (
    '<package xmlns="http://www.idpf.org/2007/opf" version="3.0"><metadata '
    'xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>Lights of the north</dc:title></metadata><manifest>'
    '<item id="c" href="c.xhtml" media-type="application/xhtml+xml"/></manifest><spine>{}</spine></package>'
)
CONTAINER = (
    '<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles><rootfile '
    'full-path="content.opf" media-type="application/oebps-package+xml"/></rootfiles></container>'
)


def write_book(path, spine, page):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mimetype", "application/epub+zip")
        archive.writestr("META-INF/container.xml", CONTAINER)
        archive.writestr("content.opf", PACKAGE.format(spine))
        archive.writestr("c.xhtml", f'<html xmlns="http://www.w3.org/1999/xhtml"><body>{page}</body></html>')


def test_an_e_book_is_read_without_marks_of_markdown(tmp_path):
    page = "<h1>Torvane</h1><p>Set lock_file_name to 2*3*4, 5 &lt; 6.</p><ul><li>use MAX_LEN</li></ul>"
    write_book(tmp_path / "a.epub", '<itemref idref="c"/>', page)
    (document,) = read_documents(tmp_path)
    assert document.metadata["title"] == "Lights of the north > Torvane"
    assert document.page_content == "Set lock_file_name to 2*3*4, 5 < 6.\n\n- use MAX_LEN"


@pytest.mark.parametrize(
    ("spine", "page", "reason"),
    [
        ('<itemref idref="c"/>' * 5000, "<p>x</p>", "its spine refers 5,000 times to 4 parts"),
        ('<itemref idref="c"/>', "<p>x</p>" * 3_000_000, "unpack to 24,0"),
        ("<!DOCTYPE x [<!ENTITY a 'b'>]>", "<p>x</p>", "declares entities"),
    ],
)
def test_an_archive_that_unpacks_to_far_more_than_it_is_is_refused(tmp_path, spine, page, reason):
    write_book(tmp_path / "a.epub", spine, page)
    (tmp_path / "b.txt").write_text("Others are read.")
    read = read_files(tmp_path, strict=False)
    assert [entry.document.page_content for entry in read.entries] == ["Others are read."]
    assert [(skipped.kind, reason in skipped.reason) for skipped in read.skipped] == [("unreadable", True)]


MAIL = """From: Ilse Korvanth <ilse@example.org>
To: Bo Lind <bo@example.org>
Subject: =?utf-8?q?Berths_f=C3=BCr_Mai?=
Date: Fri, 03 May 2024 10:00:00 +0200
MIME-Version: 1.0
Content-Type: multipart/mixed; boundary="b"

--b
Content-Type: {kind}; charset=utf-8
Content-Transfer-Encoding: quoted-printable

{body}
--b
Content-Type: text/plain
Content-Disposition: attachment; filename="crane.txt"

The crane is broken.
--b
Content-Type: image/png
Content-Disposition: attachment; filename="pier.png"

x
--b--
"""


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/plain", "Dear Bo,\n\nberth A1 costs 40 =E2=82=AC."),
        ("text/html", "<html><meta charset=3Dlatin1><p>Dear Bo,<p>berth <b>A1</b> costs 40 =E2=82=AC.</html>"),
    ],
)
def test_a_mail_has_its_subject_people_text_and_attached_text_and_names_other_attachments(tmp_path, kind, body):
    (tmp_path / "a.eml").write_text(MAIL.format(kind=kind, body=body))
    read = read_here(tmp_path / "a.eml")
    assert read.title == "Berths für Mai"
    people = "From: Ilse Korvanth <ilse@example.org>\nTo: Bo Lind <bo@example.org>"
    assert read.text.startswith(f"Berths für Mai\n\n{people}\nDate: Fri, 03 May 2024 10:00:00 +0200\n\nDear Bo,")
    assert "\n\nberth A1 costs 40 €.\n\ncrane.txt\n\nThe crane is broken." in read.text
    assert list(read.losses) == ["the attachment 'pier.png' is not read"]


@pytest.mark.parametrize(
    ("plain", "text"), [("See below.", "| Pier | 4 |"), ("Pier 4 is 6 m deep, as said.", "6 m deep")]
)
def test_of_the_two_forms_of_a_mail_that_with_more_words_is_read(tmp_path, plain, text):
    mail = EmailMessage()
    mail.set_content(plain)
    mail.add_alternative("<table><tr><td>Pier</td><td>4</td></tr><tr><td>Depth</td><td>6 m</td></tr></table>", "html")
    (tmp_path / "a.eml").write_bytes(bytes(mail))
    assert text in read_here(tmp_path / "a.eml").text


PLAIN = "Content-Type: text/plain\n\n"


@pytest.mark.parametrize(
    ("parts", "found", "loss"),
    [
        (f"--b\n{PLAIN}One.\n--b\n{PLAIN}Two.\n", [("S", "One."), ("S", "Two.")], None),
        (f"--b\nContent-Type: message/rfc822\n\nFrom: o@x\nSubject: Crane\n{PLAIN}It lifts.\n",
         [("S > Crane", "From: o@x"), ("S > Crane", "It lifts.")], None),
        ("--b\nContent-Type: text/html\n\n<h2>Fees</h2>9 \u20ac.\n", [("S > Fees", "9 \u20ac.")], None),
        (f"--b\n{PLAIN}Gr\u00fc\u00dfe.\n", [("S", "Gr\u00fc\u00dfe.")], None),
        ("--b\nContent-Type: text/plain; charset=unknown-8bit\n\nTwo.\n", [("S", "Two.")], None),
        ("--b\nContent-Type: text/csv; name=a.csv\n\nBoat,Price\n", [("S > a.csv", "Boat,Price")], None),
        (f"--b\nContent-Type: multipart/alternative; boundary=c\n\n--c\n{PLAIN}See.\n--c\n"
         "Content-Type: text/calendar\n\nSUMMARY:Crane\n--c--\n", [("S", "See."), ("S", "SUMMARY:Crane")], None),
        ("--b\nContent-Type: application/pdf; name=a.pdf\n\nx\n", [], "the attachment 'a.pdf' is not read"),
    ],
)  # fmt: skip
def test_all_texts_of_a_mail_are_read(tmp_path, parts, found, loss):
    mail = f"From: a@x\nSubject: S\nContent-Type: multipart/mixed; boundary=b\n\n{parts}--b--\n"
    (tmp_path / "a.eml").write_text(mail)
    assert [section for section in sections(tmp_path / "a.eml") if section[1] != "From: a@x"] == found
    assert read_here(tmp_path / "a.eml").losses == (() if loss is None else (loss,))


def test_rich_text_has_the_labels_of_its_clauses_and_marks_that_break_no_line(tmp_path):
    label = r"{\listtext\pard\plain\f0 %d.\tab}\pard\s1\outlinelevel0 "
    (tmp_path / "a.rtf").write_text(
        r"{\rtf1\ansi{\stylesheet{\s0 Normal;}{\s1\outlinelevel0 heading 1;}}{\header Draft\par}" + label % 4
        + r"Scope\par\pard\s0 Part AX\_900 lifts 12\~tonnes.\par" + label % 5 + r"Term\par\pard\s0 Nine days.\par}"
    )  # fmt: skip
    assert sections(tmp_path / "a.rtf") == [
        ("", "Draft"), ("4. Scope", "Part AX-900 lifts 12 tonnes."), ("5. Term", "Nine days."),
    ]  # fmt: skip


def test_an_opendocument_text_and_rich_text_are_read_with_tables_lists_and_footnotes(tmp_path):
    names = ("office", "text", "table")
    spaces = " ".join(f'xmlns:{name}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"' for name in names)
    cells = "".join(
        f"<table:table-row><table:table-cell><text:p>{left}</text:p></table:table-cell><table:table-cell>"
        f"<text:p>{right}</text:p></table:table-cell></table:table-row>"
        for left, right in (("berth", "price"), ("A1", "40"))
    )
    with zipfile.ZipFile(tmp_path / "a.odt", "w") as archive:
        archive.writestr("mimetype", "application/vnd.oasis.opendocument.text")
        archive.writestr(
            "content.xml",
            f"<office:document-content {spaces}><office:body><office:text>"
            '<text:h text:outline-level="1">Fees</text:h><text:p>Paid at <text:span>nine</text:span>.</text:p>'
            f"<text:list><text:list-item><text:p>Dogs on a lead.</text:p></text:list-item></text:list>"
            f"<table:table>{cells}</table:table></office:text></office:body></office:document-content>",
        )
    (tmp_path / "a.rtf").write_text(
        r"{\rtf1\ansi\ansicpg1252 {\pard Caf\'e9: 5 < 6.\par}{\trowd\cellx2000\cellx4000 berth\cell price\cell\row}"
        r"{\trowd\cellx2000\cellx4000 A1\cell 40\cell\row}{\pard Paid{\footnote By card.} at nine.\par}}"
    )
    document, rich = read_here(tmp_path / "a.odt").text, read_here(tmp_path / "a.rtf").text
    table = "| berth | price |\n| --- | --- |\n| A1 | 40 |"
    assert document == f"Fees\n\nPaid at nine.\n\n- Dogs on a lead.\n\n{table}"
    assert all(text in rich for text in ("Café: 5 < 6.", table, "Paid", "at nine.", "By card."))
