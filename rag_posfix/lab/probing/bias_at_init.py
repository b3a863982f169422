"""Probe of the position curve that a model has before it is trained, from its architecture alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.evaluation.figures import OTHER_COLORS, draw_estimates, finish_axes, new_column
from rag_posfix.evaluation.record import Progress
from rag_posfix.lab.encodings import Decoder
from rag_posfix.lab.probing.base import PROBES, Found, MeasuredProbe, estimate, shown
from rag_posfix.lab.probing.subject import LanguageModel, SmallDecoder, Subject, check_length, random_strings
from rag_posfix.parameters import Integer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = 10
SECTIONS = ("first", "middle", "last")
Forward = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Token ids (1, T) -> embeddings (1, T, width) and the last logits (vocabulary,), with a graph between them."""


def forward_of(model: Any) -> Forward:
    """Return how a module is read with a graph from the embeddings to the last logits.

    Args:
        model: A small decoder, or a causal language model of transformers.
    """

    def small(ids: Tensor) -> tuple[Tensor, Tensor]:
        entered: list[Tensor] = []
        logits, _ = model(ids, on_states=lambda layer, states: entered.append(states))
        return entered[0], logits[0, -1]

    def large(ids: Tensor) -> tuple[Tensor, Tensor]:
        output = model(input_ids=ids, use_cache=False, logits_to_keep=1, output_hidden_states=True)
        return output.hidden_states[0], output.logits[0, -1]

    return small if isinstance(model, Decoder) else large


def influence(forward: Forward, ids: Tensor, generator: torch.Generator) -> Tensor:
    """Return how much the last token's output depends on each token: gradient norms that sum to 1.

    Formula: I_t = |d (r . y_T) / d x_t|, y_T the last logits, x_t the embedding at t, r random signs.

    Shapes:
        ids: (1, T). returns: (T,) float64.
    """
    with torch.enable_grad():
        entered, logits = forward(ids)
        signs = torch.randint(0, 2, logits.shape, generator=generator).to(logits) * 2 - 1
        (gradient,) = torch.autograd.grad((logits * signs).sum(), entered)
    norms: Tensor = gradient[0].double().norm(dim=-1).cpu()
    shared: Tensor = norms / norms.sum()
    return shared


