"""Retrievers and rerankers: protocols, filtered and weighted searches, indexed reranking, failures of rerankers.

Filters by metadata: a small language in langchain's dict form, its check, and its evaluation on one document.

``{"year": {"$gte": 1999}, "kind": ["book", "map"]}``: the conditions of a dict hold together.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

from langchain_core.documents import BaseDocumentCompressor, Document

from rag_posfix.errors import ConfigError, RerankingError

Scalar: TypeAlias = str | int | float | bool | None
Range: TypeAlias = Literal["$gt", "$gte", "$lt", "$lte"]

RANGES: Final = ("$gt", "$gte", "$lt", "$lte")
COMPARISONS: Final = ("$eq", "$ne", "$in", "$nin", *RANGES, "$exists")
COMBINATIONS: Final = ("$and", "$or", "$not")

MAX_CONDITIONS: Final = 100
"""Comparisons in one filter."""
MAX_ALLOWED: Final = 10_000
"""Values in all lists of one filter."""
MAX_NESTING: Final = 32
"""Levels of ``$and``, ``$or`` and ``$not``."""

_EXAMPLE = '{"year": {"$gte": 1999}, "kind": ["book", "map"]}'


@dataclass(frozen=True, slots=True)
class OneOf:
    """The field has one of the values; of a field with a list, an element has."""

    field: str
    values: tuple[Scalar, ...]


@dataclass(frozen=True, slots=True)
class InRange:
    """The field is a number or text on this side of ``bound``, which is of the same type."""

    field: str
    operator: Range
    bound: str | int | float


@dataclass(frozen=True, slots=True)
class Exists:
    """The field is present, and neither None nor an empty list."""

    field: str


@dataclass(frozen=True, slots=True)
class Negation:
    """The condition does not hold: also for documents without its field."""

    condition: Condition


@dataclass(frozen=True, slots=True)
class AllOf:
    """Every condition holds; true without any."""

    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """A condition holds."""

    conditions: tuple[Condition, ...]


Condition: TypeAlias = OneOf | InRange | Exists | Negation | AllOf | AnyOf


def parse_filter(metadata_filter: object) -> Condition:
    """Return the condition that a filter states.

    A field has a value, a list of allowed values, or a dict of ``$eq``, ``$ne``, ``$in``, ``$nin``, ``$gt``, ``$gte``,
    ``$lt``, ``$lte`` and ``$exists``; ``$and`` and ``$or`` take a list of filters, ``$not`` takes a filter. True is
    not 1, 1 is 1.0, and text is compared with text only. A field with a list matches if one of its elements does.
    ``a.b`` is the field ``b`` of the dict ``a``, or of dicts in a list, where no field has that name. A missing field
    matches no comparison; ``$ne``, ``$nin`` and ``$not`` are the complements of theirs, and match it.

    Raises:
        ConfigError: it is no filter, or is larger than the limits of this module.
    """
    condition = _parse_dict(metadata_filter, "filter", 0)
    stated = list(comparisons(condition))
    n_values = sum(len(comparison.values) for comparison in stated if isinstance(comparison, OneOf))
    for number, limit, what in (
        (len(stated), MAX_CONDITIONS, "conditions"),
        (n_values, MAX_ALLOWED, "allowed values"),
    ):
        if number > limit:
            raise ConfigError(f"filter has {number} {what}, at most {limit} are allowed; write a shorter one")
    return condition


def read_filter(text: str) -> Mapping[str, Any]:
    """Return the filter of a command line: a JSON object, or ``FIELD=VALUE`` for equality.

    Raises:
        ConfigError: it is neither, or no filter.
    """
    field, equals, value = text.partition("=")
    try:
        if not text.lstrip().startswith("{") and equals and field.strip():
            metadata_filter: Any = {field.strip(): _json_or_text(value)}
        else:
            metadata_filter = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"filter {text[:200]!r} must be FIELD=VALUE or JSON such as {_EXAMPLE}") from error
    parse_filter(metadata_filter)
    return dict(metadata_filter)


def combine_filters(*filters: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a filter that matches what all ``filters`` match; None if none is given."""
    present = [metadata_filter for metadata_filter in filters if metadata_filter]
    return {"$and": present} if len(present) > 1 else present[0] if present else None


