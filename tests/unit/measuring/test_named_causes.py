"""Which causes of the bias a measurement names: only if there is time, and only of a model in this process."""

from __future__ import annotations

import pytest

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.evaluation.answers.causes import REMOVED
from rag_posfix.evaluation.answers.experiment import AnswerJournal
from rag_posfix.evaluation.ranking.rankings import RankJournal
from rag_posfix.evaluation.record import ExperimentRecord
from rag_posfix.measuring.choice import Budget, StackJournal
from rag_posfix.measuring.measure import Measurement, MeasureOptions, name_causes
from rag_posfix.measuring.report import report_page
from tests.support.serving import make_pipeline
from tests.support.tiny_evaluation import EXAMPLES, tiny_engine

METHODS = [MethodSpec("set_prompting", {}), MethodSpec("stable_mask", {})]


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Two methods and four questions in place of all."""
    monkeypatch.setattr("rag_posfix.measuring.measure.correcting_methods", lambda: METHODS)
    monkeypatch.setattr("rag_posfix.measuring.measure.CAUSE_QUESTIONS", 4)


def named(generator=None, *, examples=(), seconds=1.0, minutes=10.0, matters=None):
    pipeline = make_pipeline(generator)
    run = Measurement(
        pipeline, MeasureOptions(documents=2), Budget(minutes, lambda: 0.0), StackJournal(None), AnswerJournal(None),
        RankJournal(None), lambda done, total, text: None,
    )  # fmt: skip
    return name_causes(run, examples, seconds, matters=matters)


def test_questions_for_the_value_of_a_key_name_the_causes_without_labels():
    causes = named(tiny_engine(512))
    assert causes["questions"] == 4
    assert [entry["name"] for entry in causes["methods"].values()] == ["set_prompting", "stable_mask"]
    assert causes["methods"]["set_prompting"][REMOVED]["value"] == pytest.approx(1)
    assert causes["text"].startswith("Causes, by 4 questions with a spread of ")
    page = report_page([ExperimentRecord({"kind": "measure", "summary": {"causes": causes, "measured": {}}}, [])])
    assert f"<p>{causes['text'].replace(chr(39), '&#39;')}</p>" in page


def test_questions_with_labels_are_asked_again():
    assert named(tiny_engine(512), examples=EXAMPLES)["questions"] == len(EXAMPLES)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        # 4 questions with 3 positions, none and two methods, and both controls: 4 (2 + 3 * 3) = 44 answers of 60 s.
        ({"generator": "tiny", "seconds": 60.0, "minutes": 43.9}, "they take about 44 more minutes."),
        ({"generator": "tiny", "matters": False}, "the order changes almost no answer."),
        ({}, "they need a model in this process."),
    ],
)
def test_a_reason_is_given_where_causes_are_not_measured(options, reason):
    generator = tiny_engine() if options.pop("generator", None) else None
    assert named(generator, **options) == {"text": f"Causes of position bias were not measured: {reason}"}
