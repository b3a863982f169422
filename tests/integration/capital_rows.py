"""Two questions about capitals with three passages each, in the format of Lost in the Middle."""

from __future__ import annotations

import json
from pathlib import Path

_CITIES = (("Ostrel", "Venna"), ("Maravel", "Tull"), ("Sorrin", "Korva"))


def write_capitals(folder: Path) -> Path:
    """Write the questions to a file in ``folder`` and return it."""
    rows = [
        {
            "question": f"what is the capital of {country}",
            "answers": [capital],
            "ctxs": [{"title": n, "text": f"{c} is the capital of {n}.", "isgold": n == country} for n, c in _CITIES],
        }
        for country, capital in _CITIES[:2]
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
