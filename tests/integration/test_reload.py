"""``rag-posfix serve`` and ``rag-posfix index`` on one folder: a new index is served without a restart."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from rag_posfix.folders import default_cache_dir
from tests.support.redis_server import free_port
from tests.support.subprocesses import wait_until_ready
from tests.support.upstream import Upstream, first_passage, streamed, upstream
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.weights, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
BRIDGE = "The bridge of Arvo was built in 1911 by a company from Oslo."
ZEPPELIN = "The zeppelin of Arvo burned in its hangar in 1931."
BUILT, BURNED = "When was the bridge of Arvo built?", "When did the zeppelin of Arvo burn?"
KEY = {"authorization": "Bearer operator"}


def rag_posfix(*words: object) -> list[str]:
    return [sys.executable, "-m", "rag_posfix.cli.main", *map(str, words)]


def index_files(files: Path, index: Path) -> dict[str, Any]:
    command = rag_posfix("index", files, "--out", index, "--json")
    done = subprocess.run(command, cwd=ROOT, env=variables(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def variables(**changes: object) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'services'}",
        "RAG_POSFIX_CACHE_DIR": str(default_cache_dir()),
        **{f"RAG_POSFIX_{name}": str(value) for name, value in changes.items()},
    }


@pytest.fixture(scope="module")
def first_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files and their index."""
    folder = tmp_path_factory.mktemp("first")
    (folder / "files").mkdir()
    (folder / "files" / "bridge.md").write_text(BRIDGE)
    assert index_files(folder / "files", folder / "index")["passages"] == 1
    return folder


