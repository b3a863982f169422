"""The question's own words in a passage are cut out of it, and its score stays."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import ConfigError
from rag_posfix.generation.engine import Engine
from rag_posfix.mitigations import create
from rag_posfix.plan.layout import Layout, Span
from rag_posfix.plan.plan import relevance_rule, without_question_copies
from tests.support.number_encoder import NumberEncoder
from tests.support.tiny import loaded_model

QUESTION = tuple(range(10, 18))
FIRST, LAST = tuple(range(30, 39)), tuple(range(70, 79))


def layout_of(*texts: tuple[int, ...], question=QUESTION, relevance=None) -> Layout:
    """Return a prompt whose passages are a heading (token 5), a text and a separator (token 6)."""
    ids, passages, spans = [3], [], []
    for text in texts:
        start = len(ids)
        ids += [5, *text, 6]
        passages.append(Span(start, len(ids)))
        spans.append(Span(start + 1, len(ids) - 1))
    start = len(ids)
    ids += [*question, 4]
    return Layout(
        tuple(ids), Span(0, 1), tuple(passages), tuple(spans), Span(start, len(ids)),
        Span(start, start + len(question)), tuple(str(index) for index in range(len(texts))), relevance,
    )  # fmt: skip


def texts_of(layout: Layout) -> list[tuple[int, ...]]:
    return [layout.tokens(span) for span in layout.texts]


@pytest.mark.parametrize(
    ("text", "remainder"),
    [
        ((50, *QUESTION, 51, 52), (50, 51, 52)),  # what stands around the copy stays
        (QUESTION, ()),
        ((*QUESTION[:6], 50), (50,)),  # 4 of the 6 runs of three tokens
        ((*QUESTION[:4], 50, *QUESTION[4:], 51), (50, 51)),  # two halves: 2 and 2 runs
        ((*QUESTION[:5], 50), None),  # 3 of 6
        ((50, 51, 52), None),
    ],
)
def test_runs_that_a_passage_shares_with_the_question_are_cut(text, remainder):
    layout = layout_of(FIRST, text, LAST)
    cut = without_question_copies(layout)
    if remainder is None:
        assert cut is None
        return
    assert (cut.copies, cut.siblings) == ({1}, frozenset())
    assert texts_of(cut.layout) == [FIRST, remainder, LAST]
    assert [cut.layout.tokens(span)[0] for span in cut.layout.passages] == [5, 5, 5]
    assert cut.layout.tokens(cut.layout.question) == QUESTION
    assert cut.layout.keys == layout.keys


def test_a_short_query_has_no_copies():
    query = QUESTION[:5]  # three runs
    assert without_question_copies(layout_of(FIRST, query, question=query)) is None


def test_the_score_of_a_copy_stays_for_an_entry_of_an_faq_is_found_by_its_question():
    for relevance in ((0.4, 0.9, 0.6), (0.4, 0.1, 0.6), None):
        assert (
            without_question_copies(layout_of(FIRST, QUESTION, LAST, relevance=relevance)).layout.relevance
            == relevance
        )


def test_a_title_that_is_the_question_is_cut_too():
    layout = layout_of((*QUESTION, *FIRST), LAST)
    start = layout.texts[0].start
    titled = replace(layout, texts=(Span(start + len(QUESTION), layout.texts[0].stop), layout.texts[1]))
    cut = without_question_copies(titled).layout
    assert texts_of(cut) == [FIRST, LAST]
    assert cut.tokens(cut.passages[0]) == (5, *FIRST, 6)


@pytest.mark.parametrize("span", [Span(0, 2), Span(22, 25)])
def test_only_tokens_of_passages_can_be_cut(span):
    layout = layout_of(FIRST, LAST)  # the prefix is token 0, the question begins at 23
    with pytest.raises(ConfigError, match="must be in the passages"):
        layout.cut([span])


@pytest.fixture(scope="module")
def engine():
    return Engine(loaded_model(), NumberEncoder(), "tiny", "print")


METHODS = ["context_experts", "committee", "passage_answers"]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.slow
def test_methods_read_the_cut_prompt_as_if_it_had_been_given(name, engine):
    # The order of the passages differs too: the answer follows the content alone. Every passage is a copy here, so
    # there is no other one to weigh a copy by.
    texts = [(number, *QUESTION, number + 1) for number in (50, 52, 54)]
    relevance = (0.4, 0.9, 0.6)
    plain = layout_of(*((number, number + 1) for number in (50, 52, 54)), relevance=relevance)
    expected = scores(engine, plain, name)
    for order in itertools.permutations(range(3)):
        layout = layout_of(*texts, relevance=relevance).select(order)
        assert torch.equal(scores(engine, layout, name), expected)
    assert not torch.equal(
        scores(engine, layout_of(*texts, relevance=relevance), name, question_copies=True), expected
    )


def rule_of(*texts: tuple[int, ...]):
    """Return the rule of ``both`` for passages whose scores are 1, .5, .5, ...: log 1 = 0 and log .5 = -.69."""
    layout = layout_of(*texts, relevance=(1.0, *[0.5] * (len(texts) - 1)))
    cut = without_question_copies(layout)
    return relevance_rule("both", layout if cut is None else cut.layout, range(len(texts)), cut)


def relevance_of(rule, *question: float) -> list[float]:
    return [round(value, 2) for value in rule(torch.tensor(question)).tolist()]


def test_a_copy_counts_with_the_median_of_the_other_passages_where_its_own_likelihood_is_lower():
    rule = rule_of(QUESTION, FIRST, LAST, (50, 51))
    # The others have -3, -2 and -4, the median is -3: 0 - 3, -.69 - 3, -.69 - 2, -.69 - 4.
    assert relevance_of(rule, -6.0, -3.0, -2.0, -4.0) == [-3.0, -3.69, -2.69, -4.69]
    # What the copy says besides is likelier than that.
    assert relevance_of(rule, -1.0, -3.0, -2.0, -4.0) == [-1.0, -3.69, -2.69, -4.69]
    for texts in ((FIRST, LAST), ((*QUESTION, 50), (*QUESTION, 51))):
        assert relevance_of(rule_of(*texts), -6.0, -3.0) == [-6.0, -3.69]


def test_a_passage_that_asks_in_the_same_words_about_something_else_counts_no_more_than_the_copy():
    sibling = (*QUESTION[:5], 60, 61)  # 3 of the 6 runs, the first among them
    rule = rule_of((*QUESTION, 50), sibling, FIRST, LAST)
    # Median of -1, -5 and -4: -4. The copy counts with -4, the sibling with -4 too, and the scores decide.
    assert relevance_of(rule, -6.0, -1.0, -5.0, -4.0) == [-4.0, -4.69, -5.69, -4.69]
    assert relevance_of(rule, -6.0, -5.5, -5.0, -4.0) == [-5.0, -6.19, -5.69, -4.69]  # median -5; its own is lower
    answer = (60, *QUESTION[1:6], 61)  # as many runs, without the interrogative: an answer in the question's words
    assert relevance_of(rule_of((*QUESTION, 50), answer, FIRST, LAST), -6.0, -1.0, -5.0, -4.0)[1] == -1.69
    cut = without_question_copies(layout_of((*QUESTION, 50), sibling, answer))
    assert (cut.copies, cut.siblings) == ({0}, {1})
    assert texts_of(cut.layout) == [(50,), (60, 61), answer]
    assert without_question_copies(layout_of(sibling, FIRST)) is None, "without a copy a passage may ask"


@pytest.mark.parametrize("name", METHODS)
def test_the_score_that_came_with_a_passage_is_trusted_with_relevance_score(name):
    layout = layout_of(FIRST, QUESTION, relevance=(0.4, 0.9))
    assert create(name, {"relevance": "score"}).plan(layout, loaded_model().spec.shape).layout is None


def scores(engine, layout, name, **parameters):
    parameters = {"relevance": "both", **parameters}
    plan = create(name, parameters).plan(layout, engine.loaded.spec.shape)
    return engine.prefill(layout, plan, MitigationChoice(name, parameters)).next_log_probs()


def test_tokens_of_letters_are_compared_in_longer_runs():
    question = tuple(map(ord, "who designed the tower and the light of the tower"))
    related = tuple(map(ord, "those who design lights: their tower stands on a light roof, and they owe the rent"))
    copy = (*question, *map(ord, " ilse korvanth"))
    assert (
        without_question_copies(layout_of(tuple(map(ord, "the hall and the town")), related, question=question))
        is None
    )
    cut = without_question_copies(layout_of(related, copy, question=question))
    assert cut is not None
    assert texts_of(cut.layout)[1] == tuple(map(ord, "ilse korvanth"))  # the space is in a run of the question
