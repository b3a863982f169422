"""Writes the small sets of other languages as rows of questions with passages, for ``rag-posfix eval positions``.

    python -m benchmarks.language_sets OUT

Reads ``tests/data/languages``: ten questions of our own in French, Korean and Chinese. The gold passage is that of the
question, the distractors are those of the other questions. OUT gets a file for each language.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

SETS = Path(__file__).parents[1] / "tests" / "data" / "languages"


def rows_of(path: Path) -> list[dict[str, object]]:
    """Return a row for each question: ``question``, ``answers``, and the passages of the file as ``ctxs``."""
    sets = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [
        {
            "question": row["question"],
            "answers": [row["answer"]],
            "ctxs": [{"title": "", "text": each["text"], "isgold": each["id"] == row["id"]} for each in sets],
        }
        for row in sets
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    out = Path((arguments or sys.argv[1:])[0])
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(SETS.glob("*.jsonl")):
        lines = [json.dumps(row, ensure_ascii=False) for row in rows_of(path)]
        (out / path.name).write_text("\n".join(lines) + "\n", "utf-8")
        print(out / path.name, len(lines))


if __name__ == "__main__":
    main()
