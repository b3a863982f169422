"""Which packaged reader is taken where none is named: of those that are here, the best that fits the memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rag_posfix import checkpoints
from rag_posfix.checkpoints import READERS, WEIGHTS, Weights, choose_reader, reader_notice
from rag_posfix.process import memory_of_machine
from rag_posfix.settings import Settings
from tests.support.command_line import command_line

LARGE, MIDDLE, SMALL = READERS
GB = 10**9


@pytest.fixture
def fetched(monkeypatch, tmp_path):
    """Return a function that puts readers of 10, 2 and 1 GB of memory into the folder of caches."""
    known = {
        name: Weights(f"{name}-title, a reader", ((f"{name[:3]}_weights", "x"),), "1", "", 100, memory_megabytes=mb)
        for name, mb in ((LARGE, 10_000), (MIDDLE, 2_000), (SMALL, 1_000))
    }
    known[LARGE] = Weights("large-title, a reader", (("large_weights", "x"),), "1", "", 100, memory_megabytes=10_000)
    monkeypatch.setattr(checkpoints, "WEIGHTS", known)

    def fetch(*names: str) -> Path:
        for name in names:
            folder = tmp_path / "packages" / f"{name}-1" / known[name].packages[0]
            folder.mkdir(parents=True)
            (folder / "x").touch()
        return tmp_path

    return fetch


@pytest.mark.parametrize(
    ("here", "memory", "expected"),
    [
        ((SMALL, MIDDLE, LARGE), 32 * GB, LARGE),
        ((SMALL, MIDDLE, LARGE), 16 * GB, MIDDLE),  # 10 GB are more than three fifths of 16
        ((SMALL, MIDDLE, LARGE), 1 * GB, SMALL),  # none fits
        ((LARGE,), 1 * GB, LARGE),  # the only one
        ((SMALL,), 32 * GB, SMALL),
        ((), 32 * GB, MIDDLE),  # whose absence names the command that fetches it
    ],
)
def test_the_best_reader_that_is_fetched_and_fits_the_memory_is_taken(fetched, here, memory, expected):
    assert choose_reader(fetched(*here), memory) == expected


def test_the_line_names_the_reader_and_what_a_better_one_costs(fetched):
    folder = fetched(SMALL)
    notice = reader_notice(SMALL, folder)
    assert notice.startswith("reading with smollm2-title; a larger reader is 100 MB and takes 2.0 GB of memory: ")
    assert notice.endswith(f"rag-posfix models fetch {MIDDLE}")
    fetched(MIDDLE)
    for name in (SMALL, MIDDLE):
        assert reader_notice(name, folder).endswith(
            "the largest fetched reader that fits the memory; --model names another"
        )


def test_settings_without_a_model_take_a_fetched_reader_and_know_that_nobody_named_it(monkeypatch, tmp_path, fetched):
    monkeypatch.setattr("rag_posfix.checkpoints.memory_of_machine", lambda: 32 * GB)
    monkeypatch.delenv("RAG_POSFIX_MODEL")
    folder = fetched(MIDDLE)
    for settings in (Settings(cache_dir=folder), Settings(model="auto", cache_dir=folder)):
        assert settings.model == MIDDLE
        assert "model" not in settings.model_fields_set
    named = Settings(model=SMALL, cache_dir=folder)
    assert (named.model, "model" in named.model_fields_set) == (SMALL, True)
    other = settings.model_copy(update={"model": LARGE})
    assert "model" in other.model_fields_set


def test_the_memory_of_a_container_is_its_limit(tmp_path):
    limit = tmp_path / "memory.max"
    limit.write_text("max\n")
    machine = memory_of_machine(limit)
    assert machine == memory_of_machine(tmp_path / "absent") > 0
    limit.write_text("1000\n")
    assert memory_of_machine(limit) == 1000


def test_the_list_has_size_and_memory_of_each_reader(capsysbinary):
    code, text, _ = command_line(capsysbinary)("models", "list", "--json")
    assert code == 0
    listed = {model["name"]: model for model in json.loads(text)["models"]}
    assert listed.keys() == WEIGHTS.keys()
    assert all(listed[name]["megabytes"] < listed[name]["memory_megabytes"] for name in READERS)
    assert listed["minilm"]["memory_megabytes"] == 0
    code, text, _ = command_line(capsysbinary)("models", "list")
    assert code == 0
    assert "memory, GB" in text
    assert "tokens/s" not in text
