"""A test collection: documents, topics with judgements, and counts of unusable parts of the files."""

from __future__ import annotations

from collections.abc import Collection as Names
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from langchain_core.documents import Document

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.beir import BeirFiles, read_collection_documents, read_queries
from rag_posfix.evaluation.data.trec import Qrels, read_qrels
from rag_posfix.text import content_hash


@dataclass(frozen=True, slots=True)
class Topic:
    """A judged query.

    Attributes:
        id: Its id.
        question: Its text.
        grades: Document id -> grade; 1 and above is relevant.
    """

    id: str
    question: str
    grades: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Collection:
    """The documents of a test collection.

    Attributes:
        documents: Documents by id, in the order of the file, including those without text.
        digest: Hash of ids, titles and texts of all documents of the file.
        counts: Numbers of used and unusable parts of the files, for the record.
    """

    documents: Mapping[str, Document]
    digest: str
    counts: Mapping[str, int]


def load_topics(
    files: BeirFiles, *, limit: int | None = None, skip: int = 0, binary: bool = False
) -> tuple[list[Topic], dict[str, int]]:
    """Return the topics that were judged, in the order of the queries, and counts of what was left out.

    A query without judgements says nothing about a ranking, so it is not asked. A topic whose judgements are all 0 is
    asked and scores 0, as in trec_eval.

    Args:
        files: Where queries and judgements are.
        limit: Maximum number of topics.
        skip: Number of topics to leave out at the start, so that settings can be chosen on others.
        binary: Count every grade above 0 as 1.

    Raises:
        EvaluationError: a file is missing or malformed, two queries have one id, or no query was judged.
    """
    qrels = read_qrels(files.qrels)
    questions: dict[str, str] = {}
    for location, name, text in read_queries(files.queries):
        if questions.setdefault(name, text) != text:
            raise EvaluationError(f"{location}: query id {name!r} stands for two texts; make the ids distinct")
    judged = [name for name in questions if name in qrels]
    if not judged:
        raise EvaluationError(
            f"no query of {files.queries} is judged in {files.qrels}; the ids must be the same, first judged id: "
            f"{next(iter(qrels))!r}, first query id: {next(iter(questions))!r}"
        )
    chosen = judged[skip:] if limit is None else judged[skip : skip + limit]
    if not chosen:
        raise EvaluationError(f"skip={skip} leaves none of {len(judged)} judged queries; lower it")
    topics = [Topic(name, questions[name], _grades(qrels, name, binary)) for name in chosen]
    return topics, {
        "queries": len(questions),
        "queries_without_judgements": len(questions) - len(judged),
        "judged_queries_without_text": len(qrels) - len(judged),
        "topics": len(topics),
        "topics_without_relevant": sum(not any(grade > 0 for grade in t.grades.values()) for t in topics),
    }


def load_collection(
    path: Path, topics: list[Topic], *, titles: bool = True, only: Names[str] | None = None
) -> Collection:
    """Return the documents of a corpus.

    A document that stands in the file twice with the same content is read once.

    Args:
        path: The corpus; compressed if its name ends in ``.gz``.
        topics: What will be asked, to count judgements of documents that the corpus lacks.
        titles: Keep titles; without them documents are their text alone, for corpora whose text repeats the title.
        only: Keep documents with these ids alone in memory, all if None.

    Raises:
        EvaluationError: the file is missing or malformed, a document has no id, or one id stands for two documents.
    """
    documents: dict[str, Document] = {}
    hashes: dict[str, str] = {}
    without_text = 0
    for location, document in read_collection_documents(path):
        if not titles:
            document.metadata.pop("title", None)
        name = str(document.id)
        content = content_hash(name, str(document.metadata.get("title", "")), document.page_content)
        if hashes.setdefault(name, content) != content:
            raise EvaluationError(f"{location}: id {name!r} stands for two documents; make the ids distinct")
        if name not in documents and (only is None or name in only):
            documents[name] = document
            without_text += not document.page_content.strip()
    if not hashes:
        raise EvaluationError(f"{path} holds no documents; give BEIR's JSON lines, tab-separated lines or TREC files")
    judged = {name for topic in topics for name in topic.grades}
    return Collection(
        documents=documents,
        digest=content_hash(*sorted(hashes.values())),
        counts={
            "documents": len(hashes),
            "documents_without_text": without_text,
            "judged_documents_not_in_corpus": len(judged - hashes.keys()),
        },
    )


def _grades(qrels: Qrels, name: str, binary: bool) -> dict[str, int]:
    return {document: min(grade, 1) if binary else grade for document, grade in qrels[name].items()}
