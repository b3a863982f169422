"""RoToR: passages in one global order (by content) attend to each other, each with itself last."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from rag_posfix.attention.masks import (
    attend_causal,
    attend_prompt_with_lse,
    attend_whole,
    attend_with_lse,
    merge,
)
from rag_posfix.attention.rope import add_rotation
from rag_posfix.errors import ConfigError
from rag_posfix.lazy_torch import Tensor, torch
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation
from rag_posfix.parameters import Number
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import AttentionInput, AttentionOverride, Capability, ModelShape, Plan, RowPlan, RowScores


class CircularAttention(AttentionOverride):
    """Attention of each passage to all others in a circular arrangement that ends with the passage itself.

    Formula: let the passages have the positions P..E-1 and let passage i be tokens a..b-1 of them. In its arrangement
        the passages after it come first, then those before it, then itself. So the distance to the passages before
        it, and to itself, is the same as in the prompt; the passages after it are E - P further back, and the prefix
        E - b. Hence three segments of keys: P..g as they are, b..E-1 rotated back by E - P, the prefix rotated back by
        E - b. Only keys are rotated, by a constant each: they have the fewest heads.
    """

    def __init__(self, layout: Layout) -> None:
        self._prefix = len(layout.prefix)
        self._passages = layout.passages
        self._end = layout.suffix.start
        self._pieces = [len(layout.prefix), *map(len, layout.passages)]
        self._ends = torch.tensor([span.stop for span in layout.passages], dtype=torch.float32)
        self.standard_from = self._end

    def on(self, device: torch.device) -> CircularAttention:
        """Return a copy with its tensors on a device."""
        moved = copy.copy(self)
        moved._ends = self._ends.to(device)
        return moved

    def __call__(self, inputs: AttentionInput) -> tuple[Tensor, Tensor | None]:
        """Prefix and passages arrive in one pass, with the suffix or without it; key positions are 0, 1, 2, ...

        The keys before a passage and its own are where an ordinary prompt has them: one causal call over all
        passages computes all of them, those of the suffix included. What is left to a passage are the prefix and the
        passages after it: one call each, merged by the log-sum-exp.
        """
        query, key, value, scaling, first = inputs.query, inputs.key, inputs.value, inputs.scaling, self._prefix
        passage_query, passage_key, passage_value = (states[:, :, first:] for states in (query, key, value))
        out, lse = attend_prompt_with_lse(passage_query, passage_key, passage_value, scaling)
        moved = [attend_whole(*run, scaling) for run in self._moved_runs(inputs)]
        if first and query.shape[2] > self._end:
            moved.append(attend_with_lse(query[:, :, self._end :], key[:, :, :first], value[:, :, :first], scaling))
        moved_out, moved_lse = (torch.cat(states, dim=2) for states in zip(*moved, strict=True))
        n_moved = moved_lse.shape[2]  # without a prefix the last passage and the suffix have one run alone
        merged = merge([(out[:, :, :n_moved], lse[:, :, :n_moved]), (moved_out, moved_lse)])[0]
        outs = [merged] if n_moved == lse.shape[2] else [merged, out[:, :, n_moved:]]
        if first:
            outs.insert(0, attend_causal(query[:, :, :first], key[:, :, :first], value[:, :, :first], scaling))
        return torch.cat(outs, dim=2), None

    def _moved_runs(self, inputs: AttentionInput) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (query, key, value) of each passage and the keys that its arrangement moves, if it has any."""
        run_states, prefixes = self._moved_states(inputs)
        keys, values = run_states.unbind()
        queries = torch.split(inputs.query[:, :, : self._end], self._pieces, dim=2)[1:]
        for span, query, prefix in zip(self._passages, queries, prefixes, strict=True):
            start = span.stop - self._prefix
            if self._prefix:
                run_states.narrow(3, start, self._prefix).copy_(prefix)  # over keys that no later passage attends to
            if start < self._end:
                length = self._end - start
                yield query, keys.narrow(2, start, length), values.narrow(2, start, length)

    def _moved_states(self, inputs: AttentionInput) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return keys and values of the passages moved behind all others, (2, 1, Hkv, E, D), and of the prefixes.

        The first P tokens are room for the prefix of the first passage. Prefixes are (2, 1, Hkv, P, D), one for each
        passage.
        """
        first, end = self._prefix, self._end
        key, value = inputs.key[:, :, :end], inputs.value[:, :, :end]
        back = rotated(inputs, key, inputs.positions.new_full((1,), float(first - end)))
        moved = rotated(inputs, key[:, :, :first], self._ends - end) if first else key.new_empty(len(self._ends), 0)
        prefixes = torch.stack((moved, value[:, :, :first].expand_as(moved)), dim=1)[:, :, None] if first else moved
        return torch.stack((back, value)), prefixes.unbind()

    def visible(self, n_tokens: int) -> Tensor | None:
        """Return the attention mask: each passage attends to all other passages, and causally to itself."""
        positions = torch.arange(n_tokens)
        seen = positions[:, None] >= positions[None, :]
        for span in self._passages:
            seen[span.slice, span.stop : self._end] = True
        return seen


def rotated(inputs: AttentionInput, key: Tensor, distances: Tensor) -> Tensor:
    """Return the keys rotated by each distance to later positions. Shapes: (1, Hkv, T, D), (n,) -> (n, Hkv, T, D)."""
    return add_rotation(key.expand(len(distances), -1, -1, -1), inputs.rotate.phases(distances[:, None]))


@MITIGATIONS.register("sorted_inter_document", aliases=("rotor",))
@dataclass(frozen=True)
class SortedInterDocument(Mitigation):
    """Sort the passages by content, and let each attend to all others in one circular order that ends with itself.

    The order of the passages depends on their content alone, so the given order has no effect. Every passage attends
    to all others, so that its position in the sorted order matters less too. Only the rows of the passages differ from
    an ordinary prompt with sorted passages: question and answer have ordinary attention.

    Source: Yoon et al. (2025), RoToR, section 3, https://arxiv.org/abs/2502.08662
    Formula: with the passages in the global order 1..k, passage i sees them arranged i+1, .., k, 1, .., i-1, i: all
        others fully and itself causally, at the positions of that arrangement; suffix and answer see 1..k. The
        lexicographically smallest passage (by token ids) is nearest to the question, as in the authors' code.
        Routing: the unmodified row is used if its confidence + routing > that of the sorted row, confidence being the
        probability of the likeliest first token.
    Differs from the paper: relevance is that of any reranker, not of monoT5; keys are rotated once for all passages,
        by the common part of their arrangements, instead of once for every passage. Routing compares the
        confidence of the first token; the authors' code compares the mean over the generated tokens.
    Helps: many passages in no meaningful order.
    Hurts: passages whose order carries meaning, such as the parts of one text; models that attend mostly to the last
        passage lose the advantage of a gold passage in the last position.
    Cost: attention over T x T instead of its lower half at prefill, 1.2 to 2 times the time at 3,000 tokens in
        bfloat16 on a CPU; decoding is that of the unmodified model. With routing the unmodified prompt is read too.
    Limits: models whose rotary encoding is supported and in which every layer has all keys.

    Args:
        sort: ``lexicographic`` by token ids, or ``relevance``, the most relevant nearest to the question.
        routing: None runs the sorted row alone. A number (the paper's is 0.2) also runs the given order unmodified
            and uses the more confident row; the answer then depends on the order again.
    """

    name = "sorted_inter_document"
    order_invariant = True
    requires = frozenset({Capability.POSITIONS, Capability.FULL_CACHE, Capability.ROTATION, Capability.SOFTMAX})

    sort: Literal["lexicographic", "relevance"] = "lexicographic"
    routing: Annotated[float | None, Number(0, 1)] = None

    @property
    def is_order_invariant(self) -> bool:
        """Routing brings the caller's order back."""
        return self.routing is None

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return the sorted row; with routing, the unmodified row before it."""
        order = self._order(layout)
        if len(order) < 2:
            return Plan()
        sorted_layout = layout.select(order)
        # Passages attend to each other, so cached keys and values serve only prompts with all of them.
        reusable = (sorted_layout.suffix.start,)
        row = RowPlan(passages=order, attend=CircularAttention(sorted_layout), reusable=reusable)
        if self.routing is None:
            return Plan(rows=(row,))
        return Plan(rows=(RowPlan(), row), combine=self._route)

    def _order(self, layout: Layout) -> tuple[int, ...]:
        """Return the passages, the one nearest to the question last."""
        smallest_last = sorted(layout.canonical_order(), key=lambda i: layout.tokens(layout.passages[i]), reverse=True)
        if self.sort == "lexicographic":
            return tuple(smallest_last)
        if layout.relevance is None:
            raise ConfigError(
                "sorted_inter_document: sort='relevance' needs passages that carry relevance; rerank them first "
                "or use sort='lexicographic'"
            )
        relevance = layout.relevance
        return tuple(sorted(smallest_last, key=lambda i: relevance[i]))

    def _route(self, scores: RowScores) -> tuple[Tensor, Tensor]:
        """Return the scores of the more confident row, unmodified or sorted; the first token decides."""
        original, sorted_row = scores.confidence.exp().tolist()
        selected_row = 0 if original + (self.routing or 0.0) > sorted_row else 1
        weights = torch.zeros_like(scores.confidence)
        weights[selected_row] = 1.0
        return scores.log_probs[selected_row], weights
