"""The registry of probes, their commands, and the page about a model."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re

import pytest

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.errors import EvaluationError
from rag_posfix.lab.probing import PROBES
from rag_posfix.lab.probing.attention_mass import AttentionMass
from rag_posfix.lab.probing.base import run_probes
from rag_posfix.lab.probing.norm_by_position import NormByPosition
from rag_posfix.lab.probing.rope_waveform import RopeWaveform
from tests.support.command_line import command_line
from tests.unit.lab.probing.probed import small_decoder, tiny_model


@pytest.mark.parametrize("name", PROBES.names())
def test_a_probe_says_what_it_is(name):
    cls = PROBES.get(name)
    assert cls.name == name
    assert cls.__module__.endswith(f".{name.replace('-', '_')}")
    assert "http" in cls.paper
    text = inspect.getdoc(cls)
    assert "\nSource: " in text
    assert "\nFormula: " in text
    described = set(re.findall(r"^    (\w+): ", text.partition("\nArgs:\n")[2], re.MULTILINE))
    assert described == set(PROBES.parameters(name))


@pytest.mark.parametrize("name", PROBES.names())
def test_small_runs_read_as_many_texts_as_others_but_shorter_ones(name):
    cls = PROBES.get(name)
    PROBES.create(MethodSpec(name, {"data": "x"} if "data" in PROBES.parameters(name) else dict(cls.small)))
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    assert all(value < defaults[parameter] for parameter, value in cls.small.items())
    assert not {"strings", "prompts", "contexts", "seeds"} & cls.small.keys()
    assert cls.small.get("limit", 24) >= 24


@pytest.mark.slow
def test_the_page_holds_pictures_and_loads_nothing(tmp_path):
    probes = [RopeWaveform(context=32, bases=2, candidates=3), AttentionMass(pairs=3, rounds=1)]
    found, page = run_probes(tiny_model(400), probes, tmp_path)
    text = page.read_text("utf-8")
    assert list(found.records) == ["rope-waveform", "attention-mass"]
    assert text.count("data:image/png;base64,") == 2
    assert re.findall(r'(?:src|href)="(?!data:)', text) == []
    assert "default-src 'none'" in text
    assert "<h2>attention-mass</h2>" in text


@pytest.mark.slow
def test_a_probe_that_cannot_measure_a_model_is_told_on_the_page(tmp_path):
    probes = [NormByPosition(strings=3, tokens=16), AttentionMass()]
    found, page = run_probes(small_decoder("alibi"), probes, tmp_path)
    assert list(found.records) == ["norm-by-position"]
    assert "no tokenizer" in found.refused["attention-mass"]
    assert "Not measured: the probe attention-mass reads text" in page.read_text("utf-8")


class Unreadable(NormByPosition):
    """A probe whose questions do not fit the model."""

    name = "unreadable"

    def run(self, subject, *, out=None, progress=None):
        raise EvaluationError("question 3: 10 passages do not fit the context window; use fewer documents")


def test_a_probe_whose_texts_are_too_long_for_the_model_ends_no_other(tmp_path):
    # 64 tokens of context: texts of 128 and prompts of 16 pairs are too long, those of 16 are not.
    probes = [NormByPosition(strings=3, tokens=128), AttentionMass(), Unreadable(), RopeWaveform(context=32, bases=2)]
    found, page = run_probes(tiny_model(64), probes, tmp_path)
    assert list(found.records) == ["rope-waveform"]
    assert found.refused["norm-by-position"].startswith("strings of tokens=128 cannot be probed; give ")
    assert found.refused["attention-mass"].startswith("pairs=16 make prompts of ")
    text = page.read_text("utf-8")
    assert "<h2>norm-by-position</h2><p>Not measured: strings of tokens=128 cannot be probed; give " in text
    assert "Not measured: question 3: 10 passages do not fit the context window; use fewer documents" in text


def test_a_folder_that_cannot_be_written_is_told_before_a_probe_runs(tmp_path):
    class Counted(NormByPosition):
        ran = False

        def run(self, subject, *, out=None, progress=None):
            type(self).ran = True
            raise EvaluationError("not written")

    (tmp_path / "file").touch()
    with pytest.raises(EvaluationError, match=r"cannot write .*probes.html: .*; choose another --out"):
        run_probes(small_decoder(), [Counted()], tmp_path / "file")
    assert not Counted.ran
    run_probes(small_decoder(), [Counted()], tmp_path / "folder")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["probes.html"]


def test_commands_follow_from_the_registry(capsysbinary):
    call = command_line(capsysbinary)
    listed = json.loads(call("probe", "list", "--json")[1])["probes"]
    assert [one["name"] for one in listed] == list(PROBES.names())
    shown = call("probe", "--help")[1]
    assert all(name in shown for name in (*PROBES.names(), "list", "all"))
    options = call("probe", "attention-mass", "--help")[1]
    assert all(flag in options for flag in ("--pairs", "--rounds", "--seed", "--out", "--model", "--json"))


@pytest.mark.slow
def test_a_saved_decoder_is_probed_from_the_command_line(capsysbinary, tmp_path):
    small_decoder("rope").decoder.save(tmp_path / "model")
    call = command_line(capsysbinary)
    code, printed, _ = call(
        "probe", "all", "--probes", "rope-waveform,attention-mass", "--model", tmp_path / "model", "--device", "cpu",
        "--out", tmp_path / "out", "--json",
    )  # fmt: skip
    found = json.loads(printed)
    assert code == 0
    assert found["model"] == "model"
    assert found["probes"]["rope-waveform"]["rotated_channels"] == 16
    assert list(found["refused"]) == ["attention-mass"]


def test_wrong_values_are_told_before_a_model_is_loaded(capsysbinary, tmp_path):
    call = command_line(capsysbinary)
    assert call("probe", "attention-mass", "--pairs", "1", "--out", tmp_path)[0] == 2
    code, _, told = call("probe", "all", "--probes", "slot-attention", "--out", tmp_path)
    assert code == 1
    assert "the probe slot-attention needs questions; give a file with --data" in " ".join(told.split())
    _, _, told = call("probe", "causal-perturbation", "--first", "900", "--out", tmp_path)
    assert "must not fall from left to right" in " ".join(told.split())
