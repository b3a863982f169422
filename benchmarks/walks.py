"""How many files and functions of the project a question, a request and a KV entry pass through.

    python -m benchmarks.walks [--out DIR]

Counted with ``sys.setprofile`` in every thread: a file counts where one of its functions was called. Start-up counts
for the command line, which starts a process per question, and not for the service.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx2
import torch

from benchmarks.study import study_options, write_study
from rag_posfix.caching.kv.store import EntryShape, KVCodec, PassageKV, PassageStore
from rag_posfix.caching.redis import RedisTier
from rag_posfix.cli.main import app
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.demo_data import load_passages, load_questions
from rag_posfix.generation.engine import Engine
from tests.support.number_encoder import NumberEncoder
from tests.support.redis_server import RedisServer
from tests.support.serving import CHAT, chat, make_pipeline, serving
from tests.support.tiny import loaded_model, toy_layout

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = tuple(str(ROOT / name) + "/" for name in ("rag_posfix", "services"))


class Walk:
    """The functions of the project that were called while it was on, until ``last`` was called."""

    def __init__(self, last: str = "") -> None:
        self.functions: set[tuple[str, str]] = set()
        self._last = last
        self._on = True

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call, as a profile function of ``sys``."""
        code = frame.f_code
        if self._on and event == "call" and code.co_filename.startswith(PACKAGES):
            self.functions.add((code.co_filename, code.co_qualname))
            self._on = code.co_qualname != self._last

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in this thread, and in threads that start meanwhile."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def summary(self) -> dict[str, int]:
        """Return how many files and functions were crossed."""
        return {"files": len({file for file, _ in self.functions}), "functions": len(self.functions)}


def ask_walk() -> Walk:
    """``rag-posfix ask`` to its first token, with the packaged model and an index of the demo corpus."""
    with tempfile.TemporaryDirectory() as folder:
        passages = Path(folder) / "passages.jsonl"
        passages.write_text("".join(json.dumps({"id": p.id, "text": p.page_content}) + "\n" for p in load_passages()))
        index = str(Path(folder) / "index")
        app(["index", str(passages), "--out", index], standalone_mode=False)
        walk = Walk(last="AnswerWriter.accept")
        question = load_questions()[0].question
        with walk.counting():
            app(
                ["ask", question, "--index", index, "--k", "3", "--max-tokens", "1", "--no-cache"],
                standalone_mode=False,
            )
    return walk


def chat_walk() -> Walk:
    """One chat request over HTTP, after one that warmed the service up; the model writes a fixed text."""
    walk = Walk()
    body = chat(documents=["The bridge of Arvo was built in 1911."])
    with walk.counting(), serving(make_pipeline()) as url, httpx2.Client(timeout=60) as client:
        client.post(url + CHAT, json=body).raise_for_status()
        walk.functions.clear()
        client.post(url + CHAT, json={**body, "seed": 1}).raise_for_status()
        functions = set(walk.functions)
    walk.functions = functions
    return walk


def kv_walks() -> dict[str, Walk]:
    """A KV entry into a real Redis and back, each through a store of its own."""
    shape = EntryShape(2, 2, 8, torch.float32, 5)
    entry = PassageKV(torch.zeros(shape.sizes))
    walks = {"KV write": Walk(), "KV read": Walk()}
    with RedisServer() as server:
        with walks["KV write"].counting(), closing(PassageStore([RedisTier(server.url, KVCodec())])) as store:
            store.put_many({"key": entry}, {"key": ()})
            store.flush()
        with walks["KV read"].counting(), closing(PassageStore([RedisTier(server.url, KVCodec())])) as store:
            if "key" not in store.get_many({"key": shape}):
                raise RuntimeError("the entry was not found again")
    return walks


def plan_walk() -> Walk:
    """From a plan to the first attention kernel, for a method that replaces attention."""
    encoder: Any = NumberEncoder
    engine = Engine(loaded_model(), encoder(), "tiny", "print")
    walk = Walk(last="hooked_attention")
    with walk.counting():
        engine.open(toy_layout(), MitigationChoice("sorted_inter_document"), 1)
    return walk


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = study_options("walks", __doc__)
    chosen = parser.parse_args(arguments)
    single: dict[str, Callable[[], Walk]] = {"question": ask_walk, "HTTP chat": chat_walk, "plan to kernel": plan_walk}
    walks = {**{name: walk() for name, walk in single.items()}, **kv_walks()}
    summary = {name: walk.summary() for name, walk in walks.items()}
    print(json.dumps(summary, indent=2))
    write_study(chosen, "walks", summary)
    return summary


if __name__ == "__main__":
    main()
