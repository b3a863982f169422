"""What a judge and the few passages that it chooses cost."""

from __future__ import annotations

import pytest

from benchmarks import few_passages
from benchmarks.few_passages import main, measure_round
from benchmarks.tables import table_of
from tests.support.tool_models import save_chat_model


class Timed:
    """Stands for a pipeline: answers with the scripted times, and notes what it was asked."""

    def __init__(self, *readings):
        self.readings, self.asked = list(readings), []

    def __call__(self, pipeline, arrangement, text, documents):
        self.asked.append((text, documents))
        first, rate, cached = self.readings.pop(0)
        return {"first_s": first, "tokens_per_s": rate, "cached": cached}


def test_ratios_are_to_the_stock_runs_before_and_after(monkeypatch):
    timed = Timed((3.0, 8.0, 0.0), (0.5, 4.0, 0.9))
    monkeypatch.setattr(few_passages, "answer_time", timed)
    stock = iter([(1.0, 2.0), (3.0, 1.0)])  # 10 steps: 5 and 10 tokens per second
    ratios = measure_round({"none": None}, lambda _: next(stock), list("abcdefgh"), 1, 10)
    assert ratios == {"none": {"cold": 1.5, "warm": 0.25, "decode": 6 / 7.5, "cached": 0.9, "stock_s": 2.0}}
    (cold, first), (warm, second) = timed.asked
    assert cold != warm
    assert first != second
    assert sorted(second) == first


@pytest.mark.slow
def test_stored_passages_are_read_again_in_another_order(tmp_path, capsys):
    words = ["--documents", "3", "--tokens", "40", "--rounds", "1", "--new-tokens", "4", "--out", str(tmp_path)]
    words += ["--model", str(save_chat_model(tmp_path / "model"))]
    names = ("none", "yes_no:top_n=2/original/parallel_encoding")
    summary = main([*words, *(word for name in names for word in ("--arrangement", name))])
    assert list(summary) == list(names)
    assert summary["none"]["cached"] < 0.5 < summary[names[1]]["cached"]
    record = next(tmp_path.glob("few-passages-*.json"))
    assert table_of([str(record)]) in capsys.readouterr().out
