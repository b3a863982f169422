"""A generator whose model is loaded at the first generated answer; tokenizer and metadata need no weights."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import Chunk, Generation, GenerationRequest, MitigationChoice, MitigationInfo
from rag_posfix.files import default_cache_dir
from rag_posfix.generation.engine import mitigation_info
from rag_posfix.generation.load import ModelMetadata, read_metadata
from rag_posfix.generation.model.tokenizer import Tokenizer
from rag_posfix.plan.layout import Layout


class DeferredGenerator(Generator):
    """Describes prompts at once, and loads the model to answer one.

    Args:
        metadata: The model without its weights.
        load: Loads the model; called once.
        passages: The passage KV store that the loaded model will read from.
    """

    capabilities = frozenset({"log_probs", "first_token", "states"})
    encoder: Tokenizer

    def __init__(
        self, metadata: ModelMetadata, load: Callable[[], Generator], passages: PassageStore | None = None
    ) -> None:
        self.model_id, self.fingerprint = metadata.name, metadata.fingerprint
        self.context_window, self.hidden_size = metadata.context_window, metadata.hidden_size
        self.encoder = metadata.tokenizer
        self.passages: PassageStore | None = passages
        self._load = functools.cache(load)
        self._lock = threading.Lock()

    def loaded(self) -> Generator:
        """Return the generator with the model, which is loaded if it has not been."""
        with self._lock:
            return self._load()

    def describe(self, choice: MitigationChoice) -> MitigationInfo:
        return mitigation_info(choice)

    def check_json_schema(self, schema: str) -> None:
        self.encoder.json_grammars.check(schema)

    def first_token_log_probs(self, layout: Layout, tokens: Sequence[int], salt: str = "") -> list[tuple[float, ...]]:
        return self.loaded().first_token_log_probs(layout, tokens, salt)

    def projected_states(self, token_ids: Sequence[int], marked: Sequence[int]) -> list[tuple[float, ...]]:
        return self.loaded().projected_states(token_ids, marked)

    def generate(self, request: GenerationRequest) -> Generation:
        return self.loaded().generate(request)

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        return self.loaded().stream(request)


def deferred_generator(
    model: str,
    load: Callable[[], Generator],
    *,
    dtype: str = "auto",
    device: str = "auto",
    cache_dir: Path | None = None,
    adapter: Path | None = None,
    passages: PassageStore | None = None,
) -> DeferredGenerator:
    """Return a generator that reads the weights later; ``load`` loads the model by the same settings.

    ``load`` has to read from ``passages``; other args as for ``load_engine``.

    Raises:
        ConfigError: the model cannot be found or read.
        UnsupportedModelError: its family is not supported.
    """
    folder = cache_dir or default_cache_dir()
    metadata = read_metadata(model, dtype=dtype, device=device, cache_dir=folder, adapter=adapter)
    return DeferredGenerator(metadata, load, passages)
