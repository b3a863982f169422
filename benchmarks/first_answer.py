"""Minutes to the first answer of three new users: ``python -m benchmarks.first_answer [--out RECORD.json]``.

Each has an environment, a home folder and a cache of their own, all empty: an engineer who runs the first snippet of
the README, a researcher who measures a model with ``examples/own_data.py``, and a person at a terminal who indexes a
file and asks. Every step is a command that the documentation prints; its seconds include downloads. Versions are those
of constraints.txt, torch first, as ``make`` installs them.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rag_posfix.evaluation.record import save_record

ROOT = Path(__file__).resolve().parents[1]
FETCH = ["rag-posfix", "models", "fetch"]


def snippet() -> str:
    """Return the first Python program of the README."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    if found is None:
        raise SystemExit("README.md has no Python program")
    return found[1]


def users() -> dict[str, tuple[str, list[list[str]]]]:
    """Return of each user what is installed, and the commands up to the first answer."""
    own_data = str(ROOT / "examples" / "own_data.py")
    question = "Which extra does the HTTP service need?"
    index = [["rag-posfix", "index", str(ROOT / "README.md"), "--out", "my.index"]]
    return {
        "engineer": (".[local]", [FETCH, ["python", "-c", snippet()]]),
        "researcher": (".[local,eval]", [FETCH, ["python", own_data]]),
        "terminal": (".[local]", [FETCH, *index, ["rag-posfix", "ask", "--index", "my.index", question]]),
    }


def steps(folder: Path, extra: str, commands: list[list[str]]) -> Iterator[tuple[str, float]]:
    """Run the steps of a user, and yield name and seconds of each.

    Raises:
        SystemExit: a step failed; its output is printed.
    """
    environment = folder / "venv"
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    torch = next(line for line in (ROOT / "constraints.txt").read_text().split("\n") if line.startswith("torch=="))
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "RAG_POSFIX"))}
    variables |= {
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PIP_NO_CACHE_DIR": "1",
        "HF_HUB_OFFLINE": "1",
    }
    pip = ["python", "-m", "pip", "install", "--quiet", *constraints]
    yield "environment", timed([sys.executable, "-m", "venv", str(environment)], folder, variables)
    yield (
        f"pip install '{extra}'",
        (
            timed([*pip, torch], folder, variables)
            + timed([*pip, f"{ROOT}{extra.removeprefix('.')}"], folder, variables)
        ),
    )
    for command in commands:
        shown = " ".join(command[:3] if command[0] == "rag-posfix" and command[1] == "models" else command[:2])
        yield shown.replace(f"{ROOT}/", ""), timed(command, folder, variables)


def timed(command: list[str], folder: Path, variables: Mapping[str, str]) -> float:
    """Return the seconds of a command."""
    started = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:3])} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - started


def main(arguments: list[str]) -> None:
    """Print the seconds of every step, and the minutes to the answer."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_answer", description=__doc__)
    parser.add_argument("--out", type=Path, help="the record to write; default: none")
    output = parser.parse_args(arguments).out
    summary: dict[str, dict[str, object]] = {}
    for user, (extra, commands) in users().items():
        with tempfile.TemporaryDirectory() as folder:
            seconds = dict(steps(Path(folder), extra, commands))
        minutes = sum(seconds.values()) / 60
        summary[user] = {"seconds": {name: round(one, 1) for name, one in seconds.items()}, "minutes": minutes}
        told = ", ".join(f"{name} {one:.0f} s" for name, one in seconds.items())
        sys.stdout.write(f"{user}: {minutes:.1f} minutes to the first answer ({told})\n")
        sys.stdout.flush()
    if output is not None:
        machine = {
            "machine": platform.machine(),
            "processor_count": os.cpu_count(),
            "python": platform.python_version(),
        }
        save_record(output, {"kind": "first-answer", **machine, "summary": summary})


if __name__ == "__main__":
    main(sys.argv[1:])
