"""The forward context: what one forward pass does differently, switched on per thread. Data only."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields

from torch import Tensor

from rag_posfix.patching.spec import ModelSpec
from rag_posfix.plan.plan import AttentionOverride, HeadScale, HiddenScale, MaskFunction, Rotated


@dataclass(slots=True)
class Observer:
    """Collects the attention of the last queries, averaged over them, over layers and the heads that are here.

    Attributes:
        total: (B, Tk) float32, summed over layers.
        n_layers: Layers that have reported.
        queries: How many of the last queries count. With a plan that replaces attention: one.
        layers: The observed layers; None = all.
        approximate: Whether shares suffice whose last digits may be wrong.
        heads: Layer -> query heads that count; then nothing is averaged over heads and layers, and ``by_head`` is
            filled instead of ``total``.
        by_head: Layer -> (B, heads, Tk) float32.
    """

    total: Tensor | None = None
    n_layers: int = 0
    queries: int = 1
    layers: frozenset[int] | None = None
    approximate: bool = False
    heads: Mapping[int, tuple[int, ...]] | None = None
    by_head: dict[int, Tensor] = field(default_factory=dict)

    def observes(self, layer: int) -> bool:
        """Return whether a layer's attention is observed."""
        if self.heads is not None:
            return layer in self.heads
        return self.layers is None or layer in self.layers

    def add(self, attention: Tensor) -> None:
        """Add one layer's (B, Tk)."""
        if self.total is not None and attention.device != self.total.device:  # layers on several devices
            attention = attention.to(self.total.device)
        self.total = attention if self.total is None else self.total + attention
        self.n_layers += 1

    def mean(self) -> Tensor | None:
        """Return the mean over layers, (B, Tk), or None if no layer reported."""
        return None if self.total is None else self.total / self.n_layers


@dataclass(frozen=True, slots=True, eq=False)
class Overrides:
    """What a row's plan changes in the model's attention. All fields at their defaults: the stock path runs.

    Attributes: those of ``RowPlan``.
    """

    mask: MaskFunction | None = None
    rope_base_factor: float | None = None
    layer_scale: tuple[float, ...] | None = None
    head_scale: HeadScale | None = None
    hidden_scale: HiddenScale | None = None
    attend: AttentionOverride | None = None

    @property
    def masks_only(self) -> bool:
        """Whether only the attention mask changes."""
        return all(getattr(self, override.name) is None for override in fields(self) if override.name != "mask")

    @property
    def rotates_in_hook(self) -> bool:
        """Whether the attention hook rotates queries and keys instead of the model."""
        return (
            self.head_scale is not None
            or self.hidden_scale is not None
            or (self.attend is not None and self.attend.rotated is not Rotated.BOTH)
        )

    @property
    def changes_angles(self) -> bool:
        """Whether the model rotates by other angles than its own."""
        return self.rope_base_factor is not None or self.layer_scale is not None


@dataclass(slots=True, eq=False)
class LayerState:
    """What the layers of one batch remember between forward passes, and hand on within one.

    Attributes:
        head_divisors: Layer -> position divisor of each key/value head, decided once.
        channel: Layer -> the scaled hidden channel of the tokens of this pass, (B, Tq).
        kept: ``AttentionInput.kept``; tensors in it are never changed in place.
    """

    head_divisors: dict[int, Tensor | None] = field(default_factory=dict)
    channel: dict[int, Tensor] = field(default_factory=dict)
    kept: dict[Hashable, Tensor] = field(default_factory=dict)

    def copy(self) -> LayerState:
        """Return an independent copy."""
        return LayerState(dict(self.head_divisors), {}, dict(self.kept))


class LastLayerRead(Exception):
    """Ends a forward pass after ``ForwardContext.last_layer``. Whoever sets ``last_layer`` catches it."""


@dataclass(frozen=True, slots=True, eq=False)
class ForwardContext:
    """What one forward pass does differently.

    Attributes:
        overrides: The plan's changes.
        positions: (B | 1, Tk) positions of every token so far; the queries are the last of them. Needed with overrides
            that rotate or change angles.
        spec: The model's; needed with ``positions``.
        layer_state: Of this batch.
        prompt_length: Tokens that the prompt holds; queries from the last of them on are last tokens.
        observer: Receives the attention of the last queries.
        on_hidden_states: Receives each layer's number and the input of its attention, (B, Tq, hidden).
        starts: The first token of each row among the keys; those before it are padding. If given, causality and
            padding follow from it, and a mask is made only where the plan has one. None: the model's own mask counts.
        last_layer: The pass ends with the keys, values and observed attention of this layer, by ``LastLayerRead``; for
            contexts without overrides. None reads all layers.
        slices: Parts of the batch with caches of their own, in the order of the batch; then nothing above is used.
            Rows after the last part are padding: they attend to nothing.
    """

    overrides: Overrides = field(default_factory=Overrides)
    positions: Tensor | None = None
    spec: ModelSpec | None = None
    layer_state: LayerState = field(default_factory=LayerState)
    prompt_length: int = 1
    observer: Observer | None = None
    on_hidden_states: Callable[[int, Tensor], None] | None = None
    starts: tuple[int, ...] | None = None
    last_layer: int | None = None
    slices: tuple[BatchSlice, ...] = ()

    def by_rows(self, n_rows: int) -> list[tuple[slice, ForwardContext]]:
        """Return (rows, context) for all rows of the pass; rows of padding have a context without overrides."""
        if not self.slices:
            return [(slice(None), self)]
        contexts = [(batch_slice.rows, batch_slice.context) for batch_slice in self.slices]
        stop = contexts[-1][0].stop
        return contexts if stop == n_rows else [*contexts, (slice(stop, n_rows), ForwardContext())]


@dataclass(frozen=True, slots=True, eq=False)
class BatchSlice:
    """Rows of a batch that have a cache of their own.

    Attributes:
        rows: Which rows of the batch.
        context: As for a pass over these rows alone; it has ``starts`` and no mask.
        keys: Layer -> (keys, values), each (R, Hkv, Tk, D), of all tokens so far: the cache's own tensors.
    """

    rows: slice
    context: ForwardContext
    keys: Callable[[int], tuple[Tensor, Tensor]]


_ACTIVE: ContextVar[ForwardContext | None] = ContextVar("rag_posfix_forward_context", default=None)


def current() -> ForwardContext | None:
    """Return the context that is switched on in this thread; None leaves the model as it was trained."""
    return _ACTIVE.get()


@contextmanager
def active(context: ForwardContext) -> Iterator[None]:
    """Switch ``context`` on for the forward passes of this thread inside the block."""
    token = _ACTIVE.set(context)
    try:
        yield
    finally:
        _ACTIVE.reset(token)
