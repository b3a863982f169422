"""A question to a pipeline and its answer, as plain data: its form, and the warnings of the question."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any, Literal

from langchain_core.documents import Document

from rag_posfix.checked import MinRelevance, check_type, checked_list, checked_min_relevance
from rag_posfix.contracts.generator import Collected
from rag_posfix.contracts.method_spec import MethodSpec, named_method
from rag_posfix.contracts.request import FinishReason, MitigationChoice, PromptTemplate, Sampling, ScoredToken, Usage
from rag_posfix.contracts.retrieval import parse_filter
from rag_posfix.contracts.tools import ToolCall, ToolUse
from rag_posfix.errors import ConfigError
from rag_posfix.registry import check_method
from rag_posfix.text import checked_question

FormFault = Literal["empty", "repetition", "fragment", "endless"]

SupportVerdict = Literal["yes", "partly", "no", "unknown"]
"""Whether passages support an answer."""

WORDS = re.compile(r"\w+")
LONGEST_RUN = 100
"""Words of the longest run whose repetition is looked for."""
ENDLESS_WORDS = 60
"""A sentence of more words than this does not end."""

_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|[\u3002\uff01\uff1f\n]")
# In lower case: "Vitamin A" and "Portland, OR" are whole.
_UNFINISHED = re.compile(r"(?:[:,;]|\b(?:[Tt]he|a|an|of|is|are|was|were|and|or|to|in|by|with))\s*$")
# "1/2", "1." and "2)": the number of a page or of a list's item, without the item. "1963." is a year.
_BARE_MARKER = re.compile(r"\s*(?:\d+\s*/\s*\d+|\(?\d{1,2}[.)])\s*$")


def repeats(text: str) -> bool:
    """Return whether a run of words occurs in succession: a word three times, or 2 to 100 words twice.

    Cost: at most ``LONGEST_RUN`` comparisons for each word.
    """
    words = WORDS.findall(text.lower())
    for length in range(1, min(LONGEST_RUN, len(words) // 2) + 1):
        wanted = 2 if length == 1 else length  # equal pairs in succession, each ``length`` words apart
        equal = 0
        for word, later in zip(words, words[length:], strict=False):
            equal = equal + 1 if word == later else 0
            if equal == wanted:
                return True
    return False


def _is_json(text: str) -> bool:
    if not text.startswith("{"):
        return False
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def find_form_fault(text: str, is_cut: bool = False) -> FormFault | None:
    """Return what is wrong with the form of an answer, the first of these, or None; a JSON object has no fault.

    - ``empty``: no letter and no digit.
    - ``repetition``: ``repeats``.
    - ``fragment``: a bare list or page number ("1/2", "1."), or an end without the word that must follow ("The answer
      is:", "It is in the"). An answer that ``max_tokens`` cut (``is_cut``) may end anywhere.
    - ``endless``: a sentence has more than ``ENDLESS_WORDS`` words.
    """
    if _is_json(text):
        return None
    if not WORDS.search(text):
        return "empty"
    if repeats(text):
        return "repetition"
    if _BARE_MARKER.match(text) or (not is_cut and _UNFINISHED.search(text)):
        return "fragment"
    longest = max(len(WORDS.findall(sentence)) for sentence in _SENTENCE_END.split(text))
    return "endless" if longest > ENDLESS_WORDS else None


@dataclass(frozen=True, slots=True)
class Question:
    """A question to a pipeline. A field that is None takes the pipeline's default.

    Text and documents may be given by position, all other fields by name. Every field is checked here.

    Attributes:
        text: The question.
        documents: The passages to answer from; None retrieves passages, if the pipeline has a retriever.
        history: Earlier messages of the conversation, ``{"role", "content"}``.
        mitigation: ``name``, ``name:parameter=value``, or a ``MitigationChoice``, which a text becomes.
            Parameters that the command line reads from a file are values here.
        order: The order of the passages: a name, or ``name:parameter=value``.
        seed: Seed of the order ``random``.
        k: Number of passages to retrieve.
        sampling: Sampling parameters.
        tenant: Part of the cache key: tenants do not share cached answers.
        use_cache: Whether the answer cache may be read and written.
        index: Name of the index to retrieve from; None is the pipeline's own retriever.
        reranker: What scores the passages, also those that have a score: a name, ``name:parameter=value``, or a
            ``MethodSpec``, which a text becomes. None leaves it to the pipeline.
        allow_ungrounded: Whether the model answers from its memory if there is no passage; otherwise the answer says
            that no passage was found.
        allow_unsupported: Whether the model answers if the judge finds the answer in no passage; otherwise the answer
            says that no passage answers the question.
        template: The text of the prompt.
        query: What is searched for: ``last`` (the question), ``history`` (the last messages of the user, weighted), or
            ``rewrite`` (a question that a model writes).
        min_relevance: Which retrieved passages are read: ``auto`` (those about the question, by similarity and a
            judge), ``off`` (all), or the lowest similarity, 0 to 1, with the judge.
        second_step: Whether a second search may follow with names of the best passage; never with
            ``min_relevance="off"``.
        filter: Only passages whose metadata matches are retrieved (see ``contracts.filters``); part of the cache key.
            Cannot be given with ``documents``.
        tools: The tools that the answer may call, and their results so far. The chat template of the model must take
            tools; a server's model takes none here.

    Raises:
        ConfigError: a value has the wrong type or is out of range, or a method is unknown.
    """

    text: str
    documents: Sequence[Document] | None = None
    _: KW_ONLY
    history: Sequence[Mapping[str, str]] = ()
    mitigation: MitigationChoice | str | None = None
    order: str | None = None
    seed: int = 0
    k: int | None = None
    sampling: Sampling | None = None
    tenant: str = ""
    use_cache: bool = True
    index: str | None = None
    reranker: MethodSpec | str | None = None
    allow_ungrounded: bool | None = None
    allow_unsupported: bool | None = None
    template: PromptTemplate | None = None
    query: str | None = None
    filter: Mapping[str, Any] | None = None
    min_relevance: MinRelevance | None = None
    second_step: bool | None = None
    tools: ToolUse | None = None

    def __post_init__(self) -> None:
        checked_question(self.text)
        lists: list[tuple[str, Any, str]] = [("history", Mapping, 'messages {"role": "user", "content": text}')]
        if self.documents is not None:
            lists.append(("documents", Document, "langchain_core Documents: Document(page_content=text)"))
        for name, kind_of_entry, allowed in lists:
            object.__setattr__(self, name, tuple(checked_list(name, getattr(self, name), kind_of_entry, allowed)))
        for kind in ("mitigation", "reranker"):
            method = getattr(self, kind)
            if method is not None:
                method = named_method(method, kind)
                check_method(kind, method)
                object.__setattr__(self, kind, method)
        if self.order is not None:
            check_method("order", self.order)
        check_type("k", self.k, int | None, "a whole number >= 1, or None for the default")
        if self.k is not None and self.k < 1:
            raise ConfigError(f"k={self.k} must be a whole number >= 1, or None for the default")
        if self.min_relevance is not None:
            object.__setattr__(self, "min_relevance", checked_min_relevance(self.min_relevance))
        if self.filter is not None:
            _check_filter(self.filter, self.documents)
        for name, kind_of_value, allowed in (
            ("seed", int, "a whole number"),
            ("tenant", str, "a string"),
            ("use_cache", bool, "True or False"),
            ("index", str | None, "the name of an index, or None"),
            ("allow_ungrounded", bool | None, "True, False or None"),
            ("allow_unsupported", bool | None, "True, False or None"),
            ("second_step", bool | None, "True, False or None"),
            ("template", PromptTemplate | None, "a PromptTemplate, or None"),
            ("query", str | None, "last, history or rewrite, or None"),
            ("sampling", Sampling | None, "a Sampling, or None"),
            ("tools", ToolUse | None, "a ToolUse, or None"),
        ):
            check_type(name, getattr(self, name), kind_of_value, allowed)


def as_question(question: Question | str, documents: Sequence[Document] | None = None) -> Question:
    """Return the question of a text and its documents, or a ``Question`` as it is.

    Raises:
        ConfigError: the text or the documents are wrong, or documents come next to a ``Question``.
    """
    if not isinstance(question, Question):
        return Question(question, documents)
    if documents is not None:
        raise ConfigError("documents are given next to a Question; give them to it: Question(text, documents)")
    return question


def _check_filter(metadata_filter: object, documents: Sequence[Document] | None) -> None:
    parse_filter(metadata_filter)
    if documents is not None:
        raise ConfigError(
            "documents and a filter are given; a filter chooses among retrieved passages, so send only the documents "
            "that may be read"
        )


@dataclass(frozen=True, slots=True)
class AnswerDocument:
    """A passage in the prompt of the answer.

    Attributes:
        id: The document's id.
        score: Its relevance, or None without a score.
        position: Its position in the prompt, from 0.
        attention: Its share of the attention to passages, 0 to 1. Until 1.0 also its ``weight``, if it has one.
        title: Its title, or None.
        source: Its file, or None.
        text: Its text, complete even if the prompt holds a part of it.
        page: The page or slide of its file on which it begins, or None.
        weight: Its weight in the mixture of a method whose experts read one passage each, 0 to 1; None for methods
            that attend to all passages.
        pages: The pages on which there is some of it, if these are several.
        page_starts: Where in its text each of ``pages`` begins.
    """

    id: str
    score: float | None
    position: int
    attention: float
    title: str | None = None
    source: str | None = None
    text: str = ""
    page: int | None = None
    weight: float | None = None
    pages: tuple[int, ...] = ()
    page_starts: tuple[int, ...] = ()

    def page_at(self, offset: int) -> int | None:
        """Return the page of the character at ``offset`` of the text; None without pages."""
        return self.pages[max(0, bisect_right(self.page_starts, offset) - 1)] if self.pages else self.page


@dataclass(frozen=True, slots=True)
class Citation:
    """A span of the answer and its source documents.

    Attributes:
        start: First character in the answer.
        end: Character after the last.
        text: The characters between.
        document_ids: Ids of the source documents.
        origin: The evidence. ``quote``: the documents contain what the sentence adds to the question.
            ``attention``: the document dominated the attention, or the weights, while the sentence was generated. The
            JSON field is called ``from``.
        pages: The page or slide of each of these documents on which the words are; None for one without pages.
    """

    start: int
    end: int
    text: str
    document_ids: tuple[str, ...]
    origin: Literal["quote", "attention"] = "quote"
    pages: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Disagreement:
    """What some passages answer, where others answer something else.

    Attributes:
        text: Their answer.
        document_ids: Ids of the passages.
        date: The newest date of their metadata, titles or file names: YYYY, YYYY-MM or YYYY-MM-DD; "" if unknown.
    """

    text: str
    document_ids: tuple[str, ...]
    date: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with its sources.

    Attributes:
        text: The answer.
        documents: The passages in the prompt, in prompt order.
        citations: Sentences that passages contain, and sentences with a dominant passage, sorted by start.
        usage: Token counts, those of a server's judgements of passages included.
        cached: Whether the answer came from the answer cache.
        mitigation: Name of the mitigation.
        order: Name of the order.
        finish_reason: ``stop`` or ``length``.
        dropped: Ids of documents that are not in the prompt, with the reason: ``duplicate``, ``empty``,
            ``budget``, ``min_relevance`` (retrieved, and not about the question), ``margin`` (another passage is far
            ahead by similarity, and a small model reads it alone), ``older_version`` (another passage is a newer
            version of it), ``reranker`` (its reranker chose others), or ``unsupported`` (by the judge none of them
            answers the question, so that no answer was written).
        timings: Seconds by stage.
        log_probs: Every generated token with its log-probability, if ``sampling.top_logprobs`` asked for them. Tokens
            that end the answer or belong to a stop string start at the end of ``text`` or later.
        query: What retriever and reranker searched for: the question, or what was made of it and the history.
        second_query: What a second search for the question searched for; empty if there was none.
        warnings: What failed without failing the question: a reranker that left the documents in their order. Also, if
            the test of relevance left out all that was retrieved: the best of it, its score, and what turns the test
            off.
        grounded: Whether passages were there and the model wrote from them. It does not say that they support the
            answer: ``support`` does. False for an answer from its memory, and for the text that says that no passage
            was found, or that none answers the question.
        support: Whether passages support the answer. ``yes``: the judge finds the answer in a passage, and a passage
            has the answer's words. ``partly``: some of its words stand in passages, or the judge is in doubt. ``no``:
            the judge finds it in no passage, no passage has any of its words, or there was no passage. ``unknown``:
            nobody judged; small models judge badly.
        supported_by: Ids of the passages that support the answer, or have most of its words.
        disagreements: What passages answer that contradict each other, the newest first, this answer among them; empty
            if none was found. Looked for where the judge finds an answer in a passage without this answer's words.
        truncated: Ids of documents whose text was cut to fit into the prompt.
        stop_string: The stop string that ended the answer, or None.
        tool_calls: The calls of tools, which ``text`` does not have. Malformed calls, and calls that ``max_tokens``
            cut, stay in ``text``.
    """

    text: str
    documents: tuple[AnswerDocument, ...]
    citations: tuple[Citation, ...]
    usage: Usage
    cached: bool
    mitigation: str
    order: str
    finish_reason: FinishReason
    dropped: tuple[tuple[str, str], ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    log_probs: tuple[ScoredToken, ...] = ()
    warnings: tuple[str, ...] = ()
    query: str = ""
    second_query: str = ""
    grounded: bool = True
    support: SupportVerdict = "unknown"
    supported_by: tuple[str, ...] = ()
    disagreements: tuple[Disagreement, ...] = ()
    truncated: tuple[str, ...] = ()
    stop_string: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def form_fault(self) -> FormFault | None:
        """What is wrong with the form of the text: ``empty``, ``repetition``, ``fragment``, ``endless``, or None."""
        if self.tool_calls:  # the text only introduces them
            return None
        return find_form_fault(self.text, is_cut=self.finish_reason == "length")

    @property
    def well_formed(self) -> bool:
        """Whether the form of the text has no fault; ``form_fault`` names the fault."""
        return self.form_fault is None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object that ``rag-posfix ask --json`` prints."""
        data = asdict(self)
        data["answer"] = data.pop("text")
        data["form_fault"] = self.form_fault
        data["well_formed"] = data["form_fault"] is None
        del data["log_probs"]  # bytes, which JSON cannot hold
        if not self.tool_calls:
            del data["tool_calls"]
        for citation in data["citations"]:
            citation["from"] = citation.pop("origin")
        data["dropped"] = [{"id": identity, "reason": reason} for identity, reason in self.dropped]
        return data


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """A piece of a streamed answer; the last one has the complete ``answer``. ``log_probs`` as in ``Chunk``.

    ``prompt_tokens`` are the tokens of the prompt; a remote generator may count others, which ``answer`` has.
    """

    text: str
    answer: Answer | None = None
    log_probs: tuple[ScoredToken, ...] = ()
    prompt_tokens: int = 0


_WARNINGS = Collected[str]("rag_posfix_warnings")
collected_warnings, warn = _WARNINGS.during, _WARNINGS.add
