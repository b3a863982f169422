"""Retrieval from vector stores that other programs fill: ``qdrant:url=...,collection=...``, or a plugin's.

Filters are translated into the store's language; what cannot be translated is checked in the documents.

Conditions of filters in the languages of Qdrant, PostgreSQL, Elasticsearch and Milvus.

Every function raises ``UntranslatableError`` for a condition that its language cannot state exactly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Final, TypeAlias, TypeVar

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore

from rag_posfix.contracts.method_spec import split_outside
from rag_posfix.contracts.retrieval import (
    AllOf,
    AnyOf,
    Condition,
    Exists,
    InRange,
    Negation,
    OneOf,
    Retriever,
    Scalar,
    comparisons,
    conjuncts,
    first_matching,
    parse_filter,
)
from rag_posfix.errors import ConfigError, RagPosfixError, RetrievalError, VectorStoreError, missing_extra
from rag_posfix.retrieval.base import (
    PassageRetriever,
    QuestionRetriever,
    as_retriever,
    packaged_similarity,
    scored_documents,
)

_SIGNS: Final = {"$gt": ">", "$gte": ">=", "$lt": "<", "$lte": "<="}


class UntranslatableError(ValueError):
    """A condition that a store's language cannot state exactly."""


def qdrant_filter(condition: Condition, payload_key: str = "metadata") -> Any:
    """Return a ``qdrant_client.models.Filter`` over the fields of the payload under ``payload_key``."""
    from qdrant_client import models

    def key(field: str) -> str:
        if '"' in field:
            raise UntranslatableError(f"a field with a quote: {field}")
        return f'{payload_key}."{field}"' if not field.isidentifier() else f"{payload_key}.{field}"

    def equal(field: str, value: Scalar) -> Any:
        if value is None:
            raise UntranslatableError("Qdrant's null conditions also match missing values")
        if isinstance(value, str | bool):
            return models.FieldCondition(key=key(field), match=models.MatchValue(value=value))
        return models.FieldCondition(key=key(field), range=models.Range(gte=value, lte=value))

    def clause(condition: Condition) -> Any:
        match condition:
            case AllOf(conditions):
                return models.Filter(must=[clause(member) for member in conditions])
            case AnyOf(conditions):
                return models.Filter(should=[clause(member) for member in conditions])
            case Negation(negated):
                return models.Filter(must_not=[clause(negated)])
            case Exists(field):
                missing = models.IsEmptyCondition(is_empty=models.PayloadField(key=key(field)))
                return models.Filter(must_not=[missing])
            case OneOf(_, ()):
                return models.Filter(must=[models.HasIdCondition(has_id=[])])
            case OneOf(field, values):
                return models.Filter(should=[equal(field, value) for value in values])
            case InRange(field, operator, bound):
                if isinstance(bound, str):
                    raise UntranslatableError("Qdrant has no ranges of texts")
                limits: dict[str, Any] = {operator.removeprefix("$"): bound}
                return models.FieldCondition(key=key(field), range=models.Range(**limits))

    translated = clause(condition)
    return translated if isinstance(translated, models.Filter) else models.Filter(must=[translated])


def postgres_clause(condition: Condition, column: Any) -> Any:
    """Return an SQLAlchemy condition on a ``jsonb`` column that is true or false for every row, never null."""
    import sqlalchemy
    from sqlalchemy.dialects.postgresql import JSONB

    def contains(value: Any) -> Any:
        return column.op("@>")(sqlalchemy.cast(sqlalchemy.literal(value, JSONB), JSONB))

    match condition:
        case AllOf(conditions):
            return sqlalchemy.and_(sqlalchemy.true(), *(postgres_clause(member, column) for member in conditions))
        case AnyOf(conditions):
            return sqlalchemy.or_(sqlalchemy.false(), *(postgres_clause(member, column) for member in conditions))
        case Negation(negated):
            return sqlalchemy.not_(postgres_clause(negated, column))
        case Exists(field):
            value = column.op("->")(sqlalchemy.literal(field, sqlalchemy.Text))
            empty = [sqlalchemy.literal(text, sqlalchemy.Text) for text in ("null", "[]")]
            return sqlalchemy.func.coalesce(sqlalchemy.cast(value, sqlalchemy.Text).not_in(empty), sqlalchemy.false())
        case OneOf(field, values):
            members = [contains({field: candidate}) for value in values for candidate in (value, [value])]
            return sqlalchemy.or_(sqlalchemy.false(), *members)
        case InRange(field, operator, bound):
            # In lax mode [*] is the elements of a list, or the value itself; other types than the bound's are unknown,
            # which is no match. Texts are compared by their code points.
            kind = "string" if isinstance(bound, str) else "number"
            path = f'$.{json.dumps(field)}[*] ? (@.type() == "{kind}" && @ {_SIGNS[operator]} $bound)'
            return sqlalchemy.func.jsonb_path_exists(
                column,
                sqlalchemy.cast(sqlalchemy.literal(path, sqlalchemy.Text), sqlalchemy.dialects.postgresql.JSONPATH),
                sqlalchemy.cast(sqlalchemy.literal({"bound": bound}, JSONB), JSONB),
            )


