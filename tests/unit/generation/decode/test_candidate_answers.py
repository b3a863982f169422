"""Short answers that rows write alone: against the stock model reading each row alone."""

from __future__ import annotations

import pytest
import torch

from rag_posfix.errors import PlanConflictError
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.generation.decode.question_scores import AnswerText, write_candidates
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.prefill.prefill import prefill
from rag_posfix.plan.plan import Draft, Plan, RowPlan
from tests.support.number_encoder import NumberEncoder
from tests.support.tiny import loaded_model, stock_model, toy_layout
from tests.support.tiny_evaluation import CountedForwards

LAYOUT = toy_layout((7, 4, 9))
SEEN = ((0,), (1,), (2,), ())


def average(scores):
    weights = (
        torch.full((len(scores.log_probs),), 1 / len(scores.log_probs)) if scores.weights is None else scores.weights
    )
    return (scores.log_probs + weights.log()[:, None]).logsumexp(dim=0), weights


def plan(choose=None, max_tokens=4, independent=True):
    rows = tuple(RowPlan(passages=passages) for passages in SEEN)
    candidates = None if choose is None else Draft(max_tokens, choose)
    return Plan(rows=rows, combine=average, independent_passages=independent, draft=candidates)


@torch.inference_mode()
def candidates_of(loaded, text=None, max_tokens=4, independent=True):
    groups = prefill(loaded, LAYOUT, plan(independent=independent))
    log_probs = torch.cat([group.logits.float() for group in groups]).log_softmax(dim=-1)
    rows = [group.batch for group in groups]
    return write_candidates(rows, log_probs, torch.zeros(len(SEEN)), max_tokens, text or AnswerText())


@pytest.fixture(scope="module")
def loaded():
    return loaded_model()


@pytest.fixture(scope="module")
def stock():
    """Greedy answers of the stock model that reads each row alone, and what each row says of each of them."""
    model = stock_model()
    prompts = [list(LAYOUT.select(passages).token_ids) for passages in SEEN]
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(4):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            answers.append(tuple(ids[len(prompt) :]))
        said = torch.zeros(4, 4)
        for d, answer in enumerate(answers):
            for k, prompt in enumerate(prompts):
                logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
                said[d, k] = logits.log_softmax(dim=-1).gather(1, torch.tensor(answer)[:, None]).sum()
    return answers, said


@pytest.mark.parametrize("independent", [True, False])
def test_every_row_writes_what_the_model_writes_after_that_row_alone(loaded, stock, independent):
    answers, said = stock
    found = candidates_of(loaded, independent=independent)
    assert found.tokens == tuple(answers)
    assert len(set(found.tokens)) > 1, "the rows must not all agree, or the test sees little"
    assert torch.allclose(found.log_probs, said, atol=1e-4)


def test_a_candidate_of_one_token_takes_no_pass_of_the_model(loaded, stock):
    with CountedForwards(Engine(loaded, NumberEncoder(), "tiny", "print")) as forwards:
        found = candidates_of(loaded, max_tokens=1)
        of_prompt = len(forwards.shapes)
        candidates_of(loaded, max_tokens=2)
    assert found.tokens == tuple(answer[:1] for answer in stock[0])
    # Two tokens: one step of all rows, and one pass of all rows over each distinct answer.
    one_pass = [shape for shape in forwards.shapes[of_prompt:] if shape[1] == 1]
    assert forwards.shapes[:of_prompt] == [shape for shape in forwards.shapes[of_prompt:] if shape[1] != 1]
    assert len(one_pass) == 1 + len({answer[:2] for answer in stock[0]})


def test_an_end_token_ends_a_candidate_and_is_no_part_of_it(loaded, stock):
    first = stock[0][0]
    found = candidates_of(loaded, AnswerText(eos_ids=frozenset({first[2]})))
    assert found.tokens[0] == first[: first.index(first[2])]
    for answer, whole in zip(found.tokens, stock[0], strict=True):
        cut = whole.index(first[2]) if first[2] in whole else 4
        assert answer == whole[:cut], "other rows go on"


def test_an_empty_candidate_has_probability_1(loaded, stock):
    found = candidates_of(loaded, AnswerText(eos_ids=frozenset({stock[0][1][0]})))
    assert found.tokens[1] == ()
    assert found.log_probs[1].tolist() == [0.0] * 4


def test_a_line_break_after_visible_text_ends_a_candidate(loaded, stock):
    # Token n reads "n "; the first and the third token of row 0 read as line breaks.
    first = stock[0][0]
    assert first[1] not in (first[0], first[2])
    text = AnswerText(decode=lambda ids: "".join("\n" if i in (first[0], first[2]) else f"{i} " for i in ids))
    assert candidates_of(loaded, text).tokens[0] == first[:3]


def test_candidates_are_the_same_if_their_words_are(loaded):
    by_token = candidates_of(loaded)
    assert by_token.same.tolist() == [[a == b for b in by_token.tokens] for a in by_token.tokens]
    words = {0: "Paris", 1: " paris.", 2: "Lyon", 3: "PARIS\n"}
    place = {answer: words[row] for row, answer in enumerate(by_token.tokens)}
    found = candidates_of(loaded, AnswerText(decode=lambda ids: place.get(tuple(ids), "x")))
    assert found.same[0].tolist() == [True, True, False, True]


def test_writing_candidates_leaves_the_rows_where_they_were(loaded):
    seen = []

    def choose(answers):
        seen.append(answers)
        return torch.full((4,), 0.25)

    weighed, plain = Session(loaded, LAYOUT, plan(choose)), Session(loaded, LAYOUT, plan())
    assert len(seen) == 1
    for token in (5, 9, 11):
        assert torch.equal(weighed.next_log_probs(), plain.next_log_probs())
        weighed.advance(token)
        plain.advance(token)
    assert len(seen) == 1, "the choice is made once"


def test_the_chosen_weights_reach_the_combination(loaded):
    one_hot = torch.tensor([0.0, 1.0, 0.0, 0.0])
    chosen = Session(loaded, LAYOUT, plan(lambda answers: one_hot))
    alone = Session(loaded, LAYOUT.select((1,)), Plan())
    assert float((chosen.next_log_probs() - alone.next_log_probs()).abs().max()) < 1e-5
    assert chosen.attention() == pytest.approx((0.0, 1.0, 0.0))


def test_a_candidate_without_use_or_without_tokens_is_refused():
    with pytest.raises(PlanConflictError, match="a draft and no combine"):
        Plan(draft=Draft(4, lambda answers: torch.ones(1)))
    with pytest.raises(PlanConflictError, match="max_tokens=0"):
        Draft(0, lambda answers: torch.ones(1))


def test_rows_that_no_answer_speaks_for_are_not_read_any_further(loaded):
    # Weights on rows 1 and 3 of 4: the session goes on with two rows, and says what those two would say.
    chosen = torch.tensor([0.0, 0.25, 0.0, 0.75])
    ours = Session(loaded, LAYOUT, plan(lambda answers: chosen))
    alone = [Session(loaded, LAYOUT, Plan(rows=(RowPlan(passages=SEEN[row]),))) for row in (1, 3)]
    for token in (5, 9, 11):
        assert sum(group.n_rows for group in ours.batches) == 2
        expected = (torch.stack([one.next_log_probs() for one in alone]) + chosen[[1, 3]].log()[:, None]).logsumexp(0)
        assert torch.allclose(ours.next_log_probs(), expected, atol=1e-5)
        for one in (ours, *alone):
            one.advance(token)
