"""Draws the pictures of docs/images from records of ``rag-posfix eval positions`` and ``rag-posfix probe``.

The same record gives the same text, so that ``make docs`` can tell whether a picture is stale.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.keep_record import RESULTS
from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.evaluation.answers.pictures import draw_positions
from rag_posfix.evaluation.figures import svg_of
from rag_posfix.evaluation.record import read_head
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.probing import PROBES, Probe

DEFAULT = MethodSpec("context_experts", MITIGATIONS.presets("context_experts")["default"]).label
NAMES = {"none": "unmodified model", DEFAULT: "rag_posfix (default)"}


def pictures(results: Path = RESULTS) -> dict[str, str]:
    """Return the text of each picture by its name in docs/images."""
    return {
        "positions.svg": curve(results / "positions-litm-10-default.json", "Lost-in-the-Middle questions"),
        "first-screen.svg": curve(
            results / "positions-xquad-5-default.json", "XQuAD questions", (5.2, 3.6), bounds=False
        ),
        **{f"probe-{name}.svg": svg_of(probe.draw(head)) for name, probe, head in _probed(results)},
    }


def _probed(results: Path) -> Iterator[tuple[str, Probe, dict[str, Any]]]:
    """Yield each probe that needs no data and has a record, with the record's head."""
    for name, cls in PROBES.items():
        path = results / f"probe-{name}.json"
        if path.exists():
            yield name, cls(), read_head(path)


def curve(record: Path, data_name: str, size: tuple[float, float] = (7.2, 3.4), *, bounds: bool = True) -> str:
    """Return the curves of the unmodified model and of the default method, as SVG.

    Args:
        record: The head of a record of ``eval positions``.
        data_name: What the questions are called in the title.
        size: Width and height in inches.
        bounds: Draw the gold passage alone and the model without passages too.
    """
    head = read_head(record)
    methods = {name: found for name, found in head["summary"]["mitigations"].items() if name in NAMES}
    head = {**head, "summary": {**head["summary"], "mitigations": methods}}
    title = f"{head['model']}, {head['summary']['n']} {data_name}"
    return svg_of(draw_positions(head, title=title, names=NAMES, size=size, bounds=bounds))
