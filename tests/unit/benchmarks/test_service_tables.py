"""Tables about the service hold what the heads of records say."""

from __future__ import annotations

from benchmarks.tables import table


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
    assert lines[2:] == ["| redis killed | 40 | 0 | 1 | 2 | - | 1.5 | - | - |"]


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


def test_the_queueing_check_shows_what_was_predicted_and_measured():
    found = {"load": 0.7, "predicted_response_s": 0.5, "measured_response_s": 0.6, "measured_to_predicted": 1.2}
    head = {"kind": "capacity", "summary": {"check": {"equal": found}}}
    assert table([head]).splitlines()[2] == "| equal | 70 % | 0.500 s | 0.600 s | 1.20 |"


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
