"""``rag-posfix eval rerank`` and ``eval rerank-positions`` as users see them; letter counts stand for vectors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rag_posfix.cli import options as output
from rag_posfix.evaluation.figures import CAPTIONS
from rag_posfix.evaluation.record import read_record
from tests.support.command_line import command_line
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.rerank_data import write_collection


@pytest.fixture(autouse=True)
def _letters(monkeypatch):
    monkeypatch.setattr("rag_posfix.pipeline.build.SentenceEmbeddings", lambda model, **_: LetterEmbeddings(model))


@pytest.fixture
def run(capsysbinary):
    return command_line(capsysbinary)


@pytest.fixture
def folder(tmp_path):
    return write_collection(tmp_path / "beir")


def rows(path, count=3):
    contexts = [{"title": "t", "text": "abc" * (n + 1), "isgold": n == 0} for n in range(4)]
    lines = [json.dumps({"question": f"ab {n}", "answers": ["x"], "ctxs": contexts}) for n in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return path


class TestRerank:
    @pytest.mark.slow
    def test_the_contract_holds_for_three_files(self, run, folder, tmp_path):
        code, out, _ = run(
            "eval", "rerank", "--corpus", folder / "corpus.jsonl", "--queries", folder / "queries.jsonl",
            "--qrels", folder / "qrels" / "test.tsv", "--reranker", "embedding,embedding:top_n=1", "--depth", 2,
            "--out", tmp_path / "out", "--json",
        )  # fmt: skip
        assert code == 0
        (line,) = out.splitlines()
        found = json.loads(line)
        assert {"runs", "first_stage", "record", "significance", "n", "counts", "page", "png"} <= set(found)
        assert list(found["runs"]) == ["embedding", "embedding:top_n=1"]
        for one in [found["first_stage"], *found["runs"].values()]:
            assert {"nDCG@10", "RR@10", "R@10", "P@1", "seconds", "run_file"} <= set(one)
            columns = [line.split() for line in Path(one["run_file"]).read_text("utf-8").splitlines()]
            assert {len(column) for column in columns} == {6}
        for name in ("record", "page", "png"):
            assert Path(found[name]).is_file()

    @pytest.mark.slow
    def test_a_folder_is_enough_and_the_result_is_a_table(self, run, folder, tmp_path):
        code, out, _ = run("eval", "rerank", "--corpus", folder, "--reranker", "embedding", "--out", tmp_path / "out")
        assert code == 0
        for words in ("nDCG@10", "bm25", "embedding against first_stage", "Holm", "5 documents, 1 documents without"):
            assert words in " ".join(out.split())
        assert f"figure: {CAPTIONS['rerank']}" in out


class TestRerankPositions:
    def test_recall_is_told_per_reranker_and_gold_position(self, run, tmp_path):
        arguments = (
            "eval", "rerank-positions", "--data", rows(tmp_path / "rows.jsonl"), "--reranker", "embedding",
            "--gold-positions", "0,1,3", "--documents", 4, "--out", tmp_path / "out",
        )  # fmt: skip
        code, out, _ = run(*arguments, "--json")
        assert code == 0
        found = json.loads(out)
        one = found["rerankers"]["embedding"]
        assert list(one["places"]) == ["0", "1", "3"]
        assert {"recall@1", "recall@3", "ci95", "seconds"} <= set(one["places"]["0"])
        assert {"mean", "worst", "spread", "spread_ci95", "first_minus_last"} <= set(one["recall@1"])
        assert (found["n"], found["reused"]) == (3, 0)
        assert len(read_record(Path(found["record"])).rows) == 9
        code, out, _ = run(*arguments)
        assert code == 0
        assert "at 3" in out
        assert "3 questions; 9 rankings reused" in " ".join(out.split())


def test_the_progress_bar_shows_how_many_are_done_each_second_or_how_long_one_takes():
    from rich.progress import Task

    def task(done, seconds):
        made = Task(0, "", total=100, completed=done, _get_time=lambda: seconds)
        made.start_time, made.finished_speed = 0.0, done / seconds if seconds else None
        return output.RateColumn().render(made).plain

    assert task(50, 10) == "5.0/s"
    assert task(5, 10) == "2.0 s each"
    assert task(0, 0) == ""
