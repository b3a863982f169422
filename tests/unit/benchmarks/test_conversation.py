"""The benchmark of conversations: its halves, its summaries worked by hand, and its tables."""

from __future__ import annotations

import pytest

from benchmarks.conversation import (
    WEIGHTS,
    earlier_rows,
    load_follow_ups,
    main,
    summarize_answers,
    summarize_ranks,
    table_of,
)


def test_every_turn_but_the_first_is_a_follow_up_with_its_history():
    follow_ups = load_follow_ups()
    assert len(follow_ups) == 65  # 55 conversations of two turns, 5 of three
    assert len({follow_up.id for follow_up in follow_ups}) == 65
    first = follow_ups[0]
    assert (first.question, first.gold, first.answers[0]) == (
        "Who designed it?",
        "lighthouse-maravel",
        "Ilse Korvanth",
    )
    assert [message["role"] for message in first.history] == ["user", "assistant"]
    assert max(len(follow_up.history) for follow_up in follow_ups) == 4
    assert {follow_up.half for follow_up in follow_ups} == {0, 1}


def ranks():
    for half in (0, 1):
        scores = {"last": 0.1, "joined": 0.5, "history": 1.0, "rewrite": 0.2}
        # Half 0 prefers the weight 0.3, half 1 the weight 0.8.
        scores |= {f"weight {weight}": 1.0 if weight == (0.3, 0.8)[half] else 0.25 for weight in WEIGHTS}
        for kind, score in scores.items():
            yield {
                "id": f"p-{half}/1", "half": half, "retriever": "dense", "query": kind, "reciprocal_rank": score,
                "written": half == 0,
            }  # fmt: skip


def test_a_weight_is_chosen_on_one_half_and_reported_on_the_other():
    summary = summarize_ranks(list(ranks()))
    halves = summary["chosen_on_half"]
    assert (halves["0"]["weight"], halves["1"]["weight"]) == (0.3, 0.8)
    assert halves["0"]["dense"]["chosen"] == halves["1"]["dense"]["chosen"] == 0.25
    assert summary["queries"]["last"]["dense"] == {"reciprocal_rank": pytest.approx(0.1), "hit@5": 0.0}
    assert summary["queries"]["rewrite"]["dense"]["hit@5"] == 1.0  # rank 5
    assert (summary["n"], summary["rewritten"]) == (2, 0.5)
    assert table_of("ranks", summary, "m")["rows"][0] == ["`last`", ".100, .00"]


def test_a_condition_is_compared_with_passages_first():
    rows = [
        {"id": name, "condition": condition, "accuracy": accuracy, "has_gold": True, "cached_tokens": cached,
         "prompt_tokens": 100, "seconds": 1.0}
        for condition, cached, scores in (
            ("history", 50, (1.0, 1.0, 0.0, 1.0)), ("history, history first", 0, (0.0, 1.0, 0.0, 0.0)),
        )
        for name, accuracy in zip("abcd", scores, strict=True)
    ]  # fmt: skip
    other = summarize_answers(rows, "none")["conditions"]["history, history first"]
    assert (other["accuracy"], other["default_minus_this"]) == (0.25, 0.5)
    assert other["mcnemar_p"] == 0.5  # two pairs differ, both in favour: 2 * 1/4


def test_a_line_that_an_interrupt_tore_is_cut_off(tmp_path):
    journal = tmp_path / "answers.partial.jsonl"
    assert earlier_rows(journal) == []
    journal.write_text('{"id": "a"}\n{"id": "b"}\n{"id": "\u00e9', "utf-8")
    for _ in range(2):
        assert earlier_rows(journal) == [{"id": "a"}, {"id": "b"}]
    assert journal.read_text("utf-8") == '{"id": "a"}\n{"id": "b"}\n'


@pytest.mark.parametrize("conditions", ["last", "history;first"])
def test_conditions_that_cannot_be_compared_are_refused_before_anything_is_loaded(conditions, capsys):
    with pytest.raises(SystemExit):
        main(["answers", "--conditions", conditions])
    assert "must have 'history'" in capsys.readouterr().err
