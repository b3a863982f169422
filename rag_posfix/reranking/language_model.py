"""Base classes of rerankers that use the served language model: exclusive use, tokenised documents, windows.

Sentences of a passage that copy the question make it likely and do not answer it: they are found here.
"""

from __future__ import annotations

import re
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

from pydantic import PrivateAttr, field_validator, model_validator
from pydantic_core import PydanticCustomError

from rag_posfix.assembly.documents import SENTENCE_END, CheckedDocument
from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.assembly.tokenization import TokenizedPassage, TokenizedPrompt, cut_passage, tokenize_passage
from rag_posfix.contracts.generator import Generator
from rag_posfix.errors import PromptTooLongError
from rag_posfix.parameters import Integer
from rag_posfix.reranking.base import RERANKERS, DocumentScore, ScoringReranker
from rag_posfix.reranking.deadline import check_deadline

FEWEST_TOKENS = 16
"""A document is never cut to fewer tokens than this, heading and separator included."""

MAX_TOKENS = 8192
"""Token limit of a batch, padding and suffixes included: bounds its memory."""

_LOCK_SECONDS = 0.05
"""Interval at which a reranking that waits for another one checks its deadline."""


@dataclass(frozen=True, slots=True)
class FittedPassage:
    """A tokenised document that fits a token limit.

    Attributes:
        passage: The tokens, heading and separator included.
        truncated: Whether the end of the document was cut off.
    """

    passage: TokenizedPassage
    truncated: bool = False

    def __len__(self) -> int:
        return len(self.passage)

    @property
    def details(self) -> dict[str, Any]:
        """Metadata of the reranked document."""
        return {"long_document": "truncated"} if self.truncated else {}


