"""The conversation of ``ask --chat``."""

from __future__ import annotations

import io

import pytest
from langchain_core.documents import Document

from rag_posfix.retrieval.faiss_store import FaissVectorStore
from tests.support.command_line import command_line
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.serving import make_pipeline

PASSAGES = {"bridge": "The bridge was built in 1911.", "harbour": "The harbour froze in 1963."}


class NamedPassages:
    """Finds the passages whose names are in the query."""

    def retrieve(self, question, k):
        return [
            Document(text, metadata={"relevance_score": 0.9}) for name, text in PASSAGES.items() if name in question
        ]


@pytest.mark.parametrize(
    ("options", "searched"),
    [
        ([], "searched for: When was the bridge built? / When did the harbour freeze?"),
        (["--allow-ungrounded"], "searched for: Who is Zyzzyva? / When was the bridge built?"),
    ],
)
def test_a_question_without_a_passage_joins_the_conversation_only_where_it_was_answered(
    options, searched, tmp_path, monkeypatch, capsysbinary
):
    index = tmp_path / "my.index"
    FaissVectorStore.from_texts(["aaa"], LetterEmbeddings()).save(index)
    pipeline = make_pipeline(retriever=NamedPassages())
    monkeypatch.setattr("rag_posfix.pipeline.build.build_pipeline", lambda *_, **__: pipeline)
    lines = "Who is Zyzzyva?\nWhen was the bridge built?\nWhen did the harbour freeze?\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    code, out, _ = command_line(capsysbinary)("ask", "--index", index, "--chat", *options)
    assert code == 0
    assert PASSAGES["bridge"].removesuffix(".") in out
    assert next(line for line in out.splitlines() if line.startswith("searched for: ")) == searched