class Served:
    """A running service over an index folder, in front of a scripted model."""

    def __init__(self, folder: Path, model: Upstream, process: subprocess.Popen[str], url: str) -> None:
        self.folder, self.model, self.process, self.url = folder, model, process, url
        self.index = folder / "index"

    def ask(self, question: str, **fields: Any) -> dict[str, Any]:
        body = {"model": "default", "messages": [{"role": "user", "content": question}], **fields}
        response = httpx2.post(f"{self.url}/v1/chat/completions", json=body, headers=KEY, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    def cites(self, question: str, passage: str) -> bool:
        answer = self.ask(question)
        cited = {name for citation in answer["citations"] for name in citation["documents"]}
        return passage in [document["text"] for document in answer["documents"] if document["id"] in cited]

    def reload(self, headers: dict[str, str] = KEY) -> dict[str, Any]:
        response = httpx2.post(f"{self.url}/v1/admin/reload", headers=headers, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    def add_zeppelin(self) -> None:
        (self.folder / "files" / "zeppelin.md").write_text(ZEPPELIN)
        assert index_files(self.folder / "files", self.index)["added"] == 1

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def deleted_files(self) -> list[str]:
        """The files of this index that are deleted and that the process has mapped."""
        maps = Path(f"/proc/{self.process.pid}/maps").read_text().splitlines()
        return [line for line in maps if str(self.index) in line and "(deleted)" in line]


@contextmanager
def serve(first: Path, folder: Path, *replies: Any, **changes: object) -> Iterator[Served]:
    shutil.copytree(first, folder, dirs_exist_ok=True)
    port = free_port()
    with upstream(*(replies or [first_passage])) as model, (folder / "log").open("w") as log:
        environment = variables(
            MODEL=model.model, MITIGATION="none", INDEX=folder / "index", SERVICE_PORT=port, **changes
        )
        command = rag_posfix("serve", "--log-format", "text")
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, text=True)
        try:
            wait_until_ready(process, str(port))
            yield Served(folder, model, process, f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            assert process.wait(30) == 0, (folder / "log").read_text()


@pytest.mark.parametrize("retriever", ["dense", "bm25", "hybrid"])
def test_the_service_follows_its_index(first_index: Path, tmp_path: Path, retriever: str):
    looks = {"SERVICE_INDEX_CHECK_SECONDS": 0.2, "RETRIEVER": retriever}
    with serve(first_index, tmp_path, **looks) as served:
        assert served.cites(BUILT, BRIDGE)
        assert served.ask(BUILT)["cached"] is True
        assert not served.cites(BURNED, ZEPPELIN)
        served.add_zeppelin()
        wait_until(lambda: served.cites(BURNED, ZEPPELIN), 20)
        assert ZEPPELIN in served.ask(BURNED)["choices"][0]["message"]["content"]
        assert "2 passages" in served.log()
        wait_until(lambda: not served.deleted_files())


@pytest.fixture(scope="module")
def unattended(first_index: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Services with a key that look at their folders only when they are told to."""

    def start(*replies: Any, **changes: object) -> Any:
        folder = tmp_path_factory.mktemp("service")
        quiet = {"SERVICE_INDEX_CHECK_SECONDS": 0, "SERVICE_API_KEY": "operator", **changes}
        return serve(first_index, folder, *replies, **quiet)

    return start


def test_a_signal_reloads_and_the_answers_of_another_version_are_misses(unattended: Callable[..., Any]):
    """The key of an answer has the content of its passages: an answer stays if all of them do."""
    with unattended(K=1) as served:
        assert served.ask(BUILT)["cached"] is False
        assert served.ask(BURNED, posfix={"floor": "off"})["cached"] is False
        assert served.ask(BURNED, posfix={"floor": "off"})["cached"] is True
        served.add_zeppelin()
        assert served.ask(BURNED, posfix={"floor": "off"})["cached"] is True, "nothing looks at the folder yet"
        served.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "2 passages" in served.log())
        answer = served.ask(BURNED, posfix={"floor": "off"})
        assert (answer["cached"], answer["documents"][0]["text"]) == (False, ZEPPELIN)
        assert served.ask(BUILT)["cached"] is True
        for _ in range(3):  # nothing is new
            served.process.send_signal(signal.SIGHUP)
        assert served.reload()["indexes"][0]["reloaded"] is False
        assert served.log().count("2 passages") == 1


def test_a_request_reloads_while_a_stream_ends_on_the_version_that_it_began_with(unattended: Callable[..., Any]):
    resume = threading.Event()
    slow = streamed(BRIDGE[:20], BRIDGE[20:], pause_before=2, resume=resume)
    with unattended(first_passage, slow, first_passage) as served:
        body = {"model": "default", "messages": [{"role": "user", "content": BUILT}], "stream": True}
        with httpx2.stream("POST", f"{served.url}/v1/chat/completions", json=body, headers=KEY, timeout=60) as stream:
            lines = stream.iter_lines()
            first = next(line for line in lines if BRIDGE[:20] in line)
            (served.folder / "files" / "bridge.md").unlink()
            served.add_zeppelin()
            (index,) = served.reload()["indexes"]
            assert (index["name"], index["passages"], index["reloaded"], index["error"]) == ("", 1, True, None)
            assert served.cites(BURNED, ZEPPELIN)
            resume.set()
            pieces = [
                json.loads(line.removeprefix("data: ")) for line in (first, *lines) if line.startswith("data: {")
            ]
        text = "".join(choice["delta"].get("content") or "" for piece in pieces for choice in piece["choices"])
        assert text == BRIDGE
        documents = [document["text"] for piece in pieces for document in piece.get("documents", [])]
        assert documents == [BRIDGE]
        assert not served.cites(BUILT, BRIDGE)
        wait_until(lambda: not served.deleted_files())


def test_only_an_administrator_reloads(unattended: Callable[..., Any]):
    with unattended() as served:
        key = httpx2.post(f"{served.url}/admin/keys", json={"tenant": "acme"}, headers=KEY).json()["key"]
        for headers, status in ((None, 401), ({"authorization": f"Bearer {key}"}, 403), (KEY, 200)):
            assert httpx2.post(f"{served.url}/v1/admin/reload", headers=headers).status_code == status


def test_a_damaged_index_leaves_the_old_one_until_a_whole_one_comes(unattended: Callable[..., Any]):
    with unattended() as served:
        before = served.reload()["indexes"][0]["version"]
        new = served.folder / "new"
        shutil.copytree(served.index, new)
        vectors = next(new.glob("vectors-*"))
        vectors.write_bytes(vectors.read_bytes()[:-1])
        manifest = json.loads((new / "manifest.json").read_text())
        (new / "manifest.json").write_text(json.dumps({**manifest, "similarity": {"low": 0.1, "clear": 0.5}}))
        served.index.rename(served.folder / "old")
        new.rename(served.index)
        (index,) = served.reload()["indexes"]
        assert (index["version"], index["reloaded"]) == (before, False)
        assert "is damaged" in index["error"]
        assert f"version {before} of 1 passages is: index" in served.log()
        ready = httpx2.get(f"{served.url}/readyz")
        assert ready.status_code == 200
        assert "the index cannot be renewed since" in ready.json()["detail"]
        assert str(served.folder) not in ready.text
        assert served.cites(BUILT, BRIDGE)
        shutil.rmtree(served.index)
        (served.folder / "old").rename(served.index)
        served.add_zeppelin()
        assert served.reload()["indexes"][0]["reloaded"] is True
        assert "detail" not in httpx2.get(f"{served.url}/readyz").json()
        assert served.cites(BURNED, ZEPPELIN)


def test_two_requests_at_once_switch_once_and_questions_do_not_fail(unattended: Callable[..., Any]):
    with unattended() as served:
        served.add_zeppelin()
        stop = threading.Event()
        with ThreadPoolExecutor(6) as threads:

            def ask_all_the_time() -> int:
                count = 0
                while not stop.is_set():
                    served.ask(BUILT, cache=False)  # fails the test unless it is answered
                    count += 1
                return count

            asking = [threads.submit(ask_all_the_time) for _ in range(2)]
            reloads = [threads.submit(served.reload) for _ in range(4)]
            switched = sorted(reload.result(60)["indexes"][0]["reloaded"] for reload in reloads)
            stop.set()
            assert min(asked.result(60) for asked in asking) > 0
        assert switched == [False, False, False, True]
        assert served.log().count("2 passages") == 1


def test_a_terminal_that_is_closed_ends_the_service(first_index: Path, tmp_path: Path):
    """SIGHUP means that too; otherwise the service would go on unseen."""
    terminal, end = os.openpty()
    with upstream(first_passage) as model, (tmp_path / "log").open("w") as log:
        port = free_port()
        environment = variables(
            MODEL=model.model, MITIGATION="none", INDEX=first_index / "index", SERVICE_PORT=port, RETRIEVER="bm25"
        )
        take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
        program = f"{take}; os.execv(sys.argv[1], sys.argv[1:])"
        process = subprocess.Popen(
            [sys.executable, "-c", program, *rag_posfix("serve")],
            cwd=ROOT, env=environment, stdin=end, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        os.close(end)
        try:
            wait_until_ready(process, str(port))
            process.send_signal(signal.SIGHUP)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2)
            os.close(terminal)
            assert process.wait(30) == 0
        finally:
            process.kill()
