"""From a question and documents to a prompt: dedupe, token budget, order, layout. Knows no model and no method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from langchain_core.documents import Document

from rag_posfix.assembly.budget import FEWEST_TOKENS, PassageBudget, choose, truncate, truncate_at_sentence
from rag_posfix.assembly.documents import Candidate, Dropped, rank, read_document, unique
from rag_posfix.assembly.layout import Frame, Passage, encode_passage, open_frame
from rag_posfix.assembly.orders import OrderFacts, arrange, create_order
from rag_posfix.assembly.prompt import PromptTemplate
from rag_posfix.contracts.generator import ChatMessage, TokenEncoder
from rag_posfix.errors import ConfigError, PromptTooLongError
from rag_posfix.plan.layout import Layout
from rag_posfix.text import clean_text

__all__ = ["Assembled", "Assembler"]


@dataclass(frozen=True, slots=True)
class Assembled:
    """A prompt and what became of the documents.

    Attributes:
        layout: The tokenised prompt.
        documents: Copies of the documents in the prompt, in its order, with their whole text.
        ids: Their ids, in the same order.
        dropped: The documents that are not in the prompt, as (id, reason): first duplicates and empty ones, then
            those beyond the budget.
        truncated: Ids of the documents whose text was cut to fit.
        order: Name of the order.
    """

    layout: Layout
    documents: tuple[Document, ...]
    ids: tuple[str, ...]
    dropped: tuple[Dropped, ...]
    truncated: tuple[str, ...]
    order: str

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has."""
        return len(self.layout.token_ids)


