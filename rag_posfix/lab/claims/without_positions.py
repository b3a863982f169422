"""Text 2: what a decoder knows of positions without a position encoding."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.evaluation.figures import draw_curves, draw_numbers
from rag_posfix.evaluation.record import Progress
from rag_posfix.lab.claims.base import Claim, Condition, Evidence, trained_decoder
from rag_posfix.lab.encodings import create_encoding
from rag_posfix.lab.encodings.sinusoidal import sinusoids
from rag_posfix.lab.experiment import RunConfig, TrainingSettings, new_decoder
from rag_posfix.lab.probing.base import estimate
from rag_posfix.lab.probing.norm_by_position import PAPER_DEVIATION, norm_curves, random_decoder, resolution
from rag_posfix.lab.probing.positional_vectors import similarities
from rag_posfix.lab.probing.subject import (
    Change,
    LanguageModel,
    SmallDecoder,
    Subject,
    Watch,
    language_model,
    random_strings,
)
from rag_posfix.lab.tasks import TASKS

CHANGED = "relative change of the output"
NOTHING = 1e-3
"""Relative change below which two float32 results count as equal."""
FREE, FREE_ONE = "no positions, all tokens seen", "no positions, all tokens seen, after one layer"
MASKED, MASKED_ONE = "no positions, causal mask", "no positions, causal mask, after one layer"
DECODED = (
    "R2 of the norm of one head", "R2 of the norms of a layer", "R2 of the norms of all layers",
    "R2 of the direction of one head", "R2 of the direction, mean value removed",
)  # fmt: skip
LATER = "new positions told apart in the second half, over the first"
PLACED_FREE, PLACED = "positions, all tokens seen", "positions, causal mask"


def order_effects(model: LanguageModel, pairs: Iterable[tuple[Tensor, Tensor]]) -> dict[str, dict[str, Any]]:
    """Return how much the last token's output changes with the order of the tokens before it.

    Formula: |y' - y| / |y|, y the last logits or, after one layer, the state that enters the second.

    Args:
        pairs: The same tokens in two orders, (1, T) each, with the same last token.
    """
    changes: dict[str, list[float]] = {}
    for pair in pairs:
        zeros = torch.zeros(pair[0].shape[1], dtype=torch.long)
        for name, positions, mask in (
            (FREE, zeros, _all), (MASKED, zeros, None), (PLACED_FREE, None, _all), (PLACED, None, None),
        ):  # fmt: skip
            states: list[Tensor] = []

            def keep(layer: int, entering: Tensor, states: list[Tensor] = states) -> None:
                if layer == 1:
                    states.append(entering[0, -1].float().cpu())

            change = Change(positions, mask)
            outputs = [model.read(ids, Watch(states=keep), change)[0, -1].cpu() for ids in pair]
            changes.setdefault(name, []).append(_relative(*outputs))
            if positions is not None and states:
                changes.setdefault(f"{name}, after one layer", []).append(_relative(*states))
    return {name: estimate(torch.tensor(values)) for name, values in changes.items()}


def _all(query: Tensor, key: Tensor) -> Tensor:
    return (query >= 0) & (key >= 0)


def _relative(before: Tensor, after: Tensor) -> float:
    return float((after - before).norm() / before.norm())


def permutation(subject: Subject, progress: Progress, *, strings: int, tokens: int) -> Evidence:
    """Permute all tokens but the last, with and without positions and causal mask."""
    model = language_model(subject, "permutation")
    generator = torch.Generator().manual_seed(0)
    with progress("permuting tokens") as report:

        def pairs() -> Iterable[tuple[Tensor, Tensor]]:
            for ids in random_strings(model, strings, tokens, 0, report):
                order = torch.cat((torch.randperm(tokens - 1, generator=generator), torch.tensor([tokens - 1])))
                yield ids, ids[:, order]

        numbers = order_effects(model, pairs())
    return Evidence(numbers, partial(draw_numbers, numbers, f"{strings} strings, tokens permuted", CHANGED, "log"))


def head_outputs(decoder: SmallDecoder, ids: Tensor) -> Tensor:
    """Return what each head of each layer returns, (L, H, B, T, D) float64."""
    outputs: dict[int, Tensor] = {}

    def keep(layer: int, attended: Tensor) -> None:
        outputs[layer] = attended.transpose(0, 1).double().cpu()

    decoder.read(ids, Watch(attended=keep))
    return torch.stack([outputs[layer] for layer in sorted(outputs)])


def decoding_share(features: Tensor, penalty: float = 1e-3) -> float:
    """Return the share R^2 of log position that a ridge regression explains, fitted on one half, tested on the other.

    Shapes:
        features: (B, T, F), B >= 2 strings.
    """
    count, tokens, width = features.shape
    target = torch.arange(1, tokens + 1, dtype=torch.float64).log()
    target = (target - target.mean()).expand(count, tokens)
    fitted, tested = features[: count // 2].reshape(-1, width), features[count // 2 :].reshape(-1, width)
    centre, scale = fitted.mean(dim=0), fitted.std(dim=0).clamp(min=1e-12)
    known, unknown = ((part - centre) / scale for part in (fitted, tested))
    gram = known.T @ known + penalty * len(known) * torch.eye(width, dtype=torch.float64)
    weights = torch.linalg.solve(gram, known.T @ target[: count // 2].flatten())
    truth = target[count // 2 :].flatten()
    return 1 - float((unknown @ weights - truth).square().sum() / truth.square().sum())


def norms_and_directions(
    _: None, progress: Progress, *, seeds: int, strings: int, tokens: int, curve: bool = False
) -> Evidence:
    """Decode the position from norms of one head, a layer and all layers, and from the direction of one head."""
    rows, curves, means = [], [], []
    for seed in range(seeds):
        with progress(f"untrained decoder without positions, {seed + 1} of {seeds}"):
            decoder = random_decoder("nope", {}, seed, PAPER_DEVIATION)
            outputs = head_outputs(decoder, torch.cat(list(random_strings(decoder, strings, tokens, seed))))
            values = head_outputs(decoder, torch.arange(decoder.vocabulary)[:, None])[0, 0]  # of each token alone
        head, norms = outputs[0, 0], outputs.norm(dim=-1)
        centred = head - values.mean(dim=(0, 1))
        curves.append(norms[0, 0].mean(dim=0))
        unit = [vectors / vectors.norm(dim=-1, keepdim=True) for vectors in (head, centred)]
        means.append(torch.stack([vectors.mean(dim=0).norm(dim=-1) for vectors in unit]))
        groups = norms[0, :1], norms[0], norms.flatten(0, 1)
        features = [group.log().permute(1, 2, 0) for group in groups]
        features += unit
        rows.append(torch.tensor([decoding_share(each) for each in features]))
    shares = torch.stack(rows)
    numbers = {name: estimate(values) for name, values in zip(DECODED, shares.unbind(dim=1), strict=True)}
    numbers["all heads less one head"] = estimate(shares[:, 1] - shares[:, 0])
    numbers["all layers less one layer"] = estimate(shares[:, 2] - shares[:, 1])
    mean = torch.stack(curves).mean(dim=0)
    law = (mean[0] / torch.arange(1, tokens + 1).sqrt()).tolist()
    panel = ({"one head": mean.tolist(), "1 / sqrt(n)": law}, "position, from 0", "norm of the output")
    as_is, left = torch.stack(means).mean(dim=0).tolist()
    lengths = {"as it is": as_is, "mean value removed": left, "chance": [strings**-0.5] * tokens}
    title = f"{seeds} untrained decoders, {strings} strings"
    directions = "mean of the directions of all strings"
    panels = {title: panel, directions: (lengths, "position, from 0", "length, 1: all alike")}
    drawn = partial(draw_curves, panels) if curve else partial(draw_numbers, numbers, title, "R2")
    return Evidence(numbers, drawn)


def dispersion(_: None, progress: Progress, *, seeds: int, strings: int, tokens: int) -> Evidence:
    """Measure entropy and resolution by length in untrained decoders without positions."""
    entropies, counts = [], []
    for seed in range(seeds):
        with progress(f"untrained decoder without positions, {seed + 1} of {seeds}") as report:
            decoder = random_decoder("nope", {}, seed, PAPER_DEVIATION)
            run = norm_curves(decoder, strings, tokens, seed, entropy=True, progress=report)
        entropies.append(run.entropy[0] if run.entropy is not None else torch.empty(0))
        norms = run.norms[:, 0]
        counts.append(torch.tensor(resolution(norms.mean(dim=0), norms.std(dim=0)), dtype=torch.float64))
    entropy, apart = torch.stack(entropies), torch.stack(counts)
    lengths = torch.arange(1, tokens + 1, dtype=torch.float64).log()
    centred = lengths - lengths.mean()
    slopes = (entropy * centred).sum(dim=1) / centred.square().sum()
    half = tokens // 2
    numbers = {
        "entropy per log n": estimate(slopes),
        LATER: estimate((apart[:, -1] - apart[:, half - 1]) / apart[:, half - 1]),
        "positions told apart": estimate(apart[:, -1]),
    }
    panels = {
        f"entropy of attention, {seeds} decoders": (
            {"without positions": entropy.mean(dim=0).tolist(), "log n": lengths.tolist()}, "position", "nats",
        ),
        "positions that the norm tells apart": ({"": apart.mean(dim=0).tolist()}, "length", "positions"),
    }  # fmt: skip
    return Evidence(numbers, partial(draw_curves, panels))


def neighbours(_: None, progress: Progress, *, words: int, steps: int, batch: int, width: int) -> Evidence:
    """Compare vectors of neighbouring and of distant positions: sinusoids, and learned ones before and after."""
    task = TASKS.create(MethodSpec("language", {"length": words}))
    settings = TrainingSettings(steps, batch, evaluate_every=steps, examples=2, layers=1, width=width)
    config = RunConfig(task, create_encoding("learned", {"max_positions": 8 * words}), settings, seed=0)
    trained: Any = trained_decoder(config, progress).positions
    start: Any = new_decoder(config, torch.device("cpu")).positions
    vectors = {
        "sinusoidal": sinusoids(torch.arange(words), width, 10000.0),
        "learned, after training": trained.table[:words].detach(),
        "learned, before training": start.table[:words].detach(),
    }
    alike = {name: similarities(table.double()[None])[0] for name, table in vectors.items()}
    far = words // 2
    numbers = {
        name: estimate(cosines.diagonal(1)[: words - far] - cosines.diagonal(far)) for name, cosines in alike.items()
    }
    by_distance = {
        name: [float(cosines.diagonal(shift).mean()) for shift in range(far)] for name, cosines in alike.items()
    }
    panel = (by_distance, "distance of two positions", "cosine")
    return Evidence(numbers, lambda: draw_curves({f"{words} positions of {width} channels": panel}))


WITHOUT_POSITIONS = (
    Claim(
        2, "permutation",
        "Without positions, bidirectional attention of a query does not change with the order of the tokens; causal "
        "attention does.", permutation, (Condition(FREE, below=NOTHING), Condition(MASKED, above=0.01)),
        {"strings": 8, "tokens": 32}, {"strings": 64, "tokens": 256},
        see="How much the output of the last token changes with the order of the tokens before it.",
        beware="The model was trained with positions, so that its outputs without them are not good ones; and a "
        "single layer of causal attention does not tell the last token the order either.",
    ),
    Claim(
        2, "norm-and-direction",
        "Causal attention without positions gives y_n = p(n) z_n: the norm tells the position and the direction "
        "not.", partial(norms_and_directions, curve=True),
        (Condition(DECODED[0], above=0.5), Condition(DECODED[4], below=0.1)),
        {"seeds": 8, "strings": 24, "tokens": 128}, {"seeds": 16, "strings": 64, "tokens": 512}, reads_model=False,
        see="The norm of one head's output by position with the law 1 / sqrt(n), and how alike directions are.",
        beware="It holds for values with the mean 0: if the values have a mean, directions turn to it as n grows.",
    ),
    Claim(
        2, "neighbours", "Positions that are near have similar vectors, and distant ones have not.", neighbours,
        (Condition("sinusoidal", above=0.1), Condition("learned, after training", above=0.1)),
        {"words": 48, "steps": 200, "batch": 16, "width": 64},
        {"words": 128, "steps": 4000, "batch": 32, "width": 64}, reads_model=False,
        see="The mean cosine of two position vectors by their distance.",
        beware="Learned vectors start at random; a short training leaves most of that.",
    ),
    Claim(
        2, "decoded-position",
        "One head of a decoder without positions carries the position as one number; several heads and layers "
        "together carry it as a vector, which tells it better.", norms_and_directions,
        (Condition("all heads less one head", above=0), Condition("all layers less one layer", above=0)),
        {"seeds": 8, "strings": 24, "tokens": 128}, {"seeds": 16, "strings": 64, "tokens": 512}, reads_model=False,
        see="The share R2 of log position that is decoded on other strings, by what is read.",
        beware="More noisy copies of one number average out too; it is no evidence of another kind of information.",
    ),
    Claim(
        2, "dispersion",
        "Without positions attention spreads as texts grow, and later positions are told apart ever less.",
        dispersion,
        (Condition("entropy per log n", above=0.5), Condition(LATER, below=0.5)),
        {"seeds": 6, "strings": 24, "tokens": 128}, {"seeds": 16, "strings": 64, "tokens": 1024}, reads_model=False,
        see="The entropy of attention by position, and how many positions the norm tells apart by length.",
        beware="The decoders are untrained: training may sharpen attention.",
    ),
)  # fmt: skip
