"""Chooses the next token from log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rag_posfix.contracts.request import Sampling


class Sampler:
    """Chooses tokens for one answer. Seeded runs repeat on the same machine; no global random state is touched.

    Args:
        sampling: Temperature, top-p, top-k and seed.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._random = torch.Generator(device="cpu")
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self._sampling.temperature == 0.0

    def choose(self, log_probs: Tensor) -> int:
        """Return a token id. Greedy takes the first of equals, so that a tie never depends on chance.

        Shapes:
            log_probs: (V,) float32.
        """
        if self.greedy:
            return int(log_probs.argmax())
        scores = log_probs.cpu().double()
        # The best score becomes 0: divided by a temperature close to 0 it stays finite.
        probabilities = self._filtered((scores - scores.max()) / self._sampling.temperature)
        return int(torch.multinomial(probabilities, 1, generator=self._random))

    def _filtered(self, scores: Tensor) -> Tensor:
        """Return probabilities with everything outside of top-k and top-p at 0."""
        top_k, top_p = self._sampling.top_k, self._sampling.top_p
        if 0 < top_k < scores.shape[0]:
            dropped = scores.sort(descending=True, stable=True).indices[top_k:]
            scores = scores.index_fill(0, dropped, float("-inf"))
        probabilities = scores.softmax(dim=-1)
        if top_p < 1.0:
            ordered, index = probabilities.sort(descending=True, stable=True)
            # A token stays if the tokens ranked before it have not reached top_p: the most likely one always stays.
            dropped = index[ordered.cumsum(dim=-1) - ordered >= top_p]
            probabilities = probabilities.index_fill(0, dropped, 0.0)
        return probabilities / probabilities.sum()


def choose_together(samplers: Sequence[Sampler], log_probs: Sequence[Tensor]) -> list[int]:
    """Return what each sampler chooses, in one read from the device, or two where some draw by chance.

    Shapes:
        log_probs: (V,) float32 each.
    """
    found: dict[int, int] = {}
    greedy = [i for i, sampler in enumerate(samplers) if sampler.greedy]
    if greedy:
        found.update(zip(greedy, torch.stack([log_probs[i].argmax() for i in greedy]).tolist(), strict=True))
    drawn = [i for i in range(len(samplers)) if i not in found]
    if drawn:
        scores = torch.stack([log_probs[i] for i in drawn]).cpu()
        found.update((i, samplers[i].choose(own)) for i, own in zip(drawn, scores, strict=True))
    return [found[i] for i in range(len(samplers))]
