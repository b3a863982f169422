"""Text 1, claims that read no language model: mask and distance by themselves, and positions on a spline."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from rag_posfix.evaluation.figures import OTHER_COLORS, draw_map, finish_axes, new_column
from rag_posfix.evaluation.record import Progress, counted
from rag_posfix.lab.claims.base import Claim, Condition, Evidence, exact
from rag_posfix.lab.encodings import DecoderShape
from rag_posfix.lab.encodings.spline import Spline, SplineAutoencoder
from rag_posfix.lab.probing.base import estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RISING, MIXED, CONSTANT = "right tokens, rising", "right tokens, in random order", "right with one token per place"


def rollout(weights: Tensor, layers: int) -> Tensor:
    """Return how much the last token depends on each token after layers of equal attention with a residual stream.

    Source: Abnar and Zuidema (2020), Quantifying Attention Flow in Transformers, https://arxiv.org/abs/2005.00928
    Formula: the last row of ((I + A) / 2)^L, A the weights with rows that sum to 1.

    Shapes:
        weights: (T, T). returns: (T,).
    """
    shares = weights / weights.sum(dim=1, keepdim=True)
    layer = (shares + torch.eye(len(shares), dtype=shares.dtype)) / 2
    last: Tensor = torch.linalg.matrix_power(layer, layers)[-1]
    return last


def mask_and_distance(_: None, progress: Progress, *, tokens: int, layers: int, decay: float) -> Evidence:
    """Follow attention that knows the causal mask, the distance, or both through the layers."""
    distance = (torch.arange(tokens)[:, None] - torch.arange(tokens)).double()
    falling = decay ** distance.abs()
    kinds = {
        "causal mask": torch.ones_like(falling).tril(),
        "distance": falling,
        "mask and distance": falling.tril(),
    }
    with progress("multiplying layers"):
        curves = {name: rollout(weights, layers)[:-1] for name, weights in kinds.items()}
    tenth, quarter, numbers = max(1, tokens // 10), tokens // 4, {}
    for name, curve in curves.items():
        middle = curve[quarter:-quarter].mean()
        numbers[f"{name}, first over middle"] = exact(float(curve[:tenth].mean() / middle))
        numbers[f"{name}, last over middle"] = exact(float(curve[-tenth:].mean() / middle))

    def draw() -> Figure:
        figure, (*maps, bottom) = new_column(1 + len(kinds))
        for axes, (name, weights) in zip(maps, kinds.items(), strict=True):
            draw_map(figure, axes, (weights / weights.sum(dim=1, keepdim=True)).tolist(), cmap="viridis", vmax=0.2)
            finish_axes(axes, f"attention of one layer: {name}", "key", "query", legend=False)
        for number, (name, curve) in enumerate(curves.items()):
            bottom.plot(curve.tolist(), label=name, color=OTHER_COLORS[number])
        bottom.set_yscale("log")
        title = f"what the last token depends on, {layers} layers (exact)"
        finish_axes(bottom, title, "position, without the last token", "share")
        return figure

    return Evidence(numbers, draw)


def _trained_spline(
    ordered: bool, seed: int, progress: Progress, sizes: dict[str, int], shape: DecoderShape
) -> SplineAutoencoder:
    """Return a spline auto-encoder that was trained on rising sequences, or on sequences in random order."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = SplineAutoencoder(Spline(control_points=sizes["control_points"]), shape)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with progress(f"training the auto-encoder, {'rising' if ordered else 'random order'}, seed {seed}") as report:
        for _ in counted(range(sizes["steps"]), report):
            ids = _sequences(64, sizes["length"], shape.vocabulary, ordered, generator)
            optimizer.zero_grad()
            torch.autograd.backward(cross_entropy(model(ids).flatten(0, 1), ids.flatten()))
            optimizer.step()
    return model.eval()


def _sequences(count: int, length: int, symbols: int, ordered: bool, generator: torch.Generator) -> Tensor:
    """Return sequences of random tokens, (count, length); ``ordered`` ones rise."""
    ids = torch.randint(0, symbols, (count, length), generator=generator)
    return ids.sort(dim=1).values if ordered else ids


