"""Training data: deterministic, continued after an interruption, uniform places, nothing of the evaluation data."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from langchain_core.documents import Document

from rag_posfix.contracts.request import Generation
from rag_posfix.errors import ConfigError, EvaluationError
from rag_posfix.evaluation.data.questions import PositionExample, load_examples
from rag_posfix.lab.training.data.make_data import (
    DataSources,
    Sample,
    SampleMaker,
    TeacherPairs,
    chi_square,
    make_training_data,
    place_counts,
    read_answer,
    read_samples,
    write_samples,
)
from rag_posfix.lab.training.data.pairs import (
    TEMPLATES,
    Contamination,
    FilePairs,
    Pair,
    Segment,
    demo_examples,
    read_examples,
    read_segments,
    seeded_random,
    template_sources,
)
from rag_posfix.lab.training.data.settings import DataSettings
from tests.support.toy_encoder import ToyEncoder

SETTINGS = DataSettings(samples=24, min_tokens=60, max_tokens=180, length_bins=3, multi=0.25)


def words(text):
    return len(text.split())


def made(folder, *, settings=SETTINGS, **sources):
    return make_training_data(DataSources(**(sources or {"templates": "key_value,database"})), settings, words, folder)


@pytest.mark.slow
def test_the_same_settings_give_the_same_file_and_another_seed_another(tmp_path):
    first, second = (made(tmp_path / name).files["samples"].read_bytes() for name in "ab")
    assert first == second
    other = DataSettings(samples=24, min_tokens=60, max_tokens=180, length_bins=3, multi=0.25, seed=1)
    assert made(tmp_path / "c", settings=other).files["samples"].read_bytes() != first


@pytest.mark.parametrize("torn", [b"", b'{"question": "half a ro'])
def test_a_run_that_was_interrupted_gives_the_file_of_one_that_was_not(tmp_path, torn):
    whole = made(tmp_path / "whole").files["samples"].read_bytes()
    folder = tmp_path / "cut"
    folder.mkdir()
    lines = whole.splitlines(keepends=True)
    (folder / "samples.jsonl.partial").write_bytes(b"".join(lines[:7]) + torn)
    numbers = []
    maker = SampleMaker(template_sources("key_value,database"), SETTINGS, words, [], Contamination())

    def make(number):
        numbers.append(number)
        return maker.make(number)

    path = write_samples(folder, json.loads(lines[0])["run"], 24, make, lambda done, total: None)
    assert numbers == list(range(7, 24))
    assert path.read_bytes() == whole
    assert not (folder / "samples.jsonl.partial").exists()


@pytest.mark.parametrize("name", ["samples.jsonl", "samples.jsonl.partial"])
@pytest.mark.parametrize("change", ["settings", "rows"])
def test_other_samples_are_neither_continued_nor_replaced(tmp_path, name, change):
    made(tmp_path)
    path = (tmp_path / "samples.jsonl").rename(tmp_path / name)
    if change == "rows":
        path.write_text(path.read_text() + '{"question": "of the user"}\n')
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=f"{name}' holds other samples .*; choose another --out"):
        made(tmp_path, settings=SETTINGS if change == "rows" else replace(SETTINGS, seed=7))
    assert path.read_bytes() == before


def test_a_finished_file_is_not_made_again(tmp_path):
    before = made(tmp_path).files["samples"].stat().st_mtime_ns
    assert made(tmp_path).files["samples"].stat().st_mtime_ns == before


def test_the_distractors_of_a_question_stand_around_it_before_others(tmp_path):
    def example(number):
        gold = Document(page_content=f"the colour of stone {number} is red{number}")
        near = [f"stone {number} lies in box {box} of the second room" for box in "abc"]
        near.append(f"stone {number} was red{number} before too")  # has the answer, so it is left out
        distractors = tuple(Document(page_content=text) for text in near)
        return PositionExample(
            str(number), f"which colour has stone {number}?", (f"red{number}",), (gold,), distractors
        )

    pairs = [example(number) for number in range(4)]
    settings = DataSettings(samples=8, min_tokens=40, max_tokens=48, own_distractors=True)
    for sample in read_samples(made(tmp_path, settings=settings, pairs=[pairs]).files["samples"]):
        stone = sample.question.split()[-1].rstrip("?")
        around = [one.text for place, one in enumerate(sample.passages) if place not in sample.gold]
        own = [text for text in around if text.startswith(f"stone {stone} lies")]
        assert len(own) == 3
        assert not any(text.endswith("before too") and f"stone {stone} " in text for text in around)


def test_files_of_pairs_take_turns(tmp_path):
    files = [demo_examples()[:3], demo_examples()[3:6]]
    settings = DataSettings(samples=6, min_tokens=60, max_tokens=180, length_bins=1)
    asked = [one.question for one in read_samples(made(tmp_path, settings=settings, pairs=files).files["samples"])]
    for file, questions in zip(files, (asked[::2], asked[1::2]), strict=True):
        assert sorted(questions) == sorted(one.question for one in file)


def test_lengths_are_balanced_and_rows_are_read_by_the_evaluation(tmp_path):
    record = made(tmp_path)
    assert record.summary["length_bins"] == {"0": 8, "1": 8, "2": 8}
    assert record.summary["sources"] == {"database": 12, "key_value": 12}
    assert sum(record.summary["gold_passages"].values()) == 24
    examples = load_examples(record.files["samples"])
    samples = list(read_samples(record.files["samples"]))
    for example, sample in zip(examples, samples, strict=True):
        assert example.question == sample.question
        assert example.gold[0].page_content == sample.passages[sample.gold[0]].text
        low, high = SETTINGS.bounds(sample.length_bin)
        assert low - 20 <= sample.tokens <= high + 20  # about one record of the template


def test_chi_square_of_a_case_worked_by_hand():
    # O = 8, 12, 10, E = 10 each: (4 + 4 + 0) / 10 = 0.8; with 2 degrees of freedom p = exp(-0.8 / 2) = 0.67032
    statistic, degrees, p_value = chi_square([8, 12, 10], [10, 10, 10])
    assert (statistic, degrees) == (pytest.approx(0.8), 2)
    assert p_value == pytest.approx(0.670320046, abs=1e-8)


def test_the_expected_places_of_a_case_worked_by_hand():
    # Three passages in two parts: places 0 and 1 are in part 0 (2 * 1 // 3 = 0), place 2 in part 1.
    one = Sample(0, "q", ("a",), (Segment("", "x"),) * 3, (1,))
    found, expected = place_counts([one, one], bins=2)
    assert found == [2, 0]
    assert expected == pytest.approx([4 / 3, 2 / 3])


@pytest.mark.slow
def test_places_are_uniform(tmp_path):
    settings = DataSettings(samples=150, min_tokens=60, max_tokens=180, multi=0)
    places = made(tmp_path, settings=settings).summary["places"]
    assert places["p_value"] > 0.01
    biased = [found + 40 * (part == 0) for part, found in enumerate(places["found"])]
    assert chi_square(biased, places["expected"])[2] < 0.001


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("several", [1, 2])
def test_an_answer_of_a_template_is_in_its_segments_and_in_no_other(name, several):
    (source,) = template_sources(name)
    pair = source.pair(0, seeded_random(1), several)
    assert len(pair.segments) == several
    for part, segment in zip(pair.answers[0].split(" and "), pair.segments, strict=True):
        assert part in segment.text
    assert not any(pair.answers[0] in source.filler(seeded_random(2, n)).text for n in range(50))


def test_what_is_in_an_evaluation_file_is_left_out():
    text = "one two three four five six seven eight nine ten"
    example = PositionExample("0", "Who is it?", ("x",), (Document(page_content=f"so {text}!"),), ())
    known = Contamination([example], n=10)
    assert known.in_segment(Segment("", f"Before. {text.upper()} after"))
    assert not known.in_segment(Segment("", text.replace("five", "5")))
    assert known.in_pair(Pair("who is it", ("y",), (Segment("", "z"),)))  # a short question is found by equality
    assert not known.in_pair(Pair("who is it then", ("y",), (Segment("", "z"),)))
    assert not Contamination([]).in_pair(Pair(text, ("y",), ()))


def test_contaminated_pairs_and_passages_are_removed_from_a_file(tmp_path):
    examples = demo_examples()
    record = made(tmp_path, pairs=[examples], against=examples[:10])
    gold = {one.gold[0].page_content for one in examples[:10]}
    assert record.summary["removed_pairs"] >= 10
    for sample in read_samples(record.files["samples"]):
        assert not gold & {one.text for one in sample.passages}
    with pytest.raises(ConfigError, match="none of"):
        FilePairs(examples, 0, 100, Contamination(examples))


@pytest.mark.parametrize(
    ("gold", "passage"),
    [
        ("法国的首都是巴黎。人口两百万。", "其实法国的首都是巴黎。人口两百万。面积一百平方公里。"),
        ("フランスの首都はパリで人口は二百万人です。", "実はフランスの首都はパリで人口は二百万人ですが小さい。"),
        ("กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย", "ทุกคนรู้ว่ากรุงเทพมหานครเป็นเมืองหลวงของประเทศไทยและมีคนมาก"),
    ],
)
def test_evaluation_data_is_found_in_scripts_without_spaces(gold, passage):
    known = Contamination([PositionExample("0", "?", ("x",), (Document(page_content=gold),), ())])
    assert known.in_segment(Segment("", passage))
    assert not known.in_segment(Segment("", passage[: len(passage) // 3]))


@pytest.mark.parametrize(
    ("answer", "gold", "with_answer", "without"),
    [
        ("巴黎", "法国的首都是巴黎。", "旅行者昨天乘火车去巴黎参观博物馆。", "德国的首都是柏林。"),
        ("ปารีส", "เมืองหลวงคือปารีส", "นักท่องเที่ยวไปปารีสเมื่อวาน", "เบอร์ลินเป็นเมืองหลวง"),
        ("서울", "수도는 서울이다.", "어제 서울에서 기차를 탔다.", "베를린은 수도이다."),
        ("iPhone", "他买了iPhone。", "她也用iPhone拍照。", "她的iPhones很多。"),
    ],
)
def test_a_passage_with_the_answer_is_left_out_in_scripts_without_spaces(answer, gold, with_answer, without):
    around = (Document(page_content=with_answer), Document(page_content=without))
    examples = [PositionExample("0", "?", (answer,), (Document(page_content=gold),), around)]
    settings = DataSettings(samples=1, min_tokens=len(gold) + 1, max_tokens=len(gold) + 1, own_distractors=True)
    for seed in range(4):
        pairs = FilePairs(examples, seed, 100, Contamination(), own_distractors=True)
        sample = SampleMaker([pairs], replace(settings, seed=seed), len, [], Contamination()).make(0)
        assert {one.text for one in sample.passages} == {gold, without}


def pairs_of(path, *rows):
    """Return the questions of rows as ``--pairs`` reads them from a file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_examples(str(path), 0, None)