def filter_key(metadata_filter: Mapping[str, Any] | None) -> str:
    """Return text that is different for different filters, "" without one; the order of fields is not part of it."""
    return "" if not metadata_filter else repr(_sorted(_parse_dict(metadata_filter, "filter", 0)))


def matches(condition: Condition, metadata: Mapping[str, Any]) -> bool:
    """Return whether a document with this metadata meets a condition: the definition that every store follows."""
    match condition:
        case AllOf(conditions):
            return all(matches(member, metadata) for member in conditions)
        case AnyOf(conditions):
            return any(matches(member, metadata) for member in conditions)
        case Negation(negated):
            return not matches(negated, metadata)
        case Exists(field):
            return any(map(has_value, field_values(metadata, field)))
        case OneOf(field, values):
            allowed = {comparison_key(value) for value in values}
            return any(comparison_key(item) in allowed for item in _field_elements(metadata, field))
        case InRange(field):
            return any(in_range(condition, item) for item in _field_elements(metadata, field))


def field_values(metadata: Mapping[str, Any], field: str) -> Iterator[Any]:
    """Yield the value of a field; where none has the name ``a.b``, ``b`` of the dict ``a`` or of dicts in a list."""
    if field in metadata:
        yield metadata[field]
        return
    for dot in (index for index, character in enumerate(field) if character == "."):
        for holder in elements(metadata.get(field[:dot])):
            if isinstance(holder, Mapping):
                yield from field_values(holder, field[dot + 1 :])


def _field_elements(metadata: Mapping[str, Any], field: str) -> Iterator[object]:
    for value in field_values(metadata, field):
        yield from elements(value)


def comparison_key(value: object) -> tuple[str, object]:
    """Return a key that is equal for equal values: Python holds that True == 1. Other types than ``Scalar`` have one.

    The key of other types is never that of a value in a filter.
    """
    if isinstance(value, bool):
        return "boolean", value
    return ("value", value) if isinstance(value, str | int | float | None) else ("other", None)


def elements(value: object) -> Iterable[object]:
    """Return the values that a field is compared by: the elements of a list, or the value itself."""
    return value if isinstance(value, list | tuple | set | frozenset) else (value,)


def has_value(value: object) -> bool:
    """Return whether a field with this value exists."""
    return value is not None and not (isinstance(value, list | tuple | set | frozenset) and not value)


def in_range(condition: InRange, value: object) -> bool:
    """Return whether a value is of the bound's type and on the right side of it."""
    bound: Any = condition.bound
    comparable = isinstance(value, str) if isinstance(bound, str) else _is_number(value)
    if not comparable:
        return False
    number: Any = value
    match condition.operator:
        case "$gt":
            return bool(number > bound)
        case "$gte":
            return bool(number >= bound)
        case "$lt":
            return bool(number < bound)
        case "$lte":
            return bool(number <= bound)


def _parse_dict(value: object, path: str, depth: int) -> Condition:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}={_shown(value)} is a {type(value).__name__}; pass a dict such as {_EXAMPLE}")
    if depth > MAX_NESTING:
        raise ConfigError(f"filter nests $and, $or and $not more than {MAX_NESTING} levels deep; write it flatter")
    conditions: list[Condition] = []
    for name, operand in value.items():
        if name in COMBINATIONS:
            conditions.append(_parse_combination(name, operand, f"{path}.{name}", depth))
        elif not isinstance(name, str) or name.startswith("$"):
            raise ConfigError(
                f"{path}: {name!r} is not understood; give the name of a field, or one of {', '.join(COMBINATIONS)}"
            )
        else:
            conditions.extend(_parse_field(name, operand, path))
    return conditions[0] if len(conditions) == 1 else AllOf(tuple(conditions))


def _parse_combination(name: str, operand: object, path: str, depth: int) -> Condition:
    if name == "$not":
        return Negation(_parse_dict(operand, path, depth + 1))
    if not isinstance(operand, list | tuple) or not operand:
        raise ConfigError(f"{path}: {_shown(operand)} is not understood; give a list of one or more filters")
    members = tuple(_parse_dict(member, f"{path}[{index}]", depth + 1) for index, member in enumerate(operand))
    return AllOf(members) if name == "$and" else AnyOf(members)


def _parse_field(field: str, operand: object, path: str) -> Iterable[Condition]:
    if not isinstance(operand, Mapping):
        yield OneOf(field, _scalars(field, elements(operand), path))
        return
    if not operand:
        raise ConfigError(f"{path} {field!r}: {{}} is not understood; give a value or one of {', '.join(COMPARISONS)}")
    for operator, value in operand.items():
        yield _parse_comparison(field, operator, value, path)