def elasticsearch_filter(condition: Condition) -> dict[str, Any]:
    """Return a query clause over ``metadata.*``, whose texts have the subfield ``keyword`` of dynamic mappings."""
    match condition:
        case AllOf(()):
            return {"match_all": {}}
        case AllOf(conditions):
            return {"bool": {"filter": [elasticsearch_filter(member) for member in conditions]}}
        case AnyOf(conditions):
            clauses = [elasticsearch_filter(member) for member in conditions]
            return {"bool": {"should": clauses, "minimum_should_match": 1}}
        case Negation(negated):
            return {"bool": {"must_not": [elasticsearch_filter(negated)]}}
        case Exists(field):
            return {"exists": {"field": f"metadata.{field}"}}
        case OneOf(field, values):
            if None in values:
                raise UntranslatableError("Elasticsearch does not index null")
            texts = [value for value in values if isinstance(value, str)]
            if any(len(text) > 256 for text in texts):
                raise UntranslatableError("dynamic mappings do not index texts of more than 256 characters")
            others = [value for value in values if not isinstance(value, str)]
            if texts and others:
                raise UntranslatableError("a field of Elasticsearch has one type")
            name = f"metadata.{field}.keyword" if texts else f"metadata.{field}"
            return {"terms": {name: texts or others}} if values else {"match_none": {}}
        case InRange(field, operator, bound):
            if isinstance(bound, str):
                raise UntranslatableError("dynamic mappings read some texts as dates")
            return {"range": {f"metadata.{field}": {operator.removeprefix("$"): bound}}}


def milvus_expression(condition: Condition, metadata_field: str = "metadata") -> str:
    """Return a filter expression over a JSON field.

    Milvus compares a missing key as no match in a comparison, but not under ``not``, and equality does not look into
    lists: only conditions of texts and numbers without ``not`` are translated, each with its list form.
    """

    def name(field: str) -> str:
        return f"{metadata_field}[{json.dumps(field, ensure_ascii=False)}]"

    def joined(conditions: Sequence[Condition], word: str) -> str:
        return "(" + f" {word} ".join(milvus_expression(member, metadata_field) for member in conditions) + ")"

    match condition:
        case AllOf(conditions) if conditions:
            return joined(conditions, "and")
        case AnyOf(conditions):
            return joined(conditions, "or")
        case OneOf(field, values) if values and not any(_is_unwritable(value) for value in values):
            members = [
                f"({name(field)} == {json.dumps(value, ensure_ascii=False)} or "
                f"json_contains({name(field)}, {json.dumps(value, ensure_ascii=False)}))"
                for value in values
            ]
            return "(" + " or ".join(members) + ")"
    raise UntranslatableError("Milvus cannot state this exactly")


def _is_unwritable(value: Scalar) -> bool:
    """Return whether Milvus' parser takes no such literal in every place: null, and numbers with a sign."""
    return value is None or (isinstance(value, int | float) and value < 0)


GROUP: Final = "rag_posfix.retrievers"
"""Entry points: functions of an embedding model and options that return a vector store or a retriever."""

Options: TypeAlias = Mapping[str, str]
Hits: TypeAlias = list[tuple[Document, float]]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ExternalStore:
    """A vector store of langchain and what this package has to know of it.

    Attributes:
        search: Returns documents with ids and cosines for a question, a number, and a translated filter or None.
        translate: Returns a condition in the store's language, or raises ``UntranslatableError``.
        check: Raises an error if the store or its collection cannot be reached.
        vectors: The vector store, for those who write.
    """

    search: Callable[[str, int, Any], Hits]
    translate: Callable[[Condition], Any]
    check: Callable[[], object]
    vectors: VectorStore


