"""Records: every field of a row or object is in its text or its heading, however the file is written."""

import json

import pytest

from rag_posfix.retrieval.ingest.ingest import read_documents, read_files

PROSE = "The pump stands in the cellar of the old mill and lifts water from the river into the tank. " * 2


def rows_of(tmp_path, text, name="a.csv"):
    """Return title and text of each document of a file."""
    (tmp_path / name).write_text(text)
    read = read_files([tmp_path / name], strict=True)
    documents = [entry.document for entry in read.entries]
    return [(document.metadata.get("title", ""), document.page_content) for document in documents]


def test_a_row_with_a_short_description_is_all_its_columns_and_each_can_be_filtered_by(tmp_path):
    (tmp_path / "register.csv").write_text(
        "asset,description,site,keeper,serial,next_inspection\n"
        "P-12,Main pump of the harbour,Marvik,Anna Korv,AX-900,2026-05-01\n"
    )
    (document,) = read_documents([tmp_path])
    assert document.page_content == (
        "asset: P-12\ndescription: Main pump of the harbour\nsite: Marvik\nkeeper: Anna Korv\nserial: AX-900\n"
        "next_inspection: 2026-05-01"
    )
    assert (document.metadata["title"], document.metadata["keeper"]) == ("register", "Anna Korv")


def test_beside_long_prose_short_fields_are_in_the_heading_and_others_below_the_text(tmp_path):
    row = {"asset": "P-12", "name": "Main pump", "description": PROSE.strip(), "keeper": "Anna", "log": "x" * 250}
    ((title, text),) = rows_of(tmp_path, json.dumps([row]), "a.json")
    assert title == "Main pump > asset: P-12; keeper: Anna"
    assert text == f"{PROSE.strip()}\n\nlog: {'x' * 250}"


def test_a_text_that_is_asked_for_stands_alone(tmp_path):
    (tmp_path / "a.csv").write_text("asset,description\nP-12,Main pump\n")
    (document,) = read_documents([tmp_path], fields=["description"])
    assert (document.page_content, document.metadata.get("title")) == ("Main pump", None)


FERRY = [("", "Ticket: Adult\nPrice: 41"), ("", "Ticket: Bicycle\nPrice: 12")]


@pytest.mark.parametrize(
    "table",
    [
        "Ticket,Price\nAdult,41\nBicycle,12\n",
        "\n\nTicket,Price\nAdult,41\n,\nBicycle,12\n",  # empty lines and rows
        "# exported 2025-05-01, by hand\n## 2\nTicket,Price\nAdult,41\nBicycle,12\n",
        ",Ticket,Price\n0,Adult,41\n1,Bicycle,12\n",  # as pandas numbers the rows
        "Ticket,Price\nAdult,41,\nBicycle,12,,\n",
        "Ticket,Price,\nAdult,41,\nBicycle,12,\n",
        '"Ticket";"Price"\n"Adult";"41"\n"Bicycle";"12"\n',
        "Ticket|Price\nAdult|41\nBicycle|12\n",
    ],
)
def test_rows_are_the_same_however_the_table_is_written(tmp_path, table):
    assert rows_of(tmp_path, table) == FERRY


@pytest.mark.parametrize(
    ("table", "title"),
    [
        ("Ferry prices 2025;;\n;;\nTicket;Price;Note\nAdult;41;May\n", "Ferry prices 2025"),
        ("Ferry prices\nvalid from May\nTicket,Price,Note\nAdult,41,May\n", "Ferry prices valid from May"),
        ("#,Ticket,Price,Note\n1,Adult,41,May\n", ""),
    ],
)
def test_a_title_above_the_names_of_columns_is_the_title_of_each_row(tmp_path, table, title):
    ((found, text),) = rows_of(tmp_path, table)
    assert (found, text.removeprefix("#: 1\n")) == (title, "Ticket: Adult\nPrice: 41\nNote: May")


