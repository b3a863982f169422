"""CoPE: positions count the tokens that a query's gates let through, so that they follow content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rag_posfix.lab.encodings.base import ENCODINGS, DecoderShape, Encoding, Positions, distances
from rag_posfix.parameters import Integer

QUERIES = 64
"""Queries of a tile."""
CPU_SCORES, OTHER_SCORES = 1 << 17, 1 << 24
"""Scores of a tile: on a CPU they and what is computed of them stay near its cache, elsewhere tiles are few."""


def contextual_positions(gates: Tensor, p_max: int) -> Tensor:
    """Return how many gates are open from each key to the query, the query's own included, at most ``p_max``.

    Formula: p_ij = min(sum_{k = j}^{i} g_ik, p_max). Gates of future keys count as 0.

    Shapes:
        gates: (..., Tq, Tk) in 0 to 1. returns: the same, float32: bfloat16 does not count beyond 256.
    """
    future = distances(gates.shape[-2], gates.shape[-1], gates.device) < 0
    open_gates = gates.float().masked_fill(future, 0.0)
    return open_gates.flip(-1).cumsum(dim=-1).flip(-1).clamp(max=p_max)


class _Heads:
    """Some heads of some sequences, their tokens in reverse order, so that positions are running sums over the keys.

    Formula: z(p) = z[floor p] + (p - floor p) (z[floor p + 1] - z[floor p])

    Args:
        table: Position vectors, whose products with queries are divided by sqrt(D).
        content: Queries and keys of the content scores where they are not those of the gates.

    Shapes:
        table: (P + 1, D). query: (N, Tq, D), divided by sqrt(D). key: (N, Tk, D).
    """

    def __init__(self, softmax: bool, table: Tensor, query: Tensor, key: Tensor, *content: Tensor) -> None:
        self.softmax, self.query, self.key, self.content = softmax, query, key, content
        self.table = table[: key.shape[1] + 1].to(query.dtype)  # no position is beyond the number of gates
        self.by_position = query @ self.table.T  # (N, Tq, P + 1)
        self.steps = self.by_position.diff(dim=-1, append=self.by_position[..., -1:])  # to the next position
        self.hidden = query.new_full((QUERIES, QUERIES), float("-inf")).tril_(-1)

    def scores(self, rows: slice) -> Tensor:
        """Return the scores of some queries and the keys up to the last of them, -inf at future keys.

        Beyond the first ``near`` keys all gates are counted: every position is the last one.

        Shapes:
            returns: (N, R, C).
        """
        scores = self._products(rows, self.query, self.key)
        self.gates = scores.softmax(dim=-1) if self.softmax else scores.sigmoid()  # 0 at future keys
        last = self.table.shape[0] - 1
        positions = self.gates.cumsum(dim=-1).clamp_(max=last)
        near = positions.shape[-1] if self.softmax else int((positions.amin(dim=(0, 1)) < last).sum())
        self.below, self.weight = positions[..., :near].long(), positions[..., :near].frac_()
        self.step = self.steps[:, rows].gather(-1, self.below)
        if self.content:
            scores = self._products(rows, *self.content)
        placed = self.by_position[:, rows].gather(-1, self.below)
        scores[..., :near].add_(placed).addcmul_(self.weight, self.step)
        scores[..., near:] += self.by_position[:, rows, -1:]
        return scores

    def _products(self, rows: slice, query: Tensor, key: Tensor) -> Tensor:
        products = torch.bmm(query[:, rows], key[:, rows.start :].mT)
        size = products.shape[1]
        products[..., :size] += self.hidden[:size, :size]  # the first keys are in the future of the later queries
        return products

    def backward(self, rows: slice, grad: Tensor, low: Tensor, step: Tensor, states: Sequence[Tensor]) -> None:
        """Add the gradients of ``scores(rows)``, which was called last.

        At whole positions floor and ceiling are one, so that gates have no gradient there.

        Args:
            low, step: Added to at floor p: gradients of ``by_position`` and ``steps``.
            states: Added to: gradients of the queries and keys.

        Shapes:
            grad: (N, R, C), 0 at future keys; overwritten. low, step: (N, Tq, P + 1).
        """
        size = self.below.shape[-1]
        near, gates = grad[..., :size], self.gates[..., :size]
        low[:, rows].scatter_add_(-1, self.below, near)
        low[:, rows, -1] += grad[..., size:].sum(dim=-1)
        step[:, rows].scatter_add_(-1, self.below, near * self.weight)
        opened = self.weight.sign_().mul_(self.step).mul_(near)
        opened = opened.flip(-1).cumsum(dim=-1).flip(-1)  # a gate counts for all keys before its own
        if self.softmax:
            opened.sub_((opened * gates).sum(dim=-1, keepdim=True)).mul_(gates)
        else:
            opened.mul_(gates).addcmul_(opened, gates, value=-1)
        if self.content:
            self._add(rows, grad, *self.content, *states[2:])
            grad = opened
        else:
            near += opened
        self._add(rows, grad, self.query, self.key, *states[:2])

    @staticmethod
    def _add(rows: slice, grad: Tensor, query: Tensor, key: Tensor, query_grad: Tensor, key_grad: Tensor) -> None:
        keys = slice(rows.start, rows.start + grad.shape[-1])
        query_grad[:, rows] += torch.bmm(grad, key[:, keys])
        key_grad[:, keys].baddbmm_(grad.mT, query[:, rows])


class _CopeAttention(torch.autograd.Function):
    """Causal attention with contextual positions, a tile at a time; the backward pass computes the tiles again.

    Formula: with A = softmax(S), O = A V and the gradient dO of O: dV = A^T dO, dS = A * (dO V^T - sum_d dO_d O_d)
    """

    @staticmethod
    def forward(ctx: Any, softmax: bool, table: Tensor, value: Tensor, *states: Tensor) -> Tensor:
        """Return attention; ``states`` and the table are as in ``_Heads``, but (B, H, T, D) and not divided."""
        values, *read = map(_reversed, (value, *states))
        for query in read[::2]:
            query.mul_(query.shape[-1] ** -0.5)
        out = values.new_empty(*read[0].shape[:2], values.shape[-1])
        for group in _groups(read[0], read[1]):
            heads = _Heads(softmax, table, *(each[group] for each in read))
            for rows in _tiles(read[0]):
                out[group, rows] = torch.bmm(heads.scores(rows).softmax(dim=-1), values[group, rows.start :])
        ctx.save_for_backward(table, values, out, *read)
        ctx.softmax = softmax
        return _restored(out, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of all inputs."""
        table, values, out, *read = ctx.saved_tensors
        out_grad = _reversed(grad)
        mean = (out_grad * out).sum(dim=-1, keepdim=True)
        table_grad, value_grad, *grads = (torch.zeros_like(each) for each in (table, values, *read))
        for group in _groups(read[0], read[1]):
            heads = _Heads(ctx.softmax, table, *(each[group] for each in read))
            states = [each[group] for each in grads]
            low, step = torch.zeros_like(heads.steps), torch.zeros_like(heads.steps)
            for rows in _tiles(read[0]):
                shares = heads.scores(rows).softmax(dim=-1)
                value_grad[group, rows.start :].baddbmm_(shares.mT, out_grad[group, rows])
                products = torch.bmm(out_grad[group, rows], values[group, rows.start :].mT)
                heads.backward(rows, products.sub_(mean[group, rows]).mul_(shares), low, step, states)
            low -= step
            low[..., 1:] += step[..., :-1]
            states[0] += low @ heads.table
            table_grad[: len(heads.table)] += low.flatten(0, 1).T @ heads.query.flatten(0, 1)
        for query_grad in grads[::2]:
            query_grad.mul_(query_grad.shape[-1] ** -0.5)
        return None, table_grad, *(_restored(each, grad) for each in (value_grad, *grads))


