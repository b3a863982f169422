"""An OpenAI server in a process of its own that can be killed. Its answers are a function of the prompt."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from tests.support.upstream import Reply, as_json, judging, streamed, upstream, whole

ROOT = Path(__file__).resolve().parents[2]
_QUESTION = re.compile(r"When did station (\d+) begin")
_FIRST = re.compile(r"Station (\d+) began")


class EngineProcess:
    """``with EngineProcess() as engine: ...``; ``start`` after ``kill`` takes the same port again."""

    def __init__(self) -> None:
        self.url = ""
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> EngineProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        port = self.url.partition("127.0.0.1:")[2].partition("/")[0] or "0"
        command = [sys.executable, "-m", "tests.support.engine_process", port]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        assert self.url, "the engine did not start"

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def seen(self) -> list[int]:
        """Return the first station of each prompt that this process was sent, in order."""
        request = urllib.request.Request(self.url + "/seen", b"{}", {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return list(json.load(response)["seen"])


def main() -> None:
    """Serve on the port of the first argument until the standard input ends."""
    seen: list[int] = []

    def answer(body: dict[str, Any]) -> Reply:
        if "messages" not in body:
            return as_json({"seen": seen})
        content = body["messages"][-1]["content"]
        asked, first = _QUESTION.search(content), _FIRST.search(content)
        if first is not None:
            seen.append(int(first[1]))
        # The station that is asked about, if a passage says when it began.
        found = re.search(rf"Station {asked[1]} began in \d+ beside the river", content) if asked else None
        if body.get("logprobs"):
            yes, no = (-0.1, -3.0) if found else (-3.0, -0.1)
            return as_json(judging("Yes", {"Yes": yes, "No": no}))
        text = found[0] if found else "unknown"
        return streamed(text) if body["stream"] else whole(text)

    with upstream(answer, port=int(sys.argv[1])) as server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
