"""Probe that doubles one attention score and looks whether the answer moves to what the score belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from rag_posfix.evaluation.figures import OTHER_COLORS, new_row
from rag_posfix.evaluation.record import Progress
from rag_posfix.parameters import Integer, Number
from rag_posfix.probing.base import PROBES, Found, MeasuredProbe
from rag_posfix.probing.prompts import KeyValuePrompt, key_value_prompts
from rag_posfix.probing.subject import Change, Subject, Watch, language_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADS = 8


@dataclass(frozen=True, slots=True)
class Choice:
    """The next token of an answer where the requested value and another value differ.

    Attributes:
        ids: The tokens before it.
        gold, other: The token of the requested value, and the token of the other value.
        gold_at, other_at: Their positions in ``ids``.
    """

    ids: tuple[int, ...]
    gold: int
    other: int
    gold_at: int
    other_at: int


def choice_of(prompt: KeyValuePrompt, other: int) -> Choice | None:
    """Return the first token at which the gold value of a prompt and another value differ; None if there is none."""
    start = prompt.values[other].start
    rival = prompt.ids[prompt.values[other].slice]
    for step, (gold_token, rival_token) in enumerate(zip(prompt.answer, rival, strict=False)):
        if gold_token != rival_token:
            gold_at = prompt.values[prompt.gold].start + step
            return Choice(prompt.ids + prompt.answer[:step], gold_token, rival_token, gold_at, start + step)
    return None


def scaled_score(
    key: int, factor: float, layer: int | None = None, heads: Sequence[int] | None = None
) -> Callable[[int, Tensor], Tensor]:
    """Return the edit of the score of the last query for one key.

    Formula: s' = s + (factor - 1) |s|. With factor 2 a score above 0 is doubled, one below 0 becomes 0, so that both
        rise by their size.

    Args:
        layer: The layer; None edits all.
        heads: The heads; None edits all.
    """

    def edit(index: int, scores: Tensor) -> Tensor:
        if layer is not None and index != layer:
            return scores
        chosen = slice(None) if heads is None else list(heads)
        edited = scores.clone()
        key_scores = edited[:, chosen, -1, key]
        edited[:, chosen, -1, key] = key_scores + (factor - 1) * key_scores.abs()
        return edited

    return edit


@PROBES.register("attention-edit")
@dataclass(frozen=True)
class AttentionEdit(MeasuredProbe):
    """Double the newest token's score for another value, layer by layer and in single heads: does the answer move?

    It tests whether attention to a place causes the answer, where other probes see both together.

    Source: Yu et al. (2024), Mitigate Position Bias via Scaling a Single Dimension, section 2,
        https://arxiv.org/abs/2406.02536
    Formula: s'_Tj = s_Tj + (factor - 1) |s_Tj| for one key j, the token of another pair's value where it differs
        from that asked for. Shift: change of log p(other) - log p(gold) for the next token. Moved: share of prompts
        in which the other token becomes the more likely of the two.
    Differs from the paper: single layers and heads beside all layers; keys and values are short.

    Args:
        pairs: Pairs of a prompt.
        prompts: Number of prompts; the gold place goes round, the other pair is the next one.
        factor: What scores are multiplied by.
        seed: Seed of keys and values.
    """

    name: ClassVar[str] = "attention-edit"
    source: ClassVar[str] = (
        "Yu et al. (2024), Mitigate Position Bias via Scaling a Single Dimension, https://arxiv.org/abs/2406.02536"
    )
    deviations: ClassVar[tuple[str, ...]] = ("Single layers and heads are edited too.", "Keys and values are short.")
    reads_text: ClassVar[bool] = True

    pairs: Annotated[int, Integer(2)] = 8
    prompts: Annotated[int, Integer(1)] = 8
    factor: Annotated[float, Number(0, 100)] = 2.0
    seed: int = 0

    def measure(self, subject: Subject, progress: Progress) -> Found:
        """Read the prompts with each edit; see ``Probe.run``."""
        model = language_model(subject, self.name)
        candidates = [
            choice_of(prompt, (prompt.gold + 1) % self.pairs)
            for prompt in key_value_prompts(model, self.pairs, self.prompts, self.seed)
        ]
        choices = [choice for choice in candidates if choice is not None]
        heads, preferences = _strongest_heads(model, choices)
        edits: dict[str, tuple[int | None, tuple[int, ...] | None]] = {
            "all layers": (None, None),
            **{f"layer {layer}": (layer, None) for layer in range(model.n_layers)},
            **{f"layer {layer}, head {head}": (layer, (head,)) for layer, head in heads},
        }
        summary: dict[str, Any] = {
            "unchanged": {
                "gold_preferred": float((preferences < 0).double().mean()),
                "preference": float(preferences.mean()),
            },
            "edits": {},
        }
        rows = []
        with progress("editing scores") as report:
            for done, (label, (layer, chosen)) in enumerate(edits.items()):
                after = torch.tensor(
                    [
                        _preference(
                            model, choice, Change(scores=scaled_score(choice.other_at, self.factor, layer, chosen))
                        )
                        for choice in choices
                    ]
                )
                moved = ((preferences < 0) & (after > 0)).double().mean()
                summary["edits"][label] = {"shift": float((after - preferences).mean()), "moved": float(moved)}
                rows.append({"edit": label, "before": preferences.tolist(), "after": after.tolist()})
                report(done + 1, len(edits))
        return Found(summary, rows)

    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return the shift by layer, and in the heads that attend most."""
        figure, (left, right) = new_row(2, (11.0, 3.6))
        edits = head["summary"]["edits"]
        layers = {key: edit for key, edit in edits.items() if key.startswith("layer") and "head" not in key}
        heads = {key: edit for key, edit in edits.items() if "head" in key}
        left.bar(range(len(layers)), [edit["shift"] for edit in layers.values()], color=OTHER_COLORS[1])
        left.set_xlabel("layer whose score is edited, all heads")
        left.set_title(f"{head['model']}: shift to the other value (nats)", fontsize=10, loc="left")
        right.barh(range(len(heads)), [edit["shift"] for edit in heads.values()], color=OTHER_COLORS[2])
        right.set_yticks(range(len(heads)), list(heads), fontsize=8)
        right.set_title("in one head", fontsize=10, loc="left")
        return figure

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return the edits with the largest shift."""
        edits = sorted(head["summary"]["edits"].items(), key=lambda item: -abs(item[1]["shift"]))[:12]
        rows = [(label, f"{edit['shift']:+.3f}", f"{edit['moved']:.2f}") for label, edit in edits]
        return [("edited", "shift to the other value (nats)", "share of answers that moved"), *rows]


def _preference(model: Subject, choice: Choice, change: Change, watch: Watch | None = None) -> float:
    """Return log p(other) - log p(gold) of the next token."""
    logits = model.read(torch.tensor([choice.ids]), watch or Watch(), change)[0, 0].double()
    return float(logits[choice.other] - logits[choice.gold])


def _strongest_heads(model: Subject, choices: Sequence[Choice]) -> tuple[list[tuple[int, int]], Tensor]:
    """Return the heads that attend most to the requested value, and the preference of each choice as it is."""
    total = torch.zeros(model.n_layers, model.n_heads)
    preferences = []
    for choice in choices:

        def add(layer: int, weights: Tensor, position: int = choice.gold_at) -> None:
            total[layer] += weights[0, :, -1, position].cpu()

        preferences.append(_preference(model, choice, Change(), Watch(weights=add)))
    order = total.flatten().argsort(descending=True)[:HEADS].tolist()
    return [divmod(index, model.n_heads) for index in order], torch.tensor(preferences)
