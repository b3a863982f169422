import pytest
import torch

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.answers.answering import Asked, answer_all, answer_and_score
from tests.support.tiny_evaluation import EXAMPLES, CountedForwards, tiny_engine


@pytest.fixture(scope="module")
def engine():
    return tiny_engine()


def layout_of(engine, example, documents):
    return Assembler(engine.encoder, 180).assemble(
        example.question, documents, order="original", max_new_tokens=2
    ).layout  # fmt: skip


def test_answering_and_scoring_share_one_reading(engine):
    layout = layout_of(engine, EXAMPLES[0], [EXAMPLES[0].gold])
    with CountedForwards(engine) as forwards:
        generation, score = answer_and_score(engine, layout, MitigationChoice("none"), "so", 2)
    # The prompt, one token to score two, one token to generate two.
    assert forwards.shapes == [(1, len(layout.token_ids)), (1, 1), (1, 1)]
    assert len(generation.token_ids) == 2
    assert score == pytest.approx(engine.score(layout, [ord("s"), ord("o")]), abs=1e-5)


def test_questions_together_are_scored_and_answered_in_one_pass_each(engine):
    choice = MitigationChoice("none")
    asked = [Asked(example, tuple(example.documents(3 - n, 0)), choice) for n, example in enumerate(EXAMPLES)]
    with CountedForwards(engine) as forwards:
        found = list(answer_all(engine, asked, 2))
    assert [shape for shape in forwards.shapes if shape[0] > 1] == [(3, 1), (3, 1)]
    for one, (answer, first) in zip(asked, found, strict=True):
        layout = layout_of(engine, one.example, one.documents)
        alone = engine.generate(GenerationRequest(layout, choice, Sampling(max_tokens=2)))
        assert answer.answer == alone.text
        assert answer.log_probability == pytest.approx(engine.score(layout, [ord("s"), ord("o")]), abs=1e-5)
        assert answer.seconds > 0
        assert torch.equal(first, engine.next_log_probs(layout))


def test_an_answer_is_right_by_its_first_line_and_by_its_whole_text(engine, monkeypatch):
    monkeypatch.setattr("rag_posfix.generation.decode.answer_writer.TextStream.text", "no\nbut so", raising=False)
    monkeypatch.setattr("rag_posfix.generation.decode.answer_writer.TextStream.push", lambda self, token: "")
    monkeypatch.setattr("rag_posfix.generation.decode.answer_writer.TextStream.finish", lambda self: "")
    monkeypatch.setattr(
        "rag_posfix.generation.decode.answer_writer.TextStream.__init__",
        lambda self, *_: setattr(self, "stopped", False),
    )
    ((answer, _),) = answer_all(engine, [Asked(EXAMPLES[0], (), MitigationChoice("none"))], 2)
    assert answer.answer == "no\nbut so"
    assert (answer.accuracy, answer.accuracy_full_text) == (0.0, 1.0)


def test_passages_that_repeat_are_refused(engine):
    example = EXAMPLES[0]
    asked = Asked(example, (example.gold, example.gold), MitigationChoice("none"))
    with pytest.raises(EvaluationError, match="question 0: 1 of 2 passages do not fit or repeat"):
        list(answer_all(engine, [asked], 2))
