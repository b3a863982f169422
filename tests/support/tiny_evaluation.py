"""Questions, a reranker and an engine without weights, small enough to evaluate in milliseconds."""

from __future__ import annotations

from langchain_core.documents import Document

from rag_posfix.evaluation.data.questions import PositionExample
from rag_posfix.generation.engine import Engine
from tests.support.tiny import loaded_model
from tests.support.toy_encoder import ToyEncoder


class Alphabetical:
    """Scores by the passage, never by which is gold; answers best first."""

    def __init__(self):
        self.seen = []

    def compress_documents(self, documents, query, callbacks=None):
        self.seen.append([d.id for d in documents])
        return [
            Document(page_content=d.page_content, id=d.id, metadata={**d.metadata, "relevance_score": 1 / (2 + i)})
            for i, d in enumerate(sorted(documents, key=lambda d: d.page_content))
        ]


EXAMPLES = [
    PositionExample(
        id=str(n),
        question=f"Why{n}",
        answers=("so",),
        gold=(Document(page_content=f"gold {n}", id=f"g{n}"),),
        distractors=tuple(Document(page_content=f"other {n}{i}", id=f"d{n}{i}") for i in range(3)),
    )
    for n in range(3)
]


def tiny_engine(context_window=180) -> Engine:
    """Return an engine around a tiny random model that reads bytes."""
    loaded = loaded_model(vocab_size=ToyEncoder.vocab_size, max_position_embeddings=context_window)
    return Engine(loaded, ToyEncoder(), "tiny", "print")


class CountedForwards:
    """Counts the forward passes of an engine's model inside a ``with`` block."""

    def __init__(self, engine: Engine) -> None:
        self._model = engine.loaded.model
        self.shapes: list[tuple[int, int]] = []

    def __enter__(self) -> CountedForwards:
        self._handle = self._model.register_forward_pre_hook(
            lambda module, arguments, keywords: self.shapes.append(tuple(keywords["input_ids"].shape)),
            with_kwargs=True,
        )
        return self

    def __exit__(self, *_error: object) -> None:
        self._handle.remove()
