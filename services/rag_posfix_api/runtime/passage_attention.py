"""Measures the attention that the unmodified model pays to each passage of a request; nothing is generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from langchain_core.documents import Document

from rag_posfix.caching.answers.keys import tenant_salt
from rag_posfix.cancellation import check_cancelled
from rag_posfix.contracts.generator import PassageReader
from rag_posfix.pipeline.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Attended:
    """The attention to the passages of one prompt.

    Attributes:
        ids: Ids of the passages in the prompt, in its order.
        shares: Share of each of them in the attention to passages; they sum to 1.
        dropped: Documents that are not in the prompt, as (id, reason).
        tokens: Number of tokens of the prompt.
        order: Name of the order.
    """

    ids: tuple[str, ...]
    shares: tuple[float, ...]
    dropped: tuple[tuple[str, str], ...]
    tokens: int
    order: str


def attention_shares(
    pipeline: Pipeline, reader: PassageReader, question: str, documents: Sequence[Document], order: str
) -> Attended:
    """Return each passage's share of the attention of the prompt's last token, before the answer begins.

    Formula: share of passage i = a_i / sum_j a_j; a_i is the attention of the prompt's last token, summed over the
        tokens of passage i and averaged over layers and heads. The model is unmodified: mitigation ``none``.
    Cost: the prompt is read once.

    Args:
        pipeline: Its assembler makes the prompt, with room for one token of an answer.
        order: Name of the order of the passages in the prompt.

    Raises:
        ConfigError: the order is unknown, or has a wrong parameter.
        PromptTooLongError: the prompt exceeds the context window.
        UnsupportedModelError: the model gives no attention.
    """
    check_cancelled()
    assembled = pipeline.assembler.assemble(question, documents, order=order, max_new_tokens=1)
    layout = assembled.layout
    masses: list[float] = []
    if layout.n_passages:
        (per_token,) = reader.passage_attention([layout], tenant_salt(pipeline.defaults.tenant), check_cancelled)
        masses = [mean * len(span) for mean, span in zip(per_token, layout.passages, strict=True)]
    total = sum(masses) or 1.0
    return Attended(
        ids=tuple(assembled.ids),
        shares=tuple(mass / total for mass in masses),
        dropped=tuple((identity, reason) for identity, reason in assembled.dropped),
        tokens=assembled.prompt_tokens,
        order=assembled.order,
    )