def shares(curves: Tensor) -> dict[str, Tensor]:
    """Return the mean of the first tenth, of the middle half and of the last tenth, relative to the mean of all.

    The last token itself is left out: it reads itself through the residual stream.

    Shapes:
        curves: (..., T), 11 places or more. returns: (...) each.
    """
    values = curves[..., :-1]
    count = values.shape[-1]
    tenth, quarter = max(1, count // PARTS), count // 4
    sections = {"first": slice(tenth), "middle": slice(quarter, count - quarter), "last": slice(count - tenth, count)}
    mean = values.mean(dim=-1)
    return {name: values[..., section].mean(dim=-1) / mean for name, section in sections.items()}


def _share(section: str, curves: Tensor) -> Tensor:
    return shares(curves)[section]


def create_untrained(subject: Subject, seed: int) -> Any:
    """Return a model of the same configuration with random weights, as its library draws them."""
    trained = _torch_module(subject)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if isinstance(trained, Decoder):
            return Decoder(trained.encoding, trained.shape).eval()
        return type(trained)(trained.config).to(trained.device).eval()


@PROBES.register("bias-at-init")
@dataclass(frozen=True)
class BiasAtInit(MeasuredProbe):
    """Compare the position bias of the model and of random weights.

    What the untrained model shows comes from the causal mask, the residual stream and the position encoding alone.

    Source: Lost in the Middle at Birth (2026), https://arxiv.org/abs/2603.10123
    Formula: I_t = |d (r . y_T) / d x_t| / sum over t, the gradient of the last logits to the embeddings, averaged over
        strings of random tokens and, for the untrained model, over seeds. Intervals: bootstrap over these gradients.
    Differs from the paper: gradients of whole models in place of an analysis of averaging matrices.

    Args:
        strings: Number of random token sequences.
        tokens: Tokens per sequence.
        seeds: Number of untrained models.
        seed: First seed of the weights; seed of the tokens.
    """

    name: ClassVar[str] = "bias-at-init"
    caption: ClassVar[str] = (
        "How much the last token depends on each token, before and after training; do not conclude that the mask "
        "alone bends the untrained curve, as the residual stream and the encoding act too."
    )
    small: ClassVar[Mapping[str, int]] = {"tokens": 48}

    strings: Annotated[int, Integer(1)] = 24
    tokens: Annotated[int, Integer(32)] = 128
    seeds: Annotated[int, Integer(1)] = 2
    seed: int = 0

    def measure(self, subject: Subject, progress: Progress) -> Found:
        """Differentiate the model and untrained ones; see ``Probe.run``."""
        check_length(subject, self.tokens, 32)
        models: dict[str, list[Tensor]] = {"trained": [], "untrained": []}
        for number in range(self.seeds):
            with progress(f"untrained model {number + 1} of {self.seeds}") as report:
                model = create_untrained(subject, self.seed + number)
                models["untrained"] += self._curves(subject, model, report)
                del model
        with progress("the model itself") as report:
            models["trained"] = self._curves(subject, _torch_module(subject), report)
        curves = {name: torch.stack(runs) for name, runs in models.items()}
        return Found(
            {
                "curves": {name: curve.mean(dim=0).tolist() for name, curve in curves.items()},
                "untrained_spread": curves["untrained"].std(dim=0).tolist(),
                "shares": {
                    name: {key: estimate(curve, partial(_share, key)) for key in SECTIONS}
                    for name, curve in curves.items()
                },
                "strings": self.strings,
                "seeds": self.seeds,
            }
        )

    def _curves(self, subject: Subject, model: Any, report: Callable[[int, int], None]) -> list[Tensor]:
        forward, generator = forward_of(model), torch.Generator().manual_seed(self.seed)
        device = next(model.parameters()).device
        strings = random_strings(subject, self.strings, self.tokens, self.seed, report)
        return [influence(forward, ids.to(device), generator) for ids in strings]

    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return both curves on a logarithmic scale."""
        summary = head["summary"]
        figure, (top, bottom) = new_column(2)
        for number, (name, curve) in enumerate(summary["curves"].items()):
            style = {"color": OTHER_COLORS[number + 1], "label": name}
            top.plot(curve, linewidth=1.2, **style)
            values = [summary["shares"][name][key] for key in SECTIONS]
            at = [index + 0.2 * number - 0.1 for index in range(len(values))]
            draw_estimates(bottom, at, values, **style)
        top.set_yscale("log")
        bottom.axhline(1, color="#999999", linewidth=0.8)
        bottom.set_xticks(range(len(SECTIONS)), ("first tenth", "middle half", "last tenth"))
        n = f"{summary['strings']} strings, {summary['seeds']} untrained models"
        finish_axes(top, n, "position of the token, from 0", "share of the gradient", columns=2)
        counts = ", ".join(f"n = {share['first']['n']} {name}" for name, share in summary["shares"].items())
        finish_axes(
            bottom, f"by part, 95 % interval, {counts}", "part of the text", "relative to the mean", legend=False
        )
        return figure

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return a row per model."""
        rows = [
            (name, str(share["first"]["n"]), *(shown(share[key]) for key in SECTIONS))
            for name, share in head["summary"]["shares"].items()
        ]
        return [("model", "n", "first tenth", "middle half", "last tenth, relative to the mean"), *rows]


def _torch_module(subject: Subject) -> Any:
    if isinstance(subject, SmallDecoder):
        return subject.decoder
    if isinstance(subject, LanguageModel):
        return subject.engine.loaded.model
    raise UnsupportedModelError("the probe bias-at-init needs a language model or a small decoder")
