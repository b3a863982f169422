"""Passages that can be read alone: each is of one section, and says in its title which."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document

from rag_posfix.errors import ConfigError, RetrievalError
from rag_posfix.retrieval.ingest.ingest import read_documents, read_files
from rag_posfix.retrieval.ingest.passages import CharSpan, PassageSize, split_blocks, split_document, split_passages
from rag_posfix.retrieval.ingest.readers import read_text
from rag_posfix.retrieval.ingest.structure import Block, read_markdown
from tests.support.pdf_files import pdf_of

LEAVE = """# Benefits in Germany

Parental leave is fourteen months.

# Benefits in France

Parental leave is six months.
"""


def titled(documents):
    return [(document.metadata.get("title"), document.page_content) for document in documents]


def words(count, start=0):
    return " ".join(f"w{number}" for number in range(start, start + count))


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_a_heading_belongs_to_the_text_below_it_and_never_ends_a_passage(tmp_path):
    documents = read_documents(write(tmp_path / "travel_policy.md", LEAVE))
    assert titled(documents) == [
        ("travel policy > Benefits in Germany", "Parental leave is fourteen months."),
        ("travel policy > Benefits in France", "Parental leave is six months."),
    ]


def test_a_last_line_in_capitals_is_text(tmp_path):
    (document,) = read_documents(write(tmp_path / "a.txt", "The lamp burns.\n\nThe pier is old.\n\nTHE END\n"))
    assert document.page_content.endswith("THE END")


def test_plain_text_word_and_web_pages_have_the_same_sections(tmp_path):
    import docx

    body = "Employees in {} get {} months of parental leave."
    plain = "Travel policy\n\nGermany\n\n" + body.format("Germany", 14) + "\n\nFrance\n\n" + body.format("France", 6)
    write(tmp_path / "a.txt", plain)
    write(
        tmp_path / "a.html",
        "<title>Travel policy</title><nav><a href=/>Start</a> <a href=/x>Imprint</a></nav><main><h2>Germany</h2><p>"
        f"{body.format('Germany', 14)}</p><h2>France</h2><p>{body.format('France', 6)}</p></main><footer>Fine print"
        "</footer>",
    )
    document = docx.Document()
    document.add_heading("Travel policy", 0)
    for country, months in (("Germany", 14), ("France", 6)):
        document.add_heading(country, 2)
        document.add_paragraph(body.format(country, months))
    document.save(tmp_path / "a.docx")
    expected = [
        ("Travel policy > Germany", "Employees in Germany get 14 months of parental leave."),
        ("Travel policy > France", "Employees in France get 6 months of parental leave."),
    ]
    for name in ("a.txt", "a.html", "a.docx"):
        assert titled(read_documents(tmp_path / name)) == expected, name


def test_the_outline_of_a_pdf_file_gives_headings_and_each_passage_its_page(tmp_path):
    import pypdf

    (tmp_path / "plain.pdf").write_bytes(
        pdf_of(["Manual", "Safety\nWear gloves.", "Repair\nCall us. Tools\nUse a key."])
    )
    writer = pypdf.PdfWriter(clone_from=tmp_path / "plain.pdf")
    writer.add_outline_item(title="Safety", page_number=1)
    repair = writer.add_outline_item(title="Repair", page_number=2)
    writer.add_outline_item(title="Tools", page_number=2, parent=repair)
    writer.write(tmp_path / "pump manual.pdf")
    documents = read_documents(tmp_path / "pump manual.pdf")
    assert [
        (*pair, document.metadata["page"]) for pair, document in zip(titled(documents), documents, strict=True)
    ] == [
        ("pump manual", "Manual", 1),
        ("pump manual > Safety", "Wear gloves.", 2),
        ("pump manual > Repair", "Call us.", 3),
        ("pump manual > Repair > Tools", "Use a key.", 3),
    ]


def test_an_outline_without_numbers_names_numbered_headings_and_takes_no_words_from_sentences(tmp_path):
    import pypdf

    page = (
        "1 Introduction\nFerries are ships. We discuss the method and the results below.\n"
        "2 Method\nResults of counts are kept in two parts: results\nand counts.\nA.1 Results\nThere are nine."
    )
    (tmp_path / "plain.pdf").write_bytes(pdf_of([page]))
    writer = pypdf.PdfWriter(clone_from=tmp_path / "plain.pdf")
    for title in ("Introduction", "Method", "Results"):
        writer.add_outline_item(title=title, page_number=0)
    writer.write(tmp_path / "ferries.pdf")
    assert titled(read_documents(tmp_path / "ferries.pdf")) == [
        ("ferries > Introduction", "Ferries are ships. We discuss the method and the results below."),
        ("ferries > Method", "Results of counts are kept in two parts: results and counts."),
        ("ferries > Results", "There are nine."),
    ]


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("---\ntitle: 'Holidays'\nacl: hr\n---\n# One\n\nx y\n\n# Two\n\nz", "Holidays > One"),
        ("# Guide\n\nx y\n\n## Two\n\nz", "Guide"),
        ("## *Lamps* of `Torvane`\n\nx y", "Lamps of Torvane"),
        ("Guide\n=====\n\nx y", "Guide"),
        ("x y\n\n# Late\n\nz", None),
    ],
)
def test_the_title_is_what_the_file_states(tmp_path, text, title):
    (document, *_) = read_documents(write(tmp_path / "a.md", text))
    assert document.metadata.get("title") == title
    assert document.metadata.get("acl") == ("hr" if "acl" in text else None)


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("leave-policy_2024.txt", "leave policy 2024"),
        ("README.txt", None),
        ("a1.txt", None),
        ("Über uns.txt", "Über uns"),
    ],
)
def test_a_file_without_a_title_has_that_of_its_name(tmp_path, name, title):
    (document,) = read_documents(write(tmp_path / name, "six months"))
    assert document.metadata.get("title") == title


def test_a_heading_without_text_is_lost_nowhere(tmp_path):
    text = "# Help\n\nRead this.\n\n## In an emergency dial 112\n\n# Other\n\nMore."
    documents = read_documents(write(tmp_path / "a.md", text))
    assert titled(documents) == [
        ("Help", "Read this."),
        ("Help", "## In an emergency dial 112"),
        ("Other", "More."),
    ]


@pytest.mark.parametrize(
    ("name", "text", "headings"),
    [
        ("a.txt", "1 SCOPE\n\n{}\n\n2 TERM\n\n{}\n", ["1 SCOPE", "2 TERM"]),
        ("a.txt", "Article 1 Scope\n\n{}\n\nArticle 2 Term\n\n{}\n", ["Article 1 Scope", "Article 2 Term"]),
        ("a.txt", "Lease\n\n1. Rent\n\n{}\n\n2. Notice\n\n{}\n", ["Lease > 1. Rent", "Lease > 2. Notice"]),
        ("a.txt", "FISH SOUP\n\nOne:\n- {}\n\nCOD PIE\n\nTwo:\n- {}\n", ["FISH SOUP", "COD PIE"]),
        ("a.txt", "LEAVE\n\nGERMANY\n\n{}\n\nFRANCE\n\n{}\n", ["LEAVE > GERMANY", "LEAVE > FRANCE"]),
        ("a.txt", "== Fees ==\n{}\n=== Dogs ===\n{}\n", ["Fees", "Fees > Dogs"]),
        ("a.md", "**Is it open?**\n\n{}\n\n__Who has keys?__\n\n{}\n", ["Is it open?", "Who has keys?"]),
        ("a.md", "# Fees {{#fees}}\n\n{}\n\n## Dogs\n\n{}\n", ["Fees", "Fees > Dogs"]),
        ("a.md", "Due:\n\n**Nine crowns**\n\n{}\n\n**Mind the gap.**\n\n{}\n", [None]),
    ],
)
def test_headings_of_one_kind_are_of_one_level(tmp_path, name, text, headings):
    prose = [f"The {word} of the harbour is old and long." for word in ("pier", "crane")]
    documents = read_documents(write(tmp_path / name, text.format(*prose)))
    assert [document.metadata.get("title") for document in documents] == headings
    assert all(any(sentence in document.page_content for document in documents) for sentence in prose)


def test_steps_of_a_list_that_stand_apart_are_no_headings(tmp_path):
    (document,) = read_documents(write(tmp_path / "a.txt", "How to stop.\n\n1. Press the red button\n\n2. Wait\n"))
    assert "1. Press the red button\n\n2. Wait" in document.page_content


@pytest.mark.parametrize("mark", ["?", ":"])
def test_a_question_is_in_the_passage_of_its_answer(mark):
    text = "\n\n".join(f"What is number {n}{mark}\n\n{words(12 + n % 3, 20 * n)}" for n in range(9))
    passages = split_blocks(text, [Block("text", 0, len(text))], PassageSize(words=40))
    assert len(passages) > 4
    assert all(passage.text.startswith("What is number") for passage in passages)


def test_a_list_keeps_its_lead_sentence_and_a_table_its_header():
    items = "\n".join(f"- item {number} of the list" for number in range(8))
    text = f"{words(6)}. You need these papers:\n\n{items}\n"
    read = read_markdown(text)
    passages = split_blocks(read.text, read.blocks, PassageSize(words=26))
    assert [passage.text.splitlines()[0] for passage in passages] == [
        "w0 w1 w2 w3 w4 w5. You need these papers:",
        "You need these papers:",
        "You need these papers:",
    ]
    rows = "\n".join(f"| city{number} | {number} |" for number in range(6))
    table = read_markdown(f"| city | days |\n|---|---|\n{rows}\n")
    passages = split_blocks(table.text, table.blocks, PassageSize(words=20))
    assert len(passages) > 1
    for passage in passages:
        assert passage.text.startswith("| city | days |\n|---|---|\n| city")
        assert len(passage.text.split()) <= 20


def test_a_block_of_code_stays_whole_where_it_fits():
    code = "```\n" + "\n\n".join(f"line {number}" for number in range(6)) + "\n```"
    read = read_markdown(f"{words(10)}\n\n{code}\n\n{words(5, 20)}")
    passages = [passage.text for passage in split_blocks(read.text, read.blocks, PassageSize(words=15))]
    assert passages == [words(10), code, words(5, 20)]
    assert len(split_blocks(read.text, read.blocks, PassageSize(words=8))) > 3


def test_overlap_repeats_the_last_sentences_of_the_same_section_only():
    text = "# A\n\nOne two three. Four five. Six seven eight nine.\n\n# B\n\nTen."
    read = read_markdown(text)
    passages = split_blocks(read.text, read.blocks, PassageSize(words=7, overlap=2))
    assert [passage.text for passage in passages] == [
        "One two three. Four five.",
        "Four five. Six seven eight nine.",
        "Ten.",
    ]


def test_a_size_in_tokens_counts_with_the_counter_that_is_given():
    text = "aa bb cc dd ee ff"
    passages = split_document(
        Document(text), PassageSize(tokens=4, count_tokens=lambda text: len(text.replace(" ", "")))
    )
    assert [passage.page_content for passage in passages] == ["aa bb", "cc dd", "ee ff"]
    assert len(split_document(Document("数" * 30), PassageSize(tokens=10))) == 3
    assert len(split_document(Document("数" * 30), PassageSize(words=10))) == 3


@pytest.mark.parametrize(
    "options",
    [{"words": 5, "overlap": 5}, {"tokens": 5, "overlap": -1}, {"tokens": 0}, {"words": 0}, {"characters": 0}],
)
def test_sizes_that_leave_nothing_are_refused(options):
    with pytest.raises(ConfigError, match=r"passage size|must be >= 1"):
        PassageSize(**options)


marks = st.lists(
    st.sampled_from(
        ["# Head", "## Sub", "word", "One sentence. Two!", "- item", "1. first", "| a | b |", "|---|---|", "| 1 | 2 |",
         "```", "    code", "> quote", "", "", "x" * 40, "数据。", "You need:", "\t", "---", "Line\r", "<b>"]
    ),
    max_size=30,
).map("\n".join)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(text=marks, size=st.builds(PassageSize, words=st.integers(2, 12), overlap=st.integers(0, 1)))
def test_a_passage_ends_with_its_place_and_keeps_its_bounds(text, size):
    read = read_markdown(text)
    for passage in split_blocks(read.text, read.blocks, size):
        assert passage.text.endswith(text[passage.start : passage.end])
        assert passage.text.strip() == passage.text != ""
        assert len(passage.text.split()) <= size.words


def test_records_of_tickets_have_a_subject_and_other_fields_are_text_and_metadata(tmp_path):
    rows = [
        {"number": 7, "subject": "Lamp", "body": "The lamp is dark.", "status": "open", "tags": ["a"]},
        {"number": 8, "subject": "Door only", "body": "", "status": "done"},
    ]
    write(tmp_path / "tickets.jsonl", "\n".join(map(json.dumps, rows)))
    read = read_files(tmp_path)
    first, second = (entry.document for entry in read.entries)
    assert titled([first, second]) == [
        ("Lamp", "number: 7\nbody: The lamp is dark.\nstatus: open\ntags: a"),
        ("Door only", "number: 8\nstatus: done"),
    ]
    source = str(tmp_path / "tickets.jsonl")
    stated = {"source": source, "number": 7, "body": "The lamp is dark.", "status": "open", "tags": ["a"]}
    assert first.metadata == stated | {"title": "Lamp"}
    assert [note.message for note in read.notes] == ["text: all fields, one line each; title: subject"]


@pytest.mark.parametrize(
    ("row", "title", "text"),
    [
        ({"question": "Which?", "answer": "This."}, "Which?", "This."),
        ({"Name": "Lamp", "Description": "Bright."}, "Lamp", "Bright."),
        ({"content": "C", "resolution": "R"}, None, "C\n\nresolution: R"),
        ({"key": "a", "remark": words(9)}, None, f"key: a\nremark: {words(9)}"),
        ({"key": "a", "remark": words(30)}, "key: a", words(30)),
        ({"city": "Rome", "days": 3}, None, "city: Rome\ndays: 3"),
    ],
)
def test_fields_are_found_by_name_and_by_content(tmp_path, row, title, text):
    (document,) = read_documents(write(tmp_path / "a.json", json.dumps([row])))
    assert titled([document]) == [(title, text)]


def test_fields_that_are_named_count_instead(tmp_path):
    path = write(tmp_path / "a.csv", "id,subject,body,internal\n5,S,B,I\n")
    (document,) = read_documents(path, fields=["internal,title=body", "id=id"])
    assert (document.id, titled([document])) == ("5", [("B", "I")])
    assert document.metadata["subject"] == "S"
    for spec in ("colour=body", "title=", "title=a,title=b"):
        with pytest.raises(ConfigError, match="field"):
            read_documents(path, fields=[spec])


def test_tables_that_number_their_rows_do_not_collide(tmp_path):
    write(tmp_path / "a.csv", "id,subject,body\n1,S,one\n")
    write(tmp_path / "b.csv", "id,subject,body\n1,S,two\n")
    assert [document.metadata["id"] for document in read_documents(tmp_path)] == ["1", "1"]


def test_good_rows_of_a_bad_file_are_kept_and_bad_ones_are_named_by_their_line(tmp_path):
    lines = ['{"text": "one"}', '{"text": ', "[1]", '{"text": "four"}', '{"text": 5}']
    write(tmp_path / "a.jsonl", "\n".join(lines))
    write(tmp_path / "b.csv", 'subject,body\na,b1\na,b,c\n"open,b3\nd,b4\ne,"b5\nand more"\n')
    read = read_files(tmp_path, strict=False)
    assert [entry.document.page_content for entry in read.entries] == ["one", "four", "b1", "b4", "b5\nand more"]
    problems = [note.message for note in read.notes if note.kind == "rows"]
    assert sorted(problem.partition(": ")[0].rpartition("/")[2] for problem in problems) == [
        "a.jsonl:2", "a.jsonl:3", "a.jsonl:5", "b.csv:3", "b.csv:4",
    ]  # fmt: skip
    assert [document.page_content for document in read_documents(tmp_path, strict=False)][:2] == ["one", "four"]
    with pytest.raises(RetrievalError, match=r"a\.jsonl:2: not JSON"):
        read_documents(tmp_path)


def test_a_long_record_is_split_and_its_passages_have_its_metadata(tmp_path):
    body = f"# Cause\n\n{words(100)}\n\n# Fix\n\n{words(100, 100)}"
    path = write(tmp_path / "a.jsonl", json.dumps({"id": "t1", "title": "Lamp", "text": body, "acl": "hr"}))
    first, second = read_documents(path)
    assert [(one.id, one.metadata["title"], one.metadata["acl"]) for one in (first, second)] == [
        ("t1#1", "Lamp > Cause", "hr"),
        ("t1#2", "Lamp > Fix", "hr"),
    ]
    assert body[second.metadata["start"] : second.metadata["end"]] == second.page_content == words(100, 100)


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("Le congé parental dure six mois, d\u2019après la règle.", "cp1252"),
        ("id;name\n1;Müller\n", "latin-1"),
        ("Zażółć gęślą jaźń, proszę bardzo państwa.", "cp1250"),
        ("Русский текст для проверки кодировки.", "cp1251"),
        ("ภาษาไทยเป็นภาษาที่มีระดับเสียงของคำแน่นอน", "cp874"),
        ("これは日本語の文章です。", "shift_jis"),
        ("这是一个中文句子,用来测试编码。", "gb18030"),
    ],
)
def test_encodings_are_found(tmp_path, text, encoding):
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    assert read_text(tmp_path / "a.txt").text == text
    assert "a guess" in str(read_text(tmp_path / "a.txt").encoding_note)


def test_a_langchain_splitter_splits_what_is_between_headings(tmp_path):
    from langchain_text_splitters import RecursiveCharacterTextSplitter

    path = write(tmp_path / "a.md", f"# A\n\n{words(6)}\n\n# B\n\n{words(2)}")
    splitter = RecursiveCharacterTextSplitter(chunk_size=12, chunk_overlap=3)
    documents = read_documents(path, splitter=splitter)
    assert titled(documents) == [
        ("A", "w0 w1 w2 w3"),
        ("A", "w3 w4 w5"),
        ("B", "w0 w1"),
    ]
    text = read_text(path).text
    for document in documents:
        assert text[document.metadata["start"] : document.metadata["end"]] == document.page_content
    with pytest.raises(ConfigError, match="cannot be combined"):
        read_documents(path, splitter=splitter, size=PassageSize())
    with pytest.raises(ConfigError, match="must be a langchain text splitter"):
        read_documents(path, splitter=len)


def test_cells_of_a_workbook_are_read_as_they_are_stored(tmp_path):
    from datetime import date, datetime

    import openpyxl

    book = openpyxl.Workbook()
    book.active.title = "Staff"
    rows = (
        [], ["Phone", "Country", "Size", "Desks", "Since", None], ["0049301", "NA", "1E5", 12, datetime(2020, 3, 1)],
        [None] * 6, ["N/A", "None", "a|b\nc", None, datetime(2020, 3, 1, 8, 30)], ["7", "DE", 0.1 + 0.2, 2.0, True],
    )  # fmt: skip
    for row in rows:
        book.active.append(row)
    book.create_sheet("Empty")
    book.create_sheet("Days").append([date(2021, 1, 2)])
    book.save(tmp_path / "a.xlsx")
    assert titled(read_documents(tmp_path)) == [
        (
            "Staff",
            "| Phone | Country | Size | Desks | Since |\n| --- | --- | --- | --- | --- |\n"
            "| 0049301 | NA | 1E5 | 12 | 2020-03-01 |\n| N/A | None | a|b c |  | 2020-03-01 08:30:00 |\n"
            "| 7 | DE | 0.3 | 2 | TRUE |",
        ),
        ("Days", "2021-01-02"),
    ]


def test_a_wrong_size_in_a_workbook_hides_no_cell(tmp_path):
    import zipfile

    import openpyxl

    book = openpyxl.Workbook()
    for row in (["City", "Rate"], ["Rome"], ["Oslo", 4]):
        book.active.append(row)
    book.save(tmp_path / "whole.xlsx")
    with zipfile.ZipFile(tmp_path / "whole.xlsx") as whole, zipfile.ZipFile(tmp_path / "a.xlsx", "w") as written:
        for name in whole.namelist():
            written.writestr(name, whole.read(name).replace(b'<dimension ref="A1:B3"', b'<dimension ref="A1"'))
    (document,) = read_documents(tmp_path / "a.xlsx")
    assert document.page_content == "| City | Rate |\n| --- | --- |\n| Rome |  |\n| Oslo | 4 |"


def test_a_sentence_that_is_longer_than_a_passage_is_said(tmp_path):
    write(tmp_path / "a.txt", words(20))
    read = read_files(tmp_path, size=PassageSize(words=10))
    assert [(note.kind, note.message) for note in read.notes] == [
        ("cut", "1 times a sentence, row or line was cut: it is longer than a passage of 10 words")
    ]


prose = st.lists(
    st.sampled_from(
        ["word", "ein", "Ünïcödé", "数据。", "end.", "so?", "\n", "\n\n", "\r\n\r\n", " ", "\t", "\u2028", "x" * 30]
    )
).map(" ".join)
sizes = st.builds(PassageSize, words=st.integers(1, 12), characters=st.integers(1, 60))


@settings(max_examples=150, deadline=None)
@given(text=st.one_of(prose, st.text()), size=sizes)
def test_only_whitespace_lies_outside_of_the_passages_and_each_keeps_its_bounds(text, size):
    end = 0
    for span in split_passages(text, size):
        assert span.start >= end
        assert text[end : span.start].strip() == ""
        passage = text[span.start : span.end]
        assert passage == passage.strip() != ""
        assert len(passage) <= size.characters
        assert len(passage.split()) <= size.words
        end = span.end
    assert text[end:].strip() == ""


def test_paragraphs_are_joined_while_they_fit_and_never_broken_when_they_fit():
    text = "one two\n\nthree four\n\nfive six seven"
    passages = [text[span.start : span.end] for span in split_passages(text, PassageSize(words=4))]
    assert passages == ["one two\n\nthree four", "five six seven"]


def test_a_long_paragraph_is_broken_at_sentences():
    text = "The first one ends. The second one ends! Is there a third?"
    passages = [text[span.start : span.end] for span in split_passages(text, PassageSize(words=4))]
    assert passages == ["The first one ends.", "The second one ends!", "Is there a third?"]


def test_a_word_longer_than_a_passage_is_cut():
    assert split_passages("abcdefg", PassageSize(characters=3)) == [CharSpan(0, 3), CharSpan(3, 6), CharSpan(6, 7)]


@pytest.mark.parametrize("text", ["\n " * 200_000, "." * 400_000, '."' * 200_000, "word " * 80_000])
def test_time_grows_with_the_length_and_not_faster(text):
    started = time.process_time()
    split_passages(text + "end")
    assert time.process_time() - started < 10
