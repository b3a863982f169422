"""A measurement keeps to its time limit and says before it starts how long it takes, by a clock that answers move."""

from __future__ import annotations

import re
import threading

import pytest
from langchain_core.documents import Document

from rag_posfix.evaluation.answers.experiment import parse_arrangement
from rag_posfix.evaluation.data.questions import PositionExample
from rag_posfix.measuring.choice import JOURNAL, OUT_OF_TIME, Budget, estimate_text, find_questions, from_examples
from rag_posfix.measuring.measure import MeasureOptions, measure
from tests.support.measured import pipeline_of, texts
from tests.support.order_biased import OrderBiasedGenerator
from tests.support.serving import WordReranker, make_pipeline

VARIANTS = ("none", "default", "committee", "/reverse/none", "sorted_inter_document")
SLOWER = {"none": 1.0, "default": 3.0, "committee": 4.0, "sorted_inter_document": 0.5}
"""Time of an answer, in times of the unmodified model."""


@pytest.fixture(autouse=True)
def few_variants(monkeypatch):
    """Five variants in place of all: a measurement of milliseconds."""
    tried = [parse_arrangement(name) for name in VARIANTS]
    monkeypatch.setattr("rag_posfix.measuring.measure.supported_candidates", lambda _: tried)
    monkeypatch.setattr("rag_posfix.measuring.choice.RESAMPLES", 20)


class Timed(OrderBiasedGenerator):
    """Moves its clock with each answer."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.now, self.lock = seconds, 1000.0, threading.Lock()

    def generate(self, request):
        with self.lock:
            self.now += self.seconds * SLOWER[request.mitigation.name]
        return super().generate(request)


def labelled(count):
    return [
        PositionExample(
            str(number), f"What is house {number}?", ("The house is tall",),
            (Document(page_content=f"The house is tall. {number}.", id="g"),),
            tuple(Document(page_content=f"Stone {i} is grey. No.", id=f"d{i}") for i in range(3)),
        )
        for number in range(count)
    ]  # fmt: skip


def timed(seconds, *, labels, minutes=1.0, count=12, out=None):
    """Return the summary of a measurement, the minutes that it took, and what it said, with the answers before it."""
    generator, told = Timed(seconds), []
    pipeline = make_pipeline(generator, reranker=WordReranker()) if labels else pipeline_of(generator)
    examples = labelled(count) if labels else ()
    asked = from_examples(examples, 4) if labels else find_questions(pipeline, texts(count))[0]
    record = measure(
        pipeline, asked, examples=examples, options=MeasureOptions(minutes, documents=4),
        budget=Budget(minutes, lambda: generator.now), out=out,
        report=lambda done, total, text: told.append((len(generator.asked), text)),
    )  # fmt: skip
    return record.summary, (generator.now - 1000) / 60, told


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("seconds", [0.5, 0.8, 1.3, 2.0, 3.1])
def test_a_run_ends_within_its_minutes_by_a_fifth_and_says_what_was_left_out(seconds, labels):
    summary, minutes, _ = timed(seconds, labels=labels)
    assert minutes <= 1.2
    assert set(summary["measured"]) | set(summary["not_measured"]) == {
        parse_arrangement(name).label for name in VARIANTS
    }
    assert set(summary["not_measured"].values()) == {OUT_OF_TIME}


def test_a_run_with_enough_time_tries_every_variant():
    summary, minutes, _ = timed(0.3, labels=False, minutes=10.0, count=6)
    assert summary["not_measured"] == {}
    assert len(summary["measured"]) == len(VARIANTS)
    assert minutes < 10


def test_a_model_that_is_far_too_slow_answers_one_question_and_no_variant():
    summary, minutes, _ = timed(8.0, labels=False)
    assert (summary["flips"]["n"], list(summary["measured"])) == (1, ["none"])
    assert 5 * 8 / 60 < minutes <= 1.2  # three orders and two repetitions, and what was left for variants


def test_the_estimate_is_told_after_three_answers_and_before_the_others():
    _, _, told = timed(0.5, labels=False)
    asked, text = next((asked, text) for asked, text in told if text.startswith("an answer takes"))
    assert asked == 3
    # 12 questions, each 5 prompts of the unmodified model and 2 of 4 others: 12 * 13 * .5 s = 78 s.
    assert text.startswith("an answer takes about 0.5 s: 12 questions with 5 pipeline variants take about 1 min; ")


def test_a_run_that_goes_on_estimates_by_the_times_in_its_journal(tmp_path, monkeypatch):
    monkeypatch.setattr("rag_posfix.measuring.report.write_report", lambda *_: {})  # its figures take seconds
    timed(0.5, labels=False, count=4, out=tmp_path)
    journal = tmp_path / JOURNAL
    kept = re.sub('"seconds":[^,]+', '"seconds":7.0', journal.read_text("utf-8"))
    journal.write_text(kept, "utf-8")
    _, _, told = timed(0.5, labels=False, count=4, out=tmp_path)
    assert [text[:27] for _, text in told if text.startswith("an answer takes")] == ["an answer takes about 7.0 s"]


def test_the_estimate_says_what_the_time_is_enough_for():
    now = [0.0]
    budget = Budget(10.0, lambda: now[0])
    # 50 questions of 5 + 2 * 9 prompts at 2 s: 50 * 23 * 2 / 60 = 38 min. Half of ten minutes is 30 questions of 5
    # prompts; the other half is 2 variants of 2 prompts each for these: 300 s / (2 s * 30 * 2) = 2.5.
    assert estimate_text(2.0, 50, 23, 5, 10, budget) == (
        "an answer takes about 2.0 s: 50 questions with 10 pipeline variants take about 38 min; this run ends after "
        "10.0 min, which is enough for about 30 questions and 2 other variants"
    )
    assert estimate_text(0.1, 50, 23, 5, 10, budget).endswith("take about 1.9 min")  # 50 * 23 * .1 / 60


def test_what_was_used_before_is_not_left_for_the_measurement():
    now = [0.0]
    budget = Budget(10.0, lambda: now[0])
    now[0] = 200.0  # questions were written
    rest = budget.remaining()
    now[0] = 260.0
    assert (rest.seconds, rest.used) == (pytest.approx(400.0), 60.0)