class ExternalRetriever(QuestionRetriever):
    """Returns passages of an external store with its ids and scores, best first, ties by id.

    ``relevance_score`` is the cosine that the store computed, or 0 for a negative cosine; nothing is embedded but the
    question.

    Attributes:
        name: The kind of the store, for errors.
        store: The store.
    """

    name: str
    store: Any

    def check(self) -> None:
        """Raise RetrievalError if the store cannot be reached."""
        self._call(self.store.check)

    def _search(self, question: str, k: int, metadata_filter: Mapping[str, Any] | None) -> list[Document]:
        if metadata_filter is None:
            return self._hits(question, k, None)
        condition = parse_filter(metadata_filter)
        pushed = []
        for conjunct in conjuncts(condition):
            if any("." in comparison.field for comparison in comparisons(conjunct)):
                continue  # nested or not: stores differ
            try:
                self.store.translate(conjunct)
            except UntranslatableError:
                continue  # checked in each document below
            pushed.append(conjunct)
        argument = self.store.translate(AllOf(tuple(pushed))) if pushed else None
        return first_matching(lambda width: self._hits(question, width, argument), k, condition)

    def _hits(self, question: str, k: int, argument: Any) -> list[Document]:
        hits = self._call(lambda: self.store.search(question, k, argument))
        return scored_documents((document, round(cosine, 6)) for document, cosine in hits)

    def _call(self, work: Callable[[], T]) -> T:
        advice = "check that it runs, its address and its collection"
        return call_client(work, VectorStoreError, f"the vector store {self.name} failed with", advice)


def call_client(work: Callable[[], T], kind: Callable[[str], RagPosfixError], problem: str, advice: str) -> T:
    """Return what a client library returns; of its errors the type alone is told, messages may have secrets."""
    try:
        return work()
    except RagPosfixError:
        raise
    except Exception as error:
        raise kind(f"{problem} {type(error).__name__}; {advice}") from error


def _open_qdrant(embeddings: Embeddings, options: Options) -> ExternalStore:
    try:
        from langchain_qdrant import QdrantVectorStore
        from qdrant_client import QdrantClient
    except ImportError as error:
        raise missing_extra("langchain_qdrant", "qdrant") from error
    if ("url" in options) == ("path" in options):
        raise ConfigError("retriever qdrant takes url or path (a folder of its local mode), one of them")

    class LenientQdrant(QdrantVectorStore):
        """Returns points without text or with other metadata than a dict, which the package fails at, as empty."""

        @classmethod
        def _document_from_point(cls, scored_point: Any, *names: str) -> Document:
            payload = scored_point.payload or {}
            (_, text_key, metadata_key), identity = names, str(scored_point.id)
            text, metadata = payload.get(text_key), payload.get(metadata_key)
            fields = metadata if isinstance(metadata, dict) else {}
            return Document(id=identity, page_content=text if isinstance(text, str) else "", metadata=fields)

    target = {name: options[name] for name in ("url", "path", "api_key") if name in options}
    client = QdrantClient(**target)  # type: ignore[arg-type]  # its other arguments are numbers
    payload_key, collection = options.get("metadata", "metadata"), options["collection"]
    store = LenientQdrant(
        client,
        collection,
        embeddings,
        vector_name=options.get("vector", ""),
        content_payload_key=options.get("text", "page_content"),
        metadata_payload_key=payload_key,
    )

    def search(question: str, k: int, argument: Any) -> Hits:
        width = k
        while True:
            hits = store.similarity_search_with_score(question, width, filter=argument)
            with_text = [hit for hit in hits if hit[0].page_content.strip()]
            if len(with_text) >= k or len(hits) < width:
                return with_text[:k]
            width *= 2

    return ExternalStore(
        search,
        lambda condition: qdrant_filter(condition, payload_key),
        lambda: client.get_collection(collection),
        store,
    )


