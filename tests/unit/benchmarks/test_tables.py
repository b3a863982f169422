"""Tables hold what the heads of records say."""

from __future__ import annotations

import pytest

from benchmarks.capacity import summary, tables
from benchmarks.device_calls import table_of as calls_table
from benchmarks.faults.service import fault_table
from benchmarks.tables import LAYOUTS, filled, ratio_cell, short, table, table_of
from rag_posfix.assembly.tokenization import PROMPT_VERSION
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
        "prompt_version": PROMPT_VERSION,
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
        "|---|---|---|---|---|---|---|",
        "| `none` | -3.21 (.20) | -2.50 (1.0) | -3.21 (.20) | -2.00 (.50) | 0.71 (.80) | - |",
        "| `calibrated_attention:profile=PROFILE:temperature=2.0` | -2.00 (.25) | same | -2.00 (.25) | -2.00 (.50) "
        "| 0.00 (.00) | +0.50 [-0.12, +1.00] |",
        "",
        "20 questions. The gold passage alone: -1.50 (.50); no passages: -4.00 (.00).",
    ]


def test_prompts_of_an_earlier_version_are_named_below_the_table():
    last = table([head({"none": NONE}, prompt_version=1)]).splitlines()[-1]
    assert last.endswith(f" Prompts of version 1; today's are of {PROMPT_VERSION}.")


def test_of_a_server_that_scores_no_answer_the_accuracy_is_shown_alone():
    remote = {**method({4: (None, 0.45)}, (None, 0.45), (None, 0.0), 0.0), "planted": 0.025}
    lines = table([head({"none": remote})], "capture").splitlines()
    assert lines[2] == "| `none` | .45; planted 2 % |"
    versus = {**FREE["versus_none"], "worst_minus_best_log_probability": None, "ci95": None}
    *_, row, _, _ = table([head({"none": remote, "free": {**remote, "versus_none": versus}})]).splitlines()
    assert row.endswith(" | - |")


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


def test_of_a_method_that_several_records_hold_the_first_counts():
    lines = table([head({"none": NONE}), head({"none": FREE, "free": FREE})], "stability").splitlines()
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| `none`", "| `free`"]


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"name": "others", "sha256": "2"}},
        {"kind": "permutations"},
        {"settings": {"gold_positions": [0, 4]}},
        {"settings": {"gold_positions": [0, 9], "hostile": "echo"}},
        {"model_fingerprint": "another"},
        {"prompt_version": PROMPT_VERSION - 1},
    ],
)
def test_records_of_different_experiments_share_no_table(changes):
    with pytest.raises(EvaluationError, match="records differ in kind, data, model or settings"):
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
        "|---|---|---|---|---|---|",
        "| `m` | 5 x 150 | 2.0x | - | 1.50 | 1.00 |",
        "| `m` | 10 x 150 | 2.0x | 25x | 1.50 | 1.00 |",
    ]


@pytest.mark.parametrize(("ratio", "cell"), [(1 / 25, "25x"), (0.25, "4.0x"), (0.8, "1.25x"), (2.0, "0.50x")])
def test_a_time_is_told_as_how_many_times_faster(ratio, cell):
    assert ratio_cell("ttft_cold_ratio", ratio) == cell


def test_numbers_are_as_short_as_they_say_something():
    assert short("0.5 s, 10.5 GB, 20.05") == ".5 s, 10.5 GB, 20.05"


def test_words_name_records_in_a_folder_and_a_layout(tmp_path):
    save_record(tmp_path / "one.json", head({"none": NONE}), [])
    assert table_of(["one", "as", "stability"], tmp_path) == table([head({"none": NONE})], "stability")
    assert table_of([str(tmp_path / "one.json")]) == table([head({"none": NONE})])
    for words, said in (
        (["two"], "two.json cannot be read"),
        (["one", "as", "pie"], "no table has the layout 'pie'"),
        ([], "no record"),
    ):
        with pytest.raises(EvaluationError, match=said):
            table_of(words, tmp_path)
    assert "pie" not in LAYOUTS


def test_a_record_carries_its_table_and_several_have_rows_of_their_own():
    columns = {"way": "`{name}`", "share": "{share:.0%}", "p50": "{times[p50]:~.2f} s", "added": "{added:.1f}"}
    row = {"name": "none", "share": 0.874, "times": {"p50": 0.333}, "added": None}
    tables = {"routing": filled(columns, [row])}
    heads = [{"kind": "routing", "tables": tables}, {"kind": "routing", "tables": tables}]
    assert table(heads).splitlines() == [
        "| way | share | p50 | added |",
        "|---|---|---|---|",
        "| `none` | 87 % | .33 s | - |",
        "| `none` | 87 % | .33 s | - |",
    ]
    other = {"kind": "routing", "tables": {"routing": filled({"way": "{name}"}, [row])}}
    with pytest.raises(EvaluationError, match="different columns"):
        table([heads[0], other])


