"""Fails below the floor of coverage and lists the files below it: ``coverage_floor.py build/coverage.json``.

slipcover writes the file. The share is that of lines and branches together.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FLOOR = 90.0
"""Per cent of lines and branches, of all files together."""


def below(coverage: dict[str, Any], floor: float) -> list[tuple[float, str]]:
    """Return the files below the floor with their shares, the worst first."""
    shares = [(file["summary"]["percent_covered"], name) for name, file in coverage["files"].items()]
    return sorted(share for share in shares if share[0] < floor)


def main() -> int:
    coverage = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    total = coverage["summary"]["percent_covered"]
    print(f"coverage {total:.1f} %, floor {FLOOR:.0f} %")
    if total >= FLOOR:
        return 0
    print("\n".join(f"{share:5.1f} % {name}" for share, name in below(coverage, FLOOR)))
    return 1


if __name__ == "__main__":
    sys.exit(main())