def _open_pgvector(embeddings: Embeddings, options: Options) -> ExternalStore:
    try:
        import sqlalchemy
        from langchain_postgres.vectorstores import PGVector
    except ImportError as error:
        raise missing_extra("langchain_postgres", "pgvector") from error

    class FilteringPGVector(PGVector):  # type: ignore[misc, unused-ignore]
        """Takes a condition as filter: the package's own dict form answers null for a missing field under $not."""

        def create_vector_extension(self) -> None:
            """Leave the database as it is."""

        def create_tables_if_not_exists(self) -> None:
            """Leave the database as it is."""

        def create_collection(self) -> None:
            """Leave the database as it is."""

        def _create_filter_clause(self, filters: Any) -> Any:
            return postgres_clause(filters, self.EmbeddingStore.cmetadata)

    store = FilteringPGVector(
        embeddings, connection=options["url"], collection_name=options["collection"], create_extension=False
    )

    def search(question: str, k: int, argument: Any) -> Hits:
        hits = store.similarity_search_with_score(question, k, filter=argument)
        return [(document, 1.0 - float(distance)) for document, distance in hits]

    def check() -> None:
        with store._make_sync_session() as session:
            session.execute(sqlalchemy.text("select 1"))
            if store.get_collection(session) is None:
                raise RetrievalError(f"pgvector has no collection {options['collection']!r}")

    return ExternalStore(search, lambda condition: condition, check, store)  # translated by the class


def _open_elasticsearch(embeddings: Embeddings, options: Options) -> ExternalStore:
    try:
        from langchain_elasticsearch import ElasticsearchStore
    except ImportError as error:
        raise missing_extra("langchain_elasticsearch", "elasticsearch") from error
    names = {"api_key": "es_api_key", "user": "es_user", "password": "es_password"}
    store = ElasticsearchStore(
        options["index"],
        embedding=embeddings,
        es_url=options["url"],
        vector_query_field=options.get("vector", "vector"),
        query_field=options.get("text", "text"),
        **{names[name]: options[name] for name in names if name in options},  # type: ignore[arg-type]
    )
    client, text_field = store.client, options.get("text", "text")

    def build(hit: dict[str, Any]) -> Document:
        source = hit["_source"]
        return Document(id=hit["_id"], page_content=source.get(text_field, ""), metadata=source.get("metadata", {}))

    def search(question: str, k: int, argument: Any) -> Hits:
        def widen(body: dict[str, Any], _: str | None) -> dict[str, Any]:
            if "knn" in body:  # as many candidates as results, at least
                body["knn"]["num_candidates"] = max(k, body["knn"].get("num_candidates", k))
            return body

        filters = None if argument is None else [argument]
        hits = store.similarity_search_with_score(question, k, filters, custom_query=widen, doc_builder=build)
        return [(document, 2.0 * score - 1.0) for document, score in hits]  # its score is (1 + cosine) / 2

    return ExternalStore(search, elasticsearch_filter, lambda: client.indices.get(index=options["index"]), store)


def _open_milvus(embeddings: Embeddings, options: Options) -> ExternalStore:
    try:
        from langchain_milvus import Milvus
    except ImportError as error:
        raise missing_extra("langchain_milvus", "milvus") from error
    collection, metadata_field = options["collection"], options.get("metadata")
    vector_field = options.get("vector", "vector")

    class IdentifyingMilvus(Milvus):  # type: ignore[misc, unused-ignore]
        """Returns documents with their ids, which the package leaves out next to a metadata field."""

        def _parse_document(self, data: dict[str, Any]) -> Document:
            identity = data.get(self._primary_field)
            document = super()._parse_document(data)
            document.metadata.pop(self._primary_field, None)
            return document.model_copy(update={"id": None if identity is None else str(identity)})

    target = {"uri": options["url"], **({"token": options["token"]} if "token" in options else {})}
    store = IdentifyingMilvus(
        embeddings,
        collection_name=collection,
        connection_args=target,
        primary_field=options.get("id", "pk"),
        text_field=options.get("text", "text"),
        vector_field=vector_field,
        **({"metadata_field": metadata_field} if metadata_field else {"enable_dynamic_field": True}),
    )

    @cache
    def by_distance() -> bool:
        names = store.client.list_indexes(collection, field_name=vector_field)
        return bool(store.client.describe_index(collection, names[0])["metric_type"] == "L2")

    def search(question: str, k: int, argument: Any) -> Hits:
        hits = store.similarity_search_with_score(question, k, expr=argument)
        if not hits or not by_distance():
            return hits  # type: ignore[no-any-return, unused-ignore]
        # The distance is squared, and of unit vectors: 2 - 2 * cosine.
        return [(document, 1.0 - score / 2.0) for document, score in hits]

    def check() -> None:
        if not store.client.has_collection(collection):
            raise RetrievalError(f"milvus has no collection {collection!r}")

    field = metadata_field or "$meta"
    return ExternalStore(search, lambda condition: milvus_expression(condition, field), check, store)


