"""Scores passages with a model that reads question and passage together."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

from langchain_core.cross_encoders import BaseCrossEncoder
from pydantic import Field, PrivateAttr, field_validator
from pydantic_core import PydanticCustomError

from rag_posfix.assembly.documents import Candidate
from rag_posfix.errors import RerankingError, missing_extra
from rag_posfix.reranking.base import RERANKERS
from rag_posfix.reranking.chunks import Split, split
from rag_posfix.reranking.deadline import check_time
from rag_posfix.reranking.relevance import sigmoid
from rag_posfix.reranking.scoring import Scored, ScoringReranker
from rag_posfix.text import titled_text

__all__ = ["CrossEncoderReranker"]

DEFAULT_MODEL = "cross-encoder/ms-marco-MiniLM-L6-v2"


@RERANKERS.register("cross_encoder")
class CrossEncoderReranker(ScoringReranker):
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

    name: ClassVar[str] = "cross_encoder"

    model: Any = DEFAULT_MODEL
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

    def _turn(self) -> AbstractContextManager[None]:
        turn: AbstractContextManager[None] = self._lock
        return turn

    def _score(self, question: str, candidates: Sequence[Candidate]) -> Sequence[Scored]:
        # By length and content: batches, and with them the last digits of scores, do not depend on the order given.
        ordered = sorted(candidates, key=lambda one: (len(one.text), one.key))
        texts = {one.key: titled_text(one.title, one.text) for one in ordered}
        predict, logits = self._predictor()
        parts = {key: self._split(question, text) for key, text in texts.items()}
        raw = iter(self._raw(predict, [(question, piece) for one in parts.values() for piece in one.pieces]))
        best = {key: max(itertools.islice(raw, len(one.pieces))) for key, one in parts.items()}
        return [
            Scored(sigmoid(value) if logits else value, value, parts[key].details)
            for key, value in ((one.key, best[one.key]) for one in candidates)
        ]

    def _raw(
        self, predict: Callable[[list[tuple[str, str]]], Sequence[float]], pairs: list[tuple[str, str]]
    ) -> list[float]:
        raw: list[float] = []
        for start in range(0, len(pairs), self.batch_size):
            check_time()
            raw += [float(value) for value in predict(pairs[start : start + self.batch_size])]
        if len(raw) != len(pairs):
            raise RerankingError(f"the cross-encoder returned {len(raw)} scores for {len(pairs)} pairs")
        # Before the best of several pieces is taken: a maximum can hide a value that is not a number.
        if not all(map(math.isfinite, raw)):
            raise RerankingError("the cross-encoder returned a value that is not finite; check its weights and dtype")
        return raw

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
