"""What a question gets that it does not choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from rag_posfix.checked import FloorChoice
from rag_posfix.contracts.prompt_template import PromptTemplate
from rag_posfix.contracts.request import MitigationChoice, Sampling
from rag_posfix.parameters import accept_old_names
from rag_posfix.pipeline.measured_profile import MeasuredProfile
from rag_posfix.pipeline.query import QueryChoice
from rag_posfix.text import NO_PASSAGE_TEXT


@accept_old_names
@dataclass(frozen=True, slots=True)
class Defaults:
    """Default values for questions.

    Attributes:
        mitigation: The mitigation and its parameters.
        order: Name of the order of the passages.
        k: Number of passages to retrieve.
        sampling: Sampling parameters.
        tenant: Part of every cache key, besides the tenant of the question.
        attribution: Whether answers have citations by attention, which need the attention of four layers at each step
            and make decoding a few per cent slower.
        allow_ungrounded: Whether the model answers from its memory if there is no passage.
        no_passage_text: The answer if there is no passage and ``allow_ungrounded`` is False.
        templates: Prompt templates by the code of the question's language, in place of the pipeline's own; each may
            have its own text for no passage.
        query: What is searched for, as in ``Question``.
        floor: Which retrieved passages are read, as in ``Question``.
        measured: What the mitigation ``auto`` stands for; without it ``auto`` equals ``default``.
        filter: Joined with the filter of every question, which cannot widen it. Documents that come with a question
            are not filtered.
    """

    mitigation: MitigationChoice = field(default_factory=lambda: MitigationChoice("default"))
    order: str = "relevance"
    k: int = 10
    sampling: Sampling = field(default_factory=Sampling)
    tenant: str = ""
    attribution: bool = True
    allow_ungrounded: bool = False
    no_passage_text: str = NO_PASSAGE_TEXT
    templates: Mapping[str, PromptTemplate] = field(default_factory=lambda: MappingProxyType({}))
    query: QueryChoice = "history"
    filter: Mapping[str, Any] | None = None
    floor: FloorChoice = "auto"
    measured: MeasuredProfile | None = None
    renamed: ClassVar[Mapping[str, str]] = MappingProxyType({"traced": "attribution"})
