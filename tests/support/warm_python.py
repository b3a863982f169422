"""A Python that has imported torch and transformers once, and forks for each program that it is asked to run.

The programs import the sources of their own folder: nothing of this repository is imported before the fork.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = """
import json, os, runpy, sys
import torch, transformers.modeling_utils

for line in sys.stdin:
    arguments, folder, written = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    file = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1), os.dup2(file, 2)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(paths := [folder, os.path.join(folder, "services")])
    sys.path[:0] = paths
    kind, what, *sys.argv[1:] = arguments
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    break
"""


class WarmPython:
    """Runs ``-c`` and ``-m`` programs, each in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], written: Path) -> None:
        self._process = process
        self._written = written

    def run(self, folder: Path, *arguments: str) -> str:
        """Return what a program writes that runs in ``folder`` with its sources; fail if it fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([arguments, str(folder), str(self._written)]), file=self._process.stdin, flush=True)
        code, output = self._process.stdout.readline(), self._written.read_text("utf-8")
        assert code == "0\n", output
        return output


@contextmanager
def warm_python(folder: Path) -> Iterator[WarmPython]:
    """Start it; ``folder`` is for what the programs write."""
    command = [sys.executable, "-P", "-c", PROGRAM]
    with subprocess.Popen(
        command, cwd=folder, env=dict(os.environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield WarmPython(process, folder / "written")
        finally:
            process.kill()
