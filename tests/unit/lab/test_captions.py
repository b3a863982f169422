"""Every figure that a command draws has a sentence: what one sees, and what one must not conclude."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from rag_posfix.cli.train import show_training
from rag_posfix.evaluation import figures
from rag_posfix.evaluation.figures import PANEL, captioned, new_column, svg_of
from rag_posfix.lab import contextual_maps
from rag_posfix.lab.encodings import create_encoding
from rag_posfix.lab.experiment import TrainingSettings, run_laboratory
from rag_posfix.lab.probing import PROBES
from rag_posfix.lab.probing.base import run_probes
from rag_posfix.lab.probing.rope_waveform import RopeWaveform
from rag_posfix.lab.tasks import TASKS
from rag_posfix.lab.tasks.flip_flop import FlipFlop
from rag_posfix.lab.training import loop
from rag_posfix.lab.training.data import make_data
from rag_posfix.pipeline import build
from tests.support.command_line import command_line
from tests.unit.lab.probing.probed import small_decoder

CAPTIONS = {
    "maps": contextual_maps.CAPTION, "train": loop.CAPTION, "train data": make_data.CAPTION, **figures.CAPTIONS
} | {name: cls.caption for registry in (PROBES, TASKS) for name, cls in registry.items()}  # fmt: skip


@pytest.mark.parametrize("name", CAPTIONS)
def test_one_sentence_says_what_one_sees_and_what_one_must_not_conclude(name):
    assert re.fullmatch(r"[A-Z][^.!?]*; do not conclude [^.!?]*\.", CAPTIONS[name])


@pytest.mark.parametrize("name", CAPTIONS)
def test_a_caption_is_under_the_figure_and_inside_of_it(name):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure, (axes,) = new_column(1)
    axes.set_xlabel("x")
    canvas = FigureCanvasAgg(captioned(figure, CAPTIONS[name]))
    canvas.draw()
    (sentence,) = [text for text in figure.texts if text.get_text()]
    box, label = (text.get_window_extent(canvas.get_renderer()) for text in (sentence, axes.xaxis.label))
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert 0 <= box.y0 < box.y1 <= label.y0
    assert figure.get_figwidth() == PANEL


def test_a_figure_without_a_caption_stays_as_it_is():
    figure, _ = new_column(1)
    before = svg_of(figure)
    assert svg_of(captioned(figure, "")) == before


@pytest.mark.slow
def test_the_files_the_page_and_the_terminal_have_the_caption(tmp_path, capsysbinary):
    probe = RopeWaveform(context=32, bases=2, candidates=3)
    found, page = run_probes(small_decoder("rope"), [probe], tmp_path / "page")
    assert f"<figcaption>{RopeWaveform.caption}</figcaption></figure>" in page.read_text("utf-8")
    assert _first_words(RopeWaveform.caption) in found.records[probe.name].files["svg"].read_text("utf-8")
    small_decoder("rope").decoder.save(tmp_path / "model")
    call = command_line(capsysbinary)
    _, printed, _ = call(
        "probe", "rope-waveform", "--context", "32", "--bases", "2", "--candidates", "3", "--model",
        tmp_path / "model", "--device", "cpu", "--out", tmp_path / "probe",
    )  # fmt: skip
    assert f"figure: {RopeWaveform.caption}" in printed
    _, printed, _ = call(
        "lab", "run", "flip-flop:pairs=2", "--encoding", "nope", "--seeds", "1", "--steps", "1", "--examples", "2",
        "--width", "8", "--layers", "1", "--out", tmp_path / "lab",
    )  # fmt: skip
    assert f"figure: {FlipFlop.caption}" in printed


@pytest.mark.slow
def test_the_figure_and_the_terminal_of_training_data_have_the_caption(tmp_path, capsysbinary, monkeypatch):
    monkeypatch.setattr(build, "build_tokenizer", lambda settings: SimpleNamespace(encode_text=str.split))
    _, printed, _ = command_line(capsysbinary)(
        "train", "data", "--templates", "key_value,database", "--samples", 4, "--min-tokens", 60, "--max-tokens", 180,
        "--length-bins", 1, "--out", tmp_path,
    )  # fmt: skip
    assert f"figure: {make_data.CAPTION}" in printed
    (drawn,) = tmp_path.glob("*.svg")
    assert _first_words(make_data.CAPTION) in drawn.read_text("utf-8")


@pytest.mark.parametrize("files", [{"svg": "a.svg"}, {}])
def test_the_terminal_says_what_a_figure_of_training_shows_if_there_is_one(files, capsysbinary):
    measured = {"log_probability": {"none": [-1.0, -2.0]}}
    show_training({"objective": "in2", "best_step": 1, "before": measured, "after": measured, **files})
    assert (f"figure: {loop.CAPTION}" in capsysbinary.readouterr().out.decode()) == bool(files)


def _first_words(caption: str) -> str:
    """Return the first words of a caption, which stand in the comment of its glyphs."""
    return caption[:40]


@pytest.mark.slow
def test_the_figure_of_a_run_has_the_caption_of_its_task(tmp_path):
    settings = TrainingSettings(1, evaluate_every=1, examples=2, layers=1, width=8)
    record = run_laboratory(FlipFlop(pairs=2), [create_encoding("nope")], seeds=1, settings=settings, out=tmp_path)
    assert _first_words(FlipFlop.caption) in record.files["svg"].read_text("utf-8")