def _groups(query: Tensor, key: Tensor) -> list[slice]:
    """Return the heads whose tiles are computed together."""
    scores = CPU_SCORES if query.device.type == "cpu" else OTHER_SCORES
    size = max(1, scores // (min(query.shape[1], QUERIES) * key.shape[1]))
    return [slice(first, first + size) for first in range(0, query.shape[0], size)]


def _tiles(query: Tensor) -> list[slice]:
    """Return the queries that are computed together."""
    return [slice(first, first + QUERIES) for first in range(0, query.shape[1], QUERIES)]


def _reversed(states: Tensor) -> Tensor:
    """Return (B, H, T, D) as (B H, T, D), the last token first, in float32 at least."""
    return states.to(torch.promote_types(states.dtype, torch.float32)).flip(2).flatten(0, 1)


def _restored(states: Tensor, like: Tensor) -> Tensor:
    """Return what ``_reversed`` reversed, with the sequences, heads and dtype of another tensor."""
    return states.view(*like.shape[:2], *states.shape[1:]).flip(2).to(like.dtype)


class CopePositions(Positions):
    """CoPE in a decoder.

    Args:
        tables: Number of position tables: one per layer, or one.
        p_max: The last position.
        size: Channels of a head.
        divide: Divide position scores by sqrt(D) as well.
        softmax: Gates of a query sum to 1.
    """

    def __init__(self, tables: int, p_max: int, size: int, *, divide: bool, softmax: bool = False) -> None:
        super().__init__()
        self.p_max, self.divide, self.softmax = p_max, divide, softmax
        self.table = nn.Parameter(torch.zeros(tables, p_max + 1, size))

    def content(self, query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        """Return queries and keys of the content scores; nothing where they are those of the gates."""
        return ()

    def gates(self, query: Tensor, key: Tensor) -> Tensor:
        """Return how much each key counts for each query, 0 to 1; those of future keys are not used.

        Shapes:
            query: (B, H, Tq, D). key: (B, H, Tk, D). returns: (B, H, Tq, Tk).
        """
        gates: Tensor = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        if self.softmax:
            future = distances(query.shape[-2], key.shape[-2], gates.device) < 0
            gates = gates.masked_fill(future, float("-inf")).softmax(dim=-1)
        else:
            gates = gates.sigmoid()
        return gates

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return causal attention with contextual positions; see ``Positions.attend``."""
        table = self.table[layer if self.table.shape[0] > 1 else 0]
        scaled = table if self.divide else table * query.shape[-1] ** 0.5
        states = query, key, *self.content(query, key)
        attended: Tensor = _CopeAttention.apply(self.softmax, scaled, value, *states)  # type: ignore[no-untyped-call]
        return attended


@ENCODINGS.register("cope")
@dataclass(frozen=True)
class Cope(Encoding):
    """Count positions in tokens that the query lets count, such as sentence ends, not in tokens.

    A gate per query and key says whether the key counts. The position of a key is the number of open gates between it
    and the query; it need not be whole.

    Source: Golovneva et al. (2024), Contextual Position Encoding, section 4, https://arxiv.org/abs/2405.18719
    Formula: g_ij = sigmoid(q_i k_j / sqrt(D)); p_ij = min(sum_{k = j}^{i} g_ik, p_max); score_ij =
        (q_i k_j + z_i(p_ij)) / sqrt(D), z_i(p) interpolated between q_i e[floor p] and q_i e[ceil p]. With all gates 1
        it is ``shaw`` with e[p] at the distance p - 1; with all gates 0 all keys are at e[0].
    Differs from the paper: the paper's formula has no sqrt(D) in the gates; its code has, and so has this.
    Cost: O(T^2) time and O(T) memory: scores are computed a tile at a time, in the backward pass once more. A tile has
        no gates to read or to differentiate where every position is ``p_max``.
    Limits: trained from the start; a model that was trained without it cannot use it.

    Args:
        p_max: The last position, 1 or more; farther keys share it.
        shared: One table of positions for all layers instead of one per layer.
        divide: Divide position scores by sqrt(D) too; False is the option ``nodiv`` of the paper's code.
        gate: ``softmax`` is for comparison: the gates of a query sum to 1, so that no position is above 1.
    """

    name = "cope"

    p_max: Annotated[int, Integer(1)] = 64
    shared: bool = False
    divide: bool = True
    gate: Literal["sigmoid", "softmax"] = "sigmoid"

    def build(self, shape: DecoderShape) -> Positions:
        """Return tables of zeros."""
        tables = 1 if self.shared else shape.layers
        return CopePositions(tables, self.p_max, shape.head_dim, divide=self.divide, softmax=self.gate == "softmax")
