"""Tables hold what the heads of records say."""

from __future__ import annotations

import pytest

from benchmarks.tables import LAYOUTS, ratio_cell, seconds_cell, short, table, table_of
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.record import save_record


def method(scored, worst, spread, changes, versus=None):
    found = {
        "positions": {
            str(position): {"log_probability": log, "accuracy": share} for position, (log, share) in scored.items()
        },
        "worst_log_probability": worst[0], "worst": worst[1], "mean_log_probability": -2.0, "mean": 0.5,
        "spread_log_probability": spread[0], "spread": spread[1], "answers_that_change": changes,
    }  # fmt: skip
    if versus is not None:
        found["versus_none"] = {"worst_minus_best_log_probability": versus[0], "ci95": versus[1]}
    return found


NONE = method({0: (-3.214, 0.2), 9: (-2.5, 1.0)}, (-3.214, 0.2), (0.714, 0.8), 0.85)
FREE = method(
    {0: (-2.0, 0.25), 9: (-2.0, 0.25)}, (-2.0, 0.25), (0.0, 0.0), 0.0, (0.5, [-0.125, 1.0])
)  # fmt: skip
PROFILED = "calibrated_attention:profile=[0.1,0.9]:temperature=2.0"


def head(mitigations, **changes):
    return {
        "kind": "positions",
        "data": {"name": "rows", "sha256": "1"},
        "settings": {"gold_positions": [0, 9]},
        "summary": {
            "n": 20,
            "mitigations": mitigations,
            "gold_only": {"log_probability": -1.5, "accuracy": 0.5},
            "closed_book": {"log_probability": -4.0, "accuracy": 0.0},
        },
        **changes,
    }


def test_positions_have_a_column_each_and_an_order_free_method_says_same():
    assert table([head({"none": NONE, PROFILED: FREE})]).splitlines() == [
        "| method | gold at 0 | gold at 9 | worst | mean | spread | worst - best of `none` |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| `none` | -3.21 (.20) | -2.50 (1.0) | -3.21 (.20) | -2.00 (.50) | 0.71 (.80) | - |",
        "| `calibrated_attention:profile=PROFILE:temperature=2.0` | -2.00 (.25) | same | -2.00 (.25) | -2.00 (.50) "
        "| 0.00 (.00) | +0.50 [-0.12, +1.00] |",
        "",
        "20 questions. The gold passage alone: -1.50 (.50); no passages: -4.00 (.00).",
    ]


def test_another_layout_has_other_columns():
    lines = table([head({"none": NONE})], "stability").splitlines()
    assert lines[0] == "| method | gold at 0 | gold at 9 | worst | spread | answers that change |"
    assert lines[2] == "| `none` | -3.21 (.20) | -2.50 (1.0) | -3.21 (.20) | 0.71 (.80) | 85 % |"


def test_arrangements_say_what_their_scorer_finds_and_how_sound_the_answers_are():
    form = {"recall_at_1": 0.375, "recall_at_3": 1.0, "sound": 0.9}
    versus = {**FREE["versus_none"], "worst_minus_best_accuracy": -0.15, "mcnemar_p": 0.0625}
    found = table(
        [head({"none": {**NONE, **form}, "/reverse/none": {**FREE, **form, "versus_none": versus}})], "arrangements"
    )
    assert found.splitlines()[2:4] == [
        "| `none` | -3.21 (.20) | -2.50 (1.0) | - | - | .38, 1.00 | 90 % |",
        "| `/reverse/none` | -2.00 (.25) | same | +0.50 [-0.12, +1.00] | -.15, .06 | .38, 1.00 | 90 % |",
    ]


def test_bounds_split_the_questions_by_what_the_scorer_finds():
    split = {
        "gold_first": {"share": 0.4, "accuracy": 0.5, "gold_only_accuracy": 0.625},
        "gold_later": {"share": 0.6, "accuracy": 0.0, "gold_only_accuracy": 0.25},
    }
    lines = table([head({"none": {**NONE, "by_scorer": split}, "free": {**FREE, "by_scorer": split}})], "bounds")
    assert lines.splitlines()[2:] == ["| `free` | 40 % | .50 (.62) | .00 (.25) | .25 (.50) |"]


def test_of_a_method_that_several_records_hold_the_first_counts():
    lines = table([head({"none": NONE}), head({"none": FREE, "free": FREE})], "settings").splitlines()
    assert lines[2:4] == ["| `none` | -3.21 (.20) | -2.50 (1.0) |", "| `free` | -2.00 (.25) | same |"]


@pytest.mark.parametrize(
    "changes",
    [{"data": {"name": "others", "sha256": "2"}}, {"kind": "permutations"}, {"settings": {"gold_positions": [0, 4]}}],
)
def test_records_of_different_experiments_share_no_table(changes):
    with pytest.raises(EvaluationError, match="records differ in kind, data, questions or positions"):
        table([head({"none": NONE}), head({"free": FREE}, **changes)], "positions")


def test_bench_records_have_rows_of_their_own_and_only_columns_that_were_read():
    def bench(documents, **ratios):
        found = {"ttft_cold_ratio": 0.5, "decode_ratio": 1.5, "together_ratio": None, "memory_ratio": 1.0, **ratios}
        return {
            "kind": "bench",
            "summary": {"documents": documents, "tokens_per_document": 150, "methods": {"m": found}},
        }

    assert table([bench(5), bench(10, ttft_warm_memory_ratio=0.04)]).splitlines() == [
        "| method | passages | cold | warm, memory | decode | peak memory |",
        "| --- | --- | --- | --- | --- | --- |",
        "| `m` | 5 x 150 | 2.0x | - | 1.50 | 1.00 |",
        "| `m` | 10 x 150 | 2.0x | 25x | 1.50 | 1.00 |",
    ]


@pytest.mark.parametrize(("ratio", "cell"), [(1 / 25, "25x"), (0.25, "4.0x"), (0.8, "1.25x"), (2.0, "0.50x")])
def test_a_time_is_told_as_how_many_times_faster(ratio, cell):
    assert ratio_cell("ttft_cold_ratio", ratio) == cell


def test_numbers_are_as_short_as_they_say_something():
    assert [seconds_cell(seconds) for seconds in (28.96, 0.221, 0.0276)] == ["29.0", ".22", ".028"]
    assert short("0.5 s, 10.5 GB, 20.05") == ".5 s, 10.5 GB, 20.05"


def test_words_name_records_in_a_folder_and_a_layout(tmp_path):
    save_record(tmp_path / "one.json", head({"none": NONE}), [])
    assert table_of(["one", "as", "settings"], tmp_path) == table([head({"none": NONE})], "settings")
    assert table_of([str(tmp_path / "one.json")]) == table([head({"none": NONE})])
    for words, said in (
        (["two"], "two.json cannot be read"),
        (["one", "as", "pie"], "no table has the layout 'pie'"),
        ([], "no record"),
    ):
        with pytest.raises(EvaluationError, match=said):
            table_of(words, tmp_path)
    assert "pie" not in LAYOUTS


def test_routers_are_compared_with_round_robin():
    found = {"hit_rate": 0.5, "p50_ratio": 1.0, "throughput_ratio": 1.0}
    better = {"hit_rate": 0.874, "p50_ratio": 0.333, "throughput_ratio": 2.5}
    head = {"kind": "ray-routing", "summary": {"routers": {"round robin": found, "overlap": better}}}
    assert table([head]).splitlines()[2:] == [
        "| round robin | 50 % | 1.00 | 1.00 |",
        "| overlap | 87 % | 0.33 | 2.50 |",
    ]
