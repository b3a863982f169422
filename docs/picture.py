"""Draws what a method's plan does to a toy prompt: who sees whom, and which position each token has. SVG as text.

The picture is drawn from the plan itself, so it cannot say anything else than what runs. The same plan gives the same
text, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from docs.themes import themed
from rag_posfix.attention.masks import materialize, segment_ids
from rag_posfix.errors import RagPosfixError
from rag_posfix.mitigations import MITIGATIONS, create
from rag_posfix.plan.layout import Layout, Span
from rag_posfix.plan.plan import Capability, ModelShape, Plan, RowPlan

PREFIX, PASSAGES, SUFFIX = 2, (3, 4, 3), 3
RELEVANCE = (0.6, 0.9, 0.3)
MAX_ROWS = 4

# Okabe and Ito's colours, which the colour-blind can tell apart; prefix, passages 1 to 3, suffix.
COLOURS = ("#7f7f7f", "#e69f00", "#56b4e9", "#009e73", "#cc79a7")
NAMES = ("prefix", "passage 1", "passage 2", "passage 3", "suffix (question)")
INK, FAINT = "#222222", "#d9d9d9"

CELL, MARGIN, GAP, STRIP = 15, 18, 34, 7
LEFT = 30  # room for the axis and the strip left of a matrix
TITLE, PLOT = 40, 96
LEGEND_WIDTH, NARROWEST, LINE, LETTER = 128, 110, 18, 6.2


@dataclass(frozen=True)
class Panel:
    """One row of a plan: which segment each token belongs to, who sees whom (T, T), and positions (T,)."""

    title: str
    segments: tuple[int, ...]
    visible: Tensor
    positions: tuple[float, ...]

    @property
    def width(self) -> int:
        return LEFT + max(NARROWEST, CELL * len(self.segments))


def toy_layout() -> Layout:
    """Return a prompt of 15 tokens, 1 to 15, with three passages."""
    bounds = [0, PREFIX]
    for length in (*PASSAGES, SUFFIX):
        bounds.append(bounds[-1] + length)
    spans = [Span(start, stop) for start, stop in pairwise(bounds)]
    return Layout(
        token_ids=tuple(range(1, bounds[-1] + 1)), prefix=spans[0], passages=tuple(spans[1:-1]),
        texts=tuple(spans[1:-1]), suffix=spans[-1], question=Span(spans[-1].start, spans[-1].stop - 1),
        keys=("1", "2", "3"), relevance=RELEVANCE,
    )  # fmt: skip


def toy_plan(name: str) -> Plan | None:
    """Return the method's plan of the toy prompt, or None where it cannot be made without measuring a model first."""
    shape = ModelShape(
        n_layers=8,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        hidden_size=32,
        context_window=512,
        capabilities=frozenset(Capability),
    )
    for parameters in ({}, MITIGATIONS.get(name).example):
        try:
            return create(name, parameters).plan(toy_layout(), shape)
        except RagPosfixError:
            continue
    return None


def draw(name: str) -> str | None:
    """Return the picture of the method called ``name``, or None where there is no plan to draw."""
    plan = toy_plan(name)
    return None if plan is None else render(name, plan)


def render(name: str, plan: Plan) -> str:
    """Return the picture of a plan of the toy prompt."""
    panels = [_panel(row, i, len(plan.rows)) for i, row in enumerate(plan.rows[:MAX_ROWS])]
    notes = list(_notes(plan))
    tallest = max(CELL * len(panel.segments) for panel in panels)
    highest = max(max(panel.positions) for panel in panels)
    below = MARGIN + TITLE + tallest + PLOT + 38
    wide = sum(panel.width + GAP for panel in panels) + LEGEND_WIDTH
    width = 2 * MARGIN + max(wide, *(round(LETTER * len(note)) for note in notes), 0)
    height = below + LINE * len(notes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11" fill="{INK}" role="img">',
        f"<title>{escape(name)}: who sees whom, and positions</title>",
    ]
    x = MARGIN
    for panel in panels:
        parts += _draw_panel(panel, x, MARGIN)
        parts += _draw_positions(panel, x + LEFT, MARGIN + TITLE + tallest + 34, highest)
        x += panel.width + GAP
    parts += _draw_legend(x, MARGIN + TITLE)
    parts += [_text(MARGIN, below + LINE * i, note) for i, note in enumerate(notes)]
    return themed("\n".join([*parts, "</svg>", ""]))


def _panel(row: RowPlan, index: int, count: int) -> Panel:
    layout = toy_layout()
    seen = layout if row.passages is None else layout.select(row.passages)
    length = len(seen.token_ids)
    chosen = range(layout.n_passages) if row.passages is None else row.passages
    colours = [0, *(passage + 1 for passage in chosen), len(COLOURS) - 1]
    segments = tuple(colours[segment] for segment in segment_ids(seen, seen.passages).tolist())
    title = "" if count == 1 else f"row {index + 1} of {count}"
    return Panel(title, segments, _visible(row, length), _positions(row, length))


