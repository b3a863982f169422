"""Tables hold what the heads of records say."""

from __future__ import annotations

import pytest

from benchmarks.tables import LAYOUTS, ratio_cell, seconds_cell, short, table, table_of
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


def test_a_user_has_a_row_with_the_minutes_and_every_step():
    head = {
        "kind": "first-answer",
        "summary": {"engineer": {"minutes": 1.26, "seconds": {"environment": 3.4, "python -c": 72.2}}},
    }
    assert table([head]).splitlines()[2] == "| engineer | 1.3 | `environment` 3, `python -c` 72 |"


def test_a_fault_has_a_row_and_statuses_that_no_document_has_are_counted():
    head = {
        "kind": "service-faults",
        "summary": {
            "redis killed": {"requests": 40, "failed": 0, "wrong": 1, "undocumented": [418, 420], "added_ms": 1.5},
        },
    }
    lines = table([head]).splitlines()
    assert lines[2:] == ["| redis killed | 40 | 0 | 1 | 2 | 1.5 |"]


def test_every_load_stands_beside_its_limit():
    head = {
        "kind": "service-load",
        "summary": {
            "cached": {"rate": 300.0, "requests": 3000, "p50_ms": 1.09, "p99_ms": 30.0},
            "rerank": {"requests": 191, "p50_ms": 44.4, "p99_ms": 64.07},
            "streams": {"streams": 50, "complete": 49},
            "added": {"added_percent": -1.13},
        },
    }
    cells = [line.split(" | ")[-1].removesuffix(" |") for line in table([head]).splitlines()[2:]]
    assert cells == ["p50 1.1 ms, p99 30.0 ms", "p50 44 ms, p99 64 ms", "49 complete", "-1.1 %"]


def test_the_check_of_the_capacity_shows_what_was_planned_and_measured():
    room = {"predicted_share": 0.5, "measured_share": 0.46, "predicted_rate": 0.5, "measured_rate": 0.6}
    head = {"kind": "capacity", "summary": {"check": {"rooms": {"4": room}}}}
    assert table([head]).splitlines()[2] == "| 4 of 16 | 50 % | 46 % | 0.500 | 0.600 | 1.20 |"


def test_faults_without_a_cost_have_no_column_of_it():
    rows = {"none": {"requests": 5, "failed": 0}, "engine": {"requests": 7, "failed": 1, "recovered_s": 0.5}}
    assert table([{"kind": "fleet", "summary": rows}]).splitlines() == [
        "| fault | requests | failed | recovered after, s |",
        "|---|---|---|---|",
        "| none | 5 | 0 | - |",
        "| engine | 7 | 1 | 0.5 |",
    ]


def test_calls_of_a_method_stand_beside_those_of_the_stock_model():
    step = {"calls": 500, "reads": 1, "uploads": 0}
    methods = {
        "stock": {"prompt": {"calls": 1000, "reads": 0, "uploads": 1}, "step": step},
        "none": {"prompt": {"calls": 2500, "reads": 0, "uploads": 2}, "step": {**step, "calls": 550}},
    }
    assert table([{"kind": "device-calls", "summary": {"methods": methods}}]).splitlines()[2:] == [
        "| the stock model | 1,000 (1.0x) | 0 + 1 | 500 (1.0x) | 1 + 0 |",
        "| `none` | 2,500 (2.5x) | 0 + 2 | 550 (1.1x) | 1 + 0 |",
    ]


def test_answers_under_load_say_how_many_differ():
    row = {"method": "none", "together": 8, "questions": 12, "different_answers": 1, "different_scores": 12}
    settings = {"dtype": "float32", "batch_invariant": "off"}
    head = {"kind": "equal-under-load", "settings": settings, "summary": {"rows": [row]}}
    assert table([head]).splitlines()[2:] == ["| float32 | `off` | `none` | 8 | 1 of 12 | 12 of 12 |"]


def curve(*values):
    return {str(place): {"log_probability": score, "accuracy": right} for place, (score, right) in enumerate(values)}


def spread(*values):
    """Values, one per seed, as a record has them."""
    return {"mean": sum(values) / len(values), "low": min(values), "high": max(values), "values": list(values)}


def laboratory_row(metric, *values):
    """The row of an encoding with these values, one per seed, on a task with one split."""
    found = {"splits": {"in": spread(*values)}, "steps": [200] * len(values)}
    summary = {"metric": metric, "splits": {"in": "8 pairs"}, "encodings": {"rope": found}}
    return table([{"kind": "lab", "summary": summary}]).splitlines()[2]


def test_a_row_of_the_laboratory_has_the_result_of_each_seed():
    assert laboratory_row("error", 10.0, 30.0) == "| `rope` | 10.0, 30.0 | 200, 200 |"


def test_one_seed_has_no_range_and_perplexity_two_digits():
    assert laboratory_row("perplexity", 3.416) == "| `rope` | 3.42 | 200 |"


def test_the_error_by_place_has_the_first_place_the_mean_between_and_the_last():
    places = [spread(2.0, 4.0), spread(10.0, 20.0), spread(20.0, 40.0), spread(5.0, 7.0)]
    found = {"splits": {"in": {"by_place": places}}}
    head = {"kind": "lab", "summary": {"splits": {"in": "4 pairs"}, "encodings": {"alibi": found}}}
    (row,) = table([head], "by-place").splitlines()[2:]
    assert row == "| `alibi` | 4 pairs | 2, 4 | 15, 30 | 5, 7 |"