Opener: TypeAlias = Callable[[Embeddings, Options], ExternalStore]

OPENERS: Final[Mapping[str, tuple[Opener, frozenset[str], frozenset[str]]]] = {
    "qdrant": (
        _open_qdrant,
        frozenset({"collection"}),
        frozenset({"url", "path", "api_key", "vector", "text", "metadata"}),
    ),
    "pgvector": (_open_pgvector, frozenset({"url", "collection"}), frozenset()),
    "elasticsearch": (
        _open_elasticsearch,
        frozenset({"url", "index"}),
        frozenset({"api_key", "user", "password", "vector", "text"}),
    ),
    "milvus": (
        _open_milvus,
        frozenset({"url", "collection"}),
        frozenset({"token", "id", "vector", "text", "metadata"}),
    ),
}
"""The function that opens a store, the options it needs, and those it may have."""


def is_external(text: str) -> bool:
    """Return whether a retriever of the settings is an external store: ``KIND:key=value,...``."""
    return ":" in text


def open_external(text: str, embeddings: Embeddings, k: int, *, index: object = None) -> Retriever:
    """Return the retriever of ``KIND:key=value,...``; a value with a comma is put into double quotes.

    Raises:
        ConfigError: the kind or an option is unknown, an option is missing, a package is not installed, or an
            ``index`` is given too.
        RetrievalError: the store cannot be reached, or its vectors are of another model.
    """
    kind, _, rest = text.partition(":")
    if index is not None:
        raise ConfigError(f"index={str(index)!r} and the retriever {kind} are given; give one of them")
    options = store_options(kind, rest)
    if kind in OPENERS:
        opener, required, optional = OPENERS[kind]
        missing, unknown = sorted(required - set(options)), sorted(set(options) - required - optional)
        if missing or unknown:
            problem = f"lacks {', '.join(missing)}" if missing else f"has no option {unknown[0]!r}"
            raise ConfigError(
                f"retriever {kind} {problem}; it takes {', '.join(sorted(required))} and, if needed, "
                f"{', '.join(sorted(optional))}"
            )
        empty = ExternalRetriever(name=kind, store=None, k=k)
        store = empty._call(lambda: opener(embeddings, options))
        return ExternalRetriever(name=kind, store=store, k=k, similarity=packaged_similarity(embeddings))
    plugins = {plugin.name: plugin for plugin in entry_points(group=GROUP)}
    if kind not in plugins:
        raise ConfigError(
            f"unknown retriever {kind!r}; choose auto, dense, bm25, hybrid, or one of "
            f"{', '.join(sorted({*OPENERS, *plugins}))} as KIND:key=value,..."
        )
    opened = plugins[kind].load()(embeddings, **options)
    if isinstance(opened, VectorStore):
        return PassageRetriever(store=opened, k=k)
    if isinstance(opened, BaseRetriever) or callable(getattr(opened, "retrieve", None)):
        return as_retriever(opened)
    raise ConfigError(
        f"retriever {kind}: the plugin returned {type(opened).__name__}; it must return a langchain VectorStore or "
        "BaseRetriever, or an object with retrieve(question, k)"
    )


def store_options(kind: str, text: str) -> dict[str, str]:
    """Return the options ``key=value,...`` of a store; raise ConfigError, without values, if they are malformed."""
    advice = "put a value with a comma, bracket or brace into double quotes"
    try:
        items = split_outside(text, ",") if text else []
    except ConfigError:  # which quotes the text
        raise ConfigError(f"retriever {kind}: the options must be key=value,...; {advice}") from None
    options: dict[str, str] = {}
    for number, item in enumerate(items, start=1):
        name, equals, value = item.strip().partition("=")
        if not equals or not re.fullmatch(r"[\w.-]+", name) or name in options:  # it may be a part of a password
            raise ConfigError(f"retriever {kind}: option {number} must be key=value, each key once; {advice}")
        quoted = len(value) > 1 and value[0] == value[-1] == '"'
        options[name] = value[1:-1] if quoted else value
    return options
