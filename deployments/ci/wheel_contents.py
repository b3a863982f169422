"""Checks that a wheel holds every file of both packages and nothing else: ``wheel_contents.py WHEEL``.

Package data (profiles, passages of the demo, ``py.typed``) is easily lost: a file that is missing is found only where
it is read. Bytecode is left out.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (ROOT / "rag_posfix", ROOT / "services" / "rag_posfix_api")


def differences(wheel: Path) -> tuple[set[str], set[str]]:
    """Return the files that are missing in the wheel, and those that should not be there."""
    expected = {
        path.relative_to(package.parent).as_posix()
        for package in PACKAGES
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".pyo")
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}
    return expected - held, held - expected


def main() -> int:
    """Print what differs and return the exit code."""
    if len(sys.argv) != 2:
        print("usage: python deployments/ci/wheel_contents.py WHEEL", file=sys.stderr)
        return 2
    missing, strange = differences(Path(sys.argv[1]))
    for name in sorted(missing):
        print(f"error: the wheel lacks {name}", file=sys.stderr)
    for name in sorted(strange):
        print(f"error: the wheel holds {name}, which is in neither package", file=sys.stderr)
    return 1 if missing or strange else 0


if __name__ == "__main__":
    sys.exit(main())
