"""Arrangements, and what every answer experiment checks and loads."""

import itertools
from contextlib import nullcontext
from dataclasses import replace

import pytest
from langchain_core.documents import Document

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import ConfigError, EvaluationError, UnknownNameError
from rag_posfix.evaluation.answers.experiment import (
    Arrangement,
    EvalCase,
    answer_all,
    check_arrangements,
    load_models,
    parse_arrangement,
    score_passages,
    summarize_positions,
    with_baselines,
)
from rag_posfix.evaluation.answers.positions import (
    answer_at_positions,
    answer_in_orders,
    evaluate_permutations,
    evaluate_positions,
)
from rag_posfix.evaluation.data.questions import PositionExample
from rag_posfix.evaluation.ranking.rankings import RankJournal
from rag_posfix.reranking import GuardedReranker
from rag_posfix.reranking.yes_no import JudgeTemplate, YesNoReranker
from rag_posfix.settings import Settings
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.tiny_evaluation import EXAMPLES, Alphabetical, CountedForwards, tiny_engine

EXAMPLE = PositionExample(
    "0", "Which one?", ("three",), (Document(id="g", page_content="three"),),
    tuple(Document(id=name, page_content=text) for name, text in (("a", "one"), ("b", "two!"), ("c", "four"))),
)  # fmt: skip


class AllAlike(Alphabetical):
    """Gives every passage the same score."""

    def compress_documents(self, documents, query, callbacks=None):
        return [replace_score(document, 0.5) for document in documents]


def replace_score(document, score):
    return document.model_copy(update={"metadata": {**document.metadata, "relevance_score": score}})


@pytest.fixture(scope="module")
def engine():
    return tiny_engine(400)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", Arrangement(MethodSpec("none"))),
        ("/reverse/none", Arrangement(MethodSpec("none"), "reverse")),
        (
            "likelihood+embedding:top_n=3/reverse/none",
            Arrangement(
                MethodSpec("none"),
                "reverse",
                MethodSpec("fused", {"scorers": ["likelihood", "embedding"], "top_n": 3}),
            ),
        ),
        (
            "embedding//context_experts:experts=2",
            Arrangement(MethodSpec("context_experts", {"experts": 2}), "original", MethodSpec("embedding")),
        ),
    ],
)
def test_an_arrangement_in_text_is_read_and_its_label_reads_back(text, expected):
    assert parse_arrangement(text) == expected
    assert parse_arrangement(expected.label) == expected
    check_arrangements([expected])


@pytest.mark.parametrize("text", ["embedding/none", "a/b/c/d", "embedding/reverse/", ""])
def test_another_number_of_parts_is_refused(text):
    with pytest.raises(ConfigError, match="must be reranker/order/method"):
        parse_arrangement(text)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("embeding/reverse/none", UnknownNameError, "unknown reranker 'embeding'"),
        ("embedding/revers/none", UnknownNameError, "unknown order 'revers'"),
        ("likelihood+nothing/reverse/none", ConfigError, "nothing"),
    ],
)
def test_names_are_checked_before_anything_is_loaded(text, error, message):
    with pytest.raises(error, match=message):
        check_arrangements([parse_arrangement(text)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", False),
        ("embedding/original/none", False),
        ("embedding/random/none", False),
        ("embedding/relevance/none", True),
        ("embedding/reverse/none", True),
        ("embedding/profile:slots=[1,2]/none", True),
        ("context_experts", True),
        ("embedding/original/sorted_inter_document", True),
    ],
)
def test_an_arrangement_is_order_free_by_its_method_or_by_an_order_from_content(text, expected):
    assert parse_arrangement(text).order_free is expected


@pytest.mark.parametrize("reranker", [Alphabetical(), AllAlike()], ids=["scored", "all alike"])
@pytest.mark.parametrize("order", ["relevance", "reverse", "ends_first", "profile:slots=[3,1,2]"])
@pytest.mark.slow
def test_an_order_free_arrangement_answers_alike_in_all_orders_of_four_passages(engine, reranker, order):
    """Also where all scores are equal: ties are broken by content."""
    scored = score_passages(reranker, EXAMPLE, 4)
    answers = set()
    for passages in itertools.permutations(scored.values()):
        ((answer, log_probs),) = answer_all(engine, [EvalCase(EXAMPLE, passages, MethodSpec("none"), order)], 4)
        answers.add((answer.answer, answer.log_probability, tuple(log_probs.tolist())))
    assert len(answers) == 1


