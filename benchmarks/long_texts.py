"""What 8 MB in one field of a request cost the service, beyond the same request with a short text.

    python -m benchmarks.long_texts [--characters 8000000] [--text words|run|lines|spaces|ideographs]

The service is a process of its own with the tokenizer of SmolLM2, MiniLM for index, collections and reranking, and a
generator that writes without weights: reading a prompt costs the same for all that fit. Each line has the growth of
the process at its peak in MB and its seconds of CPU, beyond those of the short text, the status, and the field.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2

ROOT = Path(__file__).parents[1]

TEXTS: Final = {
    "words": "The bridge of Arvo was built in 1911. ",
    "run": "a",
    "lines": "x\n",
    "spaces": " ",
    "ideographs": "桥",
    "headings": "# a\n",
    "numbered": "",
}
"""What long texts repeat: each was the most expensive one for some tokenizer, pattern or encoding.

No two sentences of ``numbered`` are equal, so that a collection embeds each of its passages.
"""

_QUESTION = "When was the bridge of Arvo built?"
_DOCUMENT = "The bridge of Arvo was built in 1911."
_MESSAGES = [{"role": "user", "content": _QUESTION}]
_EARLIER = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
_EARLIER += [{"role": "assistant", "content": "Arvo."}, *_MESSAGES]
_OBJECTS = [{"id": "a", "title": "Arvo", "text": _DOCUMENT}]
_SHORT: Final = {"max_tokens": 4}
_METADATA: Final = {"metadata": {"source": "a.txt", "authors": ["Ada"]}}

BODIES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("/v1/chat/completions", {"messages": _EARLIER, "documents": _OBJECTS, "stop": "END", "user": "u", **_SHORT}),
    ("/v1/chat/completions", {"messages": _MESSAGES, **_SHORT}),  # retrieves
    ("/v1/completions", {"model": "default", "prompt": _QUESTION, "suffix": None, **_SHORT}),
    ("/v1/responses", {"input": _QUESTION, "instructions": "Be brief.", "max_output_tokens": 16}),
    ("/v1/messages", {"model": "default", "messages": _MESSAGES, "system": "Be brief.", **_SHORT}),
    ("/v1/messages/count_tokens", {"model": "default", "messages": _MESSAGES, "system": "Be brief."}),
    ("/v2/chat", {"model": "default", "messages": _MESSAGES, "documents": _OBJECTS, **_SHORT}),
    ("/api/chat", {"model": "default", "messages": _MESSAGES, "stream": False, "options": {"num_predict": 4}}),
    ("/api/generate", {"model": "default", "prompt": _QUESTION, "system": "Be brief.", "stream": False}),
    ("/v1/embeddings", {"input": [_QUESTION, _DOCUMENT], "model": "default"}),
    ("/api/embed", {"input": [_QUESTION, _DOCUMENT], "model": "default"}),
    ("/v1/rerank", {"query": _QUESTION, "documents": [_DOCUMENT, "Another one."]}),
    ("/v2/rerank", {"model": "default", "query": _QUESTION, "documents": [_DOCUMENT, "Another one."]}),
    ("/rerank", {"query": _QUESTION, "texts": [_DOCUMENT, "Another one."]}),
    ("/v1/score", {"text_1": _QUESTION, "text_2": [_DOCUMENT, "Another one."]}),
    ("/score", {"text_1": _QUESTION, "text_2": [_DOCUMENT, "Another one."]}),
    ("/api/show", {"model": "default"}),
    ("/admin/keys", {"tenant": "acme", "name": "a"}),
    ("/v1/collections", {"name": "other"}),
    ("/v1/collections/notes/documents", {"documents": [{"id": "b", "title": "Arvo", "text": _DOCUMENT, **_METADATA}]}),
    ("/v1/collections/notes/search", {"query": _QUESTION, "k": 1, "filter": {"source": "a.txt"}}),
    ("/v1/collections/notes/precompute", {"mitigation": "parallel_encoding"}),
    ("/v1/posfix/attention", {"question": _QUESTION, "documents": [_DOCUMENT, "Another one."]}),
    ("/v1/evaluate/order", {"question": _QUESTION, "documents": [_DOCUMENT, "Another one."], **_SHORT}),
)
"""A request with short texts for each route that reads text."""

MAX_SECONDS, MAX_MEGABYTES = 1.0, 100
"""Beyond those of a short text."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one long text cost: status, growth in MB and seconds of CPU, beyond those of a short text."""

    path: str
    field: str
    status: int
    megabytes: float
    seconds: float