@pytest.mark.parametrize(
    ("table", "first"),
    [
        ("1,Rope,12.5\n2,Chain,30\n", "column 1: 1\ncolumn 2: Rope\ncolumn 3: 12.5"),
        ("2026-05-01,Pump\n2026-06-01,Fan\n", "column 1: 2026-05-01\ncolumn 2: Pump"),
        ("Liv;liv@x.no\nPer;per@x.no\n", "column 1: Liv\ncolumn 2: liv@x.no"),
        ("Stock\n1,Rope\n2,Chain\n", "column 1: 1\ncolumn 2: Rope"),
        ("size,36,37,38\nRope,1,2,3\n", "size: Rope\n36: 1\n37: 2\n38: 3"),
        ("site,2026-05-01\nDock,4\n", "site: Dock\n2026-05-01: 4"),
        ("0,1,2\n1,Rope,12.5\n", "0: 1\n1: Rope\n2: 12.5"),
    ],
)
def test_a_first_row_of_values_is_a_row_and_no_names(tmp_path, table, first):
    assert rows_of(tmp_path, table)[0][1] == first


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("Region,2024,,2025\n,Q1,Q2,Q1\nNorth,1,2,3\n", [("", "Region: North\n2024 Q1: 1\n2024 Q2: 2\n2025 Q1: 3")]),
        (",2024,2024\n,Q1,Q2\nNorth,1,2\n", [("", "column 1: North\n2024 Q1: 1\n2024 Q2: 2")]),
        ("Boats\nBoat,Price\nRaft,12\n\nCrew\nRole,Home\nMate,Tull\n", [
            ("Boats", "Boat: Raft\nPrice: 12"), ("Crew", "Role: Mate\nHome: Tull"),
        ]),
        ("Boat,Price\nRaft,12\n\nPart,Weight\nRope,4\n", [
            ("", "Boat: Raft\nPrice: 12"), ("", "Part: Rope\nWeight: 4"),
        ]),
        ("Account;7\nMonth;May\n;\nDay;Payee;Place;Sum\n2.5.;Yard;Tull;41\n", [
            ("Account 7 Month May", "Day: 2.5.\nPayee: Yard\nPlace: Tull\nSum: 41"),
        ]),
        ("First name,Title,Room\nIlse,Dr.,4\n", [("", "First name: Ilse\nTitle: Dr.\nRoom: 4")]),
        ("Part,Note\nRope,\\N\n", [("", "Part: Rope")]),
    ],
)  # fmt: skip
def test_names_in_two_rows_several_tables_titles_of_persons_and_missing_values(tmp_path, table, expected):
    assert rows_of(tmp_path, table) == expected


def test_a_very_long_value_is_text_and_no_metadata_of_each_passage(tmp_path):
    paths = {f"/p{number}": {"summary": f"Lists boats of pier {number}."} for number in range(500)}
    (tmp_path / "a.json").write_text(json.dumps({"version": "3", "paths": paths}))
    documents = [entry.document for entry in read_files([tmp_path]).entries]
    assert len(documents) > 9
    assert all("paths" not in document.metadata for document in documents)
    assert any("boats of pier 499." in document.page_content for document in documents)


def test_columns_without_a_name_or_with_the_same_name_keep_their_values(tmp_path):
    ((_, text),) = rows_of(tmp_path, "Price,Price,,Price\n1,2,three,4\n")
    assert text == "Price: 1\nPrice 2: 2\ncolumn 3: three\nPrice 3: 4"
    ((_, text),) = rows_of(tmp_path, "Price,Price 2,Price\n1,2,3\n")
    assert text == "Price: 1\nPrice 2: 2\nPrice 3: 3"
    ((_, text),) = rows_of(tmp_path, "\t".join(["a"] * 900) + "\n" + "\t".join(["x"] * 900), "b.tsv")[:1]
    assert text.startswith("a: x\na 2: x\na 3: x")


@pytest.mark.parametrize(
    "header", ['"Name, first, or last";Price', '"a;b;c",Price', '"x | y | z"\tPrice', "Name, first, or last;Price"]
)
def test_the_delimiter_is_not_one_within_quotes_or_of_some_lines_alone(tmp_path, header):
    delimiter = header[-6]
    ((_, text),) = rows_of(tmp_path, f"{header}\nAnna{delimiter}41\n")
    assert text.endswith(": Anna\nPrice: 41")


