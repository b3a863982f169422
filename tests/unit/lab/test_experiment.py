"""The experiment and its commands: record, table, figure, and what is refused before anything is trained."""

from __future__ import annotations

import csv
import json

import pytest

from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.record import read_record
from rag_posfix.lab.encodings import create_encoding
from rag_posfix.lab.experiment import TrainingSettings, draw_laboratory, run_laboratory
from rag_posfix.lab.tasks.counting import Counting
from rag_posfix.lab.tasks.flip_flop import FlipFlop
from rag_posfix.lab.tasks.key_value import KeyValue
from rag_posfix.lab.tasks.language import Language
from rag_posfix.lab.tasks.text import Text, split_ids, tokens_of, vocabulary_of
from tests.support.command_line import command_line

TINY = TrainingSettings(steps=4, batch=4, evaluate_every=2, examples=16, layers=1, heads=2, width=16, warmup=1)
OPTIONS = "--steps 4 --batch 4 --evaluate-every 2 --examples 16 --layers 1 --heads 2 --width 16 --warmup 1"


def encodings(*names):
    return [create_encoding(name) for name in names]


def test_a_record_has_every_encoding_seed_and_split_with_the_spread_over_seeds(tmp_path):
    record = run_laboratory(FlipFlop(pairs=4), encodings("rope", "nope"), seeds=2, settings=TINY, out=tmp_path)
    assert {path.suffix for path in record.files.values()} == {".json", ".csv", ".svg", ".png"}
    read = read_record(record.files["record"])
    assert read.head["kind"] == "lab"
    assert read.head["settings"]["seeds"] == 2
    final = [row for row in read.rows if row["final"]]
    assert [(row["encoding"], row["seed"], row["split"]) for row in final] == [
        (name, seed, split) for name in ("rope", "nope") for seed in (0, 1) for split in ("in", "sparse", "longer")
    ]
    assert [row["step"] for row in read.rows if not row["final"]] == [2, 4] * 4
    spread = record.summary["encodings"]["rope"]["splits"]["in"]
    values = [row["value"] for row in final if (row["encoding"], row["split"]) == ("rope", "in")]
    assert spread["values"] == values
    assert (spread["mean"], spread["low"], spread["high"]) == (sum(values) / 2, min(values), max(values))
    with record.files["csv"].open(encoding="utf-8") as opened:
        table = list(csv.DictReader(opened))
    assert [float(row["value"]) for row in table] == [row["value"] for row in read.rows]
    assert len(list(tmp_path.glob("flip_flop/*/seed-*/model.safetensors"))) == 4


@pytest.mark.slow
def test_a_second_run_takes_over_what_is_finished_and_adds_a_seed(tmp_path):
    first = run_laboratory(FlipFlop(pairs=4), encodings("rope"), seeds=1, settings=TINY, out=tmp_path)
    (old,) = tmp_path.glob("flip_flop/*/seed-0/run.json")
    written = old.stat().st_mtime_ns
    second = run_laboratory(FlipFlop(pairs=4), encodings("rope"), seeds=2, settings=TINY, out=tmp_path)
    assert old.stat().st_mtime_ns == written
    values = [one.summary["encodings"]["rope"]["splits"]["in"]["values"] for one in (first, second)]
    assert values[1][:1] == values[0]
    run_laboratory(FlipFlop(pairs=5), encodings("rope"), seeds=1, settings=TINY, out=tmp_path)
    assert len(list(tmp_path.glob("flip_flop/*"))) == 2  # other sizes are another run


@pytest.mark.parametrize(
    ("task", "lines", "means"),
    [(KeyValue(pairs=3, keys=8, questions=1), 4, 0), (Language(length=8), 4, 0), (Counting(steps=6), 6, 6)],
)
def test_the_picture_shows_every_seed_of_two_encodings(task, lines, means):
    record = run_laboratory(task, encodings("alibi", "t5"), seeds=2, settings=TINY)
    assert record.files == {}
    figure = draw_laboratory(record.head)
    axes, *others = figure.axes
    assert len(axes.lines) == lines
    assert len(axes.collections) == means
    if means:  # a mark per seed, by encoding and split
        splits = record.summary["encodings"]["alibi"]["splits"]
        assert [list(line.get_ydata()) for line in axes.lines[:3]] == [split["values"] for split in splits.values()]
    legend = axes.get_legend()
    assert "each of 2 seeds, n = 16" in axes.get_title("left")
    assert [text.get_text() for text in legend.get_texts()] == ["alibi", "t5"]
    by_place = [[len(line.get_ydata()) for line in one.lines] for one in (axes, *others)]
    assert by_place == [[3] * 4, [6] * 4] or not task.measured_by_place
    assert len(others) == task.measured_by_place


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (("rope", "rope"), {}, "'rope' is named twice"),
        ((), {}, "0 encodings"),
        (("rope",), {"seeds": 0}, "1 encodings and 0 seeds"),
        (("rope", "spline"), {}, "spline is an auto-encoder"),
        (("rope",), {"device": "nowhere"}, "device 'nowhere' cannot be used"),
    ],
)
def test_what_cannot_be_compared_is_refused(names, options, message):
    with pytest.raises(ConfigError, match=message):
        run_laboratory(FlipFlop(pairs=4), encodings(*names), settings=TINY, **options)


