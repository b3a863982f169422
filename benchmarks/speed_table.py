"""Prints bench records as a Markdown table: python -m benchmarks.speed_table RECORD...

Times to the first token are told as how many times faster than the unmodified model, speeds as how many times its
tokens per second; of several records, such as those of a curve, each method has a row per record.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FASTER = {
    "ttft_cold_ratio": "cold",
    "ttft_warm_memory_ratio": "warm, memory",
    "ttft_warm_disk_ratio": "warm, disk",
    "ttft_warm_redis_ratio": "warm, Redis",
}
AS_IS = {"decode_ratio": "decode", "together_ratio": "together", "memory_ratio": "peak memory"}


def rows_of(records: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the header, the line under it, and a row for each method of each record."""
    found = [(record["summary"], name, ratios) for record in records for name, ratios in methods_of(record)]
    used = {key for _, _, ratios in found for key, value in ratios.items() if value is not None}
    keys = [key for key in (*FASTER, *AS_IS) if key in used]
    yield ["method", "passages", *({**FASTER, **AS_IS}[key] for key in keys)]
    yield ["---"] * (len(keys) + 2)
    for summary, name, ratios in found:
        size = f"{summary['documents']} x {summary['tokens_per_document']}"
        yield [f"`{name}`", size, *(cell(key, ratios.get(key)) for key in keys)]


def methods_of(record: Mapping[str, Any]) -> list[tuple[str, Mapping[str, float | None]]]:
    """Return the methods of a record in its order."""
    return list(record["summary"]["methods"].items())


def cell(key: str, ratio: float | None) -> str:
    """Return a ratio as it is read: 1/25 of the time is 25x."""
    if ratio is None:
        return "-"
    if key not in FASTER:
        return f"{ratio:.2f}"
    faster = 1 / ratio
    return f"{faster:.0f}x" if faster >= 10 else f"{faster:.2f}x" if faster < 2 else f"{faster:.1f}x"


def main() -> None:
    """Print the table of the records that are named."""
    records = [json.loads(Path(path).read_text("utf-8")) for path in sys.argv[1:]]
    for row in rows_of(records):
        sys.stdout.write(f"| {' | '.join(row)} |\n")


if __name__ == "__main__":
    main()