def _parse_comparison(field: str, operator: object, value: object, path: str) -> Condition:
    where = f"{path} {field!r}: {operator}"
    match operator:
        case "$eq" | "$ne":
            same = OneOf(field, _scalars(field, [value], path))
            return same if operator == "$eq" else Negation(same)
        case "$in" | "$nin":
            if not isinstance(value, list | tuple | set | frozenset):
                raise ConfigError(f"{where}={_shown(value)} must be a list of values")
            within = OneOf(field, _scalars(field, value, path))
            return within if operator == "$in" else Negation(within)
        case "$exists":
            if not isinstance(value, bool):
                raise ConfigError(f"{where}={_shown(value)} must be true or false")
            return Exists(field) if value else Negation(Exists(field))
        case "$gt" | "$gte" | "$lt" | "$lte":
            value = plain_scalar(value)
            if not (isinstance(value, str) or _is_number(value)):
                raise ConfigError(f"{where}={_shown(value)} must be a finite number or a text")
            return InRange(field, operator, value)  # type: ignore[arg-type]  # checked above
    raise ConfigError(f"{path} {field!r}: {_shown(operator)} is not understood; use one of {', '.join(COMPARISONS)}")


def plain_scalar(value: Any) -> Any:
    """Return a scalar of numpy as a value of Python; other values as they are."""
    numpy = sys.modules.get("numpy")  # there is no scalar of it before it is imported
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def _scalars(field: str, values: Iterable[object], path: str) -> tuple[Scalar, ...]:
    scalars: dict[tuple[str, object], Scalar] = {}
    for value in map(plain_scalar, values):
        if not (value is None or isinstance(value, str | bool) or _is_number(value)):
            raise ConfigError(
                f"{path} {field!r}: {_shown(value)} is not understood; give text, a finite number, a boolean or None, "
                "or a list of those that are allowed"
            )
        scalars[comparison_key(value)] = value
    return tuple(scalars.values())


def comparisons(condition: Condition) -> Iterable[OneOf | InRange | Exists]:
    """Yield the comparisons of a condition with one field each."""
    match condition:
        case AllOf(conditions) | AnyOf(conditions):
            for member in conditions:
                yield from comparisons(member)
        case Negation(negated):
            yield from comparisons(negated)
        case _:
            yield condition


def _sorted(condition: Condition) -> Condition:
    """Return an equivalent condition that does not depend on the order of fields and values."""
    match condition:
        case AllOf(conditions) | AnyOf(conditions):
            return type(condition)(tuple(sorted((_sorted(member) for member in conditions), key=repr)))
        case Negation(negated):
            return Negation(_sorted(negated))
        case OneOf(field, values):
            return OneOf(field, tuple(sorted(values, key=repr)))
        case _:
            return condition


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def conjuncts(condition: Condition) -> Sequence[Condition]:
    """Return conditions that hold together exactly if ``condition`` does."""
    if isinstance(condition, AllOf):
        return [part for member in condition.conditions for part in conjuncts(member)]
    return [condition]


_INDEX = "_rag_posfix_index"
"""Metadata of each document during reranking: ids may be missing or equal, and do not identify a document."""

WIDEST_SEARCH = 4096
"""Most documents that are fetched to find matching ones in a retriever that takes no filter."""

_WEIGHTED_CANDIDATES = 100
"""Passages that are searched for each message, at least; a passage that is not found has the score of the last one."""

DETAILS = "reranking"
"""Metadata key under which a reranker describes how it scored a document."""

QUESTION_TOO_LONG = "question_too_long"
"""Entry of ``DETAILS`` of documents that were not scored because the question leaves no room for them."""

FAILING_AFTER = 3
"""Failures in a row after which a reranker counts as failing."""


@dataclass(frozen=True, slots=True)
class SimilarityRange:
    """Similarities of an embedding model between which another judge decides.

    Attributes:
        low: A passage below it is not about the question.
        clear: With a passage from here on, the passages are about the question.
    """

    low: float
    clear: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.clear <= 1:
            raise ConfigError(f"similarities low={self.low}, clear={self.clear} must be 0 <= low <= clear <= 1")


