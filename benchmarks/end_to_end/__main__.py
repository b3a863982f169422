"""The end-to-end gate: from raw files to answers, by three arrangements and with the right passages alone.

    python -m benchmarks.end_to_end [--out DIR] [--questions NAME] [--limit N] [--k 5] [--arrangement NAME ...]
        [--json]
    python -m benchmarks.end_to_end --questions own_files --kind faq --half report --model qwen2.5-coder-0.5b

60 files of many kinds and languages are written and indexed, and 125 questions are asked: 90 that the files answer,
30 off topic, 5 whose only answer a filter leaves out. ``retrieved`` is the right passage among the first ``k``,
``lost`` a question whose right passage was retrieved and not read, ``citation_precision`` the share of
citations that name a passage with the answer. ``--questions unseen`` asks 15 other questions that the files answer and
15 others off topic; they were written before anything was measured on them, and nothing was chosen on them.

``--questions own_files`` asks 250 questions of nine kinds about 19 other files as people have them: FAQs, titled
files, short questions, lists and comparisons, follow-ups, off topic, with three hostile documents beside what was
retrieved, and with documents that do not answer. Settings are chosen on the half ``choose`` and reported on the half
``report``. The arrangement ``shipped`` names nothing, so the model gets its default. Below the floors of a reader
(``gate.FLOORS``) the command fails.

``--questions two_files`` asks 40 questions whose answer is in a file that only a name in another file leads to, among
all files of both sets. The half ``report`` was written after the rule was made.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.files import OWN_FILES, SHIPPED, TWO_FILES, half_of, load_questions, write_files
from benchmarks.end_to_end.gate import ARRANGEMENTS, GOLD_ALONE, Gate, below_floors, summarize
from benchmarks.study import study_options
from benchmarks.tables import table
from rag_posfix.evaluation.record import environment, write_record
from rag_posfix.generation.batching.scheduler import BatchingGenerator
from rag_posfix.generation.load import DEMO_MODEL
from rag_posfix.pipeline.build import build_embeddings, build_engine, build_pipeline
from rag_posfix.process import limit_openmp_spinning
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.indexing import update_index
from rag_posfix.settings import Settings


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = study_options("end_to_end", __doc__)
    parser.add_argument("--questions", choices=("questions", "unseen", OWN_FILES, TWO_FILES), default="questions")
    parser.add_argument("--kind", action="append", help="ask questions of this kind only; repeatable")
    parser.add_argument(
        "--half", choices=("choose", "report"), default=None, help="ask one half of the questions only"
    )
    parser.add_argument("--model", default=DEMO_MODEL, help="the reader")
    parser.add_argument("--limit", type=int, default=None, help="ask every n-th question only, about this many")
    parser.add_argument("--k", type=int, default=None, help="passages per question; 5, of own files 10")
    parser.add_argument("--threads", type=int, default=8, help="questions at the same time")
    names = ", ".join((*ARRANGEMENTS, SHIPPED, GOLD_ALONE))
    parser.add_argument("--arrangement", action="append", help=f"{names}, or RERANKER/ORDER/METHOD; repeatable")
    parser.add_argument("--name", default="end-to-end", help="name of the record")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser.parse_args(arguments)


def measure(chosen: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return head and rows of the record."""
    settings = Settings(
        model=chosen.model, reranker_deadline_seconds=600
    )  # on a slow machine a judge that gives up would change results
    files, index = folder / "files", folder / "index"
    started = time.perf_counter()
    written = write_files(files, chosen.questions)
    embeddings = build_embeddings(settings)
    update_index([files], index, embeddings, strict=False)
    indexing = time.perf_counter() - started
    passages = FaissVectorStore.load(index, embeddings).documents()
    questions = load_questions(chosen.questions)
    if chosen.half is not None:
        questions = half_of(questions, chosen.half)
    if chosen.kind:
        questions = [question for question in questions if question.kind in chosen.kind]
    questions = questions[:: max(1, len(questions) // (chosen.limit or len(questions)))]
    batching = BatchingGenerator(build_engine(settings), max_running=chosen.threads)
    with closing(build_pipeline(settings, index=index, generator=batching)) as pipeline:
        own = chosen.questions in (OWN_FILES, TWO_FILES)
        k = chosen.k or (settings.k if own else 5)
        gate = Gate(pipeline, files, passages, k=k)
        arrangements = chosen.arrangement or ([SHIPPED] if own else [*ARRANGEMENTS, GOLD_ALONE])
        rows = gate.run(questions, arrangements, threads=chosen.threads, progress=lambda line: print(line, flush=True))
    head = {
        "kind": "end-to-end", **environment(), "model": settings.model, "embedding_model": settings.embedding_model,
        "questions": chosen.questions, "half": chosen.half, "kinds": chosen.kind, "k": k, "files": len(written),
        "passages": len(passages),
        "seconds": {"index": indexing, "all": time.perf_counter() - started}, "summary": summarize(rows),
    }  # fmt: skip
    return head, [asdict(row) for row in rows]


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = options(arguments)
    limit_openmp_spinning()
    with tempfile.TemporaryDirectory() as folder:
        head, rows = measure(chosen, Path(folder).resolve())
    if chosen.out is not None:
        write_record(chosen.out, chosen.name, head, rows)
    print(
        json.dumps(head["summary"], indent=2)
        if chosen.json
        else table([head], "own-files" if chosen.questions in (OWN_FILES, TWO_FILES) else None)
    )
    shipped = head["summary"].get(SHIPPED)
    if chosen.questions == OWN_FILES and shipped and (lines := below_floors(chosen.model, shipped)):
        raise SystemExit("\n".join(lines))


if __name__ == "__main__":
    main()
