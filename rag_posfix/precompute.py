"""Reads the passages of an index into the passage store, so that the first question about them is a warm one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from langchain_core.documents import Document

from rag_posfix.assembly.documents import read_document, unique
from rag_posfix.assembly.layout import encode_passage, open_frame
from rag_posfix.assembly.prompt import PromptTemplate
from rag_posfix.errors import ConfigError
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.request import MitigationChoice

__all__ = ["precompute"]

TOGETHER = 16
"""Passages that are read in one batch."""


def precompute(
    engine: Engine,
    documents: Sequence[Document],
    mitigation: MitigationChoice,
    *,
    template: PromptTemplate | None = None,
    salt: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Read each document as it will stand in a prompt without earlier messages; return how many tokens were read.

    Documents that the store holds already cost a look into it. Their order does not matter.

    Args:
        engine: A model with a passage store.
        documents: What is read. Empty ones and duplicates are left out, as assembly does.
        mitigation: A method that reads passages independently of each other.
        template: The words of the prompt; the default ones if None.
        salt: As in ``GenerationRequest``.
        progress: Called with (documents read, documents in all).

    Raises:
        ConfigError: the method does not read passages apart, the engine has no store, or it keeps nothing.
        UnsupportedModelError: the model cannot be served by the method.
    """
    chosen = template or PromptTemplate()
    candidates, _ = unique([read_document(document, i) for i, document in enumerate(documents)])
    frame = open_frame(engine.encoder, chosen, "?", with_passages=True)
    tokens = 0
    for start in range(0, len(candidates), TOGETHER):
        some = candidates[start : start + TOGETHER]
        passages = [encode_passage(engine.encoder, chosen, one.text, title=one.title) for one in some]
        tokens += engine.read_ahead(frame.around(passages), mitigation, salt)
        _wait(engine)
        if progress is not None:
            progress(start + len(some), len(candidates))
    return tokens


def _wait(engine: Engine) -> None:
    """Wait until what was read is written: entries that do not fit the queue of the store would be lost."""
    if engine.passages is not None and not engine.passages.flush(60.0):
        raise ConfigError(
            "the passage store did not write what was read within 60 seconds; check the disk or the Redis that it "
            "keeps passages in"
        )