def main() -> None:
    """Print the costs; with ``--serve`` be the service."""
    parser = argparse.ArgumentParser(prog="benchmarks.long_texts", description=__doc__.splitlines()[0])
    parser.add_argument("--characters", type=int, default=8_000_000, help="as UTF-8 bytes")
    parser.add_argument("--text", action="append", choices=TEXTS, help="repeatable; default: all")
    parser.add_argument("--path", action="append", help="a route; repeatable; default: all")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        _serve(options.serve)
        return
    with tempfile.TemporaryDirectory() as folder, service(Path(folder)) as (url, pid):
        for path, body in BODIES:
            for name in options.text or TEXTS if path in (options.path or [path]) else ():
                for cost in measure(url, pid, path, body, long_text(name, options.characters)):
                    numbers = f"{cost.megabytes:7.0f} MB {cost.seconds:6.2f} s  {cost.status}"
                    print(f"{numbers}  {name:10} {path} {cost.field}", flush=True)


def long_text(name: str, size: int) -> str:
    """Return a text that takes ``size`` bytes of JSON."""
    if name == "numbered":
        sentences = (f"Bridge {number:07d} of Arvo was built in 1911." for number in range(size // 43))
        return " ".join(sentences)
    unit = TEXTS[name]
    return unit * (size // len(json.dumps(unit, ensure_ascii=False).encode()[1:-1]))


def measure(url: str, pid: int, path: str, body: Mapping[str, Any], text: str) -> Iterator[Cost]:
    """Yield the cost of ``text`` in each field of the body in turn: of three attempts, where one exceeds the bound.

    Other programs on the processor's cores lengthen an attempt, and nothing shortens it.
    """
    with httpx2.Client(base_url=url, timeout=300) as client:
        _, megabytes, seconds = min(_send(client, pid, path, body) for _ in range(3))
        for field, long in _lengthened(body, text):
            attempts = [_send(client, pid, path, long)]
            while len(attempts) < 3 and attempts[-1][2] - seconds >= MAX_SECONDS:
                attempts.append(_send(client, pid, path, long))
            status, more_megabytes, more_seconds = min(attempts, key=lambda attempt: attempt[2])
            yield Cost(path, field, status, more_megabytes - megabytes, more_seconds - seconds)


def _send(client: httpx2.Client, pid: int, path: str, body: Any) -> tuple[int, float, float]:
    """Return the status, by how many MB the process grew at its peak, and the seconds of the whole response."""
    content = json.dumps(body, ensure_ascii=False).encode()
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
    before, started = _kilobytes(pid, "VmRSS"), cpu_seconds(pid)
    response = client.post(path, content=content, headers={"content-type": "application/json"})
    return response.status_code, (_kilobytes(pid, "VmHWM") - before) / 1000, cpu_seconds(pid) - started


def cpu_seconds(pid: int) -> float:
    """Return the seconds that all threads of a process have worked: other programs do not add to them."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _kilobytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _lengthened(body: Any, text: str) -> Iterator[tuple[str, Any]]:
    """Yield a copy of the body for each text in it, with ``text`` in its place; and the path of the field."""
    if isinstance(body, str):
        yield "", text
    entries = enumerate(body) if isinstance(body, list) else body.items() if isinstance(body, dict) else ()
    for key, value in entries:
        for field, long in _lengthened(value, text):
            copy = list(body) if isinstance(body, list) else dict(body)
            copy[key] = long
            yield f"{key}.{field}".rstrip("."), copy


@contextmanager
def service(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the address of the service and the id of its process, which ends with the block."""
    command = [sys.executable, "-m", "benchmarks.long_texts", "--serve", str(folder)]
    # Freed memory goes back at once, so that each peak is that of its own request.
    malloc = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment = {**os.environ, **malloc}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            httpx2.post(f"{url}/v1/collections", json={"name": "notes"}, timeout=60).raise_for_status()
            documents = [{"id": "a", "text": _DOCUMENT}]
            added = httpx2.post(f"{url}/v1/collections/notes/documents", json={"documents": documents}, timeout=60)
            added.raise_for_status()
            yield url, process.pid
        finally:
            process.kill()


def _serve(folder: Path) -> None:
    from rag_posfix.assembly.assembler import Assembler
    from rag_posfix.generation.fake import FakeGenerator
    from rag_posfix.pipeline.build import build_embeddings, build_tokenizer
    from rag_posfix.pipeline.pipeline import Pipeline
    from rag_posfix.reranking.embedding import EmbeddingReranker
    from rag_posfix.retrieval.base import PassageRetriever
    from rag_posfix.retrieval.faiss_store import FaissVectorStore
    from rag_posfix.settings import Settings
    from tests.support.serving import serving

    settings = Settings()
    encoder, embeddings = build_tokenizer(settings), build_embeddings(settings)
    store = FaissVectorStore.from_texts([_DOCUMENT, "Another one."], embeddings)
    pipeline = Pipeline(
        FakeGenerator(encoder, 8192),
        Assembler(encoder, 8192),
        retriever=PassageRetriever(store=store),
        reranker=EmbeddingReranker(embeddings=embeddings),
        embeddings=embeddings,
    )
    with serving(pipeline, data_dir=folder) as url:
        print(url, flush=True)
        time.sleep(24 * 3600)


if __name__ == "__main__":
    main()
