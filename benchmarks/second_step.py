"""Whether a second search finds the other passage of an answer, among the same number of passages as one search.

    python -m benchmarks.second_step [--hotpotqa distractor-10paragraphs.jsonl.gz] [--folder DIR] [--out DIR]

Sets: questions of the gate that need two files (``seen``: the rule was made on them, ``unseen``: written after it),
those that one passage answers (``one file``: what it must not lose), and HotpotQA over all paragraphs of its rows.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from langchain_core.documents import Document

from benchmarks.end_to_end.files import OWN_FILES, TWO_FILES, half_of, load_questions, write_files
from benchmarks.end_to_end.gate import Gate
from benchmarks.study import study_options, write_study
from benchmarks.tables import filled, table
from rag_posfix.contracts.retrieval import Retriever, SearchQuery, retrieve_query
from rag_posfix.evaluation.data.questions import load_examples
from rag_posfix.pipeline.build import build_embeddings
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.pipeline.retrievers_and_servers import open_retriever
from rag_posfix.pipeline.second_step import SEARCHED, second_step, with_linked
from rag_posfix.retrieval.bm25 import BM25Retriever
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.indexing import update_index
from rag_posfix.settings import Settings
from rag_posfix.text import titled_text

SIZES = (5, 10)
IsGold = Callable[[Document], bool]
COLUMNS = {
    "questions": "{name} ({questions})", "second searches": "{searches}", "passages added": "{added}",
    "one search, 5": "{one_5}", "two, 5": "{two_5}", "one search, 10": "{one_10}", "two, 10": "{two_10}",
}  # fmt: skip
"""Of the table: numbers of questions all of whose passages are among the first 5 or 10."""


class Case(NamedTuple):
    """A question of a set, and what its passages are."""

    name: str
    question: str
    golds: Sequence[IsGold]


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = study_options("second_step", __doc__)
    parser.add_argument("--hotpotqa", type=Path, default=None, help="rows of HotpotQA; None leaves that set out")
    parser.add_argument("--folder", type=Path, default=None, help="keep the indexes here; later runs read them again")
    return parser.parse_args(arguments)


def cases_of_files(files: Path) -> Iterator[Case]:
    """Yield the questions of the gate over the files of both of its sets and those that need two."""

    def holds(text: str, file: str) -> IsGold:
        def is_gold(passage: Document) -> bool:
            content = titled_text(passage.metadata.get("title"), passage.page_content)
            return text in content and str(passage.metadata.get("source")).endswith(file)

        return is_gold

    questions = load_questions(TWO_FILES)
    for name, half in (("two files, seen", "choose"), ("two files, unseen", "report")):
        for each in half_of(questions, cast(Any, half)):
            yield Case(name, each.question, [holds(each.bridge, ""), holds(each.evidence, each.gold)])
    for questions_of, root in ((OWN_FILES, files / OWN_FILES), ("questions", files)):
        gate = Gate(cast(Pipeline, None), root, ())
        for each in load_questions(questions_of):
            if each.answers and each.gold and not (each.history or each.filter or each.kind == "lists"):
                yield Case("one file", each.question, [partial(gate.is_right, each)])


def hotpotqa(path: Path) -> tuple[list[Document], list[Case]]:
    """Return the paragraphs of all rows, each once, and the questions."""
    paragraphs: dict[str, Document] = {}
    cases = []
    for example in load_examples(path):
        golds = [titled_text(gold.metadata.get("title"), gold.page_content) for gold in example.gold]
        cases.append(Case("HotpotQA", example.question, [_is_text(text) for text in golds]))
        for document in example.documents(10):
            text = titled_text(document.metadata.get("title"), document.page_content)
            paragraphs.setdefault(text, document.model_copy(update={"id": f"paragraph-{len(paragraphs)}"}))
    return list(paragraphs.values()), cases


def _is_text(text: str) -> IsGold:
    return lambda passage: titled_text(passage.metadata.get("title"), passage.page_content) == text


def measure(retriever: Retriever, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return a row for each question: whether all of its passages are found, by searches and number of passages."""
    rows = []
    for case in cases:
        hits = {k: retriever.retrieve(case.question, k) for k in SIZES}
        step = second_step(case.question, SearchQuery(case.question), hits[SIZES[0]][0])
        linked = [] if step is None else step.linked(retrieve_query(retriever, step.query, SEARCHED, None))
        row: dict[str, Any] = {
            "name": case.name, "question": case.question, "searches": int(step is not None),
            "added": int(bool(linked)),
        }  # fmt: skip
        for k, found in hits.items():
            for name, passages in (("one", found), ("two", with_linked(found, linked, k) if linked else found)):
                row[f"{name}_{k}"] = int(all(any(map(is_gold, passages)) for is_gold in case.golds))
        rows.append(row)
    return rows


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the sums of each set."""
    sums = []
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        counted = [key for key in own[0] if key not in ("name", "question")]
        sums.append({"name": name, "questions": len(own), **{key: sum(row[key] for row in own) for key in counted}})
    return sums


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = options(arguments)
    settings = Settings()
    embeddings = build_embeddings(settings)
    with tempfile.TemporaryDirectory() as name:
        folder = (chosen.folder or Path(name)).resolve()
        if not (folder / "files").exists():
            write_files(folder / "files", TWO_FILES)
        update_index([folder / "files"], folder / "index", embeddings, strict=False)
        retriever = open_retriever(settings, folder / "index", embeddings)[0]
        rows = measure(retriever, list(cases_of_files(folder / "files")))
        if chosen.hotpotqa is not None:
            paragraphs, cases = hotpotqa(chosen.hotpotqa)
            if not (folder / "hotpotqa").exists():
                store = FaissVectorStore(embeddings)
                store.add_documents(paragraphs)
                store.save(folder / "hotpotqa", bm25=BM25Retriever.from_documents(paragraphs).statistics())
            rows += measure(open_retriever(settings, folder / "hotpotqa", embeddings)[0], cases)
    summary = summarize(rows)
    tables = {"second-step": filled(COLUMNS, summary)}
    print(table([{"kind": "second-step", "tables": tables}]))
    write_study(chosen, "second-step", summary, rows, settings={"embeddings": settings.embedding_model}, tables=tables)


if __name__ == "__main__":
    main()
