"""A part of the end-to-end gate: raw files, the shipped models, and the failures that must not return."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from benchmarks import index_files
from benchmarks.end_to_end.files import load_questions, write_files
from benchmarks.end_to_end.gate import Gate, GateRow, summarize
from rag_posfix.pipeline.build import build_embeddings, build_pipeline
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.indexing import update_index
from rag_posfix.settings import CacheSettings, Settings

pytestmark = pytest.mark.slow

FILES = (
    "handbook/benefits.md", "guides/lighthouses.md", "guides/museum.html", "made/harbour-rules.pdf",
    "made/project-heron.docx", "restricted/wages-2023.md", "restricted/wages-2024.md", "restricted/merger.md",
    "restricted/incident-staff.md", "restricted/incident-board.md", "support/faq.md", "support/tickets.jsonl",
)  # fmt: skip
ANSWERED = ("q004", "q036", "q061")  # a lighthouse among three, a PDF file, a ticket
HEADING = "q001"  # among three
FILTERED = ("q080", "q081")  # files that a filter chooses
FORBIDDEN = ("q091", "q092")
OFF_TOPIC = ("q096", "q097", "q102", "q109")


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    folder = tmp_path_factory.mktemp("gate")
    write_files(folder / "files")
    settings = Settings(cache=CacheSettings(enabled=False), reranker_deadline_seconds=600)
    embeddings = build_embeddings(settings)
    update_index([folder / "files" / name for name in FILES], folder / "index", embeddings)
    passages = FaissVectorStore.load(folder / "index", embeddings).documents()
    with closing(build_pipeline(settings, index=folder / "index")) as pipeline:
        yield Gate(pipeline, folder / "files", passages)


@pytest.mark.slow
def test_the_right_passage_of_each_file_is_among_the_first_five(gate: Gate):
    every = (*load_questions(), *load_questions("unseen"))
    questions = [question for question in every if question.answers and question.gold in FILES]
    assert len(questions) >= 25
    lost = [question.question for question in questions if not gate.gold_passages(question)]
    assert lost == [], "no passage holds the answer"
    found = {question.id for question in questions for hit in gate.retrieved(question) if gate.is_right(question, hit)}
    assert [question.question for question in questions if question.id not in found] == []


@pytest.mark.slow
def test_the_failures_of_raw_files_do_not_return(gate: Gate):
    questions = {question.id: question for question in load_questions()}
    asked = [questions[name] for name in (*ANSWERED, HEADING, *FORBIDDEN, *OFF_TOPIC)]
    rows: dict[str, GateRow] = {row.id: row for row in gate.run(asked, ["default"], threads=1)}
    wrong = [(questions[name].question, rows[name].answer) for name in ANSWERED if not rows[name].right]
    assert wrong == [], "a title, a page or a field was lost on the way"
    assert [name for name in FILTERED if not gate.is_right(questions[name], gate.retrieved(questions[name])[0])] == []
    assert rows[HEADING].gold_rank == 1
    assert "fourteen" not in rows[HEADING].answer, "the heading of France is at the end of the passage about Germany"
    assert [rows[name].answer for name in OFF_TOPIC if rows[name].grounded] == []
    summary = summarize(list(rows.values()))["default"]
    assert (summary["leaked"], summary["lost"]) == (0, 0)
    assert "84 million" not in rows["q091"].answer
    assert "slept" not in rows["q092"].answer


def test_the_benchmark_of_indexing_times_the_command_and_an_update_of_one_file(capsys):
    index_files.main(["--files", "6"])
    summary = json.loads(capsys.readouterr().out)["summary"]
    first, update = summary["first"], summary["one file changed"]
    assert first["added"] == first["passages"] >= 6
    assert 1 <= update["added"] < first["added"]
    assert min(first["cpu_seconds"], update["cpu_seconds"]) > 0
