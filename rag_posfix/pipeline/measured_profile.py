"""Measured profiles: the arrangement that ``rag-posfix measure`` chose for a model, for ``mitigation=auto``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from rag_posfix.contracts.answer import Question
from rag_posfix.contracts.generator import Generator, shown_model
from rag_posfix.contracts.method_spec import MethodSpec, named_method
from rag_posfix.errors import ConfigError

AUTO = "auto"
"""The mitigation of the measured profile; without one the preset ``auto``, which equals ``default``."""

PROFILE_KIND = "measured_profile"


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    """What ``mitigation=auto`` stands for.

    Attributes:
        mitigation: The method that reads the prompt.
        order: The order of the passages in the prompt.
        reranker: What scores or selects the passages; None leaves it to the pipeline.
        model: Name of the measured model, for messages.
        model_fingerprint: Identity of its weights and dtype.
    """

    mitigation: MethodSpec
    order: str
    reranker: MethodSpec | None
    model: str
    model_fingerprint: str

    def check_model(self, generator: Generator) -> None:
        """Raise ConfigError if the profile was measured on another model."""
        if generator.fingerprint != self.model_fingerprint:
            raise ConfigError(
                f"the profile was measured on {self.model}, and the model is {shown_model(generator.model_id)} "
                "(other weights, dtype or server); run rag-posfix measure with this model, or leave out the profile"
            )

    def resolve(self, question: Question, default: MethodSpec) -> Question:
        """Return the question with the measured arrangement if its mitigation, or the default, is ``auto``.

        An order or a reranker that the question names stays.
        """
        if named_method(question.mitigation or default, "mitigation").name != AUTO:
            return question
        return replace(
            question,
            mitigation=self.mitigation,
            order=question.order or self.order,
            reranker=question.reranker or self.reranker,
        )


def read_measured(path: Path | None) -> MeasuredProfile | None:
    """Return the profile of a file that ``rag-posfix measure`` wrote; None for a file of another kind, or no file.

    The setting ``profile`` also names records of ``probe slot-attention``, which the order ``profile`` reads.

    Raises:
        ConfigError: the file is of this kind, and damaged.
    """
    try:
        data = orjson.loads(b"{}" if path is None else path.read_bytes())
        if data.get("kind") != PROFILE_KIND:
            return None
    except (OSError, ValueError, AttributeError):  # the order profile says what is wrong with its file
        return None
    try:
        arrangement = data["arrangement"]
        reranker = arrangement["reranker"]
        return MeasuredProfile(
            _spec(arrangement["mitigation"]),
            str(arrangement["order"]),
            None if reranker is None else _spec(reranker),
            str(data["model"]),
            str(data["model_fingerprint"]),
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"profile={str(path)!r} lacks a field ({error}); write it again with rag-posfix measure"
        ) from error


def _spec(value: Mapping[str, Any]) -> MethodSpec:
    return MethodSpec(value["name"], value["parameters"])
