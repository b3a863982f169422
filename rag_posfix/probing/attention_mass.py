"""Probe of the attention that the question pays to the passage with the answer, by layer, head and slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from rag_posfix.evaluation.figures import OTHER_COLORS, new_row
from rag_posfix.evaluation.record import Progress
from rag_posfix.parameters import Integer
from rag_posfix.probing.base import PROBES, Found, MeasuredProbe, draw_map
from rag_posfix.probing.prompts import KeyValuePrompt, key_value_prompts
from rag_posfix.probing.subject import Subject, Watch, language_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def slot_masses(
    model: Subject, prompts: Sequence[KeyValuePrompt], progress: Callable[[int, int], None] | None = None
) -> Tensor:
    """Return the attention that the last token of each prompt pays to each pair, summed over the pair's tokens.

    Cost: each prompt is read once; the (H, T, T) probabilities of one layer at a time.

    Shapes:
        returns: (len(prompts), L, H, pairs) float32.
    """
    masses = torch.zeros(len(prompts), model.n_layers, model.n_heads, len(prompts[0].pairs))
    for number, prompt in enumerate(prompts):

        def keep(layer: int, weights: Tensor, number: int = number, prompt: KeyValuePrompt = prompt) -> None:
            last_query = weights[0, :, -1].cpu()  # (H, T)
            masses[number, layer] = torch.stack(
                [last_query[:, span.slice].sum(dim=-1) for span in prompt.pairs], dim=-1
            )

        model.read(prompt.tensor, Watch(weights=keep))
        if progress is not None:
            progress(number + 1, len(prompts))
    return masses


@PROBES.register("attention-mass")
@dataclass(frozen=True)
class AttentionMass(MeasuredProbe):
    """Measure the attention to the pair that is asked for in key-value retrieval, by layer, head and slot.

    Source: Yu et al. (2024), Mitigate Position Bias via Scaling a Single Dimension, section 3,
        https://arxiv.org/abs/2406.02536
    Formula: A_G(l, h) = mean over prompts of sum over the tokens j of the gold pair of a_Tj(l, h), T the last token of
        the prompt, where the value comes next. By slot: the same for the pair in slot k, where it is gold and where it
        is not, averaged over layers and heads.
    Differs from the paper: keys and values are short, so that small models can copy them.

    Args:
        pairs: Pairs of a prompt; each place is gold equally often.
        rounds: Number of sets of pairs, each asked for every one of its keys.
        seed: Seed of keys and values.
    """

    name: ClassVar[str] = "attention-mass"
    source: ClassVar[str] = (
        "Yu et al. (2024), Mitigate Position Bias via Scaling a Single Dimension, https://arxiv.org/abs/2406.02536"
    )
    deviations: ClassVar[tuple[str, ...]] = ("Keys and values are short.",)
    reads_text: ClassVar[bool] = True

    pairs: Annotated[int, Integer(2)] = 16
    rounds: Annotated[int, Integer(1)] = 3
    seed: int = 0

    def measure(self, subject: Subject, progress: Progress) -> Found:
        """Read the prompts; see ``Probe.run``."""
        model = language_model(subject, self.name)
        prompts = key_value_prompts(model, self.pairs, self.pairs * self.rounds, self.seed)
        with progress("reading prompts") as report:
            masses = slot_masses(model, prompts, report)  # (P, L, H, N)
        gold = torch.tensor([prompt.gold for prompt in prompts])
        is_gold = gold[:, None] == torch.arange(self.pairs)  # (P, N)
        by_head = masses[is_gold[:, None, None].expand_as(masses)].view(*masses.shape[:3]).mean(dim=0)  # (L, H)
        by_slot = masses.mean(dim=(1, 2))  # (P, N)
        top = by_head.flatten().argsort(descending=True)[:10].tolist()
        best = [divmod(index, by_head.shape[1]) for index in top]
        return Found(
            {
                "by_layer_and_head": by_head.tolist(),
                "heads": [{"layer": layer, "head": head, "mass": float(by_head[layer, head])} for layer, head in best],
                "slots_gold": [float(by_slot[is_gold[:, k], k].mean()) for k in range(self.pairs)],
                "slots_other": [float(by_slot[~is_gold[:, k], k].mean()) for k in range(self.pairs)],
                "best_head_by_gold_slot": [float(masses[gold == k][:, *best[0], k].mean()) for k in range(self.pairs)],
                "prompts": len(prompts),
                "tokens": len(prompts[0].ids),
            },
            [{"gold": prompt.gold, "slots": slots.tolist()} for prompt, slots in zip(prompts, by_slot, strict=True)],
        )

    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return a map of layers and heads, and the attention by slot."""
        summary = head["summary"]
        figure, (left, right) = new_row(2, (11.0, 3.8))
        draw_map(figure, left, summary["by_layer_and_head"], cmap="viridis", vmin=0)
        left.set_xlabel("head")
        left.set_ylabel("layer")
        left.set_title(f"{head['model']}: attention to the gold pair", fontsize=10, loc="left")
        for key, text, colour in (
            ("slots_gold", "the gold pair", OTHER_COLORS[2]), ("slots_other", "another pair", OTHER_COLORS[1]),
        ):  # fmt: skip
            right.plot(summary[key], marker="o", markersize=4, color=colour, label=text)
        right.set_xlabel("slot of the pair, from 0")
        right.set_title("attention by slot, all layers and heads", fontsize=10, loc="left")
        right.set_ylim(bottom=0)
        right.legend(frameon=False, fontsize=8)
        return figure

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return a row per head with the most attention to the gold pair."""
        rows = [
            (str(entry["layer"]), str(entry["head"]), f"{entry['mass']:.3f}") for entry in head["summary"]["heads"]
        ]
        return [("layer", "head", "attention to the gold pair"), *rows]
