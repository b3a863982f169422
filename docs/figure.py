"""Draws the pictures of docs/images from records of ``eval positions``, ``probe``, ``lab`` and of trainings.

The same record gives the same text, so that ``make docs`` can tell whether a picture is stale.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.keep_record import RESULTS
from docs.charts import NAMES, charts
from docs.first_screen import draw_first_screen
from docs.themes import themed
from rag_posfix.evaluation.figures import (
    OTHER_COLORS,
    captioned,
    draw_positions,
    finish_axes,
    new_column,
    svg_of,
    whiskers,
)
from rag_posfix.evaluation.record import read_head
from rag_posfix.lab.contextual_maps import CAPTION, draw_maps
from rag_posfix.lab.experiment import draw_laboratory
from rag_posfix.lab.probing import PROBES, Probe
from rag_posfix.lab.tasks import TASKS as TASK_TYPES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABORATORY = Path(__file__).with_name("laboratory.md")
TASKS = {"litm": "Lost in the Middle, 10 passages", "key_value": "key-value retrieval, 16 passages"}
RESULTS_PAGE = Path(__file__).with_name("results.md")


def pictures(results: Path = RESULTS) -> dict[str, str]:
    """Return the text of each picture by its name in docs/images."""
    drawn = {
        "positions.svg": curve(results / "positions-litm-10-default.json", "Lost-in-the-Middle questions"),
        "first-screen.svg": draw_first_screen(results),
        "fine-tuning.svg": svg_of(draw_fine_tuning(read_head(results / "fine-tuning.json"))),
        **{
            f"{name}.svg": svg_of(captioned(probe.draw(head), probe.caption)) for name, probe, head in _probed(results)
        },
        **{f"{name}.svg": svg_of(figure) for name, figure in _laboratory(results)},
        **dict(charts(RESULTS_PAGE, results)),
    }
    return {name: themed(svg) for name, svg in drawn.items()}


def draw_fine_tuning(head: Mapping[str, Any]) -> Figure:
    """Return the log-probability of the plain model at each measured place, before and after each training.

    Whiskers are the 95 % interval of the paired difference to the model before training.
    """
    summary = head["summary"]
    figure, column = new_column(len(TASKS), 3.1)
    for axes, (task, title) in zip(column, TASKS.items(), strict=True):
        for number, (model, tasks) in enumerate(summary["models"].items()):
            values = {int(place): scores["log_probability"] for place, scores in tasks[task]["none"].items()}
            gains = summary["gains"].get(model, {}).get(task, {}).get("none", {})
            ends = [gains[str(place)]["ci95"] if gains else (0.0, 0.0) for place in values]
            before = [scores["log_probability"] for scores in summary["models"]["before"][task]["none"].values()]
            points = [
                {"value": value, "ci95": [first + low, first + high]}
                for value, first, (low, high) in zip(values.values(), before, ends, strict=True)
            ]
            style = {"fmt": "o-", "markersize": 4, "capsize": 3 if gains else 0, "color": OTHER_COLORS[number]}
            at = [place + 0.12 * number for place in values]
            axes.errorbar(at, list(values.values()), yerr=whiskers(points), label=model, **style)
        axes.set_xticks(list(values))
        title += f", {head['settings']['questions']} questions\n95 % intervals of the difference to before"
        finish_axes(axes, title, "place of the gold passage, from 0", "log-probability\nper token", columns=4)
    return figure


def _laboratory(results: Path) -> Iterator[tuple[str, Figure]]:
    """Yield the name and the picture of each record of the laboratory that its page shows."""
    for name in dict.fromkeys(re.findall(r"\(images/(lab-[\w-]+)\.svg\)", LABORATORY.read_text("utf-8"))):
        head = read_head(results / f"{name}.json")
        if head["kind"] == "lab-maps":
            yield name, captioned(draw_maps(head), CAPTION)
        else:
            yield name, captioned(draw_laboratory(head), TASK_TYPES.get(head["task"]["name"]).caption)


def _probed(results: Path) -> Iterator[tuple[str, Probe, dict[str, Any]]]:
    """Yield the name, the probe and the head of each record of a probe that needs no data, of any model."""
    for name, cls in PROBES.items():
        for path in sorted(results.glob(f"probe-{name}*.json")):
            yield path.stem, cls(), read_head(path)


def curve(record: Path, data_name: str) -> str:
    """Return the curves of the unmodified model and of the default method, as SVG.

    Args:
        record: The head of a record of ``eval positions``.
        data_name: What the questions are called in the title.
    """
    head = read_head(record)
    methods = {name: result for name, result in head["summary"]["mitigations"].items() if name in NAMES}
    head = {**head, "summary": {**head["summary"], "mitigations": methods}}
    title = f"{head['model']}, {head['summary']['n']} {data_name}"
    return svg_of(draw_positions(head, title=title, names=NAMES, size=(7.2, 3.4)))
