import gzip
import json

import pytest

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.collection import (
    BeirFiles,
    beir_files,
    load_collection,
    load_topics,
    read_collection_documents,
    read_queries,
)
from tests.support.outside_data import outside_data
from tests.support.rerank_data import write_collection


def write(tmp_path, text, name="file"):
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def read(path):
    return tuple((d.id, d.metadata.get("title"), d.page_content) for _, d in read_collection_documents(path))


class TestCorpus:
    expected = (("a", "A title", "Some text."), ("5", None, "More."))

    @pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
    def test_of_json_lines(self, tmp_path, name):
        rows = [
            {"_id": "a", "title": "A title", "text": "Some text.", "metadata": {"url": "x"}},
            {"id": 5, "title": "", "contents": "More."},
        ]
        assert read(write(tmp_path, "\n".join(map(json.dumps, rows)), name)) == self.expected

    def test_of_tab_separated_lines(self, tmp_path):
        assert read(write(tmp_path, "a\tSome text.\tA title\n5\tMore.\n")) == self.expected

    def test_of_trec_markup(self, tmp_path):
        text = (
            "<DOC>\n<DOCNO> a </DOCNO>\n<TITLE>A title</TITLE>\n<TEXT>\nSome <b>text</b>.\n</TEXT>\n</DOC>\n"
            "<DOC>\n<DOCNO>5</DOCNO>\nMore.\n</DOC>\n"
        )
        found = read(write(tmp_path, text))
        assert found == (("a", "A title", "Some text ."), ("5", None, "More."))

    def test_of_trec_markup_with_several_documents_on_a_line(self, tmp_path):
        text = "<DOC><DOCNO>a</DOCNO>x</DOC><DOC><DOCNO>b</DOCNO>y\nz</DOC> <DOC><DOCNO>c</DOCNO>w</DOC>"
        assert read(write(tmp_path, text)) == (("a", None, "x"), ("b", None, "y z"), ("c", None, "w"))

    def test_entities_and_several_texts_of_markup_are_read(self, tmp_path):
        text = "<DOC><DOCNO>a</DOCNO><TEXT>p &amp; q</TEXT>\n<TEXT>&lt;r&gt;</TEXT></DOC>"
        assert read(write(tmp_path, text)) == (("a", None, "p & q <r>"),)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "is empty; give BEIR's JSON lines"),
            ('{"text": "x"}', ":1: document without an id (found None)"),
            ('{"_id": "a b", "text": "x"}', ":1: document id 'a b' holds white space, which TREC files cannot"),
            ('{"_id": "a"}', ":1: no text; the object needs a string in one of text, contents, page_content"),
            ('{"_id": "a", "text": "x", "title": 5}', ":1: title 5 must be a string"),
            ('{"_id": "a", "text": "x"}\n{"_id": ', ":2 is not JSON"),
            ("a\tb\tc\td\n", ":1 has 4 tab-separated columns, must have 2 or 3"),
            ("<DOC>\n<TEXT>x</TEXT>\n</DOC>", ":1: document without an id (found None)"),
            ("<DOC><DOCNO>a</DOCNO>x</DOC><DOC>", ":1: no closing tag before the end of the file"),
        ],
    )
    def test_that_is_malformed_names_the_line(self, tmp_path, text, said):
        with pytest.raises(EvaluationError) as caught:
            read(write(tmp_path, text))
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


class TestQueries:
    def read(self, tmp_path, text):
        return [(name, question) for _, name, question in read_queries(write(tmp_path, text))]

    @pytest.mark.parametrize(
        "text",
        [
            '{"_id": "1", "text": "first words", "metadata": {}}\n{"_id": 2, "text": "second"}',
            "1\tfirst words\n2\tsecond\n",
            "<top>\n<num> Number: 1\n<title> first words\n<desc> Description:\nx\n</top>\n"
            "<top>\n<num>2</num>\n<title>Topic: second</title>\n</top>",
            '<topics>\n<topic number="1">\n<query>first\n words</query><question>x</question>\n</topic>\n'
            "<topic number='2'><title>second</title></topic></topics>",
            '<topics><topic number="1"><query>first words</query></topic> <topic number="2"><query>second</topic>',
        ],
        ids=["json", "tabs", "classic topics", "xml topics", "xml topics on one line"],
    )
    def test_are_read_in_every_form(self, tmp_path, text):
        assert self.read(tmp_path, text) == [("1", "first words"), ("2", "second")]

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ('{"text": "x"}', ":1: query without an id"),
            ('{"_id": "1", "text": "  "}', ":1: query '1' has no text; give it some or leave it out"),
            ("1\tx\ty\n", ":1 has 3 tab-separated columns, must have 2: id and text"),
            ("<top>\n<title>x\n</top>", ":1: query without an id"),
            ("<top>\n<num>1\n<desc>x\n</top>", ":1: query '1' has no text"),
        ],
    )
    def test_that_are_malformed_name_the_line(self, tmp_path, text, said):
        with pytest.raises(EvaluationError) as caught:
            self.read(tmp_path, text)
        assert said in str(caught.value)


class TestFolder:
    def test_parts_are_found_in_the_folder_compressed_or_not(self, tmp_path):
        folder = write_collection(tmp_path / "beir", compressed=True)
        assert beir_files(folder, None, None) == BeirFiles(
            folder / "corpus.jsonl.gz", folder / "queries.jsonl", folder / "qrels" / "test.tsv"
        )

    def test_what_is_given_comes_before_what_the_folder_holds(self, tmp_path):
        folder = write_collection(tmp_path / "beir")
        other = tmp_path / "other"
        assert beir_files(folder, other, other) == BeirFiles(folder / "corpus.jsonl", other, other)

    def test_a_part_that_is_nowhere_is_named(self, tmp_path):
        folder = write_collection(tmp_path / "beir")
        with pytest.raises(EvaluationError, match=r"has no qrels/dev.tsv and no qrels/dev.tsv.gz; give --qrels"):
            beir_files(folder, None, None, "dev")
        with pytest.raises(EvaluationError, match=r"--queries is missing; give it, or a BEIR folder"):
            beir_files(folder / "corpus.jsonl", None, None)