@pytest.mark.parametrize(
    ("cell", "value"), [('5" pipe', '5" pipe'), ('"A" grade', '"A" grade'), ('"open', '"open'), ('"a\tb"', "a\tb")]
)
def test_a_quote_in_tab_separated_values_is_a_character_unless_all_are_closed(tmp_path, cell, value):
    assert rows_of(tmp_path, f"Part\tPrice\n{cell}\t41\nBolt\t2\n", "a.tsv") == [
        ("", f"Part: {value}\nPrice: 41"), ("", "Part: Bolt\nPrice: 2"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([{"name": "L", "parts": [{"head": "T", "body": "Lit."}, {"head": "M"}]}],
         [("L", "parts.head: T\nparts.body: Lit.\nparts.head: M")]),
        ({"features": [{"type": "Feature", "id": 4, "properties": {"name": "T", "lit": 1883},
                        "geometry": {"type": "Point", "coordinates": [1, 2]}}]}, [("T", "id: 4\nlit: 1883")]),
        ([{"_id": "x", "_score": 1.0, "_source": {"title": "Pump", "text": "It leaks."}}], [("Pump", "It leaks.")]),
        ([{"messages": [{"role": "user", "content": "Which?"}, {"role": "bot", "content": "That."}]}],
         [("", "messages.role: user\nmessages.content: Which?\nmessages.role: bot\nmessages.content: That.")]),
        ({"P-1": {"site": "Marvik"}, "P-2": {"site": "Torvane", "note": None}},
         [("", "key: P-1\nsite: Marvik"), ("", "key: P-2\nsite: Torvane")]),
        ([{"from": "Anna", "text": "It leaks."}, {"from": "Bo", "text": ["see ", {"link": "page 4"}]}],
         [("from: Anna", "It leaks."), ("from: Bo", "text: see\ntext.link: page 4")]),
        ([{"text": "The pump.", "replies": [{"text": "Fixed."}]}], [("", "The pump.\n\nreplies.text: Fixed.")]),
        ({"name": "Guide", "parts": [{"text": "Turn it.", "parts": [{"head": "Cold", "text": "Pull."}]}]},
         [("Guide", "Turn it.\n\nparts.head: Cold\nparts.text: Pull.")]),
        ({"took": 5, "_shards": {"total": 1}, "hits": {"total": {"value": 1, "relation": "eq"},
          "hits": [{"_id": "1", "_source": {"title": "Fuel", "body": "Pier 3."}}]}}, [("Fuel", "Pier 3.")]),
        ([{"_id": {"$oid": "5f"}, "boat": "Venn", "built": {"$date": "1990-01-01"}}],
         [("", "_id: 5f\nboat: Venn\nbuilt: 1990-01-01")]),
        ([{"boat": "Venn", "metadata": "from the list"}], [("", "boat: Venn\nmetadata: from the list")]),
        ({"status": "ok", "data": {"items": [{"part": "Rope", "price": 4}]}}, [("", "part: Rope\nprice: 4")]),
        ({"users": {"u1": {"city": "Tull"}, "u2": {"city": "Venn"}}},
         [("users", "key: u1\ncity: Tull"), ("users", "key: u2\ncity: Venn")]),
        ({"Ilse Korvanth": {"boats": [{"hull": "oak"}]}}, [("Ilse Korvanth", "hull: oak")]),
        ({"firm": "Tull AG", "staff": [{"role": "keeper"}, {"role": "pilot"}]},
         [("", "firm: Tull AG"), ("", "role: keeper"), ("", "role: pilot")]),
        ({"owner": "Ilse", "place": {"city": "Tull", "phones": [{"number": "11"}]}},
         [("", "owner: Ilse\nplace.city: Tull\nplace.phones.number: 11")]),
        ([{"text": "The pump."}, {"text": None, "note": "No pump."}], [("", "The pump."), ("", "note: No pump.")]),
        ({"title": "Manual", "parts": [{"head": "Start", "do": "Press."}]}, [("Manual", "head: Start\ndo: Press.")]),
        ({"faq": [{"q": "When?", "a": "May."}], "contact": {"phone": "555"}},
         [("", "contact.phone: 555"), ("", "q: When?\na: May.")]),
        (["First text.", "Second text."], [("", "First text."), ("", "Second text.")]),
        ([["boat", "price"], ["Canoe", 41]], [("", "boat: Canoe\nprice: 41")]),
        ("Words alone.", [("", "Words alone.")]),
        ({"Boat": {"0": "Canoe", "1": "Raft"}, "Price": {"0": 41, "1": 12}},
         [("", "Boat: Canoe\nPrice: 41"), ("", "Boat: Raft\nPrice: 12")]),
        ({"columns": ["Boat", "Price"], "index": [0], "data": [["Canoe", 41]]}, [("", "Boat: Canoe\nPrice: 41")]),
        ({"name": "Refit", "cards": [{"name": "Hull", "desc": "Blue."}], "members": [{"id": "m1", "role": "mate"}]},
         [("Refit > cards > Hull", "desc: Blue."), ("Refit > members", "id: m1\nrole: mate")]),
        ([{"id": 5, "title": {"rendered": "Crane &amp; pier"}, "excerpt": {"rendered": "<p>It <b>lifts</b>.</p>"}}],
         [("Crane & pier", "id: 5\nexcerpt: It lifts.")]),
        ({"name": "Crew", "messages": [{"from": "Ilse", "text": ["Gate ", {"type": "bold", "text": "4471"}, "."]},
          {"type": "service", "from": "Bo"}]},
         [("Crew > from: Ilse", "Gate 4471."), ("Crew > from: Bo", "type: service")]),
        ([{"text": "Key 7.", "user": "Bo"}], [("user: Bo", "Key 7.")]),
        ({"author": {"name": "Anna"}, "place": {"city": "Rome"}}, [("", "author.name: Anna\nplace.city: Rome")]),
        ([{"a": {"b": {"c": ["x", 1]}}, "vector": [0.5] * 99, "shape": [[1, 2], [3, 4]], "years": [1999, 2004]}],
         [("", "a.b.c: x, 1\nyears: 1999, 2004")]),
    ],
)  # fmt: skip
def test_nested_text_is_text(tmp_path, value, expected):
    assert rows_of(tmp_path, json.dumps(value), "a.json") == expected


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.ndjson"])
@pytest.mark.parametrize(
    "text", ['{"a": "x"}{"a": "y"}', '{\n "a": "x"\n}\n\n{\n "a": "y"\n}\n', '[{"a": "x"}, {"a": "y"}]']
)
def test_objects_are_records_however_they_follow_each_other(tmp_path, name, text):
    assert rows_of(tmp_path, text, name) == [("", "a: x"), ("", "a: y")]


