"""Scores passages with a model that reads question and passage together."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

from langchain_core.callbacks import Callbacks
from langchain_core.cross_encoders import BaseCrossEncoder
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict, Field, PrivateAttr, field_validator
from pydantic_core import PydanticCustomError

from rag_posfix.errors import RerankingError, missing_extra
from rag_posfix.reranking.base import RERANKERS, ranked_copies
from rag_posfix.reranking.candidates import checked_question, read_candidates
from rag_posfix.reranking.chunks import Split, split
from rag_posfix.reranking.deadline import check_time, in_thread
from rag_posfix.reranking.relevance import sigmoid
from rag_posfix.text import titled_text

__all__ = ["CrossEncoderReranker"]

DEFAULT_MODEL = "cross-encoder/ms-marco-MiniLM-L6-v2"


@RERANKERS.register("cross_encoder")
class CrossEncoderReranker(BaseDocumentCompressor):
    """Let a small model trained for it read each passage together with the question.

    The score of a passage does not depend on the others, nor on their order. Documents with equal title and text are
    read once; those without visible text score 0 with ``"read": False``.

    Source: Nogueira and Cho (2019), Passage Re-ranking with BERT, https://arxiv.org/abs/1901.04085; models of
        sentence-transformers (``CrossEncoder``).
    Formula: z_k = model(question, passage k); relevance_score = z_k where the model ends in a sigmoid, else
        sigmoid(z_k). ``raw_score`` is what the model's own ``predict`` returns.
    Cost: tokens read, by the other model: question and passage, once per passage; nothing is kept between questions.
        The deadline is looked at between batches.
    Limits: passages longer than the model's window are read in pieces, the best of which counts
        (``long_document: "chunked"``), or up to its end (``"truncated"``). Of a model that is only known by
        langchain's interface the window is not known: it cuts by itself, and nobody says so.

    Attributes:
        model: A model id, a folder, a ``CrossEncoder``, or a langchain ``BaseCrossEncoder``. Loaded on first use.
        top_n: How many passages to return, all if None.
        batch_size: Pairs per forward pass.
        max_length: Tokens of a pair at most; None is the model's own limit.
        long_documents: ``chunk`` or ``truncate``.
        activation: ``auto`` applies a sigmoid where the model gives logits (no activation of its own, or not known);
            ``none`` takes its numbers as they are, which must then lie in [0, 1]; ``sigmoid`` applies it always.
        device: ``auto``, ``cpu``, ``cuda``, ...; for a model that is loaded here.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    model: Any = DEFAULT_MODEL
    top_n: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=32, ge=1)
    max_length: int | None = Field(default=None, ge=16)
    long_documents: Literal["chunk", "truncate"] = "chunk"
    activation: Literal["auto", "none", "sigmoid"] = "auto"
    device: str = "auto"
    _loaded: Any = PrivateAttr(default=None)
    # One lock for loading and scoring: the tokenizers of transformers fail when two threads change padding.
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

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Return scored copies of ``documents``, best first; equal scores keep the given order.

        Args:
            documents: What to score; left untouched.
            query: The question.
            callbacks: Not used; part of langchain's interface.

        Raises:
            ConfigError: the question is empty, or a document is malformed.
            RerankingError: the model cannot be loaded, has several outputs, or returned unusable numbers; or the
                question fills its window.
        """
        if not documents:
            return []
        question, candidates = checked_question(query), read_candidates(documents)
        # By length and content: batches, and with them the last digits of scores, do not depend on the order given.
        ordered = sorted(candidates.distinct, key=lambda one: (len(one.text), one.key))
        texts = {one.key: titled_text(one.title, one.text) for one in ordered}
        with self._lock:
            scores = self._score(question, texts) if texts else {}
        details: dict[str, dict[str, Any]] = {
            key: {"reranker": "cross_encoder", "raw_score": raw, **said} for key, (_, raw, said) in scores.items()
        }
        unread = {"reranker": "cross_encoder", "raw_score": None, "read": False}
        return ranked_copies(
            documents,
            [scores[key][0] if key in scores else 0.0 for key in candidates.keys],
            self.top_n,
            [details.get(key, unread) for key in candidates.keys],
        )

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Do what ``compress_documents`` does in a worker thread; cancelled, it stops after a batch.

        Args:
            documents: What to score; left untouched.
            query: The question.
            callbacks: Not used; part of langchain's interface.
        """
        return await in_thread(functools.partial(self.compress_documents, documents, query, callbacks))

    def _score(self, question: str, texts: dict[str, str]) -> dict[str, tuple[float, float, dict[str, Any]]]:
        """Return score, raw score and what else is to be said of each text."""
        predict, logits = self._predictor()
        parts = {key: self._split(question, text) for key, text in texts.items()}
        pairs = [(question, piece) for one in parts.values() for piece in one.pieces]
        raw: list[float] = []
        for start in range(0, len(pairs), self.batch_size):
            check_time()
            raw += [float(value) for value in predict(pairs[start : start + self.batch_size])]
        if len(raw) != len(pairs):
            raise RerankingError(f"the cross-encoder returned {len(raw)} scores for {len(pairs)} pairs")
        if not all(map(math.isfinite, raw)):
            raise RerankingError("the cross-encoder returned a value that is not finite; check its weights and dtype")
        found, at = {}, 0
        for key, one in parts.items():
            best = max(raw[at : at + len(one.pieces)])
            at += len(one.pieces)
            found[key] = (sigmoid(best) if logits else best, best, one.details)
        return found

    def _split(self, question: str, text: str) -> Split:
        check_time()
        model = self._model()
        tokenizer = None if isinstance(model, BaseCrossEncoder) else getattr(model, "tokenizer", None)
        if tokenizer is None:
            return Split((text,))
        return split(tokenizer, question, text, self._window(model), chunk=self.long_documents == "chunk")

    def _window(self, model: Any) -> int | None:
        """Return how many tokens a pair may have."""
        own = getattr(model, "max_seq_length", None)
        limits = [limit for limit in (own, self.max_length) if limit is not None]
        return min(limits, default=None)

    def _predictor(self) -> tuple[Callable[[list[tuple[str, str]]], Sequence[float]], bool]:
        """Return what scores pairs, and whether a sigmoid is to be applied."""
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
        own = type(getattr(model, "activation_fn", None)).__name__
        logits = self.activation == "sigmoid" or (self.activation == "auto" and own != "Sigmoid")
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
                self._loaded = CrossEncoder(self.model, device=None if self.device == "auto" else self.device)
            except Exception as error:
                # Whatever the hub, the files or the device object to, the user needs one line.
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise RerankingError(
                    f"cross-encoder {self.model!r} could not be loaded on device {self.device!r}: {reason}; pass the "
                    "folder of a sentence-transformers CrossEncoder, or a model id with the hub in reach"
                ) from error
        return self._loaded