class Assembler:
    """Makes prompts for one generator. Holds no state between calls; safe to share between threads.

    Args:
        encoder: The generator's tokenizer.
        context_window: Most tokens that prompt and answer may have together.
        template: The words of the prompt; the default ones if None.
        order_parameters: Parameters of orders that are named without any: order -> parameter -> value.
        budget: How many tokens each passage may have, and what happens to a longer one; no limit if None.

    Raises:
        ConfigError: ``context_window`` is below 1, or a parameter of an order is wrong.
    """

    def __init__(
        self,
        encoder: TokenEncoder,
        context_window: int,
        template: PromptTemplate | None = None,
        *,
        order_parameters: Mapping[str, Mapping[str, Any]] | None = None,
        budget: PassageBudget | None = None,
    ) -> None:
        if context_window < 1:
            raise ConfigError(f"context_window={context_window} must be >= 1; give the model's number of positions")
        self.encoder = encoder
        self.context_window = context_window
        self.template = template or PromptTemplate()
        self.budget = budget or PassageBudget()
        self._order_parameters = order_parameters or {}
        for name in self._order_parameters:  # what is wrong with one is said at once
            create_order(name, self._order_parameters)

    def assemble(
        self,
        question: str,
        documents: Sequence[Document] = (),
        *,
        order: str = "relevance",
        seed: int = 0,
        max_new_tokens: int = 128,
        budget_tokens: int | None = None,
        history: Sequence[ChatMessage] = (),
        recent: Sequence[Sequence[str]] = (),
        order_free: bool = False,
    ) -> Assembled:
        """Return the prompt that asks ``question`` about ``documents``.

        Args:
            question: What is asked.
            documents: Candidates with ``metadata["relevance_score"]`` or without, in any order; never changed.
            order: The order that the passages stand in: a name, or ``name:parameter=value``.
            seed: For orders that draw.
            max_new_tokens: Room to leave for the answer.
            budget_tokens: Most tokens that the passages may take, headings and separators included; all that the
                context window leaves if None.
            history: Earlier messages; a system message among them moves to the front.
            recent: Keys of the passages of recent prompts, the newest first; for orders that reuse what was read.
            order_free: Whether the method that will read the prompt answers alike for every order.

        Raises:
            ConfigError: the question is empty, a document or message is malformed, or a number is out of range.
            UnknownNameError: no order has this name.
            PromptTooLongError: the question leaves no room, or the budget is too small for any passage.
        """
        _check(question, max_new_tokens, budget_tokens)
        arranged_by = create_order(order, self._order_parameters)
        candidates, dropped = unique([read_document(document, i) for i, document in enumerate(documents)])
        frame = open_frame(self.encoder, self.template, question, history=history, with_passages=bool(candidates))
        room = self._room(frame, max_new_tokens)
        passages, truncated = self._fill(candidates, room if budget_tokens is None else min(budget_tokens, room))
        given = sorted(passages)
        facts = OrderFacts(
            relevance=tuple(candidates[index].relevance for index in given),
            seed=seed,
            keys=tuple(candidates[index].key for index in given),
            recent=tuple(tuple(keys) for keys in recent),
            order_free=order_free,
        )
        kept = [given[i] for i in arrange(arranged_by, facts)]
        left_out = (Dropped(one.id, "budget") for index, one in enumerate(candidates) if index not in passages)
        return Assembled(
            layout=frame.around([passages[index] for index in kept]),
            documents=tuple(_copy(candidates[index].document) for index in kept),
            ids=tuple(candidates[index].id for index in kept),
            dropped=(*dropped, *left_out),
            truncated=tuple(candidates[index].id for index in truncated),
            order=arranged_by.name,
        )

    def _room(self, frame: Frame, max_new_tokens: int) -> int:
        room = self.context_window - len(frame) - max_new_tokens
        if room < 0:
            raise PromptTooLongError(
                f"question, history and template take {len(frame)} tokens and max_new_tokens={max_new_tokens} more, "
                f"but the context window has {self.context_window}; shorten the question or lower max_new_tokens"
            )
        return room

    def _fill(self, candidates: Sequence[Candidate], budget: int) -> tuple[dict[int, Passage], tuple[int, ...]]:
        """Return the passages that fit, by index of their candidate, and the indices of those that were cut."""
        ranked = rank(candidates)
        encoded: list[Passage] = []
        rules = self.budget

        def sizes() -> Iterator[int]:
            for index in ranked:
                encoded.append(self._encode(candidates[index]))
                yield len(encoded[-1])

        def cut(position: int, allowed: int) -> int:
            shorter = self._cut(encoded[position], allowed, needed=position == 0)
            if shorter is None:
                return 0
            encoded[position] = shorter
            return len(shorter)

        smallest = len(self.encoder.encode_text(self.template.separator)) + 1
        limit = rules.limits(len(ranked), budget)
        selection = choose(sizes(), budget, smallest, limit=limit, overflow=rules.overflow, cut=cut)
        if selection.refused is not None:
            position, allowed = selection.refused
            raise PromptTooLongError(
                f"document {candidates[ranked[position]].id!r} takes {len(encoded[position])} tokens and may take "
                f"{allowed}; raise the budget, use fewer or shorter documents, or set overflow to drop or truncate"
            )
        kept = {ranked[position]: encoded[position] for position in selection.kept}
        return kept, tuple(ranked[position] for position in selection.cut)

    def _encode(self, candidate: Candidate) -> Passage:
        return encode_passage(
            self.encoder, self.template, candidate.text, title=candidate.title, relevance=candidate.relevance
        )

    def _cut(self, passage: Passage, budget: int, *, needed: bool) -> Passage | None:
        """Return the beginning of a passage; None if too little is left for it and it is not needed.

        Its key stays: what is kept of it goes when the document goes.
        """
        limit = budget - len(passage.heading) - len(passage.separator)
        if limit < FEWEST_TOKENS and not needed:
            return None
        shorten = truncate_at_sentence if self.budget.overflow == "truncate" else truncate
        return replace(passage, text=shorten(passage.text, limit, self.encoder.decode))


def _check(question: str, max_new_tokens: int, budget_tokens: int | None) -> None:
    if not isinstance(question, str) or not clean_text(question).strip():
        raise ConfigError(f"question={question!r} must be a string with at least one visible character")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} must be >= 1; leave room for the answer")
    if budget_tokens is not None and budget_tokens < 1:
        raise ConfigError(f"budget_tokens={budget_tokens} must be >= 1; leave it out to use the whole context window")


def _copy(document: Document) -> Document:
    return document.model_copy(update={"metadata": dict(document.metadata)})
