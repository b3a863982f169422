"""Makes a prompt from a question and documents: deduplication, token budget, order, layout. Knows no model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from langchain_core.documents import Document

from rag_posfix.assembly.documents import (
    CheckedDocument,
    Dropped,
    checked_document,
    distinct_indices,
    ranked_indices,
)
from rag_posfix.assembly.orders import OrderInputs, apply_order, create_order
from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.assembly.tokenization import (
    PassageBudget,
    TokenizedPassage,
    TokenizedPrompt,
    cut_passage,
    select_passages,
    tokenize_passage,
    tokenize_prompt,
    truncate,
    truncate_at_sentence,
)
from rag_posfix.cancellation import check_cancelled
from rag_posfix.contracts.generator import ChatMessage, TokenEncoder
from rag_posfix.errors import ConfigError, PromptTooLongError
from rag_posfix.plan.layout import Layout
from rag_posfix.text import clean_text, text_beginning

__all__ = ["MAX_CHARACTERS", "Assembled", "Assembler"]

_log = logging.getLogger(__name__)

MAX_CHARACTERS = 64
"""Upper bound of the characters per token, on average over a prompt: words have 4 or 5, code fewer.

Text with more characters per token of the context window is rejected without tokenising it: tokenising 8 MB takes
seconds.
"""


@dataclass(frozen=True, slots=True)
class Assembled:
    """A prompt, the documents in it, and the documents that were left out.

    Attributes:
        layout: The tokenised prompt.
        documents: Copies of the documents in the prompt, in its order, with their complete text.
        ids: Their ids, in the same order.
        dropped: The documents that were left out, as (id, reason): first duplicates and empty ones, then those beyond
            the budget.
        truncated: Ids of the documents whose text was cut to fit.
        order: Name of the order.
        depends_on_recent: Whether recent prompts may have changed the order.
        silenced: Ids of the documents with sentences about other documents, which are not in the prompt.
    """

    layout: Layout
    documents: tuple[Document, ...]
    ids: tuple[str, ...]
    dropped: tuple[Dropped, ...]
    truncated: tuple[str, ...]
    order: str
    depends_on_recent: bool = False
    silenced: tuple[str, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.layout.token_ids)

    def copied_documents(self) -> tuple[Document, ...]:
        """Return copies of the documents with metadata of their own; equal questions may share this prompt."""
        return tuple(map(_copy, self.documents))

    def log_omissions(self) -> None:
        """Log how many passages were cut to fit or left out because of the budget: numbers, no text and no ids."""
        n_dropped = sum(dropped.reason == "budget" for dropped in self.dropped)
        if self.truncated or n_dropped:
            _log.warning(
                "the context window holds no more: %d of %d passages in the prompt were cut to fit, %d were left out",
                len(self.truncated), len(self.documents), n_dropped,
            )  # fmt: skip


class Assembler:
    """Makes prompts for one generator. Has no state that changes; safe to share between threads.

    Args:
        encoder: The generator's tokenizer.
        context_window: Token limit of prompt and answer together.
        template: The text of the prompt; the default template if None.
        order_parameters: Parameters of orders that are named without any: order -> parameter -> value.
        budget: Token limit of each passage, and what happens to a longer one; no limit if None.

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
        for name in self._order_parameters:  # errors are raised here, not at the first question
            create_order(name, self._order_parameters)

    def with_template(self, template: PromptTemplate) -> Assembler:
        """Return an assembler with another template; this one does not change."""
        assembler = copy.copy(self)
        assembler.template = template
        return assembler

    def with_encoder(self, encoder: TokenEncoder) -> Assembler:
        """Return an assembler whose chats have the tools of ``encoder``; this one does not change."""
        assembler = copy.copy(self)
        assembler.encoder = encoder
        return assembler

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
        tool_turns: Sequence[ChatMessage] = (),
        recent: Sequence[Sequence[str]] = (),
        order_free: bool = False,
    ) -> Assembled:
        """Return the prompt that asks ``question`` about ``documents``.

        Args:
            documents: Candidates with ``metadata["relevance_score"]`` or without, in any order; never changed.
            order: The order of the passages: a name, or ``name:parameter=value``.
            seed: For the order ``random``.
            budget_tokens: Token limit of all passages, headings and separators included; the rest of the context
                window if None.
            history: Earlier messages. They follow the passages, system messages among them first, unless the template
                has ``history_first``.
            tool_turns: Messages behind the question: calls of tools and their results, for an encoder with tools.
            recent: Content keys of the passages of recent prompts, the newest first; for the order ``cache_aware``.
            order_free: Whether the answer of the method that reads the prompt does not depend on the order.

        Raises:
            ConfigError: the question is empty, a document or message is malformed, or a number is out of range.
            UnknownNameError: no order has this name.
            PromptTooLongError: the question leaves no room, or the budget is too small for any passage.
        """
        _check(question, max_new_tokens, budget_tokens)
        self.check_length(question, [*history, *tool_turns])
        chosen_order = create_order(order, self._order_parameters)
        checked = [checked_document(document, index) for index, document in enumerate(documents)]
        distinct, dropped = distinct_indices(checked)
        candidates = [checked[index] for index in distinct]
        has_passages = bool(candidates)
        prompt = tokenize_prompt(
            self.encoder, self.template, question, history=history, tool_turns=tool_turns, has_passages=has_passages
        )
        free_tokens = self._count_free_tokens(prompt, max_new_tokens)
        budget = free_tokens if budget_tokens is None else min(budget_tokens, free_tokens)
        passages, truncated = self._fill(candidates, budget)
        selected = sorted(passages)
        inputs = OrderInputs(
            relevance=tuple(candidates[index].relevance for index in selected),
            seed=seed,
            keys=tuple(candidates[index].key for index in selected),
            recent=tuple(tuple(keys) for keys in recent),
            order_free=order_free,
        )
        ordered = [selected[i] for i in apply_order(chosen_order, inputs)]
        over_budget = (
            Dropped(candidate.id, "budget") for index, candidate in enumerate(candidates) if index not in passages
        )
        return Assembled(
            layout=prompt.with_passages([passages[index] for index in ordered]),
            documents=tuple(_copy(candidates[index].document) for index in ordered),
            ids=tuple(candidates[index].id for index in ordered),
            dropped=(*dropped, *over_budget),
            truncated=tuple(candidates[index].id for index in truncated),
            order=chosen_order.name,
            depends_on_recent=chosen_order.reads_recent,
            silenced=tuple(candidates[index].id for index in ordered if candidates[index].tells_of_sources),
        )

    def check_length(self, question: str, history: Sequence[ChatMessage]) -> None:
        """Raise PromptTooLongError for a conversation that cannot fit; reads no more of it than would fit."""
        contents = (content for message in history if isinstance(content := message.get("content"), str))
        text = "\n".join([*contents, question])
        length = len(text)
        if self._beginning(text) != text:
            raise PromptTooLongError(
                f"question and history have {length} characters, which do not fit into the context window of "
                f"{self.context_window} tokens; shorten the question or the conversation"
            )

    def _count_free_tokens(self, prompt: TokenizedPrompt, max_new_tokens: int) -> int:
        """Return the number of tokens that the context window leaves for passages."""
        free_tokens = self.context_window - len(prompt) - max_new_tokens
        if free_tokens < 0:
            raise PromptTooLongError(
                f"question, history and template take {len(prompt)} tokens and max_tokens={max_new_tokens} more, "
                f"but the context window has {self.context_window}; shorten the question or lower max_tokens"
            )
        return free_tokens

    def _fill(
        self, candidates: Sequence[CheckedDocument], budget: int
    ) -> tuple[dict[int, TokenizedPassage], tuple[int, ...]]:
        """Return the passages that fit, by index of their document, and the indices of those that were cut."""
        ranked = ranked_indices(candidates)
        tokenized: list[TokenizedPassage] = []  # by rank
        rules = self.budget

        def sizes() -> Iterator[int]:
            for index in ranked:
                check_cancelled()
                tokenized.append(self._tokenize(candidates[index]))
                yield len(tokenized[-1])

        def cut(rank: int, allowed: int) -> int:
            shorter = self._cut(tokenized[rank], allowed, required=rank == 0)
            if shorter is None:
                return 0
            tokenized[rank] = shorter
            return len(shorter)

        # The text of a passage may end in the token of the separator.
        smallest = max(len(self.encoder.encode_text(self.template.separator)), 1)
        limit = rules.limits(len(ranked), budget)
        selection = select_passages(sizes(), budget, smallest, limit=limit, overflow=rules.overflow, cut=cut)
        if selection.too_long is not None:
            rank, allowed = selection.too_long
            raise PromptTooLongError(
                f"document {candidates[ranked[rank]].id!r} takes {len(tokenized[rank])} tokens and may take "
                f"{allowed}; raise the budget, use fewer or shorter documents, or set overflow to drop or truncate"
            )
        passages = {ranked[rank]: tokenized[rank] for rank in selection.selected}
        cut_before = {rank for rank in selection.selected if len(candidates[ranked[rank]].text) > self._max_characters}
        return passages, tuple(ranked[rank] for rank in sorted(cut_before.union(selection.cut)))

    @property
    def _max_characters(self) -> int:
        """Characters of a text that are tokenised at most."""
        return MAX_CHARACTERS * self.context_window

    def _beginning(self, text: str) -> str:
        """Return as much of a text as the context window can hold, and more."""
        beginning = text[: self._max_characters]
        return text_beginning(beginning, self.context_window, lambda part: len(self.encoder.encode_text(part)))

    def _tokenize(self, document: CheckedDocument) -> TokenizedPassage:
        text, title = self._beginning(document.text), self._beginning(document.title)
        passage = tokenize_passage(self.encoder, self.template, text, title=title, relevance=document.relevance)
        return passage if (text, title) == (document.text, document.title) else replace(passage, key=document.key)

    def _cut(self, passage: TokenizedPassage, budget: int, *, required: bool) -> TokenizedPassage | None:
        """Return the passage cut to ``budget`` tokens; None if too few are left for it and it is not required."""
        shorten = truncate_at_sentence if self.budget.overflow == "truncate" else truncate
        try:
            return cut_passage(self.encoder, passage, budget, shorten)
        except PromptTooLongError:
            if required:
                raise
            return None


def _check(question: str, max_new_tokens: int, budget_tokens: int | None) -> None:
    if not isinstance(question, str) or not clean_text(question).strip():
        raise ConfigError(f"question={question!r} must be a string with at least one visible character")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} must be >= 1; leave room for the answer")
    if budget_tokens is not None and budget_tokens < 1:
        raise ConfigError(f"budget_tokens={budget_tokens} must be >= 1; leave it out to use the whole context window")


def _copy(document: Document) -> Document:
    return document.model_copy(update={"metadata": dict(document.metadata)})
