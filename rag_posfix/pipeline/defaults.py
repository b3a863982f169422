"""Default request options, and the measured profile of ``mitigation=auto``.

The test of relevance leaves out the retrieved passages that are not about the question.

``rag-posfix measure`` chooses the arrangement of a measured profile for a model.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson
from langchain_core.documents import Document

from rag_posfix.assembly.documents import document_id
from rag_posfix.checked import MinRelevance
from rag_posfix.contracts.answer import Question
from rag_posfix.contracts.generator import Generator, display_name
from rag_posfix.contracts.method_spec import MethodSpec, named_method
from rag_posfix.contracts.request import MitigationChoice, PromptTemplate, Sampling, salted
from rag_posfix.contracts.retrieval import Reranker, Retriever, SimilarityRange, rerank_indexed
from rag_posfix.errors import ConfigError
from rag_posfix.pipeline.best_passage import BestPassage
from rag_posfix.pipeline.language import asks_for_list, content_words, is_broad, language_of
from rag_posfix.pipeline.query import QueryChoice
from rag_posfix.pipeline.run import RequestContext
from rag_posfix.pipeline.support import shared_words
from rag_posfix.text import NO_PASSAGE_TEXT, split_words, titled_text

_log = logging.getLogger(__name__)

AUTO = "auto"
"""The mitigation of the measured profile; without one that of large models, else the preset ``auto`` (``default``)."""

PROFILE_KIND = "measured_profile"

LARGE_HIDDEN_SIZE = 1536
"""Channels of the hidden state of a model of 1.5 billion parameters. Smaller models judge passages badly."""

SMALL_HIDDEN_SIZE = 256
"""Channels from which a model answers questions at all; answers of smaller models are shown as they are."""


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    """What ``mitigation=auto`` stands for.

    Attributes:
        mitigation: The method that reads the prompt.
        order: The order of the passages in the prompt.
        reranker: What scores or selects the passages; None leaves it to the pipeline.
        model: Name of the measured model, for messages.
        model_fingerprint: Identity of its weights and dtype.
        all_from: For questions that ask for a list, a comparison or a summary all further passages with this score of
            the reranker are read too; None reads those that it chooses.
    """

    mitigation: MethodSpec
    order: str
    reranker: MethodSpec | None
    model: str
    model_fingerprint: str
    all_from: float | None = None

    def check_model(self, generator: Generator) -> None:
        """Raise ConfigError if the profile was measured on another model."""
        if generator.fingerprint != self.model_fingerprint:
            raise ConfigError(
                f"the profile was measured on {self.model}, and the model is {display_name(generator.model_id)} "
                "(other weights, dtype or server); run rag-posfix measure with this model, or leave out the profile"
            )

    def resolve(self, question: Question, default: MethodSpec) -> Question:
        """Return the question with the measured arrangement if its mitigation, or the default, is ``auto``.

        An order or a reranker that the question names stays.
        """
        if named_method(question.mitigation or default, "mitigation").name != AUTO:
            return question
        reranker = self.reranker
        if reranker is not None and self.all_from is not None and asks_for_list(question.text):
            reranker = MethodSpec(reranker.name, {**reranker.parameters, "all_from": self.all_from})
        return replace(
            question,
            mitigation=self.mitigation,
            order=question.order or self.order,
            reranker=question.reranker or reranker,
        )


ALL_FROM = 0.6
"""Score of the judge from which a passage is read for a broad question; .5 is that of no passage at all."""


def large_model_profile(generator: Generator) -> MeasuredProfile:
    """Return the arrangement of models with ``LARGE_HIDDEN_SIZE`` channels and more: the judge's best three.

    For broad questions also all others that it says yes to. Measured on a model of 1.5 billion parameters
    (``docs/results.md``).
    """
    return MeasuredProfile(
        MethodSpec("none"), "reverse", MethodSpec("yes_no", {"top_n": 3}), generator.model_id, generator.fingerprint,
        ALL_FROM,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerProfile(MeasuredProfile):
    """The arrangement of a model on a server where none is chosen: the judge's best five, the best last.

    A server that gives no log-probabilities judges by sampled answers, several requests for each passage: there the
    best five by embedding are read. Either order follows from scores alone, so the given order does not matter.
    """

    gives_log_probs: Callable[[], bool] = lambda: True

    def resolve(self, question: Question, default: MethodSpec) -> Question:
        """Return the question with the arrangement; the server is asked at the first one that needs it."""
        is_auto = named_method(question.mitigation or default, "mitigation").name == AUTO
        if question.reranker is None and is_auto and not self.gives_log_probs():
            question = replace(question, reranker=_BEST_BY_EMBEDDING)
        return MeasuredProfile.resolve(self, question, default)


_BEST_BY_JUDGE, _BEST_BY_EMBEDDING = MethodSpec("yes_no", {"top_n": 5}), MethodSpec("embedding", {"top_n": 5})


def server_profile(generator: Generator, ask_for_log_probs: Callable[[], bool], k: int) -> ServerProfile:
    """Return the arrangement of a model on a server; the log says what it is and how many requests it costs."""
    name = display_name(generator.model_id)

    @functools.cache
    def gives_log_probs() -> bool:
        has_log_probs = ask_for_log_probs()
        said = (
            f"it judges each passage and reads the best five: {k + 2} requests for a question with {k} passages"
            if has_log_probs
            else "it gives no log-probabilities, so it reads the best five by embedding: one request for a question"
        )
        _log.warning(
            "model %s is on a server and no method is chosen: %s; mitigation=none chooses one prompt", name, said
        )
        return has_log_probs

    return ServerProfile(
        MethodSpec("none"), "reverse", _BEST_BY_JUDGE, generator.model_id, generator.fingerprint, ALL_FROM,
        gives_log_probs,
    )  # fmt: skip


def read_measured(path: Path | None) -> MeasuredProfile | None:
    """Return the profile of a file that ``rag-posfix measure`` wrote; None for a file of another kind, or no file.

    The setting ``profile`` also names records of ``probe slot-attention``, which the order ``profile`` reads.

    Raises:
        ConfigError: the file is of this kind, and damaged.
    """
    try:
        data = orjson.loads(b"{}" if path is None else path.read_bytes())
        if data.get("kind") != PROFILE_KIND:
            return None
    except (OSError, ValueError, AttributeError):  # the order profile says what is wrong with its file
        return None
    try:
        arrangement = data["arrangement"]
        reranker = arrangement["reranker"]
        return MeasuredProfile(
            _spec(arrangement["mitigation"]),
            str(arrangement["order"]),
            None if reranker is None else _spec(reranker),
            str(data["model"]),
            str(data["model_fingerprint"]),
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"profile={str(path)!r} lacks a field ({error}); write it again with rag-posfix measure"
        ) from error


def _spec(value: Mapping[str, Any]) -> MethodSpec:
    return MethodSpec(value["name"], value["parameters"])


@dataclass(frozen=True, slots=True)
class Defaults:
    """Default values for questions.

    Attributes:
        mitigation: The mitigation and its parameters.
        order: Name of the order of the passages.
        k: Number of passages to retrieve.
        sampling: Sampling parameters.
        tenant: Part of every cache key, besides the tenant of the question.
        attribution: Whether answers have citations by attention, which need the attention of four layers at each step
            and make decoding a few per cent slower.
        allow_ungrounded: Whether the model answers from its memory if there is no passage.
        allow_unsupported: Whether the model answers if the judge finds the answer in no passage, or if no passage can
            have given the answer.
        no_passage_text: The answer if there is no passage and ``allow_ungrounded`` is False, and if none of them
            answers the question and ``allow_unsupported`` is False.
        templates: Prompt templates by the code of the question's language, in place of the pipeline's own; each may
            have its own text for no passage.
        query: What is searched for, as in ``Question``.
        min_relevance: Which retrieved passages are read, as in ``Question``.
        second_step: Whether a second search may follow the first, as in ``Question``.
        measured: What the mitigation ``auto`` stands for; without it ``auto`` equals ``default``.
        best_passage: Finds a retrieved passage that is read alone where a question names no method, reranker or order;
            None reads all.
        is_small_reader: Whether the prompt of an English follow-up has the name that its first pronoun stands for,
            an answer that adds no word to an open question is read again, and answers are tested by their words.
        filter: Joined with the filter of every question, which cannot widen it. Documents that come with a question
            are not filtered.
    """

    mitigation: MitigationChoice = field(default_factory=lambda: MitigationChoice("default"))
    order: str = "relevance"
    k: int = 10
    sampling: Sampling = field(default_factory=Sampling)
    tenant: str = ""
    attribution: bool = True
    allow_ungrounded: bool = False
    allow_unsupported: bool = False
    no_passage_text: str = NO_PASSAGE_TEXT
    templates: Mapping[str, PromptTemplate] = field(default_factory=lambda: MappingProxyType({}))
    query: QueryChoice = "history"
    filter: Mapping[str, Any] | None = None
    min_relevance: MinRelevance = "auto"
    second_step: bool = True
    measured: MeasuredProfile | None = None
    best_passage: BestPassage | None = None
    is_small_reader: bool = False

    def template_of(self, text: str, history: Sequence[Mapping[str, str]] = ()) -> PromptTemplate | None:
        """Return the template of the language of a question; None for that of the pipeline.

        A follow-up whose language is unclear ("1871?") has that of the user's last message whose language is known.
        """
        asked = (message.get("content") for message in reversed(history) if message.get("role") == "user")
        earlier = (content for content in asked if isinstance(content, str))  # assembly says what is malformed
        languages = filter(None, map(language_of, chain([text], earlier)))
        return self.templates.get(next(languages, ""))


MIN_GAIN, MIDDLE_MIN_GAIN = 0.8, 1.2
"""Nats per token of the question that a passage must gain; the second with a model of ``MIDDLE_HIDDEN_SIZE`` channels.