@pytest.mark.parametrize("guarded", [False, True], ids=["bare", "guarded"])
def test_judges_that_return_other_passages_judge_once(engine, guarded):
    template = JudgeTemplate(before="", after="{question}", yes=("y",), no=("n",))
    judges = [
        YesNoReranker(generator=engine, template=template, **selection)
        for selection in ({"top_n": 2}, {}, {"top_n": 1}, {"mass": 0.5}, {"top_n": 2, "mass": 0.4})
    ]
    apart = [score_passages(judge, EXAMPLE, 4) for judge in judges]
    journal, counts, together = RankJournal(), [], []
    with CountedForwards(engine) as counted:
        for judge in judges:
            reranker = GuardedReranker(reranker=judge) if guarded else judge
            together.append(score_passages(reranker, EXAMPLE, 4, journal))
            counts.append(len(counted.shapes))
    assert counts[0] > 0
    assert set(counts) == {counts[0]}

    def scores(passages):
        return [(name, document.metadata["relevance_score"]) for name, document in passages.items()]

    assert list(map(scores, together)) == list(map(scores, apart))
    assert [len(passages) for passages in together] == [2, 4, 1, 2, 1]


def sweep(engine, *texts, **options):
    arrangements = [parse_arrangement(text) for text in texts]
    return answer_at_positions(
        engine, [EXAMPLE, replace(EXAMPLE, id="1", question="Which other?")], arrangements,
        **{"gold_positions": [0, 3], "n_documents": 4, "reranker": Alphabetical(), "max_new_tokens": 3, **options},
    )  # fmt: skip


def test_positions_compare_arrangements(engine):
    rows = sweep(
        engine, "none", "/reverse/none", "embedding:top_n=2/reverse/none", rerankers={"embedding:top_n=2": Two()}
    )
    found = summarize_positions(rows)["mitigations"]
    assert list(found) == ["none", "/reverse/none", "embedding:top_n=2/reverse/none"]
    assert found["none"]["spread_log_probability"] > 0
    assert found["/reverse/none"]["spread_log_probability"] == 0
    assert {row.gold_rank for row in rows if row.condition == "none"} == {3}, "after four and one"
    assert (found["none"]["recall_at_1"], found["none"]["recall_at_3"]) == (0.0, 1.0)
    assert {row.gold_rank for row in rows if row.condition.startswith("embedding")} == {None}
    assert found["embedding:top_n=2/reverse/none"]["recall_at_3"] == 0.0
    assert 0 <= found["/reverse/none"]["versus_none"]["mcnemar_p"] <= 1


class Two(Alphabetical):
    """Keeps two passages, none of them gold."""

    def compress_documents(self, documents, query, callbacks=None):
        return [replace_score(one, 0.5) for one in documents if one.id != "g"][:2]


def test_permutations_compare_arrangements(engine):
    rows = answer_in_orders(
        engine, [EXAMPLE], [parse_arrangement("none"), parse_arrangement("embedding/reverse/none")],
        n_orders=6, n_documents=4, reranker=Alphabetical(), rerankers={"embedding": AllAlike()}, max_new_tokens=3,
    )  # fmt: skip
    moved = {row.condition: 0.0 for row in rows}
    for row in rows:
        moved[row.condition] = max(moved[row.condition], row.logit_difference)
    assert moved["none"] > 0
    assert moved["embedding/reverse/none"] == 0


NONE = MitigationChoice("none")


@pytest.fixture
def loads(monkeypatch):
    """What was loaded, in order: nothing real."""
    made = []
    monkeypatch.setattr(
        "rag_posfix.pipeline.build.load_engine", lambda model, **_: made.append(model) or tiny_engine()
    )
    monkeypatch.setattr(
        "rag_posfix.pipeline.build.SentenceEmbeddings", lambda model, **_: made.append(model) or LetterEmbeddings()
    )
    return made


