"""Parity with trec_eval's own code, which pytrec_eval compiles, and values worked by hand."""

import math
import random
from pathlib import Path

import pytest
import pytrec_eval

from rag_posfix.errors import ConfigError, EvaluationError
from rag_posfix.evaluation.data.collection import decreasing
from rag_posfix.evaluation.ranking.rankings import DEFAULT_MEASURES, compute_measures, parse_measures, run_files

TREC_NAMES = {"nDCG@10": "ndcg_cut_10", "R@10": "recall_10", "P@1": "P_1", "AP": "map", "RR": "recip_rank"}


def test_values_are_those_worked_by_hand():
    # Relevant: b (2) at rank 2, c (1) at rank 4, x never found. DCG = 2 / log2(3) + 1 / log2(5); the ideal order is
    # 2, 1, 1: 2 / log2(2) + 1 / log2(3) + 1 / log2(4).
    qrels = {"q": {"b": 2, "c": 1, "x": 1, "a": 0}}
    found = compute_measures(parse_measures(), qrels, {"q": {"a": 0.9, "b": 0.8, "d": 0.7, "c": 0.6}})
    ideal = 2 + 1 / math.log2(3) + 1 / 2
    assert found["nDCG@10"]["q"] == pytest.approx((2 / math.log2(3) + 1 / math.log2(5)) / ideal)
    assert found["RR@10"]["q"] == 0.5
    assert found["R@10"]["q"] == pytest.approx(2 / 3)
    assert found["P@1"]["q"] == 0.0


def test_a_relevant_document_after_the_tenth_counts_in_no_measure_at_10():
    run = {"q": {f"d{index:02d}": 1 - index / 100 for index in range(11)}}
    found = compute_measures(parse_measures(), {"q": {"d10": 1}}, run)
    assert [found[name]["q"] for name in DEFAULT_MEASURES] == [0.0] * 4


def test_all_measures_equal_trec_evals_on_random_runs():
    drawn = random.Random(5)
    names = [f"d{index}" for index in range(40)]
    qrels = {f"q{q}": {name: drawn.choice([0, 0, 1, 2, 3]) for name in drawn.sample(names, 12)} for q in range(50)}
    run = {}
    for query in qrels:
        found = drawn.sample(names, drawn.randint(1, 30))
        scores = sorted((drawn.choice([0.1, 0.5, drawn.random()]) for _ in found), reverse=True)  # with many ties
        run[query] = dict(zip(found, decreasing(scores), strict=True))
    theirs = pytrec_eval.RelevanceEvaluator(qrels, set(TREC_NAMES.values())).evaluate(run)
    ours = compute_measures(parse_measures("AP,RR"), qrels, run)
    for name, trec_name in TREC_NAMES.items():
        for query in qrels:
            assert ours[name][query] == pytest.approx(theirs[query][trec_name], abs=1e-12), (name, query)
    for query in qrels:  # trec_eval has no RR@10: its reciprocal rank, cut
        whole = theirs[query]["recip_rank"]
        assert ours["RR@10"][query] == pytest.approx(whole if whole >= 0.1 else 0.0)


def test_a_judged_query_without_a_ranking_scores_zero_and_is_not_left_out():
    found = compute_measures(
        parse_measures("AP"), {"q": {"a": 1}, "r": {"a": 1}, "s": {"a": 1}}, {"q": {"a": 1.0}, "r": {}}
    )
    assert all(list(column) == ["q", "r", "s"] for column in found.values())
    assert all(column["r"] == column["s"] == 0.0 for column in found.values())
    assert compute_measures(parse_measures(), {"q": {"a": 1}}, {})["nDCG@10"] == {"q": 0.0}


def test_a_query_without_anything_relevant_scores_zero():
    found = compute_measures(parse_measures("AP"), {"q": {"a": 0}}, {"q": {"a": 1.0}})
    assert {name: column["q"] for name, column in found.items()} == dict.fromkeys(found, 0.0)


def test_measures_are_named_freely_and_each_counts_once():
    found = [str(one) for one in parse_measures(" P(rel=2)@5 ,nDCG@10, Success@5,SetF(rel=2,beta=2.0),")]
    assert found[:4] == list(DEFAULT_MEASURES)
    assert found[4:6] == ["P(rel=2)@5", "Success@5"]
    assert len(found) == 7
    assert [str(one) for one in parse_measures()] == list(DEFAULT_MEASURES)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nDGC@10", "unknown measure 'nDGC@10'. Did you mean nDCG"),
        ("nDCG@ten", "measure 'nDCG@ten' cannot be computed"),
        ("P@0", "the cutoff must be at least 1"),
        ("P(rel=0)@5", "measure 'P(rel=0)@5' cannot be computed"),
    ],
)
def test_a_measure_that_cannot_be_computed_is_refused_before_anything_runs(text, said):
    with pytest.raises(ConfigError) as caught:
        parse_measures(text)
    assert said in str(caught.value)


class TestMeasureThatFails:
    def test_one_without_a_value_for_a_query_is_an_error_and_no_zero(self, monkeypatch):
        (one,) = parse_measures("nDCG@10")[:1]
        monkeypatch.setattr(type(one), "DEFAULT", math.nan)
        with pytest.raises(EvaluationError, match="measure nDCG@10 has no value for query 'r'; leave"):
            compute_measures([one], {"q": {"a": 1}, "r": {"a": 1}}, {"q": {"a": 1.0}})

    def test_one_that_breaks_is_one_line(self):
        # ir-measures divides by a count of pairs, and a ranking of one document has none.
        with pytest.raises(EvaluationError, match=r"ir-measures failed on .*Accuracy \(ZeroDivisionError"):
            compute_measures(parse_measures("Accuracy"), {"r": {"a": 1}}, {"r": {"a": 1.0}})


def test_without_the_extra_the_message_names_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ir_measures", None)
    with pytest.raises(ConfigError, match=r"ir_measures is not installed.*\.\[eval\]"):
        parse_measures()


def test_no_two_runs_share_a_file():
    labels = ["first_stage", "a:x=1", "a:x=[1]", "a:x={1}", "../a", "$"]
    files = run_files(Path("out"), labels)
    assert len(set(files.values())) == len(labels)
    assert {path.parent for path in files.values()} == {Path("out")}
    assert files["a:x=1"].name == "a-x=1.trec"
