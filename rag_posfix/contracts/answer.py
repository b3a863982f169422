"""A question to a pipeline and its answer, as plain data, and the warnings of the question that is answered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from langchain_core.documents import Document

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.contracts.request import FinishReason, MitigationChoice, Sampling, ScoredToken, Usage


@dataclass(frozen=True, slots=True)
class Question:
    """A question to a pipeline. A field that is None takes the pipeline's default.

    Attributes:
        text: The question.
        documents: The passages to answer from; None retrieves passages, if the pipeline has a retriever.
        history: Earlier messages of the conversation, ``{"role", "content"}``.
        mitigation: The mitigation and its parameters.
        order: The order of the passages: a name, or ``name:parameter=value``.
        seed: Seed of the order ``random``.
        k: Number of passages to retrieve.
        sampling: Sampling parameters.
        tenant: Part of the cache key: tenants do not share cached answers.
        use_cache: Whether the answer cache may be read and written.
        index: Name of the index to retrieve from; None is the pipeline's own retriever.
        reranker: What scores the passages, also those that have a score; None leaves it to the pipeline.
    """

    text: str
    documents: Sequence[Document] | None = None
    history: Sequence[Mapping[str, str]] = ()
    mitigation: MitigationChoice | None = None
    order: str | None = None
    seed: int = 0
    k: int | None = None
    sampling: Sampling | None = None
    tenant: str = ""
    use_cache: bool = True
    index: str | None = None
    reranker: MethodSpec | None = None


@dataclass(frozen=True, slots=True)
class AnswerDocument:
    """A passage in the prompt of the answer.

    Attributes:
        id: The document's id.
        score: Its relevance, or None without a score.
        position: Its position in the prompt, from 0.
        attention: Its share of the attention to passages, 0 to 1.
        title: Its title, or None.
        source: Its file, or None.
        text: Its text, complete even if the prompt holds a part of it.
        page: The page of its file on which it begins, or None.
    """

    id: str
    score: float | None
    position: int
    attention: float
    title: str | None = None
    source: str | None = None
    text: str = ""
    page: int | None = None


@dataclass(frozen=True, slots=True)
class Citation:
    """A span of the answer and its source documents.

    Attributes:
        start: First character in the answer.
        end: Character after the last.
        text: The characters between.
        document_ids: Ids of the source documents.
        origin: The evidence. ``quote``: the documents contain the text word for word. ``attention``: the document
            dominated the attention while the sentence was generated. The JSON field is called ``from``.
    """

    start: int
    end: int
    text: str
    document_ids: tuple[str, ...]
    origin: Literal["quote", "attention"] = "quote"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with its sources.

    Attributes:
        text: The answer.
        documents: The passages in the prompt, in prompt order.
        citations: Quotes of passages, and sentences with a dominant passage, sorted by start.
        usage: Token counts.
        cached: Whether the answer came from the answer cache.
        mitigation: Name of the mitigation.
        order: Name of the order.
        finish_reason: ``stop`` or ``length``.
        dropped: Ids of documents that are not in the prompt, with the reason: ``duplicate``, ``empty`` or ``budget``.
        timings: Seconds by stage.
        log_probs: Every generated token with its log-probability, if ``sampling.top_logprobs`` asked for them. Tokens
            that end the answer or belong to a stop string start at the end of ``text`` or later.
        warnings: What failed without failing the question: a reranker that left the documents in their order.
    """

    text: str
    documents: tuple[AnswerDocument, ...]
    citations: tuple[Citation, ...]
    usage: Usage
    cached: bool
    mitigation: str
    order: str
    finish_reason: FinishReason
    dropped: tuple[tuple[str, str], ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    log_probs: tuple[ScoredToken, ...] = ()
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object that ``rag-posfix ask --json`` prints."""
        data = asdict(self)
        data["answer"] = data.pop("text")
        del data["log_probs"]  # bytes, which JSON cannot hold
        for citation in data["citations"]:
            citation["from"] = citation.pop("origin")
        data["dropped"] = [{"id": identity, "reason": reason} for identity, reason in self.dropped]
        return data


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """A piece of a streamed answer; the last one has the complete ``answer``. ``log_probs`` as in ``Chunk``."""

    text: str
    answer: Answer | None = None
    log_probs: tuple[ScoredToken, ...] = ()


# langchain's interface of a reranker returns documents only, so that a reranker cannot return a warning with them.
_WARNINGS: ContextVar[list[str] | None] = ContextVar("rag_posfix_warnings", default=None)


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Yield the list to which ``warn`` adds during the block."""
    warnings: list[str] = []
    token = _WARNINGS.set(warnings)
    try:
        yield warnings
    finally:
        _WARNINGS.reset(token)


def warn(message: str) -> None:
    """Add a warning to the answer of the current question; no-op outside of a question."""
    warnings = _WARNINGS.get()
    if warnings is not None:
        warnings.append(message)
