"""Planted readers: accuracies are drawn from known ones, and what is chosen is compared with what is true."""

import random
from dataclasses import replace

import pytest

from rag_posfix.evaluation.statistics import mean
from rag_posfix.measuring.choice import Scores, choose, verdict_of

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


@pytest.fixture(scope="module")
def outcomes():
    """For each reader, the true worst accuracies of what was chosen, of none and of the best, in every run."""
    result = {}
    for reader, truth in READERS.items():
        worst = {name: min(accuracies) for name, accuracies in truth.items()}
        generator = random.Random(reader)
        result[reader] = [
            (worst[choice.name], worst["none"], max(worst.values()), choice.name)
            for choice in (choose({name: draw(name, truth[name], generator) for name in truth}) for _ in range(RUNS))
        ]
    return result


@pytest.mark.parametrize("reader", READERS)
def test_the_choice_is_never_worse_than_none_beyond_noise(outcomes, reader):
    assert min(chosen - none for chosen, none, _, _ in outcomes[reader]) >= -NOISE / 2


@pytest.mark.parametrize("reader", READERS)
def test_the_choice_is_within_noise_of_the_best_in_nine_of_ten_runs(outcomes, reader):
    near = [chosen >= best - NOISE for chosen, _, best, _ in outcomes[reader]]
    assert mean(near) >= 0.9


@pytest.mark.parametrize("reader", ["recency", "primacy", "middle"])
def test_a_biased_reader_is_told_to_change_its_arrangement(outcomes, reader):
    assert mean([name != "none" for *_, name in outcomes[reader]]) >= 0.9


@pytest.mark.parametrize("reader", READERS)
def test_at_most_one_in_twenty_readers_is_told_to_change_to_what_is_not_better(outcomes, reader):
    false = [name != "none" and chosen <= none for chosen, none, _, name in outcomes[reader]]
    assert mean(false) <= 0.05


def test_an_arrangement_with_malformed_answers_is_not_chosen():
    questions = range(40)
    table = {
        "none": Scores([[0.0, 1.0] for _ in questions], [0.5 for _ in questions], 1.0, [1.0 for _ in questions]),
        "broken": Scores([[1.0, 1.0] for _ in questions], [1.0 for _ in questions], 1.0, [0.5 for _ in questions]),
    }
    assert choose(table).name == "none"
    table["sound"] = Scores([[1.0, 1.0] for _ in questions], [1.0 for _ in questions], 2.0, [1.0 for _ in questions])
    assert choose(table).name == "sound"


def test_of_equal_arrangements_the_cheaper_one_is_chosen():
    questions = range(40)
    right = [[1.0, 1.0] for _ in questions]
    table = {
        "none": Scores([[0.0, 1.0] for _ in questions], [0.5 for _ in questions], 1.0, [1.0 for _ in questions]),
        "dear": Scores(right, [1.0 for _ in questions], 3.0, [1.0 for _ in questions]),
        "cheap": Scores(right, [1.0 for _ in questions], 1.1, [1.0 for _ in questions]),
    }
    assert choose(table).name == "cheap"


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
    assert choose(without_labels(**stable), preferred="default").name == chosen


def test_without_labels_a_default_with_malformed_answers_is_not_chosen():
    table = without_labels(none=20, sorted=40, default=40)
    table["default"] = replace(table["default"], well_formed=[0.9] * 40)
    assert choose(table, preferred="default").name == "sorted"


def test_a_verdict_without_other_arrangements_says_whether_time_was_lacking():
    summary = {
        "flips": {"rate": 0.7, "interval": (0.5, 0.8), "control": 0.0, "n": 30}, "order_matters": True, "labels": True,
        "choice": {"name": "none", "best": "none", "difference": 0.0, "interval": (0.0, 0.0), "n": 30},
        "measured": {"none": {}}, "not_measured": {"default": "out of time"},
    }  # fmt: skip
    assert "give more --minutes" in verdict_of(summary)
    assert "Keep your model" in verdict_of({**summary, "not_measured": {"default": "the model lacks it"}})
