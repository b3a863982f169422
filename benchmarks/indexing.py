"""How fast passages are embedded and indexed: the model's own batches against those of ``rag-posfix index``, in turns.

python -m benchmarks.indexing FILES...
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from rag_posfix.pipeline.build import build_embeddings
from rag_posfix.retrieval.indexing import update_index
from rag_posfix.settings import Settings

ROUNDS = 2


def main(files: list[Path]) -> None:
    """Print passages per second of both, twice; the models are loaded before."""
    ways = {"model's own": False, "index": True}
    embeddings = {name: build_embeddings(Settings(), many=many) for name, many in ways.items()}
    for one in embeddings.values():
        one.embed_query("warm")
    for _ in range(ROUNDS):
        for name, one in embeddings.items():
            with tempfile.TemporaryDirectory() as folder:
                started = time.perf_counter()
                update = update_index(files, Path(folder) / "index", one)
                seconds = time.perf_counter() - started
            print(f"{name}: {update.added} passages, {update.added / seconds:.1f}/s")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
