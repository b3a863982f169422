"""Prepares a release: ``set VERSION`` writes the version, ``check`` says what is missing, ``notes`` and ``tag``.

The version is one place, ``__version__`` in rag_posfix/__init__.py. What else shows it (the chart, tags of images) is
written from there. Nothing is published. ``make release`` runs the steps in order.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path("rag_posfix/__init__.py")
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
_NUMBER = r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?"
SHOWN = {
    Path("deployments/helm/rag-posfix/Chart.yaml"): rf'(?m)^(?:version: |appVersion: ")({_NUMBER})"?$',
    Path("deployments/helm/values/gpu.yaml"): rf"tag: ({_NUMBER})-cuda",
    Path("deployments/compose/compose.yaml"): rf"RAG_POSFIX_TAG:-({_NUMBER})",
    Path("deployments/compose/gpu.yaml"): rf"RAG_POSFIX_TAG=({_NUMBER})-cuda",
    Path("deployments/compose/.env.example"): rf"RAG_POSFIX_TAG=({_NUMBER})",
    Path("deployments/docker/Dockerfile"): rf"rag-posfix:({_NUMBER})",
    Path("docs/deployment.md"): rf"rag-posfix:({_NUMBER})",
}
"""Files that show the version, and where."""
UNRELEASED = "## [Unreleased]"
DOCKERFILE = Path("deployments/docker/Dockerfile")
_BASE_IMAGE = re.compile(r"(?m)^(?:ARG \w+_IMAGE=|FROM (?!\$))(\S+)")
_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")


class ReleaseError(Exception):
    """The release cannot be made; the message says what is missing and what to do."""


def version(root: Path = ROOT) -> str:
    """Return the version in ``rag_posfix/__init__.py``."""
    found = _VERSION.search((root / SOURCE).read_text("utf-8"))
    if found is None:
        raise ReleaseError(f'{SOURCE} has no line __version__ = "..."; add it')
    return found[1]


def set_version(new: str, root: Path = ROOT, today: datetime.date | None = None) -> None:
    """Write a version everywhere, and make a section of the changelog from its unreleased one.

    Raises:
        ReleaseError: the version is not a number such as 0.2.0 or 1.0.0rc1, or nothing is unreleased.
    """
    if not re.fullmatch(_NUMBER, new):
        raise ReleaseError(f"version={new} must be a number such as 0.2.0 or 1.0.0rc1")
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text("utf-8")
    if not section(text, UNRELEASED).strip():
        raise ReleaseError(f"CHANGELOG.md has nothing under {UNRELEASED}; say there what is new")
    date = today or datetime.datetime.now(datetime.UTC).date()
    changelog.write_text(text.replace(UNRELEASED, f"{UNRELEASED}\n\n## [{new}] - {date}", 1), "utf-8")
    source = root / SOURCE
    source.write_text(_VERSION.sub(f'__version__ = "{new}"', source.read_text("utf-8")), "utf-8")
    for path, pattern in SHOWN.items():
        page = (root / path).read_text("utf-8")
        page = re.sub(pattern, lambda shown: shown[0].replace(shown[1], new), page)
        (root / path).write_text(page, "utf-8")


def section(changelog: str, heading: str) -> str:
    """Return what is below a heading of the changelog, without it; empty if the heading is missing."""
    _, _, after = changelog.partition(f"{heading}")
    return re.split(r"(?m)^## ", after.partition("\n")[2])[0]


def notes(root: Path = ROOT) -> str:
    """Return the section of the changelog of the current version.

    Raises:
        ReleaseError: there is none, or it is empty.
    """
    current = version(root)
    text = section((root / "CHANGELOG.md").read_text("utf-8"), f"## [{current}]").strip()
    if not text:
        raise ReleaseError(
            f"CHANGELOG.md has no section ## [{current}]; run: python deployments/ci/release.py set {current}"
        )
    return text


def problems(root: Path = ROOT) -> list[str]:
    """Return what keeps the working tree from being released."""
    current = version(root)
    missing = []
    for path, pattern in SHOWN.items():
        shown = re.findall(pattern, (root / path).read_text("utf-8"))
        if set(shown) != {current}:
            missing.append(f"{path} shows {', '.join(sorted(set(shown))) or 'no version'} and not {current}")
    text = (root / DOCKERFILE).read_text("utf-8")
    stages = set(re.findall(r"(?m)^FROM \S+ AS (\S+)", text))
    missing += [
        f"{DOCKERFILE} names the image {image} without its digest; add @sha256:..."
        for image in sorted(set(_BASE_IMAGE.findall(text)) - stages)
        if not _DIGEST.search(image)
    ]
    try:
        notes(root)
    except ReleaseError as error:
        missing.append(str(error))
    if _git(root, "status", "--porcelain"):
        missing.append("the working tree has changes; commit them")
    if _git(root, "tag", "--list", f"v{current}"):
        missing.append(f"the tag v{current} exists; set a higher version")
    return missing


def tag(root: Path = ROOT) -> str:
    """Tag the current commit, in this copy only; return the name of the tag."""
    name = f"v{version(root)}"
    _git(
        root,
        "tag",
        "--annotate",
        name,
        "--message",
        f"rag_posfix {version(root)}\n\n{notes(root)}",
        "--cleanup=verbatim",
    )
    return name


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def main(arguments: list[str]) -> int:
    """Run one step; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("set", help="write a version everywhere").add_argument("version")
    for step, text in (
        ("check", "say what is missing"),
        ("notes", "print the section of the changelog"),
        ("tag", "tag the current commit in this copy"),
    ):
        steps.add_parser(step, help=text)
    chosen = parser.parse_args(arguments)
    try:
        if chosen.step == "set":
            set_version(chosen.version)
        elif chosen.step == "check":
            missing = problems()
            print("\n".join(missing) or f"{version()} can be released")
            return 1 if missing else 0
        else:
            print(notes() if chosen.step == "notes" else tag())
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
