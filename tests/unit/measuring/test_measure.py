"""A whole measurement on a reader that answers from the first passage, and on one that reads them all."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from threading import Barrier
from types import SimpleNamespace
from uuid import uuid4

import pytest
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.assembly.tokenization import PassageBudget
from rag_posfix.contracts.request import Generation, MitigationChoice
from rag_posfix.errors import ConfigError, PromptTooLongError, UnsupportedModelError
from rag_posfix.evaluation.answers.experiment import EvalCase, answer_all, parse_arrangement
from rag_posfix.evaluation.data.questions import PositionExample
from rag_posfix.evaluation.record import read_record
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.measuring.choice import (
    BELOW_MINIMUM,
    JOURNAL,
    FlipRow,
    StackJournal,
    answer_alone,
    ask_in_orders,
    draw_orders,
    find_questions,
    from_examples,
    prompt_of,
    summarize_flips,
)
from rag_posfix.measuring.measure import MeasureOptions, measure
from rag_posfix.pipeline.build import build_pipeline
from rag_posfix.pipeline.pipeline import Defaults, Pipeline, Question
from rag_posfix.retrieval.base import as_retriever
from rag_posfix.settings import Settings
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.measured import pipeline_of, shelf, texts
from tests.support.order_biased import OrderBiasedGenerator
from tests.support.pipelines import Shelf
from tests.support.serving import WordReranker, make_pipeline
from tests.support.toy_encoder import ToyEncoder

COUNT = 12
VARIANTS = (
    "none",
    "default",
    "/relevance/none",
    "embedding:top_n=3/reverse/none",
    "/relevance/repeated_passages:repeat=best",
    "sorted_inter_document",
)


@pytest.fixture(autouse=True)
def few_variants(monkeypatch):
    """Some variants in place of all, so that a measurement takes a second."""
    tried = [parse_arrangement(name) for name in VARIANTS]
    monkeypatch.setattr("rag_posfix.measuring.measure.supported_candidates", lambda _: tried)


@pytest.fixture
def no_charts(monkeypatch):
    """Reports have their table and no charts, which take longer than a measurement of a few questions."""
    for name in ("draw_curve", "draw_cost"):
        monkeypatch.setattr(f"rag_posfix.measuring.report.{name}", lambda *_: None)


class Noisy(OrderBiasedGenerator):
    """Answers with another name each time, whatever it reads; questions are open together."""

    def generate(self, request):
        found = super().generate(request)
        return Generation(f"answer {uuid4().hex}", found.token_ids, found.finish_reason, found.usage)


def without_table(row):
    return {name: value for name, value in row.items() if name != "table"}


def run(generator, out=None, count=COUNT, **options):
    pipeline = pipeline_of(generator)
    asked, dropped = find_questions(pipeline, texts(count))
    return measure(pipeline, asked, dropped=dropped, out=out, options=MeasureOptions(**options))


@pytest.mark.slow
def test_a_reader_of_the_first_passage_is_reported_and_gets_an_order_free_arrangement(tmp_path):
    record = run(OrderBiasedGenerator(), tmp_path)
    summary = record.summary
    assert summary["order_matters"] is True
    assert (summary["flips"]["rate"], summary["flips"]["control"]) == (1.0, 0.0)
    assert summary["flips"]["interval"][0] > 0.75  # Wilson's for 12 of 12: 12 / (12 + 1.96^2) = .757
    name = summary["choice"]["name"]
    assert parse_arrangement(name).order_free
    assert "changes 100%" in summary["verdict"]
    assert f"Use {name}" in summary["verdict"]
    written = read_record(tmp_path / "record.json")
    assert written.summary["measured"]["none"]["flip_rate"] > 0.4  # of two orders, a third have the same first passage
    assert json.loads((tmp_path / "profile.json").read_text())["arrangement"]["order"] == summary["chosen"]["order"]


def test_a_reader_without_bias_keeps_its_arrangement_and_tries_nothing_else():
    summary = run(FakeGenerator(ToyEncoder()), count=40).summary
    assert summary["order_matters"] is False
    assert summary["flips"]["rate"] == 0.0
    assert summary["chosen"]["mitigation"] == "none"
    assert list(summary["measured"]) == ["none"]


def test_noise_of_a_server_is_not_taken_for_bias():
    summary = run(Noisy()).summary
    assert (summary["flips"]["rate"], summary["flips"]["control"]) == (1.0, 1.0)
    assert summary["order_matters"] is not True
    assert summary["choice"]["name"] == "none"


def test_a_few_questions_do_not_tell_and_the_verdict_says_so():
    summary = run(FakeGenerator(ToyEncoder()), count=5).summary
    assert summary["order_matters"] is None
    # Of 35 questions without a change the upper end is 3.84 / (35 + 3.84) = .099, below a tenth; of 34 it is .101.
    assert summary["verdict"].startswith("Not enough questions (5) to decide")
    assert "about 35 questions of which none changes would do" in summary["verdict"]


def test_an_interrupted_measurement_asks_only_what_is_missing(tmp_path, no_charts):
    first = OrderBiasedGenerator()
    run(first, tmp_path, count=6)
    journal = tmp_path / JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-4]) + lines[-4][:20])  # as a kill leaves it
    second = OrderBiasedGenerator()
    run(second, tmp_path, count=6)
    assert len(first.asked) == len(lines)
    assert len(second.asked) == 4
    assert len(StackJournal(journal).rows()) == len(lines)


def test_answers_of_another_budget_template_or_device_are_asked_again(monkeypatch):
    generator, journal = OrderBiasedGenerator(), StackJournal()
    questions, _ = find_questions(pipeline_of(generator), [("0", Question("Wie hoch ist das rote Haus?"))])

    def asked(budget=None, **defaults):
        before = len(generator.asked)
        assembler = Assembler(generator.encoder, generator.context_window, budget=budget)
        pipeline = Pipeline(generator, assembler, defaults=Defaults(**defaults))
        ask_in_orders(
            pipeline, questions, parse_arrangement("none"), orders=2, repeats=0, seed=0, journal=journal
        )  # fmt: skip
        return len(generator.asked) - before

    assert (asked(), asked()) == (2, 0)
    assert asked(PassageBudget(8)) == 2
    assert asked(templates={"de": PromptTemplate(instruction="DEUTSCH.")}) == 2
    assert asked(templates={"fr": PromptTemplate(instruction="FRANÇAIS.")}) == 0
    monkeypatch.setattr("rag_posfix.measuring.choice.device_of", lambda engine: "cuda")
    assert asked() == 2


def test_equal_questions_and_lonely_passages_are_dropped_with_the_reason():
    pipeline = make_pipeline(FakeGenerator(ToyEncoder()), retriever=as_retriever(lambda _: shelf("")[:1]))
    kept, dropped = find_questions(pipeline, [*texts(2), ("again", Question("which colour is house number 1"))])
    assert kept == []
    assert dropped == {"fewer than two passages found": 2, "asked before": 1}


def test_a_question_without_a_relevant_passage_is_dropped_with_what_reads_all_of_them():
    retriever = as_retriever(lambda _: [Document("x", id=name, metadata={"relevance_score": 0.13}) for name in "ab"])
    pipeline = make_pipeline(FakeGenerator(ToyEncoder()), retriever=retriever, defaults=Defaults(min_relevance=0.2))
    told = []
    kept, dropped = find_questions(pipeline, texts(1), told.append)
    assert (kept, dropped) == ([], {BELOW_MINIMUM: 1})
    assert "--min-relevance off" in BELOW_MINIMUM
    (text,) = told
    assert text.startswith("question 0: no retrieved passage")
    assert "'a', with similarity 0.13, at least 0.20 is needed" in text


def test_equal_follow_ups_of_other_conversations_or_with_other_filters_are_kept():
    def turn(name, topic, **fields):
        return name, Question("And its colour?", history=[{"role": "user", "content": f"The {topic}?"}], **fields)

    found = [turn("a", "house"), turn("b", "boat"), turn("c", "boat", filter={"year": {"$ne": 1}}), turn("d", "boat")]
    kept, dropped = find_questions(pipeline_of(FakeGenerator(ToyEncoder())), found)
    assert [question.id for question in kept] == ["a", "b", "c"]
    assert dropped == {"asked before": 1}


def test_the_first_token_is_timed_with_no_other_question_open(tmp_path, monkeypatch):
    class Slow(OrderBiasedGenerator):
        """Counts the open questions; answers of ``repeated_passages`` begin after 100 ms, all others after 20 ms."""

        open = 0
        most_open = 0
        now = 0.0

        def generate(self, request):
            self.open += 1
            self.most_open = max(self.open, self.most_open)
            self.now += 0.1 if request.mitigation.name == "repeated_passages" else 0.02
            time.sleep(0.02)  # questions that are asked together overlap
            self.open -= 1
            return super().generate(request)

    generator = Slow()
    monkeypatch.setattr("rag_posfix.measuring.choice.time", SimpleNamespace(perf_counter=lambda: generator.now))
    questions, _ = find_questions(pipeline_of(generator), texts(4))
    file = tmp_path / JOURNAL
    journal = StackJournal(file)
    pipeline, arrangement = pipeline_of(generator), parse_arrangement("none")
    times = [answer_alone(pipeline, each, arrangement, seed=0, journal=journal) for each in questions[:3]]
    assert generator.most_open == 1
    assert [each.first_token_seconds for each in times] == pytest.approx([0.02] * 3)
    ask_in_orders(pipeline, questions, arrangement, orders=3, repeats=0, seed=0, journal=journal)
    assert len(generator.asked) == 4 * 3  # the answers that were timed are not asked again
    assert generator.most_open > 1
    again = StackJournal(file)
    assert [answer_alone(pipeline, each, arrangement, seed=0, journal=again) for each in questions[:3]] == times
    cost = run(generator, count=8).summary["measured"]["/relevance/repeated_passages:repeat=best"]["ttft_ratio"]
    assert cost == pytest.approx(0.1 / 0.02)


def test_tokens_and_cost_are_told_before_a_question_is_asked():
    generator, told = OrderBiasedGenerator(), []
    pipeline = pipeline_of(generator)
    asked, _ = find_questions(pipeline, texts(4))
    measure(
        pipeline, asked, options=MeasureOptions(prices=(1000.0, 500.0)),
        report=lambda done, total, text: told.append((len(generator.asked), text)),
    )  # fmt: skip
    tokens = pipeline.preview(prompt_of(asked[0], range(3), parse_arrangement("none"))).tokens
    prompts = 4 * (5 + 2 * (len(VARIANTS) - 1))
    written = prompts * pipeline.defaults.sampling.max_tokens
    cost = (prompts * tokens * 1000 + written * 500) / 1e6
    assert told[0] == (
        0, f"at most {prompts} prompts: about {prompts * tokens:,} tokens of prompts, {written:,} of answers, "
        f"{cost:.2f} by --prices\n",
    )  # fmt: skip
    assert len(generator.asked) <= prompts


def test_the_control_has_no_more_chances_to_change_than_the_orders():
    """Two passages have two orders: one other order and one repetition, whatever was asked for."""
    generator = OrderBiasedGenerator()
    ((name, question), *_) = texts(1)
    questions, _ = find_questions(pipeline_of(generator), [(name, question)])
    questions = [replace(question, passages=question.passages[:2]) for question in questions]
    rows = ask_in_orders(
        pipeline_of(generator), questions, parse_arrangement("none"), orders=10, repeats=2, seed=0,
        journal=StackJournal(),
    )  # fmt: skip
    assert sorted(row.kind for row in rows) == ["order", "order", "repeat"]


def test_orders_are_distinct_and_the_first_two_do_not_depend_on_the_count():
    question = find_questions(pipeline_of(FakeGenerator(ToyEncoder())), texts(1))[0][0]
    orders = draw_orders(question, 6, 0)
    assert len(set(orders)) == 6
    assert draw_orders(question, 2, 0) == orders[:2]


def test_a_profile_is_used_by_auto_and_refused_by_another_model(tmp_path, monkeypatch, no_charts):
    run(OrderBiasedGenerator(), tmp_path)
    from rag_posfix.pipeline import build as module

    monkeypatch.setattr(module, "SentenceEmbeddings", lambda _name, **_: LetterEmbeddings())
    arrangement = json.loads((tmp_path / "profile.json").read_text())["arrangement"]
    mitigation, order = arrangement["mitigation"]["name"], arrangement["order"]
    settings = Settings(profile=tmp_path / "profile.json", order="ends_first")
    pipeline = build_pipeline(settings, retriever=Shelf(), generator=OrderBiasedGenerator())
    if mitigation == "default":  # which of several equally good methods is chosen depends on their times
        mitigation = "context_experts"
    assert (pipeline.ask("Which river?").mitigation, pipeline.ask("Which river?").order) == (mitigation, order)
    chosen = pipeline.ask(Question("Which river?", mitigation="auto", order="ends_first"))
    assert (chosen.mitigation, chosen.order) == (mitigation, "ends_first")
    assert pipeline.ask(Question("Which river?", mitigation="context_experts")).mitigation == "context_experts"
    other = OrderBiasedGenerator()
    other.fingerprint = "another"
    with pytest.raises(ConfigError, match="measured on fake"):
        build_pipeline(settings, retriever=Shelf(), generator=other)


def weights(count):
    """Labelled questions whose gold passage has the words of the question."""
    return [
        PositionExample(
            str(number), f"What does gold{number} weigh?", (f"gold{number} weighs {number} kilos",),
            (Document(page_content=f"The gold{number} weighs {number} kilos. Yes.", id="g"),),
            tuple(Document(page_content=f"A stone number {i} is grey. No.", id=f"d{i}") for i in range(4)),
        )
        for number in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("question", "asked_before", "expected"),
    [
        ("What does it weigh?", "", "OWN."),
        ("Was ist das und wie schwer ist es?", "", "DEUTSCH."),
        ("1871?", "Wie schwer ist das goldene Ding?", "DEUTSCH."),  # a follow-up has the language of its conversation
    ],
)
@pytest.mark.slow
def test_labelled_questions_have_the_template_of_the_pipeline_and_of_their_language(question, asked_before, expected):
    class Read(OrderBiasedGenerator):
        prompts = ()

        def generate(self, request):
            self.prompts += (self.encoder.decode(request.layout.token_ids),)
            return super().generate(request)

    generator = Read()
    templates = {"de": PromptTemplate(instruction="DEUTSCH.")}
    pipeline = Pipeline(
        generator, Assembler(generator.encoder, generator.context_window, PromptTemplate(instruction="OWN.")),
        reranker=WordReranker(), choose_reranker=lambda spec: WordReranker(), defaults=Defaults(templates=templates),
    )  # fmt: skip
    turns = ({"role": "user", "content": asked_before}, {"role": "assistant", "content": "OK."})
    history = turns if asked_before else ()
    examples = [replace(example, question=question, history=history) for example in weights(3)]
    measure(pipeline, from_examples(examples, 5), examples=examples, options=MeasureOptions(documents=5))
    read = [prompt for prompt in generator.prompts if "weighs" in prompt]  # closed book has another instruction
    assert [prompt for prompt in read if expected not in prompt] == []
    assert read


@pytest.mark.slow
def test_labels_choose_by_accuracy_and_show_ceiling_and_floor(tmp_path):
    examples = weights(12)
    pipeline = make_pipeline(
        OrderBiasedGenerator(), reranker=WordReranker(), choose_reranker=lambda spec: WordReranker()
    )
    options = MeasureOptions(documents=5)
    record = measure(pipeline, from_examples(examples, 5), examples=examples, options=options, out=tmp_path)
    summary = record.summary
    assert {position: scores["accuracy"] for position, scores in summary["positions"]["none"].items()} == {
        "0": 1.0, "2": 0.0, "4": 0.0,
    }  # fmt: skip
    assert (summary["ceiling"]["accuracy"], summary["floor"]["accuracy"]) == (1.0, 0.0)
    assert summary["choice"]["name"] != "none"
    assert summary["measured"][summary["choice"]["name"]]["worst"] == 1.0
    assert summary["measured"]["/relevance/none"]["worst"] == 1.0
    page = (tmp_path / "report.html").read_text()
    assert '{"level": "gold passage alone", "accuracy": 1.0}, {"level": "no passages", "accuracy": 0.0}' in page
    assert {"curve.svg", "curve.png", "cost.svg", "cost.png"} <= set(record.files)


@pytest.mark.parametrize("error", [UnsupportedModelError, PromptTooLongError, ConfigError])
@pytest.mark.slow
def test_an_arrangement_that_the_model_refuses_costs_itself_and_not_the_measurement(error):
    class Refusing(OrderBiasedGenerator):
        """Refuses a method as an engine does: when the prompt is there."""

        refused = "sorted_inter_document"

        def generate(self, request):
            if request.mitigation.name == self.refused:
                raise error(f"{self.refused} does not run here")
            return super().generate(request)

    def measured(generator, examples):
        pipeline = make_pipeline(generator, reranker=WordReranker(), choose_reranker=lambda spec: WordReranker())
        asked, options = from_examples(weights(4), 5), MeasureOptions(documents=5)
        return measure(pipeline, asked, examples=examples, options=options).summary

    broken = Refusing()
    broken.refused = "none"
    for examples in ((), weights(4)):
        summary = measured(Refusing(), examples)
        assert summary["not_measured"] == {"sorted_inter_document": "sorted_inter_document does not run here"}
        assert len(summary["measured"]) == len(VARIANTS) - 1
        with pytest.raises(error, match="none does not run here"):
            measured(broken, examples)


def test_labelled_questions_of_a_remote_model_are_open_together():
    at_once = Barrier(4, timeout=20)

    class Together(OrderBiasedGenerator):
        """Answers when four requests are open."""

        def generate(self, request):
            at_once.wait()
            return super().generate(request)

    examples = weights(8)
    cases = [EvalCase(example, example.gold, MitigationChoice("none")) for example in examples]
    answers = [graded.answer for graded, _ in answer_all(Together(), cases, 8)]
    alone = [graded.answer for graded, _ in answer_all(OrderBiasedGenerator(), cases, 8)]
    assert answers == alone


def test_a_judge_judges_the_changes_that_are_reported_and_no_others():
    judged = []
    pipeline = pipeline_of(OrderBiasedGenerator())
    asked, _ = find_questions(pipeline, texts(12))
    record = measure(pipeline, asked, judge=lambda *answers: bool(judged.append(answers)))
    assert len(record.summary["measured"]) > 1
    assert len(judged) == sum(row["changed"] for row in record.rows) > 0


def test_the_difference_is_paired_by_question():
    rows = run(OrderBiasedGenerator(), count=12).rows
    assert {row["kind"] for row in rows} == {"order", "repeat"}
    assert {len([row for row in rows if row["question"] == name]) for name in {row["question"] for row in rows}} == {5}
    flips = summarize_flips([FlipRow(**{**row, "condition": "none"}) for row in map(without_table, rows)])
    assert flips["difference_interval"] == [1.0, 1.0]
