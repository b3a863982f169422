"""``rag-posfix serve`` and ``rag-posfix index`` on one folder: a new index is served without a restart."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from rag_posfix.files import default_cache_dir
from tests.support.redis_server import free_port
from tests.support.subprocesses import wait_until_ready
from tests.support.upstream import first_passage, streamed, upstream
from tests.support.waiting import wait_until
from tests.support.warm_python import WarmProcess, WarmPython

pytestmark = [pytest.mark.weights, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
BRIDGE = "The bridge of Arvo was built in 1911 by a company from Oslo."
ZEPPELIN = "The zeppelin of Arvo burned in its hangar in 1931."
BUILT, BURNED = "When was the bridge of Arvo built?", "When did the zeppelin of Arvo burn?"
KEY = {"authorization": "Bearer operator"}


def index_files(python: WarmPython, files: Path, index: Path) -> dict[str, Any]:
    command = ("-m", "rag_posfix.cli.main", "index", files, "--out", index, "--json")
    return json.loads(python.run(ROOT, *command, environment=variables()).splitlines()[-1])


def variables(**changes: object) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'services'}",
        "RAG_POSFIX_CACHE_DIR": str(default_cache_dir()),
        **{f"RAG_POSFIX_{name}": str(value) for name, value in changes.items()},
    }


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory, python: WarmPython) -> Path:
    """Two indexes: ``index`` has one passage, and ``newer``, an update of it, has one more."""
    folder = tmp_path_factory.mktemp("indexes")
    (folder / "files").mkdir()
    (folder / "files" / "bridge.md").write_text(BRIDGE)
    assert index_files(python, folder / "files", folder / "index")["passages"] == 1
    shutil.copytree(folder / "index", folder / "newer")
    (folder / "files" / "zeppelin.md").write_text(ZEPPELIN)
    assert index_files(python, folder / "files", folder / "newer")["added"] == 1
    return folder


class Served:
    """A running service over an index folder, in front of a scripted model."""

    def __init__(self, folder: Path, process: WarmProcess, url: str) -> None:
        self.folder, self.process, self.url = folder, process, url
        self.index = folder / "index"

    def ask(self, question: str, **fields: Any) -> dict[str, Any]:
        body = {"model": "default", "messages": [{"role": "user", "content": question}], **fields}
        response = httpx2.post(f"{self.url}/v1/chat/completions", json=body, headers=KEY, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    def cites(self, question: str, passage: str) -> bool:
        answer = self.ask(question)
        cited = {name for citation in answer["citations"] for name in citation["document_ids"]}
        return passage in [document["text"] for document in answer["documents"] if document["id"] in cited]

    def reload(self, headers: dict[str, str] = KEY) -> dict[str, Any]:
        response = httpx2.post(f"{self.url}/v1/admin/reload", headers=headers, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    def renew(self) -> None:
        """Replace the index by the newer one as ``rag-posfix index`` does: the manifest last, old files deleted."""
        old = [file for file in self.index.iterdir() if file.name != "manifest.json"]
        shutil.copytree(self.folder / "newer", self.index, ignore=lambda *_: ["manifest.json"], dirs_exist_ok=True)
        shutil.copy(self.folder / "newer" / "manifest.json", self.folder / "manifest.json")
        (self.folder / "manifest.json").rename(self.index / "manifest.json")
        for file in old:
            file.unlink()

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def deleted_files(self) -> list[str]:
        """The files of this index that are deleted and that the process has mapped."""
        maps = Path(f"/proc/{self.process.pid}/maps").read_text().splitlines()
        return [line for line in maps if str(self.index) in line and "(deleted)" in line]


@contextmanager
def serve(python: WarmPython, indexes: Path, folder: Path, *replies: Any, **changes: object) -> Iterator[Served]:
    shutil.copytree(indexes, folder, dirs_exist_ok=True)
    port = free_port()
    with upstream(*(replies or [first_passage])) as model:
        environment = variables(
            MODEL=model.model, MITIGATION="none", INDEX=folder / "index", SERVICE_PORT=port, **changes
        )
        command = ("-m", "rag_posfix.cli.main", "serve", "--log-format", "text")
        process = python.start(ROOT, *command, output=folder / "log", environment=environment)
        try:
            wait_until_ready(process, str(port), 300)
            yield Served(folder, process, f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            assert process.wait(60) == 0, (folder / "log").read_text()


UNATTENDED = {"SERVICE_INDEX_CHECK_SECONDS": 0, "SERVICE_API_KEY": "operator"}
"""Services that look at their folders only when they are told to."""


def test_the_service_follows_what_the_command_writes(python: WarmPython, indexes: Path, tmp_path: Path):
    with serve(python, indexes, tmp_path, SERVICE_INDEX_CHECK_SECONDS=0.2) as served:
        assert served.cites(BUILT, BRIDGE)
        assert not served.cites(BURNED, ZEPPELIN)
        assert index_files(python, served.folder / "files", served.index)["added"] == 1
        wait_until(lambda: served.cites(BURNED, ZEPPELIN))
        assert "2 passages" in served.log()
        wait_until(lambda: not served.deleted_files())
        refused = httpx2.post(f"{served.url}/v1/admin/reload", timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")


def test_a_signal_reloads_and_answers_from_other_passages_are_misses(
    python: WarmPython, indexes: Path, tmp_path: Path
):
    """The key of an answer has the content of its passages: an answer stays if all of them do."""
    all_passages = {"posfix": {"min_relevance": "off"}}
    with serve(python, indexes, tmp_path, RETRIEVER="hybrid", K=1, **UNATTENDED) as served:
        assert served.ask(BUILT)["cached"] is False
        assert served.ask(BURNED, **all_passages)["cached"] is False
        assert served.ask(BURNED, **all_passages)["cached"] is True
        served.renew()
        assert served.ask(BURNED, **all_passages)["cached"] is True, "nothing looks at the folder yet"
        served.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "2 passages" in served.log())
        answer = served.ask(BURNED, **all_passages)
        assert (answer["cached"], answer["documents"][0]["text"]) == (False, ZEPPELIN)
        assert served.cites(BURNED, ZEPPELIN)
        assert served.ask(BUILT)["cached"] is True
        for _ in range(3):  # nothing is new
            served.process.send_signal(signal.SIGHUP)
        assert served.reload()["indexes"][0]["reloaded"] is False
        assert served.log().count("2 passages") == 1
        wait_until(lambda: not served.deleted_files())


def test_a_request_reloads_while_a_stream_ends_on_the_version_that_it_began_with(
    python: WarmPython, indexes: Path, tmp_path: Path
):
    resume = threading.Event()
    slow = streamed(BRIDGE[:20], BRIDGE[20:], pause_before=2, resume=resume)
    replies = [first_passage, slow, first_passage]  # the first is for the question before readiness
    with serve(python, indexes, tmp_path, *replies, RETRIEVER="bm25", **UNATTENDED) as served:
        key = httpx2.post(f"{served.url}/admin/keys", json={"tenant": "acme"}, headers=KEY, timeout=60).json()["key"]
        for headers, status in ((None, 401), ({"authorization": f"Bearer {key}"}, 403)):
            assert httpx2.post(f"{served.url}/v1/admin/reload", headers=headers, timeout=60).status_code == status
        body = {"model": "default", "messages": [{"role": "user", "content": BUILT}], "stream": True}
        with httpx2.stream("POST", f"{served.url}/v1/chat/completions", json=body, headers=KEY, timeout=60) as stream:
            lines = stream.iter_lines()
            first = next(line for line in lines if BRIDGE[:20] in line)
            served.renew()
            (index,) = served.reload()["indexes"]
            assert (index["name"], index["passages"], index["reloaded"], index["error"]) == ("", 2, True, None)
            assert served.cites(BURNED, ZEPPELIN)
            assert not served.deleted_files(), "the passages of the stream are in its prompt"
            resume.set()
            pieces = [json.loads(line[6:]) for line in (first, *lines) if line.startswith("data: {")]
        text = "".join(choice["delta"].get("content") or "" for piece in pieces for choice in piece["choices"])
        assert text == BRIDGE
        (documents,) = [piece["documents"] for piece in pieces if piece.get("documents")]
        assert [document["text"] for document in documents] == [BRIDGE]


def test_a_damaged_index_leaves_the_old_one_until_one_comes_that_is_whole(
    python: WarmPython, indexes: Path, tmp_path: Path
):
    with serve(python, indexes, tmp_path, **UNATTENDED) as served:
        before = served.reload()["indexes"][0]["version"]
        damaged = served.folder / "damaged"
        shutil.copytree(served.folder / "newer", damaged)
        vectors = next(damaged.glob("vectors-*"))
        vectors.write_bytes(vectors.read_bytes()[:-1])
        served.index.rename(served.folder / "old")
        damaged.rename(served.index)
        (index,) = served.reload()["indexes"]
        assert (index["version"], index["reloaded"]) == (before, False)
        assert "is damaged" in index["error"]
        assert f"version {before} of 1 passages is: index" in served.log()
        ready = httpx2.get(f"{served.url}/readyz", timeout=60)
        assert ready.status_code == 200
        assert "the index cannot be renewed since" in ready.json()["detail"]
        assert str(served.folder) not in ready.text
        assert served.cites(BUILT, BRIDGE)
        shutil.rmtree(served.index)
        (served.folder / "old").rename(served.index)
        served.renew()
        assert _reloads_under_load(served) == [False, False, False, True]
        assert served.log().count("2 passages") == 1
        assert "detail" not in httpx2.get(f"{served.url}/readyz", timeout=60).json()
        assert served.cites(BURNED, ZEPPELIN)


def _reloads_under_load(served: Served) -> list[bool]:
    """Send four reloads at once while questions are asked, none of which may fail; return which of them switched."""
    stop = threading.Event()

    def ask_all_the_time() -> int:
        count = 0
        while not stop.is_set():
            served.ask(BUILT, cache=False)
            count += 1
        return count

    with ThreadPoolExecutor(6) as threads:
        asking = [threads.submit(ask_all_the_time) for _ in range(2)]
        reloads = [threads.submit(served.reload) for _ in range(4)]
        switched = sorted(reload.result(60)["indexes"][0]["reloaded"] for reload in reloads)
        stop.set()
        assert min(asked.result(60) for asked in asking) > 0
    return switched


def test_a_terminal_that_is_closed_ends_the_service(tmp_path: Path):
    """SIGHUP means that too; otherwise the service would go on unseen."""
    terminal, end = os.openpty()
    take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
    program = f"{take}; os.execv(sys.argv[1], sys.argv[1:])"
    serving = "from rag_posfix.settings import Settings; from rag_posfix_api.server import run\n"
    serving += "from tests.support.serving import make_pipeline; run(Settings(), port=0, pipeline=make_pipeline())"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", program, sys.executable, "-c", serving],
            cwd=ROOT, env=variables(), stdin=end, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        os.close(end)
        try:
            wait_until(lambda: "ready: " in (tmp_path / "log").read_text(), 120)
            process.send_signal(signal.SIGHUP)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2)
            os.close(terminal)
            assert process.wait(60) == 0
        finally:
            process.kill()
