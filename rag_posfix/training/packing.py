"""Packing: which prompts are read together in one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from rag_posfix.generation.model.one_pass import AnsweredPrompt, can_share_pass, forward_with_answers
from rag_posfix.generation.model.sequence_batch import LoadedModel


def packs(loaded: LoadedModel, prompts: Sequence[AnsweredPrompt], most_tokens: int) -> list[list[int]]:
    """Return the numbers of the prompts of each pass; a prompt goes into the first pass that has room for it.

    Args:
        most_tokens: Most tokens of a pass. A prompt with more is a pass of its own, and so is one that cannot share a
            pass (``can_share_pass``); with 0 all are.
    """
    passes: list[list[int]] = []
    room: list[int] = []
    for number, one in enumerate(prompts):
        shares = can_share_pass(loaded, one)
        at = next((at for at, left in enumerate(room) if shares and one.n_tokens <= left), len(passes))
        if at == len(passes):
            passes.append([])
            room.append(most_tokens if shares else 0)
        passes[at].append(number)
        room[at] -= one.n_tokens
    return passes


def read_packed(
    loaded: LoadedModel, prompts: Sequence[AnsweredPrompt], most_tokens: int
) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Yield the numbers of the prompts of a pass, and the logits of each of their answers, (len(answer), V).

    Args: those of ``packs``.
    """
    for numbers in packs(loaded, prompts, most_tokens):
        yield numbers, forward_with_answers(loaded, [prompts[number] for number in numbers])
