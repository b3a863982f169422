"""Experiments as commands and as functions: both return the same record, and files hold what was returned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rag_posfix.cli import main as cli
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.evaluation import (
    RerankerChoice,
    evaluate_permutations,
    evaluate_positions,
    evaluate_reranking,
    evaluate_reranking_positions,
    load_examples,
    read_record,
)
from rag_posfix.settings import Settings
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.rerank_data import write_collection
from tests.support.tiny import save_tiny

CHOICES = [MitigationChoice("none"), MitigationChoice("parallel_windows")]
METHODS = ["--mitigation", "none,parallel_windows"]


@pytest.fixture(autouse=True)
def _letters(monkeypatch):
    monkeypatch.setattr("rag_posfix.pipeline.build.SentenceEmbeddings", lambda model, **_: LetterEmbeddings(model))
    monkeypatch.setenv("RAG_POSFIX_DTYPE", "float32")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=2048))


@pytest.fixture
def settings(tiny):
    return Settings(model=tiny)


@pytest.fixture
def data(tmp_path):
    contexts = [{"title": "t", "text": "abc" * (n + 1), "isgold": n == 0} for n in range(4)]
    rows = [{"question": f"ab {n}", "answers": ["x"], "ctxs": contexts} for n in range(3)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(capsysbinary, tiny):
    def call(*arguments):
        with pytest.raises(SystemExit) as exit_:
            cli.main([str(argument) for argument in (*arguments, "--model", tiny, "--json")])
        captured = capsysbinary.readouterr()
        assert not exit_.value.code, captured.out
        return json.loads(captured.out)

    return call


def without_time(value):
    """Return a value as JSON has it, without what differs from run to run: times, memory, names of new files."""
    if isinstance(value, dict):
        timed = ("seconds", "second", "ttft", "tokens_per_s", "ratio", "memory", "bytes")
        changing = (
            "at",
            "record",
            "page",
            "profile_path",
            "run_file",
            "run_sha256",
            "load_average",
            "svg",
            "png",
        )
        return {
            str(name): without_time(one)
            for name, one in value.items()
            if name not in changing and not any(part in str(name) for part in timed)
        }
    if isinstance(value, list | tuple):
        return [without_time(one) for one in value]
    return value


def assert_same(printed, record, out):
    """Check that a command printed what a function returned, and that the record it wrote holds the same rows."""
    assert without_time(printed) == without_time(record.to_json())
    assert printed["record"].startswith(str(out))
    written = read_record(Path(printed["record"]))
    assert without_time(written.head) == without_time(record.head)
    assert without_time(written.rows) == without_time(record.rows)
    assert len(written.rows) > 0


@pytest.mark.slow
def test_positions(run, data, settings, tmp_path):
    out = tmp_path / "out"
    options = ["--gold-positions", "0,2", "--documents", 3, "--max-tokens", 2, "--limit", 2]
    printed = run("eval", "positions", "--data", data, *METHODS, *options, "--out", out)
    record = evaluate_positions(
        data, CHOICES, gold_positions=[0, 2], documents=3, max_tokens=2, limit=2, settings=settings
    )  # fmt: skip
    assert_same(printed, record, out)
    assert "record" not in record.to_json()
    again = evaluate_positions(
        data, CHOICES, gold_positions=[0, 2], documents=3, max_tokens=2, limit=2, settings=settings, out=out
    )  # fmt: skip
    assert again.summary["reused"] == len(record.rows), "the command's journal is the function's"


@pytest.mark.slow
def test_permutations(run, data, settings, tmp_path):
    options = ["--orders", 3, "--documents", 3, "--max-tokens", 2, "--seed", 5]
    printed = run("eval", "permutations", "--data", data, *METHODS, *options, "--out", tmp_path / "out")
    record = evaluate_permutations(data, CHOICES, orders=3, documents=3, max_tokens=2, seed=5, settings=settings)
    assert_same(printed, record, tmp_path / "out")


def test_questions_may_be_given_in_place_of_a_file(data, settings):
    options = {"orders": 2, "documents": 2, "max_tokens": 1, "settings": settings}
    from_file = evaluate_permutations(data, CHOICES[:1], limit=1, skip=1, **options)
    given = evaluate_permutations(load_examples(data), CHOICES[:1], limit=1, skip=1, **options)
    assert without_time(given.rows) == without_time(from_file.rows)
    assert given.head["data"]["name"] is None
    assert len(given.head["data"]["sha256"]) == 64


@pytest.mark.slow
def test_reranking(run, settings, tmp_path):
    folder, out = write_collection(tmp_path / "beir"), tmp_path / "out"
    printed = run("eval", "rerank", "--corpus", folder, "--reranker", "embedding", "--depth", 3, "--out", out)
    record = evaluate_reranking(folder, [RerankerChoice("embedding")], depth=3, settings=settings)
    assert_same(printed, record, out)
    assert Path(printed["runs"]["embedding"]["run_file"]).is_file()


def test_reranking_positions(run, data, settings, tmp_path):
    options = ["--reranker", "embedding", "--gold-positions", "0,3", "--documents", 4]
    printed = run("eval", "rerank-positions", "--data", data, *options, "--out", tmp_path / "out")
    record = evaluate_reranking_positions(
        data, [RerankerChoice("embedding")], gold_positions=[0, 3], documents=4, settings=settings
    )  # fmt: skip
    assert_same(printed, record, tmp_path / "out")
