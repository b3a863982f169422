"""Draws the pictures of docs/images from records of ``eval positions``, ``probe``, ``lab`` and of trainings.

The same record gives the same text, so that ``make docs`` can tell whether a picture is stale.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.keep_record import RESULTS
from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.evaluation.figures import OTHER_COLORS, draw_positions, new_row, svg_of
from rag_posfix.evaluation.record import read_head
from rag_posfix.laboratory.contextual_maps import draw_maps
from rag_posfix.laboratory.experiment import draw_laboratory
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.probing import PROBES, Probe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT = MethodSpec("context_experts", MITIGATIONS.presets("context_experts")["default"]).label
LABORATORY = Path(__file__).with_name("laboratory.md")
TASKS = {"litm": "Lost in the Middle, 10 passages", "key_value": "key-value retrieval, 16 passages"}
NAMES = {"none": "unmodified model", DEFAULT: "rag_posfix (default)"}


def pictures(results: Path = RESULTS) -> dict[str, str]:
    """Return the text of each picture by its name in docs/images."""
    return {
        "positions.svg": curve(results / "positions-litm-10-default.json", "Lost-in-the-Middle questions"),
        "first-screen.svg": curve(
            results / "positions-xquad-5-default.json", "XQuAD questions", (5.2, 3.6), bounds=False
        ),
        "fine-tuning.svg": svg_of(draw_fine_tuning(read_head(results / "fine-tuning.json"))),
        **{f"probe-{name}.svg": svg_of(probe.draw(head)) for name, probe, head in _probed(results)},
        **{f"{name}.svg": svg_of(figure) for name, figure in _laboratory(results)},
    }


def draw_fine_tuning(head: Mapping[str, Any]) -> Figure:
    """Return the log-probability of the plain model by place, before and after each training."""
    figure, row = new_row(len(TASKS), (8.4, 3.6))
    for axes, (task, title) in zip(row, TASKS.items(), strict=True):
        for number, (model, found) in enumerate(head["summary"]["models"].items()):
            scores = [one["log_probability"] for one in found[task]["none"].values()]
            axes.plot(range(len(scores)), scores, marker="o", color=OTHER_COLORS[number], label=model)
        axes.set_xticks(range(3), ("first", "middle", "last"))
        axes.set_xlabel("place of the gold passage")
        axes.set_title(title, fontsize=10, loc="left")
    row[0].set_ylabel("log-probability per token")
    handles, labels = row[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    return figure


def _laboratory(results: Path) -> Iterator[tuple[str, Figure]]:
    """Yield the name and the picture of each record of the laboratory that its page shows."""
    for name in dict.fromkeys(re.findall(r"\(images/(lab-[\w-]+)\.svg\)", LABORATORY.read_text("utf-8"))):
        head = read_head(results / f"{name}.json")
        yield name, draw_maps(head) if head["kind"] == "lab-maps" else draw_laboratory(head)


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
