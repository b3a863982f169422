"""Tables of trained models, from heads that were worked by hand."""

from __future__ import annotations

from benchmarks.tables import table


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


def test_a_row_of_the_laboratory_has_mean_and_range_of_the_seeds():
    assert laboratory_row("error", 10.0, 30.0) == "| `rope` | 20.0 (10.0 to 30.0) | 200, 200 |"


def test_one_seed_has_no_range_and_perplexity_two_digits():
    assert laboratory_row("perplexity", 3.416) == "| `rope` | 3.42 | 200 |"


def test_the_error_by_place_has_the_first_place_the_mean_between_and_the_last():
    places = [spread(2.0, 4.0), spread(10.0, 20.0), spread(20.0, 40.0), spread(5.0, 7.0)]
    found = {"splits": {"in": {"by_place": places}}}
    head = {"kind": "lab", "summary": {"splits": {"in": "4 pairs"}, "encodings": {"alibi": found}}}
    (row,) = table([head], "by-place").splitlines()[2:]
    assert row == "| `alibi` | 4 pairs | 3 (2 to 4) | 22 (15 to 30) | 6 (5 to 7) |"


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
