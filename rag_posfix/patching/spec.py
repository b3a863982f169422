"""The specification of a patched model, and the ranks that it is split over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor

from rag_posfix.patching.plain import PlainForward
from rag_posfix.plan.plan import ModelShape


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The ranks of a tensor-parallel model. With one process every method is the identity.

    Methods are collective: all ranks call them in the same order, with tensors of the same shape.

    Attributes:
        count: How many processes.
        rank: Which of them this is, from 0.
        control: Process group for what is not on the model's device; needed with two processes or more. It waits for
            ever: the other ranks wait in it for commands of the first rank.
        patience: How long ranks wait for each other in the middle of a step.
    """

    count: int = 1
    rank: int = 0
    control: Any = None
    patience: timedelta = timedelta(minutes=10)

    def wait(self) -> None:
        """Wait until all ranks are here, as long as it takes; one that has ended is an error."""
        if self.count > 1:
            torch.distributed.barrier(group=self.control)

    def mean(self, over_heads: Tensor) -> Tensor:
        """Return a mean over this rank's heads as the mean over all heads. Ranks have equally many heads."""
        if self.count == 1:
            return over_heads
        total = over_heads.clone()
        torch.distributed.all_reduce(total)
        return total / self.count

    def gather(self, local_heads: Tensor, size: int, dim: int) -> Tensor:
        """Return the tensors of all ranks, concatenated in their order along one axis.

        Some families' projections are gathered before attention: there each rank has all heads already.

        Args:
            size: Length of the axis on all ranks together; a tensor of that length is returned unchanged.
        """
        if local_heads.shape[dim] == size:
            return local_heads
        local_heads = local_heads.contiguous()
        gathered = [torch.empty_like(local_heads) for _ in range(self.count)]
        torch.distributed.all_gather(gathered, local_heads)
        return torch.cat(gathered, dim=dim)

    def own_heads(self, values: Tensor, n_own: int) -> Tensor:
        """Return the values of this rank's heads. Shapes: (H, ...) -> (n_own, ...)."""
        if values.shape[0] == n_own:
            return values
        return values[self.rank * n_own : (self.rank + 1) * n_own]

    def broadcast_decision(self, decision: Tensor) -> Tensor:
        """Return the first rank's decision: what others computed may differ from it in the last digit."""
        if self.count == 1:
            return decision
        message = decision.cpu().contiguous()
        self.broadcast(message, no_timeout=False)
        return message.to(decision.device)

    def broadcast(self, values: Tensor, *, no_timeout: bool) -> None:
        """Fill ``values`` on all ranks with the values of the first rank.

        Args:
            values: On the CPU.
            no_timeout: Wait as long as it takes, not only as long as in the middle of a step.
        """
        work: Any = torch.distributed.broadcast(values, 0, group=self.control, async_op=True)
        if no_timeout:
            work.wait()
        else:
            work.wait(self.patience)


Rotation = Literal["half", "interleaved", "other"]


@dataclass(frozen=True, slots=True)
class Family:
    """How one family of models handles positions.

    Attributes:
        model_type: ``config.model_type``.
        rotation: How it pairs channels when it rotates queries and keys.
        linear: Whether queries and keys are linear in the normalised hidden state: no norm of their own.
        one_base: Whether all layers rotate by the same angles.
        softmax: Whether attention is the softmax of scaled scores: no soft caps, no sinks.
        complex_angles: Whether layers get their angles as complex numbers, not as cosines and sines.
    """

    model_type: str
    rotation: Rotation
    linear: bool
    one_base: bool = True
    softmax: bool = True
    complex_angles: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ModelSpec:
    """A model as it was loaded, in most cases with the attention hook.

    Attributes:
        family: Its row in the table of families, or what was read from the model itself.
        shape: Sizes and capabilities of the whole model, however many ranks it is split over.
        angles: (states, (B, T) positions, factor of the RoPE base or None) -> (cos, sin), each (B, T, rotated), from
            the model's own rotary module, in the dtype of ``states``.
        handles: The module hooks that were put on the model.
        ranks: The processes that the model is split over.
        original_window: The most positions that a call may have under ``angles``; None: as many as the context window.
        unrotated: Layers whose queries and keys are not rotated.
        plain: How the model is called without the attention hook; None where it has the hook.
        within: The same model for calls that fit its sliding windows, ``within.shape.context_window`` tokens: it keeps
            all keys. None where there are no windows, or others.
        is_listed: Whether the family is in the table; else the model itself passed every check at load.
        attention: transformers' name of the attention that the hook takes the place of: ``sdpa`` or ``eager``.
        extended: The same model for calls with more positions: LongRoPE then rotates all of them by other
            frequencies.
    """

    family: Family
    shape: ModelShape
    angles: Callable[[Tensor, Tensor, float | None], tuple[Tensor, Tensor]]
    handles: tuple[Any, ...]
    ranks: Ranks = field(default_factory=Ranks)
    original_window: int | None = None
    unrotated: frozenset[int] = frozenset()
    plain: PlainForward | None = None
    within: ModelSpec | None = None
    extended: ModelSpec | None = None
    is_listed: bool = True
    attention: str = "sdpa"

    @property
    def reading(self) -> str:
        """How prompts are read: with the attention hook, listed or proved at load, or as plain prompts."""
        if self.plain is not None:
            return f"plain prompts: {self.plain.reason}"
        return "the attention hook (listed family)" if self.is_listed else "the attention hook (proved at load)"

    @property
    def structure(self) -> dict[str, Any]:
        """What is known of attention: how channels are paired, which layers do not rotate, whether keys are linear.

        Of a model without the attention hook: whether it reads rows in one batch, and what of its cache can be stored.
        """
        if self.plain is not None:
            return {
                "rows_in_one_batch": self.plain.batch != "",
                "stored_keys": self.plain.kept is not None,
                "stored_snapshots": self.plain.snapshots is not None,
            }
        return {
            "rotation": self.family.rotation,
            "unrotated_layers": sorted(self.unrotated),
            "linear_in_hidden_state": self.family.linear,
            "one_set_of_angles": self.family.one_base,
            "plain_softmax": self.family.softmax,
        }
