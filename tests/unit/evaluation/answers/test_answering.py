"""Answers are graded, batched, kept in a journal, and their form is judged."""

import json
import math
from dataclasses import replace

import pytest
import torch
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.answers.experiment import (
    AnswerJournal,
    EvalCase,
    GradedAnswer,
    answer_all,
    answer_and_score,
    case_key,
    is_sound,
    summarize_form,
)
from rag_posfix.evaluation.statistics import best_subspan_em, first_line, normalize
from rag_posfix.generation.engine import Engine
from tests.support.tiny_evaluation import EXAMPLES, CountedForwards, tiny_engine

ANSWER = GradedAnswer("é\nx", 1.0, 0.0, -2.5, 0.25, 0.5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Eiffel Tower!", "eiffel tower"),
        ("  a  cat\tand an\nowl ", "cat and owl"),
        ("Theatre an-other", "theatre another"),
        ("U.S.A.", "usa"),
        ("(1976)", "1976"),
        ("It's", "its"),
        ("the.cat", "thecat"),
        ("The", ""),
        ("", ""),
        ("Röntgen", "röntgen"),
        ("“x—y”", "“x—y”"),  # as SQuAD's script, which knows ASCII alone
        ("六 个月。", "六个月"),
        ("《红楼梦》 (1791年)", "红楼梦1791年"),
        ("หิน แกรนิต", "หินแกรนิต"),
        ("여섯 달.", "여섯 달"),
    ],
)
def test_answers_are_normalised_as_squad_does(text, expected):
    assert normalize(text) == expected


@pytest.mark.parametrize(
    ("answer", "accepted", "score"),
    [
        ("It was Wilhelm Röntgen, in 1901.", ["Röntgen"], 1.0),
        ("the ANSWER is 42.", ["41", "42"], 1.0),
        ("The Eiffel Tower", ["an Eiffel tower"], 1.0),
        ("Eiffel", ["Eiffel Tower"], 0.0),
        ("", ["Eiffel Tower"], 0.0),
        ("anything", ["the", "!"], 0.0),
        ("anything", [], 0.0),
        ("Parisian", ["Paris"], 1.0),
        ("面积约为3.5平方公里。", ["3.5"], 1.0),
        ("比分是24\u201310。", ["24-10"], 1.0),
        ("1000人です。", ["1,000"], 1.0),
        ("\uff2e\uff28\uff2bです", ["NHK"], 1.0),
        ("NHK", ["\uff2e\uff28\uff2b"], 1.0),
        ("สูง 3.5 เมตร", ["3.5"], 1.0),
        ("1、2、3です", ["12"], 0.0),
        ("東京です", ["\uff01"], 0.0),
    ],
)
def test_an_answer_is_right_if_it_holds_an_accepted_one(answer, accepted, score):
    assert best_subspan_em(answer, accepted) == score


@pytest.mark.parametrize(
    ("text", "line"), [("one\ntwo", "one"), (" one ", "one"), ("\none", ""), ("one\r\ntwo", "one"), ("", "")]
)
def test_the_first_line_is_what_stands_before_the_first_break(text, line):
    assert first_line(text) == line


@pytest.fixture(scope="module")
def engine():
    return tiny_engine()


def layout_of(engine, example, documents):
    return Assembler(engine.encoder, 180).assemble(
        example.question, documents, order="original", max_new_tokens=2
    ).layout  # fmt: skip


def test_answering_and_scoring_share_one_reading(engine):
    layout = layout_of(engine, EXAMPLES[0], EXAMPLES[0].gold)
    with CountedForwards(engine) as forwards:
        generation, score = answer_and_score(engine, layout, MitigationChoice("none"), "so", 2)
    # The prompt, one token to score two, one token to generate two.
    assert forwards.shapes == [(1, len(layout.token_ids)), (1, 1), (1, 1)]
    assert len(generation.token_ids) == 2
    assert score == pytest.approx(engine.score(layout, [ord("s"), ord("o")]), abs=1e-5)


def test_questions_together_are_scored_and_answered_in_one_pass_each(engine):
    choice = MitigationChoice("none")
    cases = [EvalCase(example, tuple(example.documents(3 - n, 0)), choice) for n, example in enumerate(EXAMPLES)]
    with CountedForwards(engine) as forwards:
        found = list(answer_all(engine, cases, 2))
    assert [shape for shape in forwards.shapes if shape[0] > 1] == [(3, 1), (3, 1)]
    for one, (answer, first) in zip(cases, found, strict=True):
        layout = layout_of(engine, one.example, one.documents)
        alone = engine.generate(GenerationRequest(layout, choice, Sampling(max_tokens=2)))
        assert answer.answer == alone.text
        assert answer.log_probability == pytest.approx(engine.score(layout, [ord("s"), ord("o")]), abs=1e-5)
        assert answer.seconds > 0
        assert torch.equal(first, engine.next_log_probs(layout))