@runtime_checkable
class Retriever(Protocol):
    """Finds candidates: Documents with ``id`` and ``metadata["relevance_score"]`` in [0, 1], best first."""

    def retrieve(self, question: str, k: int) -> list[Document]:
        """Return at most ``k`` documents for ``question``, best first."""
        ...


@runtime_checkable
class QueryRetriever(Protocol):
    """Finds candidates for a query of several texts in its own way."""

    def retrieve_query(self, query: SearchQuery, k: int, metadata_filter: Mapping[str, Any] | None) -> list[Document]:
        """Return at most ``k`` documents for ``query`` that match a filter, best first."""
        ...


@runtime_checkable
class Reranker(Protocol):
    """Scores documents for a question (a langchain ``BaseDocumentCompressor`` has this method)."""

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> Sequence[Document]:
        """Return copies, best first, with ``metadata["relevance_score"]`` in [0, 1]; ties keep their order."""
        ...


def current_of(retriever: Retriever) -> Retriever:
    """Return the retriever that one question uses from its beginning to its end.

    A retriever whose passages are replaced as a whole meanwhile has it in an attribute ``current_retriever``.
    """
    current: Retriever = getattr(retriever, "current_retriever", retriever)
    return current


def retrieve_matching(
    retriever: Retriever, question: str, k: int, metadata_filter: Mapping[str, Any] | None
) -> list[Document]:
    """Return at most ``k`` documents of ``retriever`` that match a filter, best first; all match without a filter.

    A retriever whose ``retrieve`` takes ``filter`` gets it. Any other is asked for more documents until ``k`` of them
    match. Either way, every document is checked here: one without the metadata that the filter needs is left out.

    Raises:
        ConfigError: it is no filter.
    """
    if not metadata_filter:
        return retriever.retrieve(question, k)
    condition = parse_filter(metadata_filter)
    if "filter" in inspect.signature(retriever.retrieve).parameters:
        filtering: Any = retriever
        return [
            document
            for document in filtering.retrieve(question, k, filter=metadata_filter)
            if matches(condition, document.metadata)
        ]
    return first_matching(lambda width: retriever.retrieve(question, width), k, condition)


@dataclass(frozen=True, slots=True)
class SearchQuery:
    """What is searched for.

    Attributes:
        text: For rerankers, and for retrievers that take one text.
        weighted: Texts with weights, the question first: the score of a passage is the weighted mean of its scores
            for the texts. Empty if ``text`` is searched for.
    """

    text: str
    weighted: tuple[tuple[str, float], ...] = ()


def retrieve_query(
    retriever: Retriever, query: SearchQuery, k: int, metadata_filter: Mapping[str, Any] | None
) -> list[Document]:
    """Return at most ``k`` documents for a query, best first.

    Retrievers with ``weighs_texts`` search for each text of ``query.weighted``. Formula: score(d) = sum_i w_i s_i(d) /
    sum_i w_i. Cosines are linear in the query's embedding and BM25 is a sum over words, so this is the score of the
    weighted sum of the embeddings, or of words with the weights of their messages. A retriever with a method
    ``retrieve_query`` is asked by it. Other retrievers get ``query.text``.
    """
    if isinstance(retriever, QueryRetriever):
        return retriever.retrieve_query(query, k, metadata_filter)
    if len(query.weighted) < 2 or not getattr(retriever, "weighs_texts", False):
        return retrieve_matching(retriever, query.text, k, metadata_filter)
    width = max(k, _WEIGHTED_CANDIDATES)
    documents: dict[str, Document] = {}
    searches: list[tuple[float, dict[str, float], float]] = []  # weight, scores, score of what is not among them
    for text, weight in query.weighted:
        hits = retrieve_matching(retriever, text, width, metadata_filter)
        scores = {str(hit.id): float(hit.metadata["relevance_score"]) for hit in hits}
        searches.append((weight, scores, min(scores.values()) if len(hits) == width else 0.0))
        documents = {str(hit.id): hit for hit in hits} | documents
    total = sum(weight for weight, _, _ in searches)
    relevance = {
        name: sum(weight * scores.get(name, other) for weight, scores, other in searches) / total for name in documents
    }
    best = sorted(documents, key=lambda name: (-relevance[name], name))[:k]
    return [
        documents[name].model_copy(
            update={"metadata": {**documents[name].metadata, "relevance_score": min(relevance[name], 1.0)}}
        )
        for name in best
    ]