def test_every_gold_passage_of_a_row_is_left_out_and_belongs_to_its_pair(tmp_path):
    texts = [
        "gold one two three four five six seven eight nine",
        "gold uno dos tres cuatro cinco seis siete ocho nueve",
    ]
    ctxs = [*({"text": text, "isgold": True} for text in texts), {"text": "noise", "isgold": False}]
    examples = pairs_of(tmp_path / "rows.jsonl", {"question": "q", "answers": ["one uno"], "ctxs": ctxs})
    known = Contamination(examples)
    assert all(known.in_segment(Segment("", text)) for text in texts)
    pair = FilePairs(examples, 0, 100, Contamination(), own_distractors=True).pair(0, seeded_random(0), 1)
    assert [segment.text for segment in pair.segments] == texts
    assert [segment.text for segment in pair.around] == ["noise"]


def test_an_empty_paragraph_is_no_distractor_and_a_question_with_an_empty_gold_one_is_left_out(tmp_path):
    row = {"question": "q", "answer": "ans", "supporting_facts": [["A", 0]],
           "context": [["A", ["The ans is here."]], ["B", []], ["C", ["Other text."]]]}  # fmt: skip
    empty_gold = {**row, "question": "p", "supporting_facts": [["A", 0], ["B", 0]]}
    pairs = FilePairs(pairs_of(tmp_path / "rows.jsonl", row, empty_gold), 0, 100, Contamination(), True)
    assert pairs.removed == 1
    pair = pairs.pair(0, seeded_random(0), 1)
    assert [segment.text for segment in (*pair.segments, *pair.around)] == ["The ans is here.", "Other text."]


