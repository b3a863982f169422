"""Scores passages with a cross-encoder; splits passages that exceed its window."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from langchain_core.cross_encoders import BaseCrossEncoder
from pydantic import PrivateAttr, field_validator
from pydantic_core import PydanticCustomError

from rag_posfix.assembly.documents import CheckedDocument
from rag_posfix.checkpoints import check_encoder
from rag_posfix.errors import PromptTooLongError, RerankingError, missing_extra
from rag_posfix.parameters import Integer
from rag_posfix.reranking.base import RERANKERS, DocumentScore, ScoringReranker, sigmoid
from rag_posfix.reranking.deadline import check_deadline
from rag_posfix.text import text_beginning, titled_text

DEFAULT_MODEL = "cross-encoder/ms-marco-MiniLM-L6-v2"

FEWEST_TOKENS = 8
"""A question must leave at least this many tokens for a passage."""


@dataclass(frozen=True, slots=True)
class ChunkedText:
    """A passage, split to fit the window of a cross-encoder.

    Attributes:
        chunks: The text, or consecutive segments of it.
        truncated: Whether the end of the text is not read: one chunk exceeds the window, or there are too many.
    """

    chunks: tuple[str, ...]
    truncated: bool = False

    @property
    def details(self) -> dict[str, Any]:
        """Metadata of the reranked document."""
        chunks = {"chunks": len(self.chunks)} if len(self.chunks) > 1 else {}
        if self.truncated:
            return {"long_document": "truncated", **chunks}
        return {"long_document": "chunked", **chunks} if chunks else {}


@RERANKERS.register("cross_encoder")
class CrossEncoderReranker(ScoringReranker):
    """Read each passage together with the question, with a model trained for ranking.

    Source: Nogueira and Cho (2019), Passage Re-ranking with BERT, https://arxiv.org/abs/1901.04085; models of
        sentence-transformers (``CrossEncoder``).
    Formula: z_k = model(question, passage k); relevance_score = z_k if the model ends in a sigmoid, else sigmoid(z_k).
        ``raw_score`` is the number that the model's ``predict`` returns.
    Cost: tokens read, by the cross-encoder: question and passage, once per passage; nothing is cached. The deadline is
        checked between batches.
    Limits: a passage that exceeds the model's window is read in chunks, and the best score counts
        (``long_document: "chunked"``); or it is truncated (``"truncated"``), as is one of more than ``max_chunks``.
        The window of a langchain ``BaseCrossEncoder`` is not known; it truncates without any notice.

    Attributes:
        model: A model id, a folder, a ``CrossEncoder``, or a langchain ``BaseCrossEncoder``. Loaded on first use.
        top_n: Number of passages to return, all if None.
        batch_size: Pairs per forward pass.
        max_length: Token limit of a pair; None is the model's own limit.
        long_documents: ``chunk`` or ``truncate``.
        max_chunks: Number of chunks of a passage that are read.
        activation: ``auto`` applies a sigmoid if the model returns logits (it has no activation, or an unknown one);
            ``none`` uses the model's numbers, which must lie in [0, 1]; ``sigmoid`` always applies it.
        device: ``auto``, ``cpu``, ``cuda``, ...; for a model id or folder.
    """

    name: ClassVar[str] = "cross_encoder"
    loads_own_model: ClassVar[bool] = True

    model: Any = DEFAULT_MODEL
    batch_size: Annotated[int, Integer(1)] = 32
    max_length: Annotated[int | None, Integer(16)] = None
    long_documents: Literal["chunk", "truncate"] = "chunk"
    max_chunks: Annotated[int, Integer(1)] = 64
    activation: Literal["auto", "none", "sigmoid"] = "auto"
    device: str = "auto"
    _loaded: Any = PrivateAttr(default=None)
    # One lock for loading and scoring: a transformers tokenizer fails if two threads set its padding.
    _lock: Any = PrivateAttr(default_factory=threading.RLock)

    @field_validator("model", mode="before")
    @classmethod
    def _is_model(cls, value: Any) -> Any:
        named = isinstance(value, str) and bool(value.strip())
        if named or isinstance(value, BaseCrossEncoder) or (not isinstance(value, str) and hasattr(value, "predict")):
            return value
        raise PydanticCustomError(
            "cross_encoder",
            "must be a model id, a folder, a sentence-transformers CrossEncoder or a langchain BaseCrossEncoder",
        )

    def _exclusive(self) -> AbstractContextManager[None]:
        lock: AbstractContextManager[None] = self._lock
        return lock

    def _score(self, question: str, documents: Sequence[CheckedDocument]) -> Sequence[DocumentScore]:
        # Sorted by length and content: the last digits of a score depend on its batch, so batches must not vary.
        ordered = sorted(documents, key=lambda document: (len(document.text), document.key))
        texts = {document.key: titled_text(document.title, document.text) for document in ordered}
        predict, logits = self._predictor()
        split = {key: self._split(question, text) for key, text in texts.items()}
        pairs = [(question, chunk) for chunked in split.values() for chunk in chunked.chunks]
        raw = iter(self._raw_scores(predict, pairs))
        best = {key: max(itertools.islice(raw, len(chunked.chunks))) for key, chunked in split.items()}
        return [
            DocumentScore(sigmoid(value) if logits else value, value, split[key].details)
            for key, value in ((document.key, best[document.key]) for document in documents)
        ]

    def _raw_scores(
        self, predict: Callable[[list[tuple[str, str]]], Sequence[float]], pairs: list[tuple[str, str]]
    ) -> list[float]:
        raw: list[float] = []
        for start in range(0, len(pairs), self.batch_size):
            check_deadline()
            raw += [float(value) for value in predict(pairs[start : start + self.batch_size])]
        if len(raw) != len(pairs):
            raise RerankingError(f"the cross-encoder returned {len(raw)} scores for {len(pairs)} pairs")
        # Checked before the maximum over chunks is taken, which can hide NaN.
        if not all(map(math.isfinite, raw)):
            raise RerankingError("the cross-encoder returned a value that is not finite; check its weights and dtype")
        return raw

    def _split(self, question: str, text: str) -> ChunkedText:
        check_deadline()
        model = self._model()
        tokenizer = None if isinstance(model, BaseCrossEncoder) else getattr(model, "tokenizer", None)
        if tokenizer is None:
            return ChunkedText((text,))
        max_chunks = self.max_chunks if self.long_documents == "chunk" else 0
        return split_into_chunks(tokenizer, question, text, self._window(model), max_chunks)

    def _window(self, model: Any) -> int | None:
        """Return the token limit of a pair; None if it is not known."""
        model_limit = getattr(model, "max_seq_length", None)
        limits = [limit for limit in (model_limit, self.max_length) if limit is not None]
        return min(limits, default=None)

    def _predictor(self) -> tuple[Callable[[list[tuple[str, str]]], Sequence[float]], bool]:
        """Return the function that scores pairs, and whether a sigmoid must be applied to its results."""
        model = self._model()
        if isinstance(model, BaseCrossEncoder):
            return model.score, self.activation != "none"
        outputs = getattr(model, "num_labels", 1)
        if outputs != 1:
            raise RerankingError(
                f"the cross-encoder has {outputs} outputs, must have one; use a model that was trained for ranking"
            )
        options: dict[str, Any] = {"batch_size": self.batch_size, "show_progress_bar": False}
        if self.max_length is not None:
            options["processing_kwargs"] = {"text": {"max_length": self._window(model), "truncation": True}}
        activation = type(getattr(model, "activation_fn", None)).__name__
        logits = self.activation == "sigmoid" or (self.activation == "auto" and activation != "Sigmoid")
        return functools.partial(model.predict, **options), logits

    def _model(self) -> Any:
        if not isinstance(self.model, str):
            return self.model
        if self._loaded is None:
            try:
                from sentence_transformers import CrossEncoder
            except ImportError as error:
                raise missing_extra("sentence_transformers", "local") from error
            try:
                loaded = CrossEncoder(self.model, device=None if self.device == "auto" else self.device)
                check_encoder(self.model, loaded.model)
                self._loaded = loaded
            except Exception as error:
                # The hub, the files and the device raise many types of errors; the user gets one line.
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise RerankingError(
                    f"cross-encoder {self.model!r} could not be loaded on device {self.device!r}: {reason}; pass the "
                    "folder of a sentence-transformers CrossEncoder, or a model id with the hub in reach"
                ) from error
        return self._loaded


def split_into_chunks(tokenizer: Any, question: str, text: str, window: int | None, max_chunks: int) -> ChunkedText:
    """Split a passage into chunks that fit the window together with the question.

    Chunks do not overlap and end between two words if there is a space. If the tokenizer cannot return the offsets of
    its tokens in the text, or with ``max_chunks=0``, the passage is one chunk.

    Raises:
        PromptTooLongError: the question leaves fewer than ``FEWEST_TOKENS`` tokens for the passage.
    """
    if window is None:
        return ChunkedText((text,))

    def count_tokens(part: str) -> int:
        return len(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])

    beginning = text_beginning(question, window, count_tokens)
    n_question = count_tokens(beginning)
    free_tokens = window - n_question - tokenizer.num_special_tokens_to_add(pair=True)
    if free_tokens < FEWEST_TOKENS or beginning != question:
        raise PromptTooLongError(
            f"the question takes {'at least ' * (beginning != question)}{n_question} tokens, and the cross-encoder's "
            f"window of {window} has {max(free_tokens, 0)} left for a passage; at least {FEWEST_TOKENS} are needed: "
            "shorten the question, or raise max_length"
        )
    has_offsets = bool(getattr(tokenizer, "is_fast", False))
    whole, text = text, text_beginning(text, max(max_chunks, 1) * free_tokens, count_tokens)
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=has_offsets, verbose=False)
    n_tokens = len(tokens["input_ids"])
    if n_tokens <= free_tokens:
        return ChunkedText((text,))
    if max_chunks == 0 or not has_offsets:
        return ChunkedText((text,), truncated=True)
    starts = [int(start) for start, _ in tokens["offset_mapping"]]
    segments = [segment for segment in _split_text(text, starts, free_tokens) if segment.strip()]
    return ChunkedText(tuple(segments[:max_chunks]), truncated=len(segments) > max_chunks or text != whole)


def _split_text(text: str, starts: Sequence[int], limit: int) -> Iterator[str]:
    """Yield consecutive segments of a text of at most ``limit`` tokens; ``starts`` are the offsets of its tokens."""
    token, start = 0, 0
    while token + limit < len(starts):
        stop = starts[token + limit]
        space = max(text.rfind(" ", start + 1, stop), text.rfind("\n", start + 1, stop))
        stop = space + 1 if space > 0 else max(stop, start + 1)
        yield text[start:stop]
        start, token = stop, bisect_left(starts, stop, lo=token + 1)
    yield text[start:]