def _visible(row: RowPlan, length: int) -> Tensor:
    drawn: Callable[[int], Tensor | None] | None = getattr(row.attend, "visible", None)
    found = drawn(length) if drawn is not None else None
    if found is not None:
        return found
    if row.mask is not None:
        return materialize(row.mask, length, length)
    return torch.ones(length, length, dtype=torch.bool).tril()


def _positions(row: RowPlan, length: int) -> tuple[float, ...]:
    return tuple(range(length)) if row.positions is None else tuple(row.positions[0].tolist())


def _notes(plan: Plan) -> Iterator[str]:
    """Yield what a matrix and dots cannot show, in words."""
    if len(plan.rows) > MAX_ROWS:
        yield f"The plan has {len(plan.rows)} rows; the first {MAX_ROWS} are drawn."
    if plan.combine is not None:
        yield f"The next token is decided by all {len(plan.rows)} rows together."
    by_note: dict[str, list[int]] = {}
    for number, row in enumerate(plan.rows, start=1):
        for note in _row_notes(row):
            by_note.setdefault(note, []).append(number)
    for note, numbers in by_note.items():
        where = "" if len(numbers) == len(plan.rows) else f"Row {', '.join(map(str, numbers))}: "
        yield where + note


def _row_notes(row: RowPlan) -> Iterator[str]:
    if row.attend is not None:
        name = type(row.attend).__name__.strip("_")
        yield f"Attention among what is seen is computed by {name}{_where(row.attend)}, not by a plain softmax."
    if row.rope_base_factor is not None:
        yield f"The base of the rotary encoding is multiplied by {row.rope_base_factor:.3g}."
    if row.layer_scale is not None:
        low, high = float(row.layer_scale.min()), float(row.layer_scale.max())
        yield f"Positions are divided by {low:.3g} to {high:.3g}, depending on the layer."
    if row.head_scale is not None:
        yield "Positions are divided by another number in each head, decided when the prompt has been read."
    if row.hidden_scale is not None:
        scale = row.hidden_scale
        yield f"For queries and keys hidden channel {scale.channel} is scaled by {scale.factor:.3g}{_where(scale)}."


def _where(holder: Any) -> str:
    layers = holder.layers
    return "" if layers is None else f" in layers {layers.start} to {layers.stop - 1}"


def _draw_panel(panel: Panel, x: int, y: int) -> Iterator[str]:
    left, top = x + LEFT, y + TITLE
    count = len(panel.segments)
    side = CELL * count
    if panel.title:
        yield _text(left, y + 10, panel.title, weight="bold")
    yield _text(left, top - STRIP - 6, "is seen (key)")
    middle = top + side / 2
    yield _text(x + 10, middle, "sees (query)", anchor="middle", turn=(x + 10, middle))
    for i, segment in enumerate(panel.segments):
        yield _rect(left + CELL * i, top - STRIP - 2, CELL - 1, STRIP, COLOURS[segment])
        yield _rect(left - STRIP - 2, top + CELL * i, STRIP, CELL - 1, COLOURS[segment])
    for q in range(count):
        for k in range(count):
            fill = COLOURS[panel.segments[k]] if panel.visible[q, k] else "none"
            yield _rect(left + CELL * k, top + CELL * q, CELL - 1, CELL - 1, fill, outlined=not panel.visible[q, k])


def _draw_positions(panel: Panel, left: int, top: int, highest: float) -> Iterator[str]:
    """Yield a dot per token: across its place in the row, upwards its position, to the same scale in every row."""
    side, tall = CELL * len(panel.segments), PLOT - 20
    scale = tall / highest if highest else 0.0
    yield _text(left, top - 8, "position")
    for value in (0.0, highest):
        at = top + tall - value * scale
        yield f'<line x1="{left}" y1="{at:.1f}" x2="{left + side}" y2="{at:.1f}" stroke="{FAINT}"/>'
        yield _text(left - 6, at + 4, f"{round(value, 1):g}", anchor="end")
    for i, (segment, position) in enumerate(zip(panel.segments, panel.positions, strict=True)):
        x, y = left + CELL * i + (CELL - 1) / 2, top + tall - position * scale
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{COLOURS[segment]}"/>'


def _draw_legend(x: int, y: int) -> Iterator[str]:
    for colour, name in zip((*COLOURS, "none"), (*NAMES, "not seen"), strict=True):
        yield _rect(x, y, 11, 11, colour, outlined=name == "not seen")
        yield _text(x + 17, y + 10, name)
        y += LINE


def _rect(x: float, y: float, width: float, height: float, fill: str, outlined: bool = False) -> str:
    # The outline lies inside, so that empty and full squares have one size.
    if outlined:
        return (
            f'<rect x="{x + 0.5:g}" y="{y + 0.5:g}" width="{width - 1:g}" height="{height - 1:g}" fill="{fill}" '
            f'stroke="{FAINT}"/>'
        )
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "", weight: str = "", turn: Sequence[float] | None = None
) -> str:
    options = f' text-anchor="{anchor}"' if anchor else ""
    options += f' font-weight="{weight}"' if weight else ""
    options += f' transform="rotate(-90 {turn[0]:g} {turn[1]:g})"' if turn else ""
    return f'<text x="{x:g}" y="{y:g}"{options}>{escape(text)}</text>'
