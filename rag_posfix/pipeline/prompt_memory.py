"""The prompts of questions that were asked a short while ago: their texts are not tokenised and hashed again."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembled
from rag_posfix.contracts.answer import Answer

MOST_CHARACTERS = 1_000_000
"""Of all texts that are remembered; with tokens and objects this takes about 15 MB."""

SECONDS = 300.0
"""How long a prompt is remembered."""

_PLAIN = frozenset({str, int, float, bool, type(None)})
"""Types whose values ``repr`` tells apart."""


@dataclass(slots=True, eq=False)
class RememberedPrompt:
    """A prompt, and what follows from it alone.

    Attributes:
        key: The key of its answer in the cache; None if the answer is not cached.
        scope: The scope of its recent prompts.
        answered: The last cache entry that was read for it, and the answer that was made of the entry.
        texts: Its texts, while it is remembered.
        until: When it is forgotten.
    """

    assembled: Assembled
    key: str | None
    scope: str
    answered: tuple[Mapping[str, Any], Answer] | None = None
    texts: tuple[str, ...] = ()
    until: float = 0.0

    def answer(self, stored: Mapping[str, Any], make: Callable[[], Answer]) -> Answer:
        """Return the answer of a cache entry: that of the last one if it is equal, else what ``make`` returns."""
        answered = self.answered
        if answered is not None and answered[0] == stored:
            return answered[1]
        answer = make()
        if self.texts and not answer.log_probs:  # these take far more memory than the prompt
            self.answered = stored, answer
        return answer


class PromptMemory:
    """Remembers prompts by everything that they were made of. Safe to share between threads.

    The oldest ones are forgotten first. ``clock`` returns monotonic seconds; ``characters`` is the length of all
    texts that are remembered.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prompts: OrderedDict[Hashable, RememberedPrompt] = OrderedDict()
        self.characters = 0
        self._lock = threading.Lock()

    def get(self, origin: Hashable) -> RememberedPrompt | None:
        """Return the prompt of ``origin``, or None."""
        with self._lock:
            self._forget_until(self._clock())
            return self._prompts.get(origin)

    def put(self, origin: Hashable, prompt: RememberedPrompt, texts: Sequence[str]) -> None:
        """Remember a prompt that was made of ``origin``, with these texts."""
        size = sum(map(len, texts))
        if size > MOST_CHARACTERS // 4:
            return
        current_time = self._clock()
        with self._lock:
            self._forget(origin)
            prompt.texts, prompt.until = tuple(texts), current_time + SECONDS
            self._prompts[origin] = prompt
            self.characters += size
            self._forget_until(current_time)

    def drop(self, texts: Collection[str]) -> None:
        """Forget the prompts that were made of a document with one of these texts."""
        removed = frozenset(texts)
        with self._lock:
            for origin in [each for each, prompt in self._prompts.items() if not removed.isdisjoint(prompt.texts)]:
                self._forget(origin)

    def _forget_until(self, current_time: float) -> None:
        while self._prompts:
            origin, prompt = next(iter(self._prompts.items()))
            if prompt.until > current_time and self.characters <= MOST_CHARACTERS:
                return
            self._forget(origin)

    def _forget(self, origin: Hashable) -> None:
        prompt = self._prompts.pop(origin, None)
        if prompt is not None:
            self.characters -= sum(map(len, prompt.texts))


def document_values(documents: Sequence[Document]) -> tuple[Hashable, ...] | None:
    """Return what is different for different documents; None if a value in their metadata is not a plain one."""
    values = []
    for document in documents:
        metadata = document.metadata
        if not all(type(value) in _PLAIN for value in metadata.values()):
            return None
        values.append((document.id, document.page_content, repr(metadata)))
    return tuple(values)
