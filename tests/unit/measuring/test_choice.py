"""Planted readers: accuracies are drawn from known ones, and what is chosen is compared with what is true."""

import functools
import random
from dataclasses import asdict, replace

import pytest

from rag_posfix.evaluation.statistics import mean
from rag_posfix.measuring.choice import CANDIDATES, Scores, choose, supported_candidates, verdict_of
from rag_posfix.mitigations import MITIGATIONS
from tests.support.measured import pipeline_of
from tests.support.order_biased import OrderBiasedGenerator

RUNS = 200
QUESTIONS = 60
NOISE = 0.2
"""About the half width of the interval of a paired difference over the questions."""

READERS = {
    # true accuracy at the first, middle and last position; candidates whose order is fixed have one accuracy
    "recency": {"none": (0.3, 0.35, 0.8), "sorted": (0.7,) * 3, "default": (0.65,) * 3, "repeat": (0.5, 0.5, 0.75)},
    "primacy": {"none": (0.8, 0.4, 0.3), "sorted": (0.75,) * 3, "default": (0.7,) * 3, "repeat": (0.75, 0.5, 0.5)},
    "middle": {"none": (0.8, 0.3, 0.8), "sorted": (0.7,) * 3, "default": (0.75,) * 3, "repeat": (0.75, 0.6, 0.75)},
    "unbiased": {"none": (0.6,) * 3, "sorted": (0.6,) * 3, "default": (0.6,) * 3, "repeat": (0.6,) * 3},
    "hurt by it": {"none": (0.5, 0.45, 0.5), "sorted": (0.5,) * 3, "default": (0.15,) * 3, "repeat": (0.48,) * 3},
    "nine alike": dict.fromkeys(("none", "sorted", "default", "repeat", *"abcde"), (0.6,) * 3),
}  # fmt: skip


def draw(name, accuracies, generator):
    """Scores of one arrangement; one with a fixed order has one answer for all positions."""
    rows = []
    for _ in range(QUESTIONS):
        if len(set(accuracies)) == 1 and name != "none":
            rows.append([float(generator.random() < accuracies[0])] * len(accuracies))
        else:
            rows.append([float(generator.random() < accuracy) for accuracy in accuracies])
    cost = {"repeat": 2.0, "default": 1.5}.get(name, 1.0)
    return Scores(rows, [mean(row) for row in rows], cost, [1.0] * QUESTIONS)


def choice_of(table, **changes):
    return choose(table, **{"default": "default", "labels": True, "order_matters": True, **changes})


@functools.cache
def outcomes(reader):
    """The true worst accuracies of what was chosen, of none and of the best, and the choice, in every run."""
    truth, generator = READERS[reader], random.Random(reader)
    worst = {name: min(accuracies) for name, accuracies in truth.items()}
    choices = (choice_of({name: draw(name, truth[name], generator) for name in truth}) for _ in range(RUNS))
    return [(worst[choice.name], worst["none"], max(worst.values()), choice) for choice in choices]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.slow
def test_the_choice_is_never_worse_than_none_beyond_noise(reader):
    assert min(chosen - none for chosen, none, _, _ in outcomes(reader)) >= -NOISE / 2


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.slow
def test_the_choice_is_within_noise_of_the_best_in_nine_of_ten_runs(reader):
    near = [chosen >= best - NOISE for chosen, _, best, _ in outcomes(reader)]
    assert mean(near) >= 0.9


@pytest.mark.parametrize("reader", ["recency", "primacy", "middle"])
def test_a_biased_reader_is_told_to_change_its_arrangement(reader):
    assert mean([choice.is_better for *_, choice in outcomes(reader)]) >= 0.9


@pytest.mark.parametrize("reader", READERS)
def test_at_most_one_in_twenty_readers_is_told_to_change_to_what_is_not_better(reader):
    false = [choice.is_better and chosen <= none for chosen, none, _, choice in outcomes(reader)]
    assert mean(false) <= 0.05


@pytest.mark.parametrize("truth", [(0.5,) * 3, (0.45, 0.55, 0.65)])
@pytest.mark.slow
def test_a_default_that_is_below_none_by_the_noise_is_used_in_at_most_one_of_twenty_runs(truth):
    generator, default = random.Random(0), (min(truth) - NOISE,) * 3
    tables = ({"none": draw("none", truth, generator), "default": draw("", default, generator)} for _ in range(RUNS))
    assert mean([choice_of(table).name != "none" for table in tables]) <= 0.05


def test_an_arrangement_with_malformed_answers_is_not_chosen():
    questions = range(40)
    table = {
        "none": Scores([[0.0, 1.0] for _ in questions], [0.5 for _ in questions], 1.0, [1.0 for _ in questions]),
        "broken": Scores([[1.0, 1.0] for _ in questions], [1.0 for _ in questions], 1.0, [0.5 for _ in questions]),
    }
    assert choice_of(table).name == "none"
    table["sound"] = Scores([[1.0, 1.0] for _ in questions], [1.0 for _ in questions], 2.0, [1.0 for _ in questions])
    assert choice_of(table).name == "sound"


def test_of_equal_arrangements_the_cheaper_one_is_chosen():
    questions = range(40)
    right = [[1.0, 1.0] for _ in questions]
    table = {
        "none": Scores([[0.0, 1.0] for _ in questions], [0.5 for _ in questions], 1.0, [1.0 for _ in questions]),
        "dear": Scores(right, [1.0 for _ in questions], 3.0, [1.0 for _ in questions]),
        "cheap": Scores(right, [1.0 for _ in questions], 1.1, [1.0 for _ in questions]),
    }
    assert choice_of(table).name == "cheap"


