"""A generator without weights whose unmodified answers depend on the order of the passages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rag_posfix.contracts.request import Chunk, Generation, GenerationRequest, MitigationChoice, MitigationInfo
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.plan.layout import Layout
from tests.support.toy_encoder import ToyEncoder


class OrderBiasedGenerator(FakeGenerator):
    """Answers with the first sentence of the first passage under ``none``, by content alone otherwise.

    The passage at place i, from 1, gets an attention in proportion to 1 / i. Pieces
    after the second one wait for ``gate``. With ``weighted`` the shares of other methods are weights of experts.
    """

    capabilities = frozenset({"log_probs", "attention"})

    def __init__(self) -> None:
        super().__init__(ToyEncoder())
        self.gate = threading.Event()
        self.gate.set()
        self.weighted = False
        self.asked: list[tuple[str, tuple[str, ...]]] = []

    def describe(self, choice: MitigationChoice) -> MitigationInfo:
        return replace(super().describe(choice), order_invariant=choice.name != "none")

    def generate(self, request: GenerationRequest) -> Generation:
        layout = request.layout
        texts = [self.encoder.decode(layout.tokens(span)) for span in layout.texts]
        self.asked.append((request.mitigation.name, tuple(texts)))
        found = super().generate(request)
        if request.mitigation.name != "none" or not texts:
            return replace(found, weighted=self.weighted)
        return replace(found, text=texts[0].split(". ")[0], attention=tuple(_shares(len(texts))))

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        for number, chunk in enumerate(super().stream(request)):
            if number >= 2 and not self.gate.wait(60):
                raise TimeoutError("the test never opened the gate")
            yield chunk

    def passage_attention(
        self, layouts: Sequence[Layout], salt: str = "", check: Callable[[], None] | None = None
    ) -> list[tuple[float, ...]]:
        return [
            tuple(
                share / len(span) / 2 for share, span in zip(_shares(layout.n_passages), layout.passages, strict=True)
            )
            for layout in layouts
        ]


def _shares(count: int) -> list[float]:
    masses = [1 / place for place in range(1, count + 1)]
    return [mass / sum(masses) for mass in masses]