def first_matching(retrieve: Callable[[int], list[Document]], k: int, condition: Condition) -> list[Document]:
    """Return the first ``k`` documents that meet a condition, of a search that takes a number of documents alone.

    The search is repeated for four times as many, until ``k`` match, there are no more, or ``WIDEST_SEARCH`` were
    searched: then fewer may be returned than there are.
    """
    width = k
    while True:
        documents = retrieve(width)
        hits = [document for document in documents if matches(condition, document.metadata)]
        if len(hits) >= k or len(documents) < width or width >= WIDEST_SEARCH:
            return hits[:k]
        width = min(4 * width, max(k, WIDEST_SEARCH))


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A reranked document.

    Attributes:
        index: Its index in the list that was reranked.
        document: The copy that the reranker returned, with its score.
    """

    index: int
    document: Document


def rerank_indexed(reranker: Reranker, question: str, documents: Sequence[Document]) -> list[RankedDocument]:
    """Return what a reranker returns, in its order, each document with its index in ``documents``.

    The reranker is not called without documents; they are left untouched.

    Raises:
        RerankingError: the reranker dropped the metadata of a document.
    """
    if not documents:
        return []
    return _restore_indices(reranker, reranker.compress_documents(_add_index(documents), question))


async def arerank_indexed(
    reranker: BaseDocumentCompressor, question: str, documents: Sequence[Document]
) -> list[RankedDocument]:
    """Do what ``rerank_indexed`` does with the reranker's asynchronous method."""
    if not documents:
        return []
    return _restore_indices(reranker, await reranker.acompress_documents(_add_index(documents), question))


def _add_index(documents: Sequence[Document]) -> list[Document]:
    return [
        document.model_copy(update={"metadata": {**(document.metadata or {}), _INDEX: index}})
        for index, document in enumerate(documents)
    ]


def _restore_indices(reranker: object, documents: Sequence[Document]) -> list[RankedDocument]:
    ranked = []
    for document in documents:
        metadata = dict(document.metadata or {})
        index = metadata.pop(_INDEX, None)
        if not isinstance(index, int):
            raise RerankingError(
                f"{type(reranker).__name__} returned a document without the metadata that it was given "
                f"({', '.join(sorted(metadata)) or 'none'} is left); a reranker must return copies with all metadata"
            )
        ranked.append(RankedDocument(index, document.model_copy(update={"metadata": metadata})))
    return ranked


@dataclass(frozen=True, slots=True)
class RerankerFailures:
    """The failures of one reranker: by reason (``error``, ``timeout``), and those since its last success.

    ``since`` is the Unix time of the first failure in a row (0 without one), ``last_error`` the name of a class.
    """

    counts: dict[str, int] = field(default_factory=lambda: {"error": 0, "timeout": 0})
    in_a_row: int = 0
    since: float = 0.0
    last_error: str = ""


class RerankerHealth:
    """The failures of rerankers by name. Safe to share between threads. ``clock`` returns the Unix time."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: dict[str, RerankerFailures] = {}

    def failures(self) -> dict[str, RerankerFailures]:
        """Return the failures of each reranker that was called."""
        with self._lock:
            return dict(self._failures)

    def count_success(self, name: str) -> None:
        """End the row of failures of a reranker."""
        with self._lock:
            self._failures[name] = RerankerFailures(self._failures.get(name, RerankerFailures()).counts)

    def count_failure(self, name: str, error: Exception, reason: str) -> None:
        """Count a failure: ``reason`` is ``error`` or ``timeout``."""
        with self._lock:
            before = self._failures.get(name, RerankerFailures())
            self._failures[name] = replace(
                before,
                counts={**before.counts, reason: before.counts[reason] + 1},
                in_a_row=before.in_a_row + 1,
                since=before.since if before.in_a_row else self._clock(),
                last_error=type(error).__name__,
            )

    def describe_failing(self) -> str | None:
        """Return which rerankers failed ``FAILING_AFTER`` times in a row or more, and since when; None without one."""
        lines = [
            f"reranker {name} failed {failures.in_a_row} times in a row since "
            f"{datetime.fromtimestamp(failures.since, UTC):%Y-%m-%dT%H:%M:%SZ} ({failures.last_error})"
            for name, failures in sorted(self.failures().items())
            if failures.in_a_row >= FAILING_AFTER
        ]
        return "; ".join(lines) + "; documents keep their order" if lines else None
