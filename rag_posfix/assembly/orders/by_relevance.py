"""Orders without parameters: by score, as given, and random."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rag_posfix.assembly.orders.base import ORDERS, Order, OrderInputs, best_first


@ORDERS.register("relevance")
@dataclass(frozen=True, slots=True)
class Relevance(Order):
    """Best document first, worst last."""

    name = "relevance"
    by_content = True

    def __call__(self, inputs: OrderInputs) -> tuple[int, ...]:
        return best_first(inputs.relevance, inputs.keys)


@ORDERS.register("reverse")
@dataclass(frozen=True, slots=True)
class Reverse(Order):
    """Worst document first, best last, next to the question."""

    name = "reverse"
    by_content = True

    def __call__(self, inputs: OrderInputs) -> tuple[int, ...]:
        return best_first(inputs.relevance, inputs.keys)[::-1]


@ORDERS.register("ends_first")
@dataclass(frozen=True, slots=True)
class EndsFirst(Order):
    """Best document first, second best last, and so on inwards: ranks 1 3 5 .. 6 4 2, for odd and even numbers.

    The order of LongLLMLingua's ``two_stage`` and of Haystack's ``LostInTheMiddleRanker``. LangChain's and
    LlamaIndex's ``LongContextReorder`` put the best document last where the number of documents is even.
    """

    name = "ends_first"
    by_content = True

    def __call__(self, inputs: OrderInputs) -> tuple[int, ...]:
        ranked = best_first(inputs.relevance, inputs.keys)
        return ranked[0::2] + ranked[1::2][::-1]


@ORDERS.register("original")
@dataclass(frozen=True, slots=True)
class Original(Order):
    """The order in which the documents were given."""

    name = "original"

    def __call__(self, inputs: OrderInputs) -> tuple[int, ...]:
        return tuple(range(len(inputs.relevance)))


@ORDERS.register("random")
@dataclass(frozen=True, slots=True)
class Random(Order):
    """A random order; the same seed gives the same order in every process and Python version."""

    name = "random"

    def __call__(self, inputs: OrderInputs) -> tuple[int, ...]:
        # Python guarantees reproducible sequences for Random.random(), not for shuffle().
        generator = random.Random(inputs.seed)
        draws = [generator.random() for _ in inputs.relevance]
        return tuple(sorted(range(len(draws)), key=draws.__getitem__))
