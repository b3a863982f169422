"""Questions that a writer writes from passages: what is kept, what is dropped and why, and what is never asked."""

from __future__ import annotations

import re
from dataclasses import replace

from langchain_core.documents import Document

from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.measuring.measure import WrittenJournal, gap_questions, same_by, write_questions
from rag_posfix.retrieval.base import as_retriever
from tests.support.serving import make_pipeline
from tests.support.toy_encoder import ToyEncoder

HOUSES = [
    Document(
        page_content=f"The house {name} was built in {1900 + number}. It is tall.",
        id=name,
        metadata={"relevance_score": 0.5},
    )
    for number, name in enumerate(("Arn", "Bel", "Cor", "Dun", "Elm", "Fen"))
]
REPLIES = {
    "Arn": "When was the house Arn built?\nAnswer: 1900",
    "Bel": "When was the house Bel built?\nAnswer: 1850",
    "Cor": "The house was built in\nAnswer: 1902",
    "Dun": "Was the house Dun built in 1903?\nAnswer: 1903.",
    "Elm": "What size is the house Elm?\nAnswer: tall",
    "Fen": "Question: When was Fen built?\nAnswer: 1905.",
}


class Writer(FakeGenerator):
    """Writes the reply of the house that is named last; answers questions about a text with what it is told."""

    def __init__(self, answers="1900 or 1905"):
        super().__init__(ToyEncoder())
        self.prompts = []
        self.answers = answers

    def generate(self, request):
        layout = request.layout
        prompt = self.encoder.decode(layout.token_ids)
        self.prompts.append(prompt)
        found = super().generate(request)
        if "Write one question" not in prompt:
            return replace(found, text=self.answers)
        return replace(found, text=REPLIES[re.findall(r"house (\w+) was", prompt)[-1]])


def written(writer=None, reader=None, **options):
    writer = writer or Writer()
    generator = reader or writer
    separate = {} if reader is None else {"writer": writer}
    pipeline = make_pipeline(generator, retriever=as_retriever(lambda _: HOUSES), **separate)
    return write_questions(pipeline, HOUSES, 10, documents=4, **options)


def test_questions_are_kept_by_their_text_and_dropped_with_the_reason():
    examples, dropped = written()
    assert sorted(example.id for example in examples) == ["Arn", "Fen"]
    assert dropped == {
        "the answer is not in the passage": 1,
        "no question with an answer was written": 1,
        "the question holds its answer": 1,
        "another passage holds the answer": 1,
    }
    example = next(example for example in examples if example.id == "Arn")
    assert (example.answers, example.gold[0].id) == (("1900",), "Arn")
    assert "Arn" not in [document.id for document in example.distractors]
    assert len(example.distractors) == 3


def test_the_measured_model_is_never_asked_to_answer_a_question():
    writer = Writer()
    written(writer)
    assert all("Write one question" in prompt for prompt in writer.prompts)


def test_a_writer_of_its_own_must_answer_the_question_from_its_passage():
    reader = Writer()
    examples, dropped = written(Writer("1900"), reader)
    assert [example.id for example in examples] == ["Arn"]
    assert dropped["the writer answers otherwise"] >= 1
    assert reader.prompts == []


def test_the_same_seed_writes_the_same_questions_and_a_journal_asks_nothing_again(tmp_path):
    path = tmp_path / "journal.jsonl"
    first, _ = written(journal=WrittenJournal(path), seed=3)
    again = Writer()
    second, _ = written(again, journal=WrittenJournal(path), seed=3)
    assert [example.question for example in first] == [example.question for example in second]
    assert again.prompts == []


def test_equal_passages_are_used_once_and_equal_questions_are_dropped():
    pipeline = make_pipeline(Writer(), retriever=as_retriever(lambda _: HOUSES))
    twin = Document(page_content=HOUSES[0].page_content, id="twin")
    other = Document(page_content="The house Arn was built in 1900. It is not small.", id="other")
    examples, dropped = write_questions(pipeline, [HOUSES[0], twin, other], 10, documents=3)
    assert len(examples) + dropped.total() == 2
    assert len(examples) <= 1


def test_a_gap_takes_the_last_word_that_no_other_passage_has():
    pipeline = make_pipeline(Writer(), retriever=as_retriever(lambda _: HOUSES))
    plain = Document(page_content="It was built. It is tall.", id="plain")
    examples = gap_questions(pipeline, [*HOUSES, plain], 10, documents=4, seed=0, leave_out={"Bel"})
    assert sorted(example.id for example in examples) == ["Arn", "Cor", "Dun", "Elm", "Fen"]
    example = next(example for example in examples if example.id == "Dun")
    assert (example.question, example.answers) == ("Fill the gap: The house Dun was built in ____.", ("1903",))
    assert len(example.distractors) == 3
    assert len(gap_questions(pipeline, HOUSES, 2, documents=4, seed=0, leave_out=())) == 2


def test_only_yes_of_the_judge_means_the_same():
    assert same_by(Writer("Yes, both do."))("Q?", "a", "b") is True
    assert same_by(Writer("No"))("Q?", "a", "b") is False
    assert same_by(Writer("It is yes"))("Q?", "a", "b") is False
