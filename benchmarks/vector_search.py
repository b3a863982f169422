"""The vector store at a million documents: build, save, load and search, and how many neighbours the graph misses.

    OMP_NUM_THREADS=2 python -m benchmarks.vector_search --out DIR [--vectors 50000]

Vectors are random unit vectors in clusters of about a hundred: a centre on the sphere and noise of ``--noise`` times
its length, from a seed; questions are drawn the same way. They are as hard as their dimension, which text embeddings
are not: those lie near fewer dimensions. Documents are short, with metadata to filter by.

Searches go through ``FaissVectorStore.similarity_search_by_vector``, one question at a time, documents and exact
scores included, each way of loading in a process of its own. Recall is the share of the ten nearest, found by
comparing with all vectors, that is returned. Seconds are by the clock; those of the processor stand beside them, for
machines that do other things too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from rag_posfix.evaluation.record import environment, write_record
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.index import vector_index

CHUNK = 50_000
K = 10
GROUPS = 1000
FILTERS: dict[str, Any] = {"none": None, "a thousandth": {"group": 7}, "a half": {"half": 1}}
LOADS: dict[str, dict[str, Any]] = {
    "memory": {},
    "mapped": {"mmap": True},
    "mapped, hashes not compared": {"mmap": True, "verify": False},
}

Rows = NDArray[np.float32]


class NoModel(Embeddings):
    """Stands for the model whose vectors these might be."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:  # noqa: D102
        raise NotImplementedError

    def embed_query(self, text: str) -> list[float]:  # noqa: D102
        raise NotImplementedError


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vectors", type=int, default=1_000_000)
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--noise", type=float, default=0.75, help="length of the noise beside a centre of length 1")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--filtered", type=int, default=100, help="of the questions, how many are asked with filters")
    parser.add_argument("--kind", default="auto", choices=("auto", "flat", "hnsw"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="folder for the record")
    return parser.parse_args(arguments)


def centres(given: argparse.Namespace) -> Rows:
    random = np.random.default_rng([given.seed, 0])
    return _unit(random.standard_normal((max(1, given.vectors // 100), given.dimension), dtype=np.float32))


def around(middle: Rows, count: int, noise: float, seed: Sequence[int]) -> Rows:
    random = np.random.default_rng(seed)
    chosen = middle[random.integers(0, len(middle), count)]
    spread = random.standard_normal(chosen.shape, dtype=np.float32) * np.float32(noise / chosen.shape[1] ** 0.5)
    return _unit(chosen + spread)


def _unit(rows: Rows) -> Rows:
    unit: Rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit


def chunks(given: argparse.Namespace) -> Iterator[tuple[int, Rows]]:
    """Yield the vectors, with the number of the first of each chunk; the same ones every time."""
    middle = centres(given)
    for start in range(0, given.vectors, CHUNK):
        yield start, around(middle, min(CHUNK, given.vectors - start), given.noise, [given.seed, 1, start])


def questions(given: argparse.Namespace) -> Rows:
    return around(centres(given), given.questions, given.noise, [given.seed, 2])


def document(number: int) -> Document:
    metadata = {"group": number % GROUPS, "half": number % 2}
    return Document(id=f"{number:08}", page_content=f"passage {number}", metadata=metadata)


def build(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Build and save, in a process of its own: what it takes of memory is then that of building."""
    store = FaissVectorStore(NoModel(), kind=given.kind)
    wall = processor = 0.0
    for start, rows in chunks(given):
        documents = [document(start + row) for row in range(len(rows))]
        at, used = time.perf_counter(), time.process_time()
        store.add_vectors(documents, rows)
        wall, processor = wall + time.perf_counter() - at, processor + time.process_time() - used
        print(f"{len(store)} of {given.vectors} in {wall:.0f} s", file=sys.stderr)
    at = time.perf_counter()
    manifest = store.save(folder)
    return {
        "build_s": wall,
        "build_processor_s": processor,
        "save_s": time.perf_counter() - at,
        "bytes": {role: file.bytes for role, file in manifest.files.items()},
        "peak_memory_bytes": peak_memory(),
    }


def search(given: argparse.Namespace, folder: Path, how: str) -> dict[str, Any]:
    """Load and search, in a process of its own."""
    asked = questions(given).tolist()
    before = resident_memory()
    at = time.perf_counter()
    store = FaissVectorStore.load(folder, NoModel(), **LOADS[how])
    found: dict[str, Any] = {"load_s": time.perf_counter() - at, "load_memory_bytes": resident_memory() - before}
    at = time.perf_counter()
    store.similarity_search_by_vector(asked[0], K)
    found["first_question_ms"] = 1e3 * (time.perf_counter() - at)
    ids: list[list[str]] = []
    for name, chosen in FILTERS.items():
        part = asked if chosen is None else asked[: given.filtered]
        if chosen is not None:
            store.similarity_search_by_vector(asked[0], K, filter=chosen)  # the first reads the metadata of all
        times, used = [], time.process_time()
        for question in part:
            at = time.perf_counter()
            got = store.similarity_search_by_vector(question, K, filter=chosen)
            times.append(1e3 * (time.perf_counter() - at))
            if chosen is None:
                ids.append([str(one.id) for one in got])
        cuts = statistics.quantiles(times, n=100)
        found[f"filter: {name}"] = {
            "p50_ms": cuts[49],
            "p95_ms": cuts[94],
            "mean_processor_ms": 1e3 * (time.process_time() - used) / len(part),
        }
    found["memory_bytes"] = resident_memory() - before
    found["ids"] = ids
    return found


def nearest(given: argparse.Namespace) -> list[set[str]]:
    """Return the ids of the ten nearest of each question, by comparing with all vectors."""
    asked = questions(given)
    best = np.full((len(asked), K), -np.inf, dtype=np.float32)
    names = np.zeros((len(asked), K), dtype=np.int64)
    for start, rows in chunks(given):
        scores = np.concatenate([best, asked @ rows.T], axis=1)
        numbers = np.concatenate(
            [names, np.broadcast_to(np.arange(start, start + len(rows)), (len(asked), len(rows)))], 1
        )
        top = np.argpartition(-scores, K, axis=1)[:, :K]
        best, names = np.take_along_axis(scores, top, axis=1), np.take_along_axis(numbers, top, axis=1)
    return [{f"{number:08}" for number in row} for row in names.tolist()]


def resident_memory() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_memory() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def apart(function: Any, *arguments: Any) -> Any:
    """Return what a function returns in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def main() -> None:
    given = options()
    load = {"before": os.getloadavg()}
    with tempfile.TemporaryDirectory(prefix="vector-search-") as scratch:
        folder = Path(scratch) / "index"
        summary: dict[str, Any] = {"build": apart(build, given, folder), "search": {}}
        exact = nearest(given)
        for how in LOADS:
            found = apart(search, given, folder, how)
            hits = [len(wanted & set(got)) for wanted, got in zip(exact, found.pop("ids"), strict=True)]
            summary["search"][how] = {"recall_at_10": sum(hits) / (K * len(hits)), **found}
            print(how, summary["search"][how], file=sys.stderr)
    load["after"] = os.getloadavg()
    record = {
        "kind": "vector-search",
        **environment(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "load_average": load,
        "settings": {name: value for name, value in vars(given).items() if name != "out"},
        "index": {
            "graph_from": vector_index.GRAPH_FROM,
            "M": vector_index.NEIGHBOURS,
            "efConstruction": vector_index.BUILD_WIDTH,
            "efSearch": vector_index.SEARCH_WIDTH,
        },
        "summary": summary,
    }
    if given.out is not None:
        print(write_record(given.out, "vector-search", record))


if __name__ == "__main__":
    main()