def splines(
    _: None, progress: Progress, *, seeds: int, steps: int, length: int, symbols: int, width: int,
    control_points: int, examples: int,
) -> Evidence:  # fmt: skip
    """Reconstruct sequences by control points on a spline: rising ones, and those in an order of their own."""
    sizes = {"steps": steps, "length": length, "control_points": control_points}
    shape = DecoderShape(symbols, layers=2, heads=2, width=width, inner=2 * width)
    right: dict[str, list[Tensor]] = {RISING: [], MIXED: [], CONSTANT: []}
    shown: dict[str, Any] = {}
    for seed in range(seeds):
        for name, ordered in ((RISING, True), (MIXED, False)):
            model = _trained_spline(ordered, seed, progress, sizes, shape)
            tested = _sequences(examples, length, symbols, ordered, torch.Generator().manual_seed(10_000 + seed))
            with torch.inference_mode():
                answers = model(tested).argmax(dim=-1)
                if not seed:
                    points = model.control_points(tested[:1])
                    curves = (points[0], model.trajectory(points, 101)[0], model.trajectory(points, length)[0])
                    shown[name] = (tested[0].tolist(), answers[0].tolist(), [part.double() for part in curves])
            right[name].append((answers == tested).double().mean(dim=1))
            if ordered:
                right[CONSTANT].append((tested == tested.mode(dim=0).values).double().mean(dim=1))
    shares = {name: torch.cat(rows) for name, rows in right.items()}
    numbers = {name: estimate(values) for name, values in shares.items()}
    numbers["rising less one token per place"] = estimate(shares[RISING] - shares[CONSTANT])
    numbers["rising less random order"] = estimate(shares[RISING] - shares[MIXED])
    return Evidence(numbers, partial(_draw_splines, shown, length))


def _draw_splines(shown: dict[str, Any], length: int) -> Figure:
    """Return a sequence of each kind with its reconstruction, and the curve of the rising one."""
    figure, (*panels, bottom) = new_column(3)
    for axes, (name, (tokens, answers, _)) in zip(panels, shown.items(), strict=True):
        axes.plot(tokens, "o", color=OTHER_COLORS[1], label="sequence", markerfacecolor="none")
        axes.plot(answers, "x", color=OTHER_COLORS[2], label="reconstruction")
        finish_axes(axes, f"one sequence of {length}, {name.partition(', ')[2]}", "place", "token", columns=2)
    points, curve, places = shown[RISING][2]
    centre = curve.mean(dim=0)
    axes_of = torch.linalg.svd(curve - centre).Vh[:2].T
    flat = [((part - centre) @ axes_of).T.tolist() for part in (points, curve, places)]
    styles = {"control points": ("s--", 2), "spline": ("-", 0), "places": ("o", 3)}
    for (x, y), (label, (style, colour)) in zip(flat, styles.items(), strict=True):
        bottom.plot(x, y, style, label=label, linewidth=1, markersize=4, color=OTHER_COLORS[colour])
    title = "the spline of the rising sequence"
    finish_axes(bottom, title, "first direction", "second direction", columns=3)
    return figure


WITHOUT_MODEL = (
    Claim(
        1, "mask-and-distance",
        "The causal mask alone turns attention to the first tokens layer by layer, and a decay with the distance "
        "alone to the last ones.", mask_and_distance,
        (
            Condition("causal mask, first over middle", above=1), Condition("causal mask, last over middle", below=1),
            Condition("distance, first over middle", below=1), Condition("distance, last over middle", above=1),
        ),
        {"tokens": 64, "layers": 8, "decay": 0.9}, {"tokens": 512, "layers": 24, "decay": 0.97}, reads_model=False,
        see="What each token attends to in one layer, and what the last token depends on after all layers.",
        beware="Equal attention to what is seen: a trained model attends to content too.",
    ),
    Claim(
        1, "splines",
        "Control points on a spline replace position encodings where the order follows from the elements.", splines,
        (Condition("rising less one token per place", above=0.2), Condition("rising less random order", above=0.2)),
        {"seeds": 2, "steps": 150, "length": 8, "symbols": 12, "width": 32, "control_points": 6, "examples": 64},
        {"seeds": 5, "steps": 4000, "length": 32, "symbols": 64, "width": 128, "control_points": 8, "examples": 256},
        reads_model=False,
        see="A sequence and its reconstruction, rising and in random order, and its spline with the control points.",
        beware="An auto-encoder, which predicts no next token; that it fails in random order is by design.",
    ),
)  # fmt: skip
