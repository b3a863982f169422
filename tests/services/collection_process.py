"""Processes that work on collections: a server that is killed, and a writer among others.

Run as ``python -m tests.services.collection_process serve FOLDER`` or ``... write FOLDER PREFIX COUNT``.
"""

import sys
from pathlib import Path

from langchain_core.documents import Document

from rag_posfix.settings import Settings
from rag_posfix_api.collections.store import Collections
from rag_posfix_api.server import bind, make_server
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.serving import limits
from tests.support.tenants import pipeline_with_embeddings


def serve(folder: Path) -> None:
    """Serve on a free port, which stdout says."""
    listener = bind("127.0.0.1", 0)
    server = make_server(Settings(), limits(data_dir=folder), pipeline_with_embeddings())
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    server.run(sockets=[listener])


def write(folder: Path, prefix: str, count: int) -> None:
    """Add so many documents to the collection ``shared``, one after the other, when stdin says so."""
    collection = Collections(folder, 10, 10_000).get("acme", "shared", LetterEmbeddings(), lambda removed: None)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    for number in range(count):
        collection.put([Document(id=f"{prefix}{number}", page_content=f"{prefix} {number}")])
        collection.put([Document(id="both", page_content=f"{prefix} {number}")])


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(Path(sys.argv[2]))
    else:
        write(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