def test_the_confidence_of_an_answer_is_the_geometric_mean_of_the_probabilities_of_its_tokens(engine):
    case = EvalCase(EXAMPLES[0], tuple(EXAMPLES[0].documents(1)), MitigationChoice("none"))
    layout = layout_of(engine, case.example, case.documents)
    ((answer, _),) = answer_all(engine, [case], 2)
    generation = engine.generate(GenerationRequest(layout, case.choice, Sampling(max_tokens=2, top_logprobs=0)))
    assert "\n" not in generation.text
    # The exponential of a mean of logarithms is the geometric mean.
    assert answer.confidence == pytest.approx(math.exp(engine.score(layout, generation.token_ids)), abs=1e-5)


def test_an_answer_is_right_by_its_first_line_and_by_its_whole_text(engine, monkeypatch):
    monkeypatch.setattr("rag_posfix.generation.decode.answer_writer.TextStream.text", "no\nbut so", raising=False)
    monkeypatch.setattr("rag_posfix.generation.decode.answer_writer.TextStream.push", lambda self, token: "")
    monkeypatch.setattr("rag_posfix.generation.decode.answer_writer.TextStream.finish", lambda self: "")
    monkeypatch.setattr(
        "rag_posfix.generation.decode.answer_writer.TextStream.__init__",
        lambda self, *_: None,
    )
    for name, value in (("stopped", False), ("stop_string", None)):
        monkeypatch.setattr(f"rag_posfix.generation.decode.answer_writer.TextStream.{name}", value, raising=False)
    ((answer, _),) = answer_all(engine, [EvalCase(EXAMPLES[0], (), MitigationChoice("none"))], 2)
    assert answer.answer == "no\nbut so"
    assert (answer.accuracy, answer.accuracy_full_text) == (0.0, 1.0)


def test_the_history_of_a_turn_is_read_by_the_model_and_part_of_the_key(engine):
    alone = EvalCase(EXAMPLES[0], tuple(EXAMPLES[0].documents(1)), MitigationChoice("none"))
    history = ({"role": "user", "content": "a"},)
    turn = replace(alone, example=replace(alone.example, history=history))
    (first, _), (second, _) = answer_all(engine, [alone, turn], 4)
    assert first.log_probability != second.log_probability
    assert case_key(engine, alone, 4, any_order=False) != case_key(engine, turn, 4, any_order=False)


def test_passages_that_repeat_are_refused(engine):
    example = EXAMPLES[0]
    case = EvalCase(example, (*example.gold, *example.gold), MitigationChoice("none"))
    with pytest.raises(EvaluationError, match="question 0: 1 of 2 passages do not fit or repeat"):
        list(answer_all(engine, [case], 2))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "journal.jsonl"


def test_what_is_added_is_found_now_and_by_the_next_run(path):
    journal = AnswerJournal(path)
    assert journal.get("a") is None
    assert not path.exists()
    journal.add("a", ANSWER)
    assert journal.get("a") == ANSWER
    assert AnswerJournal(path).get("a") == ANSWER
    (line,) = path.read_text("utf-8").splitlines()
    assert set(json.loads(line)) == {"key", "answer", "at", "version", "commit"}


def test_a_journal_of_a_version_without_confidence_is_read(path):
    AnswerJournal(path).add("a", ANSWER)
    line = json.loads(path.read_text("utf-8"))
    del line["answer"]["confidence"]
    path.write_text(json.dumps(line), "utf-8")
    assert AnswerJournal(path).get("a") == replace(ANSWER, confidence=None)


def test_without_a_path_answers_stay_in_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    journal = AnswerJournal()
    journal.add("a", ANSWER)
    assert journal.get("a") == ANSWER
    assert list(tmp_path.iterdir()) == []


def test_of_two_lines_with_one_key_the_last_counts(path):
    AnswerJournal(path).add("a", ANSWER)
    AnswerJournal(path, fresh=True).add("a", replace(ANSWER, answer="new"))
    assert AnswerJournal(path).get("a").answer == "new"


def test_a_fresh_journal_ignores_earlier_answers_and_keeps_them(path):
    AnswerJournal(path).add("a", ANSWER)
    fresh = AnswerJournal(path, fresh=True)
    assert fresh.get("a") is None
    fresh.add("b", ANSWER)
    assert AnswerJournal(path).get("a") == AnswerJournal(path).get("b") == ANSWER