def test_columns_beside_one_that_is_called_text_are_in_the_heading(tmp_path):
    table = "asset,text,keeper\nP-1,Main pump,Anna\n"
    assert rows_of(tmp_path, table) == [("asset: P-1; keeper: Anna", "Main pump")]
    assert rows_of(tmp_path, "id,title,text\n1,Pump,It leaks.\n") == [("Pump", "It leaks.")]


def test_images_within_records_are_no_text(tmp_path):
    row = {"name": "Anna", "photo": f"data:image/png;base64,{'iVBORw0KGgo' * 90}", "note": "Keeper."}
    assert rows_of(tmp_path, json.dumps([row]), "a.json") == [("Anna", "note: Keeper.")]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_number_that_is_none_is_a_missing_field_and_no_lost_record(tmp_path, name):
    assert rows_of(tmp_path, '{"site": "Marvik", "depth": NaN, "height": -Infinity}\n', name) == [("", "site: Marvik")]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("note\nThe crane lifts.\nSmith, John\n", ["The crane lifts.", "Smith, John"]),
        ("boat,metadata\nVenn,old\n", ["boat: Venn\nmetadata: old"]),
        ("part,role,text\nAX-17,lift,\n", ["part: AX-17\nrole: lift"]),
    ],
)
def test_no_cell_is_lost_by_the_name_of_a_column_or_a_comma_in_the_only_one(tmp_path, table, expected):
    assert [text for _, text in rows_of(tmp_path, table, "a.csv")] == expected


def test_an_id_that_is_no_number_of_the_row_stands_above_the_text(tmp_path):
    prose = " ".join(["lifts"] * 40)
    assert rows_of(tmp_path, f"id,description\nAX-17,{prose}\n", "a.csv") == [("id: AX-17", prose)]
    assert rows_of(tmp_path, f"id,description\n1,{prose}\n2,{prose}.\n", "a.csv")[0] == ("", prose)


def test_html_in_a_field_is_its_text_and_a_tag_within_a_sentence_stays(tmp_path):
    articles = [
        {"title": "Reset", "body": "<p>Hold the <b>red</b> key for 5&nbsp;s.</p>\n<ul><li>5 &lt; 6</li></ul>"},
        {"title": "Tags", "body": "Write <p> before a paragraph and </p> after it."},
    ]
    assert rows_of(tmp_path, json.dumps(articles), "a.json") == [
        ("Reset", "Hold the red key for 5 s.\n\n- 5 < 6"),
        ("Tags", "Write <p> before a paragraph and </p> after it."),
    ]