def without_labels(**stable):
    """Scores of arrangements of which ``stable`` of 40 answers do not change; agreement falls from the first on."""
    return {
        name: Scores([[float(number < count)] for number in range(40)], [1 - place / 10] * 40, 1.0 + place, [1.0] * 40)
        for place, (name, count) in enumerate(stable.items())
    }


@pytest.mark.parametrize(
    ("stable", "chosen"),
    [
        ({"none": 20, "sorted": 40, "default": 40, "repeat": 40}, "default"),
        ({"none": 20, "sorted": 40, "default": 37, "repeat": 40}, "default"),  # 3 of 40 are what batching changes
        ({"none": 20, "sorted": 40, "default": 35, "repeat": 40}, "sorted"),  # of the others the cheapest
        ({"none": 20, "repeat": 40, "sorted": 40}, "repeat"),
        ({"none": 38, "sorted": 40, "default": 40}, "none"),
    ],
)
def test_without_labels_the_default_is_chosen_unless_it_is_less_stable(stable, chosen):
    assert choice_of(without_labels(**stable), labels=False, order_matters=None).name == chosen


def test_without_labels_a_default_with_malformed_answers_is_not_chosen():
    table = without_labels(none=20, sorted=40, default=40)
    table["default"] = replace(table["default"], well_formed=[0.9] * 40)
    assert choice_of(table, labels=False).name == "sorted"


def accuracies(*counts, average=0.5):
    """Scores at one position for each count, of which so many of 40 answers are correct."""
    rows = [[float(number < count) for count in counts] for number in range(40)]
    return Scores(rows, [average] * 40, 1.0, [1.0] * 40)


@pytest.mark.parametrize(
    ("default", "order_matters", "chosen"),
    [
        (accuracies(20, 20), True, "default"),
        (accuracies(20, 20), None, "none"),  # these questions do not tell
        (accuracies(20, 20), False, "none"),
        (accuracies(19, 19), True, "none"),  # below none at its worst position
        (accuracies(20, 20, average=0.4), True, "none"),  # below none on average
        (replace(accuracies(20, 20), well_formed=[0.9] * 40), True, "none"),
        (None, True, "none"),  # not measured
    ],
)
def test_where_nothing_is_better_and_the_order_matters_a_default_that_is_not_below_none_is_used(
    default, order_matters, chosen
):
    table = {"none": accuracies(20, 30), "sorted": accuracies(21, 21)}
    choice = choice_of(table if default is None else {**table, "default": default}, order_matters=order_matters)
    assert (choice.name, choice.best, choice.is_better) == (chosen, "sorted", False)


def test_without_labels_a_default_that_is_as_stable_as_none_is_used_where_the_order_matters():
    for stable, chosen in {30: "default", 29: "none"}.items():
        assert choice_of(without_labels(none=30, default=stable), labels=False).name == chosen


def test_a_verdict_for_the_default_says_that_nothing_is_better():
    choice = choice_of({"none": accuracies(20, 30), "default": accuracies(21, 21)})
    assert choice.p == 1.0  # one question of 40 differs, and its sign is a coin
    assert verdict_of(summary_of(choice=asdict(choice))).endswith(
        "Nothing beats your model beyond noise, and its answers change with the order. Use default: +0.03 in accuracy "
        "at the worst position (+0.00 to +0.07, p = 1.000, 40 questions) against the model as it is."
    )


def summary_of(**changes):
    """Return the summary of a measurement whose verdict is that nothing was measured but the model as it is."""
    return {
        "flips": {"rate": 0.7, "interval": (0.5, 0.8), "control": 0.0, "n": 30}, "order_matters": True, "labels": True,
        "choice": {
            "name": "none", "best": "none", "is_better": False, "difference": 0.0, "interval": (0.0, 0.0), "p": 1.0,
            "n": 30,
        },
        "measured": {"none": {}}, "not_measured": {"default": "out of time"}, **changes,
    }  # fmt: skip


def test_a_verdict_without_other_arrangements_says_whether_time_was_lacking():
    assert "give more --minutes" in verdict_of(summary_of())
    assert "Keep your model" in verdict_of(summary_of(not_measured={"default": "the model lacks it"}))


@pytest.mark.parametrize(
    ("n", "difference", "enough"),
    [
        (10, 0.3, "about 20 questions"),  # 6 / .3
        (10, 0.8, "about 20 questions"),  # eight of ten changed, but the control did too: twice as many
        (40, 0.0, "about 41 questions of which none changes"),
    ],
)
def test_an_undecided_verdict_says_how_many_questions_would_do(n, difference, enough):
    flips = {"n": n, "rate": 0.5, "interval": (0.2, 0.8), "control": 0.2, "difference": difference}
    summary = summary_of(flips=flips, order_matters=None)
    assert verdict_of(summary).startswith(f"Not enough questions ({n}) to decide whether the order of the passages")
    assert f"; {enough} would do" in verdict_of(summary)


def test_every_method_is_tried_once_the_default_first_and_those_without_a_record_last():
    tried = supported_candidates(pipeline_of(OrderBiasedGenerator()))
    labels = [arrangement.label for arrangement in tried]
    assert labels[:2] == ["none", "default"]
    assert len(set(labels)) == len(labels)
    assert {MITIGATIONS.resolve(arrangement.mitigation.name) for arrangement in tried} == set(MITIGATIONS.names())
    assert labels[len(CANDIDATES) :] == ["blended", "hidden_scaling", "stack"]
