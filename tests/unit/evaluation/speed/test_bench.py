"""The bench: its prompt, readings in turns, ratios of neighbours, and the record."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from rag_posfix.contracts.generator import TokenEncoder
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import EvaluationError, PromptTooLongError
from rag_posfix.evaluation.record import read_record
from rag_posfix.evaluation.speed.bench import (
    UNMODIFIED,
    PeakMemory,
    Reading,
    SpeedMeasurement,
    bench_layout,
    measure_speed,
    summarize_speed,
    time_methods,
)
from rag_posfix.generation.engine import Engine
from rag_posfix.patching.install import ATTENTION_NAME
from tests.support.attention_hook import attention_of
from tests.support.tiny import loaded_model, toy_layout


class WordEncoder(TokenEncoder):
    """One token per word; a line break is one too. A prompt is what the user says."""

    eos_ids = frozenset()

    def __init__(self):
        self.words = []

    def encode_text(self, text):
        found = text.replace("\n", " \n ").split(" ")
        return [self._number(word) for word in found if word]

    def encode_template(self, text):
        return self.encode_text(text)

    def decode(self, token_ids):
        return " ".join(self.words[token] for token in token_ids)

    decode_answer = decode

    def render_chat(self, messages, *, open_answer=True):
        return " user: " + "".join(message["content"] for message in messages) + (" answer: " if open_answer else "")

    def _number(self, word):
        if word not in self.words:
            self.words.append(word)
        return self.words.index(word)


NONE, EXPERTS = MitigationChoice("none"), MitigationChoice("context_experts")


@pytest.fixture(scope="module")
def engine():
    return Engine(loaded_model(), WordEncoder(), "tiny", "fingerprint")


class TestMeasure:
    @pytest.mark.slow
    def test_unmodified_stands_before_between_and_after_the_methods_in_every_round(self, engine):
        seen = []
        found = time_methods(
            engine, toy_layout(), [NONE, EXPERTS, NONE], repeats=2, new_tokens=3,
            progress=lambda done, total: seen.append((done, total)),
        )  # fmt: skip
        one_round = [UNMODIFIED, "none", UNMODIFIED, "context_experts", UNMODIFIED]
        assert [reading.name for reading in found.readings] == one_round * 2
        assert [reading.repeat for reading in found.readings] == [0] * 5 + [1] * 5
        assert all(reading.ttft_s > 0 and reading.decode_tokens_per_s > 0 for reading in found.readings)
        assert set(found.memory) == {UNMODIFIED, "none", "context_experts"}
        assert seen == [(done, 14) for done in range(1, 15)]  # 2 + 2 methods once, then 2 rounds of 5

    @pytest.mark.slow
    def test_the_methods_run_through_the_hook_and_the_stock_model_does_not(self, engine, monkeypatch):
        used = []
        forward = type(engine.loaded.model).forward
        monkeypatch.setattr(
            type(engine.loaded.model),
            "forward",
            lambda self, *args, **options: (
                used.append(attention_of(self)),
                forward(self, *args, **options),
            )[1],
        )
        time_methods(engine, toy_layout(), [NONE], repeats=1, new_tokens=1)
        # Prompt and MEMORY_TOKENS = 4 steps to warm up, for the memory of both, then prompt and 1 step in turns.
        assert used == ["sdpa"] * 10 + [ATTENTION_NAME] * 5 + ["sdpa"] * 2 + [ATTENTION_NAME] * 2 + ["sdpa"] * 2

    @pytest.mark.slow
    def test_a_method_that_is_refused_is_listed_with_its_reason(self, engine):
        few = MitigationChoice("context_experts", {"experts": 1})  # needs relevance, which this prompt lacks
        found = time_methods(engine, toy_layout(), [few, NONE], repeats=1, new_tokens=1)
        assert list(found.refused) == ["context_experts:experts=1"]
        assert "carry no relevance" in found.refused["context_experts:experts=1"]
        assert [reading.name for reading in found.readings] == [UNMODIFIED, "none", UNMODIFIED]

    @pytest.mark.slow
    def test_when_every_method_is_refused_it_says_why(self, engine):
        few = MitigationChoice("context_experts", {"experts": 1})
        with pytest.raises(EvaluationError, match=r"no method is left to measure: .* carry no relevance"):
            time_methods(engine, toy_layout(), [few], repeats=1, new_tokens=1)

    def test_a_prompt_beyond_the_context_window_is_refused_before_any_work(self, engine):
        with pytest.raises(
            PromptTooLongError, match="prompt and answer take 515 tokens, but the context window is 512"
        ):
            time_methods(engine, toy_layout((495,)), [NONE], repeats=1, new_tokens=6)  # 5 + 495 + 8, then 6 and 1

    @pytest.mark.parametrize(("repeats", "new_tokens"), [(0, 4), (1, 0)])
    def test_nothing_to_measure_is_refused(self, engine, repeats, new_tokens):
        with pytest.raises(EvaluationError, match=f"repeats={repeats} and new_tokens={new_tokens} must both be"):
            time_methods(engine, toy_layout(), [NONE], repeats=repeats, new_tokens=new_tokens)


class TestRecord:
    @pytest.mark.slow
    def test_the_record_holds_every_reading_and_what_it_ran_on(self, engine, tmp_path):
        steps = []
        record = measure_speed(
            [NONE], documents=2, tokens=20, repeats=1, new_tokens=1, engine=engine, out=tmp_path,
            progress=lambda step: nullcontext(lambda done, total: steps.append((step, done, total))),
        )  # fmt: skip
        assert [row["name"] for row in record.rows] == [UNMODIFIED, "none", UNMODIFIED]
        assert [record.head[name] for name in ("kind", "model", "dtype", "device")] == [
            "bench", "tiny", "float32", "cpu",
        ]  # fmt: skip
        assert {"versions", "threads", "memory", "summary", "settings"} <= set(record.head)
        assert list(record.rows[1]["warm_ttft_s"]) == ["memory", "disk"]
        assert (record.summary["documents"], record.summary["tokens_per_document"]) == (2, 20)
        assert record.to_json() == {**record.summary, "record": str(record.files["record"])}
        assert list(read_record(record.files["record"]).rows) == list(record.rows)
        assert steps[-1] == ("measuring", 6, 6)  # 2 and 1 method, then one round of 3


class TestSummary:
    def test_a_ratio_is_the_median_over_rounds_of_the_method_over_the_mean_of_its_neighbours(self):
        def turn(repeat, before, method, after):
            names = (UNMODIFIED, "m", UNMODIFIED)
            return [Reading(repeat, name, *pair) for name, pair in zip(names, (before, method, after), strict=True)]

        readings = (
            *turn(0, (1.0, 10.0), (4.0, 6.0), (3.0, 14.0)),  # ttft 4 / 2 = 2; speed 6 / 12 = 0.5
            *turn(1, (1.0, 10.0), (3.0, 9.0), (1.0, 10.0)),  # 3 / 1 = 3; 9 / 10 = 0.9
            *turn(2, (2.0, 20.0), (8.0, 12.0), (2.0, 20.0)),  # 8 / 2 = 4; 12 / 20 = 0.6
        )
        memory = {UNMODIFIED: PeakMemory(1000, 200), "m": PeakMemory(1500, 700)}
        found = summarize_speed(SpeedMeasurement(readings, memory, {"x": "because"}))
        assert found["methods"]["m"] == pytest.approx(
            {
                "ttft_cold_ratio": 3.0,  # the median of 2, 3, 4
                "ttft_warm_ratio": None,
                "decode_ratio": 0.6,  # the median of 0.5, 0.9, 0.6
                "memory_ratio": 1.5,  # 1500 / 1000
                "memory_extra_ratio": 3.5,  # 700 / 200
            }
        )
        # The medians of 1 3 1 1 2 2 and of 10 14 10 10 20 20.
        assert found["unmodified"] == {
            "ttft_s": 1.5, "decode_tokens_per_s": 12.0, "peak_memory_bytes": 1000, "extra_memory_bytes": 200,
        }  # fmt: skip
        assert found["refused"] == {"x": "because"}

    def test_memory_that_the_system_does_not_tell_is_null(self):
        readings = tuple(Reading(0, name, 1.0, 1.0) for name in (UNMODIFIED, "m", UNMODIFIED))
        found = summarize_speed(SpeedMeasurement(readings, {UNMODIFIED: None, "m": None}, {}))
        assert found["unmodified"]["peak_memory_bytes"] is None
        assert found["methods"]["m"]["memory_ratio"] is None


class TestLayout:
    @pytest.mark.parametrize(("documents", "tokens"), [(1, 3), (20, 150), (60, 20)])
    def test_every_passage_has_exactly_the_tokens_asked_for_and_none_is_like_another(self, documents, tokens):
        layout = bench_layout(WordEncoder(), documents, tokens)
        assert [len(span) for span in layout.passages] == [tokens] * documents
        assert len(set(layout.keys)) == documents
        assert len(set(layout.relevance)) == documents
        assert len(layout.question) > 0

    def test_a_passage_longer_than_the_corpus_begins_again(self):
        layout = bench_layout(WordEncoder(), 1, 12_000)
        assert len(layout.passages[0]) == 12_000

    def test_a_passage_reads_as_text_and_ends_in_its_separator(self):
        encoder = WordEncoder()
        layout = bench_layout(encoder, 2, 12)
        text = encoder.decode(layout.tokens(layout.passages[0]))
        # The corpus begins so; the separator is two line breaks, two of the twelve tokens.
        assert text == "The Maravel lighthouse stands on Cape Sorrin, at the northern \n \n"

    @pytest.mark.parametrize(("documents", "tokens"), [(0, 10), (3, 2)])
    def test_sizes_that_leave_no_text_are_refused(self, documents, tokens):
        with pytest.raises(
            EvaluationError, match=f"documents={documents} and tokens={tokens} must be at least 1 and 3"
        ):
            bench_layout(WordEncoder(), documents, tokens)
