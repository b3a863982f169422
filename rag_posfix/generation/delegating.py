"""A generator around another one, with the same model metadata. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic, TypeVar

from rag_posfix.contracts.generator import Generator, TokenEncoder, check_json_schema, gives_scores
from rag_posfix.contracts.request import (
    Chunk,
    Generation,
    GenerationRequest,
    MitigationChoice,
    MitigationInfo,
    whole_answer,
)

Inner = TypeVar("Inner", bound=Generator)


class DelegatingGenerator(ABC, Generic[Inner]):
    """Base of generators that answer with another one. Implements all of ``Generator`` but ``stream``."""

    def __init__(self, inner: Inner) -> None:
        self._inner = inner

    @property
    def model_id(self) -> str:
        return self._inner.model_id

    @property
    def fingerprint(self) -> str:
        return self._inner.fingerprint

    @property
    def context_window(self) -> int:
        return self._inner.context_window

    @property
    def encoder(self) -> TokenEncoder:
        return self._inner.encoder

    @property
    def scores_tokens(self) -> bool:
        return gives_scores(self._inner)

    def describe(self, choice: MitigationChoice) -> MitigationInfo:
        return self._inner.describe(choice)

    def check_json_schema(self, schema: str) -> None:
        """Raise if no answer can follow a JSON schema: ConfigError or UnsupportedModelError."""
        check_json_schema(self._inner, schema)

    def generate(self, request: GenerationRequest) -> Generation:
        """Return the whole answer. Errors as those of ``stream``."""
        return whole_answer(self.stream(request))

    @abstractmethod
    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer piece by piece; the last chunk carries the whole."""
