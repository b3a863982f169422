"""A Python that has imported the large packages once, and forks for each program that it is asked to run.

A start of torch, transformers and sentence-transformers costs seven seconds of a core, a fork some milliseconds. The
programs import the sources of their own folder: nothing of this repository is imported before the fork.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.waiting import wait_until

PROGRAM = """
import json, os, runpy, sys, warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import fastapi, sentence_transformers, torch, transformers.modeling_utils

for line in sys.stdin:
    asked = json.loads(line)
    if "ended" in asked:
        child, status = os.waitpid(asked["ended"], os.WNOHANG)
        print(os.waitstatus_to_exitcode(status) if child else "", flush=True)
        continue
    child = os.fork()
    if child:
        print(child, flush=True)
        continue
    nothing, file = os.open(os.devnull, os.O_RDONLY), os.open(asked["output"], os.O_WRONLY)
    os.dup2(nothing, 0), os.dup2(file, 1), os.dup2(file, 2)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.path[:0] = [asked["folder"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    kind, what, *sys.argv[1:] = asked["arguments"]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    break
"""


class WarmProcess:
    """A running program, with what tests need of ``subprocess.Popen``."""

    def __init__(self, python: WarmPython, pid: int) -> None:
        self._python = python
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        if self.returncode is None and (code := self._python.ask(ended=self.pid)):
            self.returncode = int(code)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the exit code; fail if the program runs longer."""
        wait_until(lambda: self.poll() is not None, timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmPython:
    """Runs ``-c`` and ``-m`` programs, each in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._folder = folder

    def ask(self, **asked: Any) -> str:
        """Return the line that the warm process answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()

    def start(
        self, folder: Path, *arguments: object, output: Path, environment: Mapping[str, str] | None = None
    ) -> WarmProcess:
        """Start a program in ``folder``; stdout and stderr go to the file ``output``.

        Sources are those of ``PYTHONPATH`` in ``environment``; without it, those of ``folder``. No coverage is
        measured: a test run inside of this one would write its own over that of the worker.
        """
        own = os.pathsep.join([str(folder), str(folder / "services")])
        variables = {**os.environ, "PYTHONPATH": own} if environment is None else dict(environment)
        variables = {name: value for name, value in variables.items() if not name.startswith("SLIPCOVER_")}
        words = [str(argument) for argument in arguments]
        output.write_text("")
        pid = self.ask(arguments=words, folder=str(folder), output=str(output), environment=variables)
        return WarmProcess(self, int(pid))

    def run(
        self, folder: Path, *arguments: object, environment: Mapping[str, str] | None = None, seconds: float = 280.0
    ) -> str:
        """Return what a program writes that runs in ``folder``; fail if it fails."""
        output = self._folder / "written"
        process = self.start(folder, *arguments, output=output, environment=environment)
        try:
            code = process.wait(seconds)
        finally:
            process.kill()
        written = output.read_text("utf-8")
        assert code == 0, written
        return written


@contextmanager
def warm_python(folder: Path) -> Iterator[WarmPython]:
    """Start it; ``folder`` is for what the programs write."""
    command = [sys.executable, "-P", "-c", PROGRAM]
    with subprocess.Popen(
        command, cwd=folder, env=dict(os.environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield WarmPython(process, folder)
        finally:
            process.kill()