def test_no_segment_around_a_pair_has_its_answer(tmp_path):
    record = made(tmp_path, pairs=[demo_examples()], segments=read_segments("demo", 100))
    for sample in read_samples(record.files["samples"]):
        for place, one in enumerate(sample.passages):
            if place not in sample.gold:
                assert not any(f" {answer.lower()} " in f" {one.text.lower()} " for answer in sample.answers)


def test_gold_passages_are_moved_together():
    sample = Sample(0, "q", ("a",), tuple(Segment("", text) for text in "abcde"), (1, 4))
    moved = sample.move_gold(2)
    assert ["".join(one.text for one in moved.passages), moved.gold] == ["acbed", (2, 3)]
    with pytest.raises(ConfigError, match="between 0 and 3"):
        sample.move_gold(4)


class Teacher:
    """A generator that gives the answers in turn."""

    fingerprint = "teacher"
    encoder = ToyEncoder()

    def __init__(self, *answers):
        self._answers = list(answers)
        self.asked = []

    def generate(self, request):
        self.asked.append(self.encoder.decode(request.layout.token_ids))
        return Generation(self._answers.pop(0), (), "stop")


def test_a_teacher_is_asked_about_a_segment_and_unusable_answers_are_drawn_again():
    segments = [Segment("", f"The mast of ship {n} is {n + 20} metres tall.") for n in range(4)]

    class Quoting(Teacher):
        def generate(self, request):
            self.asked.append(self.encoder.decode(request.layout.token_ids))
            number = self.asked[-1].split("is ")[-1].split(" metres")[0]
            good = json.dumps({"question": "How tall is the mast?", "answer": f"{number} metres"})
            return type("G", (), {"text": "no idea" if len(self.asked) == 1 else f"Here: {good}"})()

    teacher = Quoting()
    settings = DataSettings(samples=1, min_tokens=20, max_tokens=20, length_bins=1, multi=0)
    maker = SampleMaker([TeacherPairs(teacher, segments)], settings, words, [], Contamination())
    sample = maker.make(0)
    assert sample.rejected == 1
    assert sample.answers[0] in sample.passages[sample.gold[0]].text
    assert "JSON" in teacher.asked[0]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", '{"question": "q"}', '{"question": "q", "answer": 3}', '{"question":"q","answer":"not in it"}'],
)
@pytest.mark.parametrize("segments", [(Segment("", "a text"),), (Segment("", "a text"), Segment("", "another"))])
def test_an_answer_of_a_teacher_that_cannot_be_used_gives_no_pair(text, segments):
    assert read_answer(text, segments) is None