def test_a_fault_has_a_row_and_statuses_that_no_document_has_are_counted():
    rows = {
        "none": {"requests": 5, "failed": 0, "wrong": 0},
        "redis killed": {"requests": 40, "failed": 0, "undocumented": [418, 420], "added_ms": 1.5},
        "pipelining": {"answers": 4},
    }
    assert table([{"kind": "fleet", "tables": {"fleet": fault_table(rows)}}]).splitlines() == [
        "| fault | requests | failed | wrong | undocumented status | added, ms |",
        "|---|---|---|---|---|---|",
        "| none | 5 | 0 | 0 | - | - |",
        "| redis killed | 40 | 0 | - | 2 | 1.5 |",
    ]


def test_calls_of_a_method_stand_beside_those_of_the_stock_model():
    step = {"calls": 500, "reads": 1, "uploads": 0}
    methods = {
        "stock": {"prompt": {"calls": 1000, "reads": 0, "uploads": 1}, "step": step},
        "none": {"prompt": {"calls": 2500, "reads": 0, "uploads": 2}, "step": {**step, "calls": 550}},
    }
    assert calls_table(methods)["rows"] == [
        ["the stock model", "1,000 (1.0x)", "0 + 1", "500 (1.0x)", "1 + 0"],
        ["`none`", "2,500 (2.5x)", "0 + 2", "550 (1.1x)", "1 + 0"],
    ]


def test_the_plan_and_the_fleet_of_a_capacity_have_tables():
    made = tables(summary(0))
    assert [len(row) for table in made.values() for row in table["rows"][:1]] == [9, 6]
    assert made["capacity-fleet"]["rows"][0][:2] == ["20 % answered", "routed by passage"]


def test_capture_shows_each_record_of_hostile_passages_beside_the_one_without():
    def record(hostile, worst, planted):
        result = {"worst": worst, "worst_log_probability": -2.0, **({} if planted is None else {"planted": planted})}
        settings = {} if hostile is None else {"hostile": hostile}
        return {"kind": "positions", "data": "d", "settings": settings, "summary": {"mitigations": {"none": result}}}

    heads = [record(None, 0.25, None), record("echo", 0.0, None), record("poison", 0.5, 0.31)]
    assert table(heads, "capture").splitlines() == [
        "| method | no hostile passage | echo | poison |",
        "|---|---|---|---|",
        "| `none` | -2.00 (.25) | -2.00 (.00) | -2.00 (.50); planted 31 % |",
    ]
    for changes in ({"data": "e"}, {"dtype": "float32"}):
        with pytest.raises(EvaluationError, match="differ in more than --hostile"):
            table([heads[0], {**heads[1], **changes}], "capture")


def test_own_files_have_a_row_for_each_kind_and_a_column_for_each_reader_and_arrangement():
    measured = {
        "right_by_kind": {"faq": [3, 4]}, "names": None, "unwanted": 0.25, "off_topic_answered": 1, "off_topic": 15,
        "unanswered_answered": 0, "unanswered": 0, "right": 3, "questions": 4, "planted": 2, "heading_only": 0,
    }  # fmt: skip
    heads = [
        {"kind": "end-to-end", "model": "small", "summary": {"shipped": measured}},
        {"kind": "end-to-end", "model": "large",
         "summary": {"shipped": measured | {"right_by_kind": {"faq": [4, 4], "lists": [1, 2]}}, "none": measured}},
    ]  # fmt: skip
    rows = [line.strip("| ").split(" | ") for line in table(heads, "own-files").splitlines()]
    assert rows[0] == ["right answers", "small", "large", "large, `none`"]
    assert rows[2] == ["faq", "3 of 4", "4 of 4", "3 of 4"]
    assert ["off topic, answered", "1 of 15", "1 of 15", "1 of 15"] in rows
    assert ["planted answers", "2", "2", "2"] in rows
    assert any(row[0] == "lists" and "1 of 2" in row for row in rows)


def test_causes_have_a_row_per_method_and_two_columns_per_model():
    def numbers(low, high):
        name = "RoPE's distance decay, multi_base: "
        return {
            f"{name}share of the spread removed": {"value": 0.416, "ci95": [low, high], "n": 4},
            f"{name}worst position gains": {"value": 0.125, "ci95": [0, 1], "n": 4},
            f"{name}mean gains": {"value": -1.0, "ci95": [-2, 0], "n": 4},
        }

    claims = [{"model": "a", "numbers": numbers(-0.1, 0.925)}, {"model": "b", "numbers": numbers(0.416, 0.416)}]
    header, _, *rows = table([{"kind": "lab-reproduce-1", "summary": {"claims": claims}}], "causes").splitlines()
    assert header == "| cause, method | a: % removed | worst, mean | b: % removed | worst, mean |"
    assert rows[3] == "| RoPE's distance decay, `multi_base` | 42 (-10 to 92) | +0.12, -1.00 | 42 | +0.12, -1.00 |"
    assert rows[0] == "| causal mask, `blended` | - | - | - | - |"