def test_the_best_counters_of_every_decoder_have_a_row_each():
    counter = {"layer": 1, "head": 2, "query": "thing", "gate": 0.9, "largest_other_gate": 0.5, "difference": 0.4}
    counters = {"sentences": counter, "paragraphs": {**counter, "head": 0}}
    head = {
        "kind": "lab-maps", "encoding": "cope", "settings": {"people": 2}, "summary": {"counters": counters},
    }  # fmt: skip
    assert table([head]).splitlines()[2:] == [
        "| `cope` | 2 | sentences | 1, 2 | thing | 0.90 | 0.50 | 0.40 |",
        "| `cope` | 2 | paragraphs | 1, 0 | thing | 0.90 | 0.50 | 0.40 |",
    ]


def test_a_tuned_model_is_shown_beside_the_one_before_it():
    alone = {"log_probability": -1.0, "accuracy": 0.5}
    none = curve((-3.0, 0.1), (-4.0, 0.2), (-2.0, 0.3))
    models = {
        "before": {"litm": {"gold_only": alone, "none": none, "set": curve((-3.5, 0.1))}},
        "block": {"litm": {"gold_only": alone, "none": none}},
    }
    perplexity = {
        "before": {"perplexity": 20.0, "difference": 0.0, "difference_ci95": [0.0, 0.0]},
        "block": {"perplexity": 21.0, "difference": -0.05, "difference_ci95": [-0.06, -0.04]},
    }
    trainings = {"block": {"seconds": 600.0, "steps": 100, "best_step": 80}}
    head = {
        "kind": "fine-tuning",
        "summary": {"models": models, "perplexity": perplexity, "trainings": trainings},
    }
    shown = "-3.00 (0.10) | -4.00 (0.20) | -2.00 (0.30) | -4.00 (0.10) | 2.00 (0.20) | -3.00 (0.20) | -1.00 (0.50)"
    assert table([head]).splitlines()[2:] == [
        f"| litm | `none` | before | {shown} |",
        f"| litm | `none` | block | {shown} |",
        "| litm | `set` | before | -3.50 (0.10) |  |  | -3.50 (0.10) | 0.00 (0.00) | -3.50 (0.10) | -1.00 (0.50) |",
    ]
    assert table([head], "forgetting").splitlines()[2:] == [
        "| before | - | - | 20.00 | - |",
        "| block | 10 | 80 of 100 | 21.00 | -0.050 [-0.060, -0.040] |",
    ]


def test_what_a_training_adds_has_intervals_and_one_cell_for_methods_without_an_order():
    def gain(value):
        return {"mean": value, "ci95": [value - 0.1, value + 0.1]}

    none = {"0": gain(0.5), "4": gain(0.6), "9": gain(0.4), "worst": gain(0.45), "spread": gain(-0.2)}
    same = {"0": gain(0.5), "4": gain(0.5), "9": gain(0.5), "worst": gain(0.5), "spread": gain(0.0)}
    head = {"kind": "fine-tuning", "summary": {"gains": {"block": {"key_value": {"none": none, "set": same}}}}}
    places = "+0.50 [+0.40, +0.60] | +0.60 [+0.50, +0.70] | +0.40 [+0.30, +0.50]"
    assert table([head], "gains").splitlines()[2:] == [
        f"| key-value | `none` | block | {places} | +0.45 [+0.35, +0.55] | -0.20 [-0.30, -0.10] |",
        "| key-value | `set` | block |  |  |  | +0.50 [+0.40, +0.60] | - |",
    ]


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


def test_servers_have_a_row_per_record_and_the_last_fifty_are_compared_with_the_second_fifty():
    blocks = [9.0] * 5 + [2.0] * 5 + [7.0] * 5 + [1.9] * 5
    heads = [
        {
            "kind": "engines",
            "settings": {"documents": 14, "tokens": 150, "questions": len(speeds) * 10},
            "summary": {
                "ratios": {"first_token_cold": 0.5, "first_token_warm": 3.25, "questions_per_s": 2.0},
                "plain": {"cached_share": 0.25},
                "judged": {"cached_share": 0.75, "questions_per_s_by_ten": speeds},
            },
        }
        for speeds in (blocks, blocks[:4])
    ]
    assert table(heads).splitlines()[2:] == [
        "| 14 x 150 | 200 | .50 | 3.25 | 2.00 | -5.0 % | 25 %, 75 % |",
        "| 14 x 150 | 40 | .50 | 3.25 | 2.00 | - | 25 %, 75 % |",
    ]
    changed = {"plain": {"orders": 3, "same_order": 0}, "judged": {"orders": 0, "same_order": 0}}
    head = {"settings": {"ordered": 4, "orders": 24}, "summary": {"changed": changed}}
    assert table([head], "engines-changed").splitlines()[2:] == [
        "| plain | 4 | 24 | 3 | 0 |",
        "| judged | 4 | 24 | 0 | 0 |",
    ]