@pytest.mark.parametrize("cut", [1, 2, 40, -2])
def test_a_torn_last_line_is_ignored_and_harms_no_later_line(path, cut):
    AnswerJournal(path).add("a", ANSWER)
    AnswerJournal(path).add("b", ANSWER)
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:cut])
    journal = AnswerJournal(path)
    assert journal.get("a") == ANSWER
    assert journal.get("b") is None
    journal.add("c", ANSWER)
    journal.add("d", ANSWER)
    again = AnswerJournal(path)
    assert [again.get(key) is not None for key in "abcd"] == [True, False, True, True]


def test_a_last_line_that_lacks_only_its_end_counts(path):
    AnswerJournal(path).add("a", ANSWER)
    path.write_bytes(path.read_bytes().rstrip())
    journal = AnswerJournal(path)
    assert journal.get("a") == ANSWER
    journal.add("b", ANSWER)
    assert AnswerJournal(path).get("b") == ANSWER


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"5",
        b"\xff",
        b'{"key": "a"}',
        b'{"key": 5, "answer": {}}',
        json.dumps({"key": "a", "answer": {"answer": "x"}}).encode(),
        json.dumps({"key": "a", "answer": {**dict.fromkeys(GradedAnswer.__slots__), "answer": "x"}}).encode(),
        json.dumps({"key": ["a"], "answer": {**dict.fromkeys(GradedAnswer.__slots__, 1.0), "answer": "x"}}).encode(),
    ],
)
def test_lines_that_say_something_else_are_ignored(path, line):
    path.parent.mkdir()
    path.write_bytes(line + b"\n")
    assert AnswerJournal(path).get("a") is None


def test_an_answer_without_a_finite_score_is_computed_again(path):
    AnswerJournal(path).add("a", replace(ANSWER, log_probability=float("-inf")))
    assert AnswerJournal(path).get("a") is None


def test_who_wrote_the_answers_that_were_taken_is_known(path):
    AnswerJournal(path).add("a", ANSWER)
    own = json.loads(path.read_text("utf-8"))
    theirs = {**own, "key": "b", "version": "0.0.1", "commit": None}
    path.write_text(json.dumps(own) + "\n" + json.dumps(theirs) + "\n")
    journal = AnswerJournal(path)
    assert journal.sources == []
    journal.get("b")
    assert journal.sources == ["0.0.1 None"]
    journal.add("c", ANSWER)
    journal.get("c")
    assert journal.sources == ["0.0.1 None"]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EvaluationError, match=r"cannot write .*journal.*; choose another --out"):
        AnswerJournal(tmp_path / "file" / "journal.jsonl").add("a", ANSWER)
    (tmp_path / "folder").mkdir()
    with pytest.raises(EvaluationError, match=r"cannot read the journal .*; remove it or choose another --out"):
        AnswerJournal(tmp_path / "folder")


class TestKey:
    engine = tiny_engine()
    example = EXAMPLES[0]
    passages = tuple(
        Document(page_content=text, metadata={"title": "t", "relevance_score": score})
        for text, score in (("b", 0.5), ("a", 0.25))
    )

    def key(self, engine=None, example=None, documents=None, choice=None, tokens=24, any_order=False, **fields):
        documents = self.passages if documents is None else documents
        case = EvalCase(example or self.example, documents, choice or MitigationChoice("none"), **fields)
        return case_key(engine or self.engine, case, tokens, any_order=any_order)

    def test_all_that_an_answer_depends_on_changes_the_key(self):
        other = Engine(self.engine.loaded, self.engine.encoder, "tiny", "another print")
        base = tiny_engine()
        base.encoder.has_chat_template = False
        b, a = self.passages
        keys = [
            self.key(),
            self.key(engine=other),
            self.key(engine=base),
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
            self.key(order="relevance"),
            self.key(order="reverse"),
            self.key(template=PromptTemplate(instruction="Answer in one word.")),
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


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Rome", True),
        ("Rome\nParis is another town.", True),
        ("\nRome", False),
        ("...", False),
        (" ".join(f"w{n}" for n in range(30)), True),
        (" ".join(f"w{n}" for n in range(31)), False),
        ("Rome Rome Rome", False),
    ],
)
def test_a_sound_answer_has_one_to_thirty_words_in_its_first_line_and_repeats_nothing(answer, expected):
    assert is_sound(answer) is expected


def test_the_summary_counts():
    assert summarize_form(["Rome", "no no no", ""]) == {"sound": 1 / 3, "repeats": 1 / 3, "words": 4 / 3}
    assert summarize_form([]) == {"sound": 0.0, "repeats": 0.0, "words": 0.0}