def test_the_answer_about_two_segments_may_be_in_either():
    segments = (Segment("", "The lighthouse was lit in 1883."), Segment("", "The Ostrilla sank in 1909."))
    for answer in ("1883", "ostrilla"):
        assert read_answer(json.dumps({"question": "q", "answer": answer}), segments).answers == (answer,)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "not a training sample"),
        ('{"question": "q", "answers": ["a"], "ctxs": [{"text": "t"}]}', "isgold"),
        ('{"question": "q", "answers": ["a"], "ctxs": [{"text": " ", "isgold": true}]}', "visible"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, row, said):
    path = tmp_path / "samples.jsonl"
    path.write_text(row + "\n")
    with pytest.raises(EvaluationError, match=said):
        list(read_samples(path))


def test_a_title_that_is_null_is_empty(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"question": "q", "answers": ["a"], "ctxs": [{"title": null, "text": "t", "isgold": true}]}\n')
    assert next(read_samples(path)).passages == (Segment("", "t"),)


def test_settings_out_of_range_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="max_tokens=10"):
        DataSettings(min_tokens=20, max_tokens=10)
    with pytest.raises(ConfigError, match="--templates, --pairs or --teacher"):
        make_training_data(DataSources(), SETTINGS, words, tmp_path)
    with pytest.raises(ConfigError, match="unknown template 'code'"):
        template_sources("code")