Chosen on half of the questions of the end-to-end gate: with 135M parameters, and with 0.5 billion also on half of
those about own files.
"""

FALLING_SHARE = 0.75
"""Upper part of the similarities in doubt over which the needed gain falls to 0, chosen on half of the paraphrased
questions about own files: they gain less from a passage that has other words for what they ask.
"""

MIDDLE_HIDDEN_SIZE = 768
"""Channels from which, up to ``LARGE_HIDDEN_SIZE``, a passage must gain more: the model knows better what it asks."""

DETAILS = "reranking"


@dataclass(frozen=True, slots=True)
class RelevanceTest:
    """Two tests of retrieved passages: similarity, and a judge where similarity does not decide.

    With ``auto``, a passage with most content words of the question is judged whatever its similarity, and a broad
    question (list, compare, summarise) needs no judge: no single passage makes it likely.

    Attributes:
        judge: Returns the reranker whose ``raw_score`` is the gain of a passage in nats per token; None without one.
        least_gain: A judged passage of low similarity with less is not read.
    """

    judge: Callable[[], Reranker | None] = lambda: None
    least_gain: float = MIN_GAIN

    def similar(
        self, run: RequestContext, retriever: Retriever, documents: Sequence[Document], choice: MinRelevance
    ) -> tuple[list[Document], dict[str, float]]:
        """Return the passages that are similar enough, and the gain that each needs, by id.

        No gains if the judge need not decide.
        """
        known = similarity_of(retriever)
        if choice == "off" or not documents or (known is None and choice == "auto"):
            return list(documents), {}
        low = known.low if known is not None and choice == "auto" else float(choice)
        scored = [(document, _score(document)) for document in documents]
        named = content_words(run.question.text) if choice == "auto" else frozenset()
        kept = [document for document, score in scored if score >= low or has_most_words(document, named)]
        run.leave_out(scored, kept, f"with similarity {{:.2f}}, at least {low:.2f} is needed")
        is_clear = known is not None and max(map(_score, kept), default=0.0) >= known.clear
        if is_clear or is_broad(run.question.text):
            return kept, {}
        return kept, {document_id(document): self._needed_gain(_score(document), known) for document in kept}

    def _needed_gain(self, score: float, known: SimilarityRange | None) -> float:
        """Return the gain that a passage of a similarity needs: the nearer to one that is clear, the less."""
        if known is None:
            return self.least_gain
        share = (known.clear - score) / (FALLING_SHARE * (known.clear - known.low))
        return self.least_gain * min(1.0, max(0.0, share))

    def judged(
        self, run: RequestContext, documents: Sequence[Document], needed: Mapping[str, float]
    ) -> Sequence[Document]:
        """Return the passages that gain what they need; all if none needs any, without a judge, or if it fails."""
        judge = self.judge() if documents and needed else None
        if judge is None:
            return documents
        # A judge that fails returns what it was given: the details of the reranker before it are no verdict.
        unjudged = [
            document.model_copy(update={"metadata": {k: v for k, v in document.metadata.items() if k != DETAILS}})
            for document in documents
        ]
        with run.timed("judge"), salted(run.salt):
            ranked = rerank_indexed(judge, run.query.text, unjudged)
        kept: list[Document] = []
        below: list[tuple[Document, float, float]] = []
        gains = {entry.index: (entry.document.metadata.get(DETAILS) or {}).get("raw_score") for entry in ranked}
        for index, document in enumerate(documents):
            gain, least = gains.get(index), needed.get(document_id(document), self.least_gain)
            if isinstance(gain, float) and gain < least:
                below.append((document, gain, least))
            else:
                kept.append(document)
        least = max(below, key=lambda entry: entry[1])[2] if below else 0.0  # of the passage that is named
        reason = f"which the judge gives {{:.2f}} nats per token, at least {least:.2f} are needed"
        run.leave_out([(document, gain) for document, gain, _ in below], kept, reason)
        return kept


def similarity_of(retriever: Retriever) -> SimilarityRange | None:
    """Return between which similarities of a retriever the judge decides; None if its scores are not known."""
    range_of = getattr(retriever, "similarity_range", None)
    known: SimilarityRange | None = range_of() if callable(range_of) else None
    return known


def has_most_words(document: Document, words: Set[str]) -> bool:
    """Return whether a passage with its title has more than half of the words, two at least, in any inflection."""
    text = titled_text(document.metadata.get("title"), document.page_content)
    count = len(shared_words(words, set(split_words(text))))
    return count > max(1, len(words) / 2)


def _score(document: Document) -> float:
    score = document.metadata.get("relevance_score")
    return float(score) if isinstance(score, Real) else 1.0