def test_a_method_is_checked_by_name_parameters_and_number():
    check_arrangements(
        [NONE, MitigationChoice("context_experts"), MitigationChoice("context_experts", {"experts": 1})]
    )
    with pytest.raises(UnknownNameError, match="unknown mitigation 'nonee'"):
        check_arrangements([MitigationChoice("nonee")])
    with pytest.raises(ConfigError, match="'context_experts:experts=1' occurs twice"):
        check_arrangements([MitigationChoice("context_experts", {"experts": 1})] * 2)


def test_what_is_given_is_not_loaded_and_the_rest_is_as_settings_say(loads):
    engine, reranker, steps = tiny_engine(), Alphabetical(), []
    settings = Settings(model="m", embedding_model="e")

    def progress(step):
        steps.append(step)
        return nullcontext(lambda done, total: None)

    found = load_models([Arrangement(NONE)], engine, reranker, None, progress)
    assert (found, loads, steps) == ((engine, reranker, "Alphabetical"), [], [])
    assert load_models([Arrangement(NONE)], engine, None, settings, progress)[::2] == (engine, "e")
    assert loads == ["e"]
    assert load_models([Arrangement(NONE)], None, reranker, settings, progress)[1:] == (reranker, "Alphabetical")
    assert loads == ["e", "m"]
    assert steps == ["loading the model and the embeddings"] * 2


@pytest.mark.parametrize(
    ("experiment", "options", "message"),
    [
        (evaluate_positions, {"gold_positions": [0, 9], "documents": 3}, "gold position 9 must be between 0 and 2"),
        (evaluate_positions, {"documents": 9}, "documents=9 must be between 1 and 4"),
        (evaluate_positions, {"skip": 3}, "3 questions leave none with limit=None and skip=3"),
        (evaluate_permutations, {"documents": 3, "orders": 7}, "orders=7 must be between 2 and 6"),
    ],
)
def test_what_cannot_be_done_is_told_before_a_model_is_loaded(loads, experiment, options, message):
    with pytest.raises(EvaluationError, match=message):
        experiment(EXAMPLES, [NONE], settings=Settings(), **options)
    with pytest.raises(UnknownNameError, match="unknown mitigation 'pine-apple'"):
        experiment(EXAMPLES, [MitigationChoice("pine-apple")], settings=Settings())
    assert loads == []


def test_baselines_are_plain_prompts_of_every_scorer_each_once():
    chosen = [parse_arrangement(text) for text in ("none", "likelihood/original/committee", "/reverse/none")]
    assert [each.label for each in with_baselines(chosen)] == [
        "none",
        "likelihood/original/committee",
        "/reverse/none",
        "/relevance/none",
        "/ends_first/none",
        "embedding:top_n=1/reverse/none",
        "embedding:top_n=3/reverse/none",
        "embedding:top_n=5/reverse/none",
        "/relevance/repeated_passages:repeat=all",
        "/relevance/repeated_passages:repeat=best",
        "likelihood/relevance/none",
        "likelihood/reverse/none",
        "likelihood/ends_first/none",
        "likelihood:top_n=1/reverse/none",
        "likelihood:top_n=3/reverse/none",
        "likelihood:top_n=5/reverse/none",
        "likelihood/relevance/repeated_passages:repeat=all",
        "likelihood/relevance/repeated_passages:repeat=best",
    ]
    assert all(each.order_free for each in with_baselines(chosen)[1:])


def test_baselines_of_a_scorer_that_selects_read_all_passages():
    chosen = [parse_arrangement(text) for text in ("yes_no:top_n=3/reverse/none", "yes_no:mass=0.5/reverse/none")]
    assert [each.label for each in with_baselines(chosen)] == [
        "yes_no:top_n=3/reverse/none",
        "yes_no:mass=0.5/reverse/none",
        "yes_no/relevance/none",
        "yes_no/reverse/none",
        "yes_no/ends_first/none",
        "yes_no:top_n=1/reverse/none",
        "yes_no:top_n=5/reverse/none",
        "yes_no/relevance/repeated_passages:repeat=all",
        "yes_no/relevance/repeated_passages:repeat=best",
    ]
