"""An answer that is the heading of a passage is read again without headings."""

from __future__ import annotations

import pytest
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.pipeline.headings import CopiedHeading
from rag_posfix.pipeline.pipeline import Defaults, Pipeline, Question
from tests.support.reader import ScriptedReader

QUESTION = "How long does the delivery take?"
PATH = "Supplier contract > Delivery"
TEXT = "It takes nine days."


@pytest.mark.parametrize(
    "answer",
    [
        PATH, "supplier contract > delivery.", f" **{PATH}**\n", f"{PATH}\nIt takes nine days.", f"{PATH} > Times",
        "Delivery > Times", "How long does the delivery take",
    ],
)  # fmt: skip
def test_an_answer_that_is_a_path_of_headings_or_repeats_the_question_is_a_copy(answer):
    titles = [f"{PATH} > Times", "FAQ > How long does the delivery take?", None]
    assert CopiedHeading(titles, QUESTION).is_copied(answer)


@pytest.mark.parametrize(
    "answer", ["Supplier contract", "Torvane Lighthouse", "Nine days", "", "Delivery takes nine days"]
)
def test_a_heading_that_adds_to_the_question_is_an_answer(answer):
    assert not CopiedHeading([PATH, "Torvane Lighthouse"], QUESTION).is_copied(answer)


def test_the_beginning_of_a_path_may_become_a_copy_and_other_words_may_not():
    headings = CopiedHeading([PATH], QUESTION)
    assert headings.may_be_copied("Supp")
    assert headings.may_be_copied("Supplier contract > De")
    assert not headings.may_be_copied("Supplier contract, d")
    reworded = CopiedHeading([PATH], QUESTION, rewords=True)
    assert reworded.may_be_copied("The deliv")
    assert not headings.may_be_copied("The deliv")
    assert not reworded.may_be_copied("Nine days")
    assert not CopiedHeading(["Torvane Lighthouse"], "Which section is it?").may_be_copied("T")


@pytest.mark.parametrize(
    ("question", "answer", "is_copied"),
    [
        ("How do I cancel a booking?", "Cancel the booking.", True),
        ("How do I cancel a booking?", "Cancelling the booking", True),  # another ending
        ("How do I cancel a booking?", "Cancel the booking by post.", False),
        ("How do I delete my account?", "Delete your account.", True),
        ("Wie lösche ich mein Konto?", "Ich lösche das Konto.", True),
        ("Is a cat allowed?", "A cat is allowed.", False),  # an answer, since nothing else was asked
        ("Who is older, Anna Moe or Ida Moe?", "Ida Moe", False),
        ("Which of Anna Moe and Ida Moe is older?", "Ida Moe", False),
    ],
)
def test_an_answer_to_an_open_question_that_adds_no_word_is_a_copy(question, answer, is_copied):
    assert CopiedHeading(["FAQ"], question, rewords=True).is_copied(answer) is is_copied
    assert not CopiedHeading(["FAQ"], question).is_copied(answer)


class Copying(ScriptedReader):
    """Answers with the first line of its first passage, the heading included, and counts the tokens that it reads."""

    def __init__(self):
        super().__init__(written=lambda texts: texts[0].strip().splitlines()[0])
        self.read_tokens = []

    def texts(self, layout):
        return [self.encoder.decode(layout.tokens(span)) for span in layout.passages]

    def stream(self, request):
        self.read_tokens.append(len(request.layout.token_ids))
        return super().stream(request)


def ask(streams, **options):
    reader = Copying()
    pipeline = Pipeline(reader, Assembler(reader.encoder, reader.context_window))
    documents = [Document(TEXT, id="a", metadata={"title": PATH}), Document("Else.", id="b", metadata={"title": "X"})]
    question = Question(QUESTION, documents, order="original", mitigation="none", **options)
    if not streams:
        return pipeline.ask(question), [], reader
    chunks = list(pipeline.stream(question))
    return chunks[-1].answer, [chunk.text for chunk in chunks], reader


@pytest.mark.parametrize("streams", [False, True])
def test_a_copied_heading_is_read_again_without_headings(streams):
    answer, pieces, reader = ask(streams)
    assert answer.text == TEXT
    assert not streams or "".join(pieces) == TEXT
    assert [document.id for document in answer.documents] == ["a", "b"]
    assert answer.documents[0].title == PATH
    once, twice = reader.read_tokens
    assert answer.usage.prompt_tokens == once + twice


@pytest.mark.parametrize(("is_small", "expected"), [(True, TEXT), (False, "The delivery, how long.")])
def test_a_small_reader_that_only_rewords_the_question_reads_again(is_small, expected):
    class Rewording(Copying):
        def __init__(self):
            super().__init__()
            self.written = lambda texts: "The delivery, how long." if PATH in texts[0] else texts[0].strip()

    reader = Rewording()
    pipeline = Pipeline(
        reader, Assembler(reader.encoder, reader.context_window), defaults=Defaults(is_small_reader=is_small)
    )
    documents = [Document(TEXT, id="a", metadata={"title": PATH})]
    assert pipeline.ask(Question(QUESTION, documents, mitigation="none")).text == expected
