"""Runs the steps of a target of the Dockerfile in a plain virtual environment, without a container engine.

    python deployments/ci/image_steps.py cpu             # list the steps
    python deployments/ci/image_steps.py cpu --run DIR   # run them in DIR, which must be empty

COPY copies into the folder. ENV and RUN run as written, with /app and /build below DIR, without cache mounts. Steps of
the final image change the system (users, folders of the root); they are not run. ``python`` on the PATH makes the
environments.

``UV_TORCH_BACKEND`` is not set if the environment has UV_FIND_LINKS: then torch comes from there.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deployments" / "docker" / "Dockerfile"
FOLDERS = ("/app", "/build")
"""Folders of the image that stand below the folder of the run."""


@dataclass(frozen=True)
class Step:
    """One instruction: its stage, its name in capitals, and its text without line continuations."""

    stage: str
    instruction: str
    text: str


def read_steps(dockerfile: str) -> list[Step]:
    """Return the instructions of a Dockerfile in order. ``stage`` is empty before the first FROM."""
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    logical = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    steps: list[Step] = []
    stage = ""
    for line in filter(str.strip, logical):
        instruction, _, text = line.strip().partition(" ")
        if instruction.upper() == "FROM":
            stage = text.split()[-1]
        steps.append(Step(stage, instruction.upper(), re.sub(r"\s+", " ", text.strip())))
    return steps


def stages_of(target: str, steps: Sequence[Step]) -> list[str]:
    """Return the stages that make the environment of ``target``, the first one first.

    Raises:
        SystemExit: no stage has this name.
    """
    parents = {step.stage: step.text.split()[0] for step in steps if step.instruction == "FROM"}
    if target not in parents:
        raise SystemExit(f"error: the Dockerfile has no target {target!r}; it has {', '.join(parents)}")
    chain = [target]
    while chain[0] in parents:
        chain.insert(0, parents[chain[0]])
    return chain[1:]


def steps_of(target: str, steps: Sequence[Step]) -> list[Step]:
    """Return the steps that fill /app of ``target``: those of the stage that it copies /app from."""
    stages_of(target, steps)
    sources = [
        match.group(1)
        for step in steps
        if step.stage == target and (match := re.fullmatch(r"--from=(\S+) /app /app", step.text))
    ]
    if len(sources) != 1:
        raise SystemExit(f"error: the target {target!r} must copy /app from one stage, it copies from {sources}")
    chain = stages_of(sources[0], steps)
    return [step for name in chain for step in steps if step.stage == name and step.instruction != "FROM"]


def command_of(step: Step) -> str:
    """Return the shell command of a RUN step, without its mounts."""
    return re.sub(r"--mount=\S+ ", "", step.text)


def variables_of(step: Step) -> Iterator[tuple[str, str]]:
    """Yield the variables of an ENV step."""
    for assignment in step.text.split():
        name, _, value = assignment.partition("=")
        yield name, value


def below(folder: Path, text: str) -> str:
    """Return ``text`` with the folders of the image below ``folder``."""
    for name in FOLDERS:
        text = re.sub(rf"(?<![\w/]){name}(?![\w-])", f"{folder}{name}", text)
    return text


def run(steps: Sequence[Step], folder: Path) -> None:
    """Run the steps in ``folder``.

    Raises:
        SystemExit: the folder is not empty, or a step failed.
    """
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"error: {folder} must be empty")
    build = folder / "build"
    build.mkdir(parents=True)
    environment = dict(os.environ)
    for step in steps:
        if step.instruction == "ENV":
            values = {name: below(folder, value) for name, value in variables_of(step)}
            environment |= {name: Template(value).safe_substitute(environment) for name, value in values.items()}
            if "UV_FIND_LINKS" in environment:
                environment.pop("UV_TORCH_BACKEND", None)
        elif step.instruction == "COPY" and not step.text.startswith("--from="):
            *sources, _ = step.text.split()
            for source in sources:
                copy(ROOT / source, build / Path(source).name)
        elif step.instruction == "RUN":
            command = below(folder, command_of(step))
            print(f"+ {command}", file=sys.stderr, flush=True)
            done = subprocess.run(["/bin/sh", "-c", command], cwd=build, env=environment, check=False)
            if done.returncode:
                raise SystemExit(f"error: exit code {done.returncode} of: {command}")


def copy(source: Path, target: Path) -> None:
    """Copy a file or a folder, without bytecode."""
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.py[cod]"))
    else:
        shutil.copy(source, target)


def main(arguments: Sequence[str] | None = None) -> int:
    """List or run the steps of a target."""
    parser = argparse.ArgumentParser(description="Run the steps of a target of the Dockerfile without a container.")
    parser.add_argument("target", help="cpu, cuda or ray")
    parser.add_argument("--run", metavar="DIR", type=Path, help="run the steps in this empty folder")
    options = parser.parse_args(arguments)
    steps = steps_of(options.target, read_steps(DOCKERFILE.read_text("utf-8")))
    if options.run is not None:
        run(steps, options.run.resolve())
        return 0
    for step in steps:
        print(step.instruction, step.text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
