"""A generator whose model is loaded at the first generated answer; until then the tokenizer and the files suffice."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import Chunk, Generation, GenerationRequest, MitigationChoice, MitigationInfo
from rag_posfix.folders import default_cache_dir
from rag_posfix.generation.engine import mitigation_info
from rag_posfix.generation.load import ModelFacts, read_facts
from rag_posfix.generation.model.tokenizer import Tokenizer


class DeferredGenerator:
    """Implements ``contracts.generator.Generator``: describes prompts at once, and loads the model to answer one.

    Args:
        facts: What is known of the model without its weights.
        load: Loads the model; called once.
    """

    def __init__(self, facts: ModelFacts, load: Callable[[], Generator]) -> None:
        self._facts = facts
        self._load = functools.cache(load)
        self._lock = threading.Lock()

    def loaded(self) -> Generator:
        """Return the generator with the model, which is loaded if it has not been."""
        with self._lock:
            return self._load()

    @property
    def model_id(self) -> str:
        """Name of the model."""
        return self._facts.name

    @property
    def fingerprint(self) -> str:
        """Identity of weights and dtype."""
        return self._facts.fingerprint

    @property
    def context_window(self) -> int:
        """Token limit of prompt and answer together."""
        return self._facts.context_window

    @property
    def encoder(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self._facts.tokenizer

    @property
    def scores_tokens(self) -> bool:
        """Log-probabilities are returned."""
        return True

    def describe(self, choice: MitigationChoice) -> MitigationInfo:
        """Check a mitigation and its parameters, and return its name, fingerprint and order invariance."""
        return mitigation_info(choice)

    def generate(self, request: GenerationRequest) -> Generation:
        """Return the whole answer."""
        return self.loaded().generate(request)

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer in pieces."""
        return self.loaded().stream(request)


def deferred_generator(
    model: str,
    load: Callable[[], Generator],
    *,
    dtype: str = "auto",
    device: str = "auto",
    cache_dir: Path | None = None,
    adapter: Path | None = None,
) -> DeferredGenerator:
    """Read what is known of a model without its weights.

    Args:
        model: As for ``load_engine``.
        load: Loads the model with the same settings.
        dtype: As for ``load_engine``.
        device: As for ``load_engine``.
        cache_dir: As for ``load_engine``.
        adapter: As for ``load_engine``.

    Raises:
        ConfigError: the model cannot be found or read.
        UnsupportedModelError: its family is not supported.
    """
    folder = cache_dir or default_cache_dir()
    facts = read_facts(model, dtype=dtype, device=device, cache_dir=folder, adapter=adapter)
    return DeferredGenerator(facts, load)