def test_an_encoding_that_ends_before_the_longest_split_is_refused_before_training(tmp_path):
    short = [create_encoding("learned", {"max_positions": 20})]
    with pytest.raises(ConfigError, match="no position vector after 20"):
        run_laboratory(Language(length=16), short, settings=TINY, out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_record_has_the_digest_of_its_text_and_a_changed_file_is_trained_on_again(tmp_path):
    text = tmp_path / "text.txt"
    digests = set()
    for content in ("a word, and ", "other words "):
        text.write_text(content * 400, "utf-8")
        for cached in (tokens_of, vocabulary_of, split_ids):
            cached.cache_clear()
        record = run_laboratory(
            Text(str(text), 8, 16), encodings("rope"), seeds=1, settings=TINY, out=tmp_path / "out"
        )
        assert record.head["data"]["name"] == "text.txt"
        digests.add(record.head["data"]["sha256"])
    assert len(digests) == len(list((tmp_path / "out/text").iterdir())) == 2


@pytest.mark.slow
def test_lab_run_prints_the_summary_as_json_and_as_a_table(tmp_path, capsysbinary):
    call = command_line(capsysbinary)
    command = [
        "lab",
        "run",
        "key-value:pairs=3:keys=8:questions=2",
        "--encoding",
        "cope:p_max=4,shaw",
        "--seeds",
        "2",
        "--out",
    ]
    code, printed, _ = call(*command, tmp_path, *OPTIONS.split(), "--json")
    found = json.loads(printed)
    assert code == 0
    assert found["task"] == "key_value:keys=8:pairs=3:questions=2"
    assert list(found["encodings"]) == ["cope:p_max=4", "shaw"]
    assert len(found["encodings"]["shaw"]["splits"]["in"]["by_place"]) == 3
    assert found["record"].endswith(".json")
    code, printed, _ = call(*command, tmp_path, *OPTIONS.split())
    assert code == 0
    assert "longer: 6 pairs" in printed
    assert "error by position, from the first pair" in printed


@pytest.mark.parametrize(
    ("task", "encoding", "message"),
    [
        ("flipflop", "rope", "unknown task 'flipflop'. Did you mean 'flip_flop'"),
        ("flip-flop:pair=4", "rope", "has no parameter 'pair'. Did you mean 'pairs'?"),
        ("flip-flop", "ropee", "unknown encoding 'ropee'. Did you mean 'rope'"),
        ("flip-flop", "cope:p_max=0", "p_max=0 must be a whole number >= 1"),
    ],
)
def test_wrong_names_are_told(task, encoding, message, tmp_path, capsysbinary):
    code, _, error = command_line(capsysbinary)("lab", "run", task, "--encoding", encoding, "--out", tmp_path)
    assert code == 1
    assert message in " ".join(error.split())


def test_lab_list_names_every_task_and_encoding(capsysbinary):
    call = command_line(capsysbinary)
    _, printed, _ = call("lab", "list", "--json")
    found = json.loads(printed)
    assert [one["name"] for one in found["tasks"]] == [
        "counting", "flip_flop", "key_value", "language", "last_sentence", "selective_copy", "text",
    ]  # fmt: skip
    assert [one["name"] for one in found["encodings"] if not one["causal"]] == ["spline"]
    memory = {one["name"]: one["memory"] for one in found["encodings"]}
    assert (memory["cope"], memory["shaw"]) == ("linear", "per sequence")
    assert all(one["summary"] and one["deviations"] is not None for part in found.values() for one in part)
    code, printed, _ = call("lab", "list")
    assert code == 0
    assert "stable_mask" in printed
