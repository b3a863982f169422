"""What one forward pass does differently, and how a thread switches it on. Data only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor

from rag_posfix.patching.spec import ModelSpec
from rag_posfix.plan.attention_override import Attend, Rotated
from rag_posfix.plan.plan import HeadScale, HiddenScale, MaskFunction

__all__ = ["Edits", "Member", "Observer", "Scratch", "SeamCall", "active", "current"]


@dataclass(slots=True)
class Observer:
    """Collects the attention of the newest queries, averaged over them, over layers and the heads that are here.

    Attributes:
        total: (B, Tk) float32, summed over layers.
        n_layers: Layers that have reported.
        queries: How many of the newest queries count. With a plan that replaces attention: one.
        layers: Which layers are asked; None asks all.
        rough: Whether shares are wanted, and their last digits are not.
    """

    total: Tensor | None = None
    n_layers: int = 0
    queries: int = 1
    layers: frozenset[int] | None = None
    rough: bool = False

    def asks(self, layer: int) -> bool:
        """Return whether a layer's attention is wanted."""
        return self.layers is None or layer in self.layers

    def add(self, attention: Tensor) -> None:
        """Add one layer's (B, Tk)."""
        self.total = attention if self.total is None else self.total + attention
        self.n_layers += 1

    def mean(self) -> Tensor | None:
        """Return the mean over layers, (B, Tk), or None if no layer reported."""
        return None if self.total is None else self.total / self.n_layers


@dataclass(frozen=True, slots=True, eq=False)
class Edits:
    """What a row's plan asks of the model. All fields at their defaults: nothing, the stock path runs.

    Attributes: those of ``RowPlan``.
    """

    mask: MaskFunction | None = None
    rope_base_factor: float | None = None
    layer_scale: tuple[float, ...] | None = None
    head_scale: HeadScale | None = None
    hidden_scale: HiddenScale | None = None
    attend: Attend | None = None

    @property
    def holds_rotation(self) -> bool:
        """Whether the seam rotates queries and keys instead of the model."""
        return (
            self.head_scale is not None
            or self.hidden_scale is not None
            or (self.attend is not None and self.attend.rotated is not Rotated.BOTH)
        )

    @property
    def sets_angles(self) -> bool:
        """Whether the model rotates by other angles than its own."""
        return self.rope_base_factor is not None or self.layer_scale is not None


@dataclass(slots=True, eq=False)
class Scratch:
    """What a sequence's layers remember between forward passes, and pass to each other within one.

    Attributes:
        head_ratios: Layer -> position divisor of each key/value head, decided once.
        channel: Layer -> the scaled hidden channel of the tokens of this pass, (B, Tq).
    """

    head_ratios: dict[int, Tensor | None] = field(default_factory=dict)
    channel: dict[int, Tensor] = field(default_factory=dict)

    def copy(self) -> Scratch:
        """Return a scratch that goes its own way."""
        return Scratch(dict(self.head_ratios), {})


@dataclass(frozen=True, slots=True, eq=False)
class SeamCall:
    """What one forward pass does differently.

    Attributes:
        edits: What the plan asks for.
        positions: (B | 1, Tk) positions of every token so far; the queries are the last of them. Needed with edits
            that rotate or set angles.
        spec: The model's; needed with ``positions``.
        scratch: Of this sequence.
        n_prompt: Tokens that the prompt holds; queries from the last of them on are newest tokens.
        observer: Receives the attention of the newest queries.
        listener: Receives each layer's number and what its attention reads, (B, Tq, hidden).
        starts: The first token of each row among the keys; those before it are padding. Not None: the seam knows all
            that a mask would say, and none is made unless the plan has one. None: the model's own mask counts.
        members: Rows with caches of their own, in the order of the batch; then nothing above is used.
    """

    edits: Edits = field(default_factory=Edits)
    positions: Tensor | None = None
    spec: ModelSpec | None = None
    scratch: Scratch = field(default_factory=Scratch)
    n_prompt: int = 1
    observer: Observer | None = None
    listener: Callable[[int, Tensor], None] | None = None
    starts: tuple[int, ...] | None = None
    members: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """Some rows of a batch that have a cache of their own.

    Attributes:
        rows: Which rows of the batch.
        call: What a pass of these rows alone would be asked for; it has ``starts`` and no mask.
        keys: Layer -> (keys, values), each (R, Hkv, Tk, D), of all tokens so far: the cache's own tensors.
    """

    rows: slice
    call: SeamCall
    keys: Callable[[int], tuple[Tensor, Tensor]]


_ACTIVE: ContextVar[SeamCall | None] = ContextVar("rag_posfix_seam_call", default=None)


def current() -> SeamCall | None:
    """Return the call that is switched on in this thread."""
    return _ACTIVE.get()


@contextmanager
def active(call: SeamCall) -> Iterator[None]:
    """Switch ``call`` on for the forward passes of this thread inside the block."""
    token = _ACTIVE.set(call)
    try:
        yield
    finally:
        _ACTIVE.reset(token)