class LanguageModelReranker(ScoringReranker):
    """Base of rerankers that use the served model. Rerankings use it one at a time; the others wait.

    A reranking that is cancelled stops within one step. ``metadata["reranking"]["long_document"]`` is ``"truncated"``
    for a document whose end was not read.

    Attributes:
        generator: The served model.
        top_n: Number of passages to return, all if None.
    """

    generator: Generator
    _lock: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    @field_validator("generator", mode="before")
    @classmethod
    def _can_be_read(cls, value: Any) -> Any:
        capabilities = value.capabilities if isinstance(value, Generator) else frozenset()
        if cls.reads and not cls.reads & capabilities:
            reads = {name: getattr(RERANKERS.get(name), "reads", ()) for name in RERANKERS.names()}
            others = [name for name, needed in reads.items() if not needed or needed & capabilities]
            raise PydanticCustomError(
                "passage_reader",
                "{kind} cannot read passages for a reranker; use an Engine (load_engine, tp=1), or one of the "
                "rerankers {others}",
                {"kind": type(value).__name__, "others": ", ".join(others)},
            )
        return value

    @property
    def _template(self) -> PromptTemplate:
        """The template of answers: passages have the same tokens, so cached keys and values serve both."""
        return PromptTemplate()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        while not self._lock.acquire(timeout=_LOCK_SECONDS):
            check_deadline()
        try:
            check_deadline()
            yield
        finally:
            self._lock.release()

    def _fitted(self, document: CheckedDocument, limit: int) -> FittedPassage:
        """Return a document in tokens, at most ``limit``."""
        encoder = self.generator.encoder
        passage = tokenize_passage(encoder, self._template, document.text, title=document.title)
        return self._truncated(FittedPassage(passage), limit)

    def _truncated(self, fitted: FittedPassage, limit: int) -> FittedPassage:
        """Return a passage of at most ``limit`` tokens. It keeps the content key of the complete document."""
        if len(fitted) <= limit:
            return fitted
        check_limit(limit)
        shorter = cut_passage(self.generator.encoder, fitted.passage, limit, heading_limit=limit // 2)
        return FittedPassage(shorter, truncated=True)


def check_limit(limit: int) -> None:
    """Raise PromptTooLongError where too few tokens are left for each document."""
    if limit < FEWEST_TOKENS:
        raise PromptTooLongError(
            f"{max(limit, 0)} tokens are left for each document, and at least {FEWEST_TOKENS} are needed; rank "
            "fewer documents at a time (window), or shorten the question"
        )


class PassageReadingReranker(LanguageModelReranker):
    """Base of rerankers that use attention or log-probabilities of the model while it reads; nothing is generated.

    Attributes:
        generator: The served model; an ``Engine``, or a ``BatchingGenerator`` around one.
        top_n: Number of passages to return, all if None.
    """

    reads = frozenset({"attention"})


class SeparatePassageReranker(LanguageModelReranker):
    """Base of rerankers that read each passage alone, several in a batch.

    Attributes:
        batch_size: Maximum number of passages per batch.
    """

    batch_size: Annotated[int, Integer(1)] = 64

    def _batches(self, passages: Sequence[TokenizedPassage], suffix: int) -> Iterator[list[int]]:
        """Yield the indices of the passages of each batch: sorted by length and content, so as not to depend on order.

        In bfloat16 the last digits of a score depend on the batch.
        """
        batch: list[int] = []
        for index in sorted(range(len(passages)), key=lambda i: (len(passages[i]), passages[i].key)):
            size = (len(passages[index]) + suffix) * (len(batch) + 1)  # padded: the last passage is the longest
            if batch and (len(batch) == self.batch_size or size > MAX_TOKENS):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch


@dataclass(frozen=True, slots=True)
class _WindowScore:
    """The raw score of a document in a window."""

    raw: float
    fitted: FittedPassage


class WindowedReranker(LanguageModelReranker):
    """Base of rerankers whose prompt contains several documents.

    If there are more candidates than ``window``, the first ``window`` are read in one prompt; the others rank below
    them in the given order, with score 0 and ``"read": False``. Candidates are given best first, and the authors of
    in-context reranking found one window better than several. With ``stride`` all candidates are read, in overlapping
    windows from the last candidate to the first; each window moves its best documents to its front. Scores are then
    (n - rank) / n, because raw scores of different windows are not comparable.

    Documents that together exceed the context window are cut, the longest first, until they fit.

    Attributes:
        generator: The served model.
        top_n: Number of passages to return, all if None.
        window: Maximum number of documents in one prompt.
        stride: Number of candidates by which the next window is closer to the first; None reads one window.
        max_document_tokens: Token limit of a document; a longer one is cut.
        order: Order of the documents of a window in the prompt. ``canonical``: by content hash, so that the scores do
            not depend on the given order. ``input``: the given order.
    """

    window: Annotated[int, Integer(2)] = 20
    stride: Annotated[int | None, Integer(1)] = None
    max_document_tokens: Annotated[int, Integer(16)] = 512
    order: Literal["canonical", "input"] = "canonical"

    @model_validator(mode="after")
    def _windows_overlap(self) -> Self:
        if self.stride is not None and self.stride >= self.window:
            raise PydanticCustomError(
                "stride",
                "stride={stride} must be below window={window}: windows have to overlap",
                {"stride": self.stride, "window": self.window},
            )
        return self

    @abstractmethod
    def _prompts(self, question: str, count: int) -> Sequence[TokenizedPrompt]:
        """Return the prompts, without passages, that are read about a window of ``count`` documents."""

    @abstractmethod
    def _raw_scores(self, prompts: Sequence[TokenizedPrompt], passages: Sequence[TokenizedPassage]) -> Sequence[float]:
        """Return the raw score of each passage of a window, in prompt order; higher is better."""

    @abstractmethod
    def _normalized(self, raw: Sequence[float]) -> Sequence[float]:
        """Return the scores in [0, 1] for the raw scores of one window."""

    def _labelled(self, passages: Sequence[TokenizedPassage]) -> Sequence[TokenizedPassage]:
        """Return the passages with labels, such as numbers; unchanged by default."""
        return passages

    def _max_passage_tokens(self, prompts: Sequence[TokenizedPrompt], count: int) -> int:
        """Return the number of tokens that all passages of a window may have together."""
        return self.generator.context_window - max(len(prompt) for prompt in prompts)

    def _score(self, question: str, documents: Sequence[CheckedDocument]) -> Sequence[DocumentScore]:
        if self.stride is None or len(documents) <= self.window:
            read = self._read(question, documents[: self.window])
            unread = [DocumentScore(0.0)] * (len(documents) - len(read))
            scores = self._normalized([window_score.raw for window_score in read])
            return [*(_document_score(*pair) for pair in zip(read, scores, strict=True)), *unread]
        ranking = list(range(len(documents)))
        window_scores: dict[int, _WindowScore] = {}
        for start, stop in self._windows(len(documents), self.stride):
            window = ranking[start:stop]
            read = self._read(question, [documents[index] for index in window])
            window_scores.update(zip(window, read, strict=True))
            ranking[start:stop] = sorted(window, key=lambda index: -window_scores[index].raw)
        n = len(documents)
        rank_of = {index: rank for rank, index in enumerate(ranking)}
        return [_document_score(window_scores[index], (n - rank_of[index]) / n) for index in range(n)]

    def _windows(self, count: int, stride: int) -> Iterator[tuple[int, int]]:
        """Yield start and end (exclusive) of each window, from the last to the first."""
        start = count - self.window
        while start > 0:
            yield start, start + self.window
            start -= stride
        yield 0, self.window

    def _read(self, question: str, documents: Sequence[CheckedDocument]) -> list[_WindowScore]:
        """Read one window; return the scores in the order of ``documents``."""
        check_deadline()
        prompts = self._prompts(question, len(documents))
        fitted = self._fitted_together(documents, self._max_passage_tokens(prompts, len(documents)))
        order = list(range(len(documents)))
        if self.order == "canonical":
            order.sort(key=lambda index: documents[index].key)
        passages = self._labelled([fitted[index].passage for index in order])
        raw = dict(zip(order, self._raw_scores(prompts, passages), strict=True))
        return [_WindowScore(raw[index], passage) for index, passage in enumerate(fitted)]

    def _fitted_together(self, documents: Sequence[CheckedDocument], budget: int) -> list[FittedPassage]:
        fitted = [self._fitted(document, self.max_document_tokens) for document in documents]
        limit = common_length_limit([len(passage) for passage in fitted], budget)
        return [self._truncated(passage, limit) for passage in fitted]


def common_length_limit(sizes: Sequence[int], budget: int) -> int:
    """Return the largest common limit at which all sizes together do not exceed ``budget``: only the longest are cut.

    Formula: the largest m with sum_k min(size_k, m) <= budget.
    """
    left = budget
    ascending = sorted(sizes)
    for done, size in enumerate(ascending):
        equal_share = left // (len(ascending) - done)
        if size > equal_share:
            return equal_share
        left -= size
    return max(sizes, default=0)


def _document_score(window_score: _WindowScore, score: float) -> DocumentScore:
    return DocumentScore(score, window_score.raw, window_score.fitted.details)


NGRAM_WORDS = 3
COPIED_SHARE = 0.6
"""A copy has more than this share of the question's n-grams."""
LEAST_NGRAMS = 3
"""A question with fewer n-grams has no copies: passages have the words of a short query because they are about it."""

_WORDS = re.compile(r"\w+")
# Scripts without spaces between words: each character counts as a word.
_UNSPACED = re.compile(r"([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\u0e00-\u0e7f])")


def without_copies(text: str, question: str) -> str:
    """Return the text without the sentences that copy the question; unchanged if none does.

    Formula: a sentence is left out if |G(question) & G(sentence)| / |G(question)| > ``COPIED_SHARE``, where G is the
        set of runs of three words, in lower case, without punctuation, and if it has the first and the last of them:
        an answer in the words of the question has another word in place of the interrogative.
    """
    ngrams = _ngrams(question)
    wanted = set(ngrams)
    if len(wanted) < LEAST_NGRAMS:
        return text
    retained, dropped, start = [], False, 0
    for end in [*(match.end() for match in SENTENCE_END.finditer(text)), len(text)]:
        sentence = text[start:end]
        copied = wanted.intersection(_ngrams(sentence))
        if len(copied) > COPIED_SHARE * len(wanted) and {ngrams[0], ngrams[-1]} <= copied:
            dropped = True
        else:
            retained.append(sentence)
        start = end
    return "".join(retained).strip() if dropped else text


def document_without_copies(document: CheckedDocument, question: str) -> CheckedDocument:
    """Return the document without such sentences in title and text; the same object if there is none."""
    title, text = without_copies(document.title, question), without_copies(document.text, question)
    changed = (title, text) != (document.title, document.text)
    return replace(document, title=title, text=text) if changed else document


def _ngrams(text: str) -> list[tuple[str, ...]]:
    words = _WORDS.findall(_UNSPACED.sub(r" \1 ", text.casefold()))
    return [tuple(words[index : index + NGRAM_WORDS]) for index in range(len(words) - NGRAM_WORDS + 1)]