class TestLoading:
    def files(self, tmp_path, **parts):
        return beir_files(write_collection(tmp_path / "beir", **parts), None, None)

    def test_only_judged_queries_are_asked_and_the_rest_is_counted(self, tmp_path):
        files = self.files(tmp_path, qrels=[("2", "d3", 1), ("1", "d1", 2), ("1", "d2", 0), ("9", "d1", 1)])
        topics, counts = load_topics(files)
        assert [(t.id, dict(t.grades)) for t in topics] == [("1", {"d1": 2, "d2": 0}), ("2", {"d3": 1})]
        assert counts == {
            "queries": 3, "queries_without_judgements": 1, "judged_queries_without_text": 1, "topics": 2,
            "topics_without_relevant": 0,
        }  # fmt: skip

    def test_topics_can_be_limited_skipped_and_made_binary(self, tmp_path):
        files = self.files(tmp_path, qrels=[("1", "d1", 4), ("2", "d3", 0), ("3", "d3", -1)])
        assert [t.id for t in load_topics(files, limit=2)[0]] == ["1", "2"]
        assert [t.id for t in load_topics(files, limit=1, skip=1)[0]] == ["2"]
        assert [dict(t.grades) for t in load_topics(files, binary=True)[0]] == [{"d1": 1}, {"d3": 0}, {"d3": -1}]
        assert load_topics(files)[1]["topics_without_relevant"] == 2
        with pytest.raises(EvaluationError, match="skip=3 leaves none of 3 judged queries; lower it"):
            load_topics(files, skip=3)

    def test_queries_and_judgements_of_different_collections_are_refused(self, tmp_path):
        with pytest.raises(EvaluationError, match=r"no query of .* is judged in .*first judged id: '7', .*: '1'"):
            load_topics(self.files(tmp_path, qrels=[("7", "d1", 1)]))

    def test_one_id_for_two_queries_is_refused_and_a_repeated_query_is_one(self, tmp_path):
        same = [{"_id": "1", "text": "x"}, {"_id": "1", "text": "x"}]
        assert len(load_topics(self.files(tmp_path, queries=same))[0]) == 1
        with pytest.raises(EvaluationError, match=r":2: query id '1' stands for two texts; make the ids distinct"):
            load_topics(self.files(tmp_path, queries=[same[0], {"_id": "1", "text": "y"}]))

    def test_one_id_for_two_documents_is_refused_and_a_repeated_document_is_one(self, tmp_path):
        same = [{"_id": "a", "title": "t", "text": "x"}, {"_id": "a", "title": "t", "text": "x"}]
        assert load_collection(self.files(tmp_path, corpus=same).corpus, []).counts["documents"] == 1
        for other in ({"_id": "a", "title": "t", "text": "y"}, {"_id": "a", "title": "u", "text": "x"}):
            with pytest.raises(EvaluationError, match=r":2: id 'a' stands for two documents; make the ids distinct"):
                load_collection(self.files(tmp_path, corpus=[same[0], other]).corpus, [])

    def test_judgements_of_documents_that_the_corpus_lacks_are_counted(self, tmp_path):
        files = self.files(tmp_path, qrels=[("1", "d1", 1), ("1", "gone", 1), ("2", "gone", 0), ("2", "lost", 1)])
        collection = load_collection(files.corpus, load_topics(files)[0])
        assert collection.counts == {"documents": 5, "documents_without_text": 1, "judged_documents_not_in_corpus": 2}

    def test_titles_can_be_left_out_and_are_part_of_the_digest(self, tmp_path):
        path = self.files(tmp_path).corpus
        with_titles, without = load_collection(path, []), load_collection(path, [], titles=False)
        assert with_titles.documents["d1"].metadata == {"title": "Lighthouse"}
        assert without.documents["d1"].metadata == {}
        assert with_titles.digest != without.digest

    def test_the_digest_is_of_the_documents_and_not_of_their_order(self, tmp_path):
        rows = [{"_id": "a", "text": "x"}, {"_id": "b", "text": "y"}]
        digests = [
            load_collection(self.files(tmp_path, corpus=corpus).corpus, []).digest
            for corpus in (rows, rows[::-1], rows[:1])
        ]
        assert digests[0] == digests[1] != digests[2]

    def test_documents_that_are_not_needed_are_read_and_not_kept(self, tmp_path):
        found = load_collection(self.files(tmp_path).corpus, [], only={"d2"})
        assert list(found.documents) == ["d2"]
        assert found.counts["documents"] == 5
        assert found.digest == load_collection(self.files(tmp_path).corpus, []).digest


@pytest.mark.parametrize(("name", "documents", "topics"), [("scifact", 5183, 150), ("cranfield", 1400, 225)])
def test_the_shared_collections_are_read_whole(name, documents, topics):
    corpus = outside_data(f"beir/{name}/corpus.jsonl.gz")
    files = beir_files(corpus.parent, None, None)
    found, counts = load_topics(files)
    collection = load_collection(files.corpus, found)
    assert (len(collection.documents), len(found)) == (documents, topics)
    assert collection.counts["judged_documents_not_in_corpus"] == 0
    assert counts["queries_without_judgements"] == counts["judged_queries_without_text"] == 0
    assert collection.counts["documents_without_text"] == (2 if name == "cranfield" else 0)
