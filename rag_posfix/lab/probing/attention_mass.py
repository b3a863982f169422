"""Probe of the attention that the question pays to the passage with the answer, by layer, head and slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from rag_posfix.evaluation.figures import OTHER_COLORS, draw_estimates, draw_map, finish_axes, new_column
from rag_posfix.evaluation.record import Progress
from rag_posfix.lab.probing.base import PROBES, Found, MeasuredProbe, estimate, shown
from rag_posfix.lab.probing.subject import (
    KeyValuePrompt,
    LanguageModel,
    Subject,
    Watch,
    after_context,
    key_value_prompts,
    language_model,
)
from rag_posfix.parameters import Integer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADS = 8


def slot_masses(
    model: LanguageModel, prompts: Sequence[KeyValuePrompt], progress: Callable[[int, int], None] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the attention that the last token of each prompt pays to each pair, and to each key.

    Cost: pairs that several prompts share are read once, each question once.

    Shapes:
        returns: the sum over the pair's tokens, and the mean over the key's tokens; (len(prompts), L, H, pairs)
            float32 each.
    """
    masses = torch.zeros(2, len(prompts), model.n_layers, model.n_heads, len(prompts[0].pairs))
    for number, (prompt, prefix, _) in enumerate(after_context(model, prompts, progress)):

        def keep(layer: int, weights: Tensor, number: int = number, prompt: KeyValuePrompt = prompt) -> None:
            last_query = weights[0, :, -1].cpu()  # (H, T)
            for slot, (pair, key) in enumerate(zip(prompt.pairs, prompt.keys, strict=True)):
                masses[0, number, layer, :, slot] = last_query[:, pair.slice].sum(dim=-1)
                masses[1, number, layer, :, slot] = last_query[:, key.slice].mean(dim=-1)

        model.read(prompt.tensor[:, len(prompt.context) :], Watch(weights=keep), prefix=prefix)
    return masses[0], masses[1]


@PROBES.register("attention-mass")
@dataclass(frozen=True)
class AttentionMass(MeasuredProbe):
    """Measure the attention to the gold pair, by layer, head and slot.

    Two measures, which rank other heads: the mass of the whole pair, value included, and the mean over the positions
    of its key, which is the source's. A head that reads the value has much of the first and nothing of the second.

    Source: Yu et al. (2024), Mitigate Position Bias via Scaling a Single Dimension, section 3,
        https://arxiv.org/abs/2406.02536
    Formula: pair(l, h) = mean over prompts of sum over the tokens j of the gold pair of a_Tj(l, h), T the last token,
        after which the value comes. A_G(l, h) = the same with the mean over the tokens j of the gold key.
        By slot: the pair's mass in slot k, where it is gold and where it is not, averaged over layers and heads.
        Null: the mass of the other pairs in the same head and prompt. Intervals: bootstrap over prompts.
    Differs from the paper: keys and values are short, so that small models can copy them; the mass of the pair is
        measured beside A_G.

    Args:
        pairs: Pairs of a prompt; each place is gold equally often.
        rounds: Number of sets of pairs, each asked for every one of its keys.
        seed: Seed of keys and values.
    """

    name: ClassVar[str] = "attention-mass"
    caption: ClassVar[str] = (
        "The last token's attention to the gold pair and to its key by layer and head, and to any pair by slot; do "
        "not conclude that the answer follows the attention."
    )
    reads_text: ClassVar[bool] = True

    pairs: Annotated[int, Integer(2)] = 16
    rounds: Annotated[int, Integer(1)] = 3
    seed: int = 0

    def measure(self, subject: Subject, progress: Progress) -> Found:
        """Read the prompts; see ``Probe.run``."""
        model = language_model(subject, self.name)
        prompts = key_value_prompts(model, self.pairs, self.pairs * self.rounds, self.seed)
        with progress("reading prompts") as report:
            masses, key_masses = slot_masses(model, prompts, report)  # (P, L, H, N)
        gold = torch.tensor([prompt.gold for prompt in prompts])
        is_gold = gold[:, None] == torch.arange(self.pairs)  # (P, N)
        of_gold = is_gold[:, None, None].expand_as(masses)
        pair, key = (values[of_gold].view(*values.shape[:3]) for values in (masses, key_masses))  # (P, L, H)
        other = (masses.sum(dim=-1) - pair) / (self.pairs - 1)
        by_slot = masses.mean(dim=(1, 2))  # (P, N)
        heads = {"by_pair": self._best(pair, pair, key, other), "by_key": self._best(key, pair, key, other)}
        return Found(
            {
                "pair_by_layer_and_head": pair.mean(dim=0).tolist(),
                "key_by_layer_and_head": key.mean(dim=0).tolist(),
                "heads": heads,
                "slots_gold": [estimate(by_slot[is_gold[:, k], k]) for k in range(self.pairs)],
                "slots_other": [estimate(by_slot[~is_gold[:, k], k]) for k in range(self.pairs)],
                "prompts": len(prompts),
                "tokens": len(prompts[0].ids),
            },
            [{"gold": prompt.gold, "slots": slots.tolist()} for prompt, slots in zip(prompts, by_slot, strict=True)],
        )

    def _best(self, ranked: Tensor, pair: Tensor, key: Tensor, other: Tensor) -> list[dict[str, Any]]:
        """Return the heads with the largest mean of one measure, with all measures; each (P, L, H)."""
        order = ranked.mean(dim=0).flatten().argsort(descending=True)[:HEADS].tolist()
        return [
            {
                "layer": layer,
                "head": head,
                "pair": estimate(pair[:, layer, head]),
                "key": estimate(key[:, layer, head]),
                "other_pair": estimate(other[:, layer, head]),
            }
            for layer, head in (divmod(index, ranked.shape[2]) for index in order)
        ]

    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return a map of layers and heads for both measures, and the attention by slot."""
        summary = head["summary"]
        figure, (*maps, slots) = new_column(3)
        titles = {"pair": "share on the gold pair", "key": "share on a token of the gold key"}
        for axes, (name, title) in zip(maps, titles.items(), strict=True):
            draw_map(figure, axes, summary[f"{name}_by_layer_and_head"], cmap="viridis", vmin=0)
            best = summary["heads"][f"by_{name}"][0]
            text = f"{title}, {summary['prompts']} prompts\nmost: layer {best['layer']}, head {best['head']}"
            finish_axes(axes, text, "head", "layer", legend=False)
        for key, text, colour in (
            ("slots_gold", "the gold pair", OTHER_COLORS[2]), ("slots_other", "another pair", OTHER_COLORS[1]),
        ):  # fmt: skip
            values = summary[key]
            label = f"{text}, n = {values[0]['n']} a slot"
            draw_estimates(slots, range(len(values)), values, fmt="o-", color=colour, label=label)
        slots.set_ylim(bottom=0)
        slots.xaxis.get_major_locator().set_params(integer=True)
        title = "mass by slot, all layers and heads, 95 % interval"
        finish_axes(slots, title, "slot of the pair, from 0", "share of attention")
        return figure

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return a row per head with the most of each measure."""
        rows = [
            (
                measure,
                str(row["layer"]),
                str(row["head"]),
                shown(row["pair"]),
                shown(row["key"], ".2g"),
                shown(row["other_pair"]),
            )
            for measure, name in (("pair", "by_pair"), ("key", "by_key"))
            for row in head["summary"]["heads"][name]
        ]
        n = head["summary"]["prompts"]
        return [("most by", "layer", "head", f"gold pair, n = {n}", "gold key, mean", "another pair"), *rows]
