"""Starts ``rag-posfix serve`` of the environment on the PATH, asks one question and stops it; needs no other package.

    python deployments/ci/ask_service.py [SECONDS]

SECONDS is how long the model may take to load (300). The exit code is 0 if the service became ready, answered and
ended with exit code 0 after SIGTERM; otherwise the reason and the log of the service go to stderr.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

COMMAND = ("rag-posfix", "serve", "--host", "127.0.0.1", "--port", "0")
STOP_SECONDS = 60.0
QUESTION = {
    "model": "default",
    "messages": [{"role": "user", "content": "When was the bridge of Arvo built?"}],
    "documents": [
        {"id": "bridge", "text": "The bridge of Arvo was built in 1911."},
        {"id": "harbour", "text": "The harbour of Arvo froze in 1963."},
    ],
    "max_tokens": 16,
}


class CheckError(Exception):
    """The service did not do what it should."""


class Running:
    """A service that was started, and its log."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._address: queue.Queue[str | None] = queue.Queue()
        # Read all the time: a full pipe would stop the service.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self.lines.append(line)
            if "listening on " in line:
                self._address.put(json.loads(line)["message"].removeprefix("listening on "))
        self._address.put(None)

    def address(self, seconds: float) -> str:
        """Return the URL of the service."""
        try:
            address = self._address.get(timeout=seconds)
        except queue.Empty:
            raise CheckError(f"the service did not listen within {seconds:g} s") from None
        if address is None:
            raise CheckError(f"the service ended with exit code {self.process.wait(STOP_SECONDS)} before it listened")
        return address

    def wait_until_ready(self, url: str, seconds: float) -> None:
        """Return once ``/readyz`` answers with 200."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise CheckError(f"the service ended with exit code {self.process.returncode} before it was ready")
            try:
                with urllib.request.urlopen(url + "/readyz", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise CheckError(f"the service was not ready within {seconds:g} s")

    def stop(self) -> None:
        """End the service and check its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise CheckError(f"the service did not end within {STOP_SECONDS:g} s of SIGTERM") from None
        if code:
            raise CheckError(f"the service ended with exit code {code} after SIGTERM")

    def close(self) -> None:
        """End the process if it still runs, and read its log to the end."""
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        if self.process.stderr is not None:
            self.process.stderr.close()


def ask(url: str) -> str:
    """Return the answer to one question with two documents."""
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(QUESTION).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        answer: str = json.load(response)["choices"][0]["message"]["content"]
    if not answer.strip():
        raise CheckError("the answer is empty")
    return answer


def check(command: Sequence[str] = COMMAND, seconds: float = 300.0) -> str:
    """Start the service, ask, stop it, and return the answer.

    Raises:
        CheckError: with the log of the service, if one of these failed.
    """
    service = Running(command)
    try:
        url = service.address(seconds)
        service.wait_until_ready(url, seconds)
        answer = ask(url)
        service.stop()
    except (CheckError, OSError) as error:
        service.close()
        raise CheckError(f"{error}; its log:\n{''.join(service.lines)}") from error
    service.close()
    return answer


def main() -> int:
    """Run the check and return the exit code."""
    try:
        answer = check(seconds=float(sys.argv[1]) if len(sys.argv) > 1 else 300.0)
    except CheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"question": QUESTION["messages"][0]["content"], "answer": answer}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
