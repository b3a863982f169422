"""``rag-posfix train data --teacher``: pairs from a model behind a real OpenAI-compatible server."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from rag_posfix.generation.fake import FakeGenerator
from tests.support.serving import make_pipeline, serving
from tests.support.toy_encoder import ToyEncoder

pytestmark = pytest.mark.slow

TEXTS = {f"ship-{n}.txt": f"The mast of the ship Vessel{n} is {n + 20} metres tall and made of oak." for n in range(6)}
MAST = re.compile(r"the ship (Vessel\d+) is (\d+ metres)")


class WritingTeacher(FakeGenerator):
    """Writes a question about the ship in the prompt; every third answer is not in the form that was asked for."""

    def __init__(self):
        super().__init__(ToyEncoder(), 8192)
        self.asked = []

    def generate(self, request):
        prompt = self.encoder.decode(request.layout.token_ids)
        self.asked.append(prompt)
        ship, height = MAST.search(prompt).groups()
        written = json.dumps({"question": f"How tall is the mast of {ship}?", "answer": height})
        text = "I cannot help with that." if len(self.asked) % 3 == 0 else f"Here you are:\n{written}"
        return replace(super().generate(request), text=text)


def texts(folder):
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


def arguments(tmp_path, teacher):
    return (
        "train", "data", "--teacher", teacher, "--texts", texts(tmp_path / "texts"), "--samples", 8, "--multi", 0,
        "--min-tokens", 60, "--max-tokens", 80, "--length-bins", 1, "--out", tmp_path / "made",
    )  # fmt: skip


def test_pairs_that_a_server_writes_become_samples(run, tmp_path):
    teacher = WritingTeacher()
    with serving(make_pipeline(teacher)) as url:
        result = run(*arguments(tmp_path, f"openai:fake@{url}/v1"), "--json")
    assert result.code == 0, result.err
    rows = [json.loads(line) for line in (tmp_path / "made" / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    assert result.json["sources"] == {"teacher": 8}
    for row in rows:
        (gold,) = [one["text"] for one in row["ctxs"] if one["isgold"]]
        ship, height = MAST.search(gold).groups()
        assert row["question"] == f"How tall is the mast of {ship}?"
        assert row["answers"] == [height]
        assert all(height not in one["text"] for one in row["ctxs"] if not one["isgold"])
    assert len(teacher.asked) - 8 >= len(teacher.asked) // 3  # what cannot be used is drawn again


def test_a_server_that_is_not_there_is_named(run, tmp_path):
    result = run(*arguments(tmp_path, "openai:fake@http://127.0.0.1:9/v1"), "--json")
    assert "127.0.0.1:9" in result.error["message"]
    assert not (tmp_path / "made" / "samples.jsonl").exists()


def test_a_teacher_without_an_address_is_refused(run, tmp_path):
    result = run(*arguments(tmp_path, "gpt"), "--json")
    assert "--teacher 'gpt' must be openai:NAME@URL" in result.error["message"]
