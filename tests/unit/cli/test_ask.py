"""The conversation of ``ask --chat``, and what ``ask`` says of the support of an answer."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from langchain_core.documents import Document

from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.pipeline.support import SupportTest
from rag_posfix.reranking.yes_no import YesNoReranker
from rag_posfix.retrieval.bm25 import BM25Retriever
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from tests.support.command_line import command_line
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.reader import ScriptedReader
from tests.support.serving import make_pipeline
from tests.support.toy_encoder import ToyEncoder

PASSAGES = {"bridge": "The bridge was built in 1911.", "harbour": "The harbour froze in 1963."}


class NamedPassages:
    """Finds the passages whose names are in the query."""

    def retrieve(self, question, k):
        return [
            Document(text, metadata={"relevance_score": 0.9}) for name, text in PASSAGES.items() if name in question
        ]


class Quoting(FakeGenerator):
    """Answers with the sentence about the bridge."""

    def generate(self, request):
        return replace(super().generate(request), text=PASSAGES["bridge"])


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


def test_a_source_is_named_with_the_page_of_its_sentence(tmp_path, monkeypatch, capsysbinary):
    index = tmp_path / "my.index"
    FaissVectorStore.from_texts(["aaa"], LetterEmbeddings()).save(index)
    pages = {"source": "a.pdf", "page": 3, "pages": [3, 4], "page_starts": [0, len(PASSAGES["harbour"]) + 1]}
    document = Document(" ".join([PASSAGES["harbour"], PASSAGES["bridge"]]), metadata=pages)
    pipeline = make_pipeline(Quoting(ToyEncoder()), retriever=BM25Retriever.from_documents([document]))
    monkeypatch.setattr("rag_posfix.pipeline.build.build_pipeline", lambda *_, **__: pipeline)
    _, out, err = command_line(capsysbinary)("ask", "When was the bridge built?", "--index", index)
    assert f"[1] a.pdf, page 4\n    {PASSAGES['bridge']}" in out + err


@pytest.mark.parametrize(
    ("odds", "code", "said"),
    [
        (3.0, 0, "support: yes, by [1]"),
        (0.1, 0, "support: partly, by [1]"),
        (-1.0, 3, "no passage answers the question: the model was not asked"),
    ],
)
def test_what_the_judge_finds_is_said_below_the_answer(odds, code, said, tmp_path, monkeypatch, capsysbinary):
    index = tmp_path / "my.index"
    FaissVectorStore.from_texts(["aaa"], LetterEmbeddings()).save(index)
    values = {PASSAGES["bridge"]: odds, "": 0.0}  # log-probabilities of Y and N as the first letter
    reader = ScriptedReader({text: {89: value, 121: -99.0, 78: 0.0, 110: -99.0} for text, value in values.items()})
    judge = YesNoReranker(generator=reader)
    pipeline = make_pipeline(retriever=NamedPassages(), support=SupportTest(lambda: judge, is_trusted=True))
    monkeypatch.setattr("rag_posfix.pipeline.build.build_pipeline", lambda *_, **__: pipeline)
    question = "When was the bridge built?"
    exit_code, out, err = command_line(capsysbinary)("ask", question, "--index", index)
    assert (exit_code, said in out + err) == (code, True)
    assert ("log-odds of -1.00" in out + err) is (code == 3)
