import json
from dataclasses import replace

import pytest
from langchain_core.documents import Document

from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.answers.answer_journal import Journal, answer_key
from rag_posfix.evaluation.answers.answering import Answer, Asked
from rag_posfix.generation.engine import Engine
from tests.support.tiny_evaluation import EXAMPLES, tiny_engine

ANSWER = Answer("é\nx", 1.0, 0.0, -2.5, 0.25)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "journal.jsonl"


def test_what_is_added_is_found_now_and_by_the_next_run(path):
    journal = Journal(path)
    assert journal.get("a") is None
    assert not path.exists()
    journal.add("a", ANSWER)
    assert journal.get("a") == ANSWER
    assert Journal(path).get("a") == ANSWER
    (line,) = path.read_text("utf-8").splitlines()
    assert set(json.loads(line)) == {"key", "answer", "at", "version", "commit"}


def test_without_a_path_answers_stay_in_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    journal = Journal()
    journal.add("a", ANSWER)
    assert journal.get("a") == ANSWER
    assert list(tmp_path.iterdir()) == []


def test_of_two_lines_with_one_key_the_last_counts(path):
    Journal(path).add("a", ANSWER)
    Journal(path, fresh=True).add("a", replace(ANSWER, answer="new"))
    assert Journal(path).get("a").answer == "new"


def test_a_fresh_journal_ignores_earlier_answers_and_keeps_them(path):
    Journal(path).add("a", ANSWER)
    fresh = Journal(path, fresh=True)
    assert fresh.get("a") is None
    fresh.add("b", ANSWER)
    assert Journal(path).get("a") == Journal(path).get("b") == ANSWER


@pytest.mark.parametrize("cut", [1, 2, 40, -2])
def test_a_torn_last_line_is_ignored_and_harms_no_later_line(path, cut):
    Journal(path).add("a", ANSWER)
    Journal(path).add("b", ANSWER)
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:cut])
    journal = Journal(path)
    assert journal.get("a") == ANSWER
    assert journal.get("b") is None
    journal.add("c", ANSWER)
    journal.add("d", ANSWER)
    again = Journal(path)
    assert [again.get(key) is not None for key in "abcd"] == [True, False, True, True]


def test_a_last_line_that_lacks_only_its_end_counts(path):
    Journal(path).add("a", ANSWER)
    path.write_bytes(path.read_bytes().rstrip())
    journal = Journal(path)
    assert journal.get("a") == ANSWER
    journal.add("b", ANSWER)
    assert Journal(path).get("b") == ANSWER


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"5",
        b"[]",
        b"\xff",
        b'{"key": "a"}',
        b'{"key": "a", "answer": []}',
        b'{"key": 5, "answer": {}}',
        json.dumps({"key": "a", "answer": {"answer": "x"}}).encode(),
        json.dumps({"key": "a", "answer": dict.fromkeys(Answer.__slots__, 1.0)}).encode(),
        json.dumps({"key": "a", "answer": {**dict.fromkeys(Answer.__slots__), "answer": "x"}}).encode(),
        json.dumps({"key": ["a"], "answer": {**dict.fromkeys(Answer.__slots__, 1.0), "answer": "x"}}).encode(),
    ],
)
def test_lines_that_say_something_else_are_ignored(path, line):
    path.parent.mkdir()
    path.write_bytes(line + b"\n")
    assert Journal(path).get("a") is None


def test_an_answer_without_a_finite_score_is_computed_again(path):
    Journal(path).add("a", replace(ANSWER, log_probability=float("-inf")))
    assert Journal(path).get("a") is None


def test_who_wrote_the_answers_that_were_taken_is_known(path):
    Journal(path).add("a", ANSWER)
    own = json.loads(path.read_text("utf-8"))
    theirs = {**own, "key": "b", "version": "0.0.1", "commit": None}
    path.write_text(json.dumps(own) + "\n" + json.dumps(theirs) + "\n")
    journal = Journal(path)
    assert journal.sources == []
    journal.get("b")
    assert journal.sources == ["0.0.1 None"]
    journal.add("c", ANSWER)
    journal.get("c")
    assert journal.sources == ["0.0.1 None"]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EvaluationError, match=r"cannot write the journal .*; choose another --out"):
        Journal(tmp_path / "file" / "journal.jsonl").add("a", ANSWER)
    (tmp_path / "folder").mkdir()
    with pytest.raises(EvaluationError, match=r"cannot read the journal .*; remove it or choose another --out"):
        Journal(tmp_path / "folder")


class TestKey:
    engine = tiny_engine()
    example = EXAMPLES[0]
    passages = tuple(
        Document(page_content=text, metadata={"title": "t", "relevance_score": score})
        for text, score in (("b", 0.5), ("a", 0.25))
    )

    def key(self, engine=None, example=None, documents=None, choice=None, tokens=24, any_order=False):
        documents = self.passages if documents is None else documents
        asked = Asked(example or self.example, documents, choice or MitigationChoice("none"))
        return answer_key(engine or self.engine, asked, tokens, any_order=any_order)

    def test_all_that_an_answer_depends_on_changes_the_key(self):
        other = Engine(self.engine.loaded, self.engine.encoder, "tiny", "another print")
        b, a = self.passages
        keys = [
            self.key(),
            self.key(engine=other),
            self.key(example=replace(self.example, question="How?")),
            self.key(example=replace(self.example, answers=("so", "thus"))),
            self.key(documents=()),
            self.key(documents=(a, b)),
            self.key(documents=(b,)),
            self.key(documents=(b, Document(page_content="a", metadata={"title": "u", "relevance_score": 0.25}))),
            self.key(documents=(b, Document(page_content="a", metadata={"title": "t", "relevance_score": 0.75}))),
            self.key(documents=(b, Document(page_content="a", metadata={"title": "t"}))),
            self.key(choice=MitigationChoice("context_experts")),
            self.key(choice=MitigationChoice("context_experts", {"experts": 2})),
            self.key(tokens=25),
            self.key(any_order=True),
        ]
        assert len(set(keys)) == len(keys)

    def test_names_of_questions_and_documents_do_not(self):
        renamed = tuple(
            Document(page_content=d.page_content, metadata=d.metadata, id=f"x{d.id}") for d in self.passages
        )
        assert self.key(example=replace(self.example, id="another"), documents=renamed) == self.key()

    def test_of_any_order_is_of_the_set_of_passages_with_their_relevance(self):
        b, a = self.passages
        assert self.key(documents=(a, b), any_order=True) == self.key(any_order=True)
        swapped = (
            Document(page_content="b", metadata={"title": "t", "relevance_score": 0.25}),
            Document(page_content="a", metadata={"title": "t", "relevance_score": 0.5}),
        )
        assert self.key(documents=swapped, any_order=True) != self.key(any_order=True)
