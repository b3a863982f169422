"""Scores passages with a rerank route of another server: Cohere's, Jina's, vLLM's, or text-embeddings-inference's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field, PrivateAttr

from rag_posfix.assembly.documents import CheckedDocument
from rag_posfix.errors import ConfigError, RerankingError
from rag_posfix.reranking.base import RERANKERS, DocumentScore, ScoringReranker, sigmoid
from rag_posfix.reranking.deadline import check_deadline
from rag_posfix.text import titled_text

_BYTES_OF_ANSWER = 64
"""Tokens' worth of answer per passage: an index and a score, and the text where a server repeats it."""


class JsonServer(Protocol):
    """The method of a connection that the reranker needs."""

    def post_all(
        self, route: str, bodies: Sequence[Mapping[str, Any]], max_tokens: int, check: Callable[[], None] = ...
    ) -> list[Mapping[str, Any]]:
        """Send JSON bodies to a route and return the objects of the answers."""
        ...


def no_connection(url: str) -> JsonServer:
    """Raise: nobody supplied connections."""
    raise ConfigError(f"nothing connects to {url} here; make the reranker with build_pipeline, or give connect")


@RERANKERS.register("endpoint")
class EndpointReranker(ScoringReranker):
    """Score passages with the rerank route of a server, such as ``endpoint:url="http://127.0.0.1:8000":model=NAME``.

    The key of ``RAG_POSFIX_REMOTE_API_KEY`` is sent only if ``url`` has scheme, host and port of the remote model.

    Source: the rerank API of Cohere, https://docs.cohere.com/reference/rerank
    Formula: relevance_score = the server's score where all are in [0, 1], else the sigmoid of each; ``raw_score`` is
        the server's.
    Cost: one request with question and passages; what it reads is the server's matter.
    Limits: a cross-encoder scores a passage alone, so its score does not depend on the order; the model may be another
        kind. Clients of the service cannot name it: they would make the service call any address.

    Attributes:
        connect: Returns the connection to a URL; supplied by the application.
        url: Base URL; ``/rerank`` is appended, unless it ends so.
        model: The server's name of the model; not sent if empty.
        api: ``cohere`` (``documents``; Cohere, Jina, vLLM) or ``tei`` (``texts``; text-embeddings-inference).
        top_n: Number of passages to return, all if None.
    """

    name: ClassVar[str] = "endpoint"
    loads_own_model: ClassVar[bool] = True

    connect: Callable[[str], JsonServer] = Field(default=no_connection, exclude=True, repr=False)
    url: str = Field(default="http://127.0.0.1:8000", pattern=r"^https?://[^\s@?#]+$")
    model: str = ""
    api: Literal["cohere", "tei"] = "cohere"
    _server: JsonServer | None = PrivateAttr(default=None)

    def _score(self, question: str, documents: Sequence[CheckedDocument]) -> Sequence[DocumentScore]:
        # By content: a model that reads passages together would read them in the same order each time.
        order = sorted(range(len(documents)), key=lambda index: documents[index].key)
        texts = [titled_text(documents[index].title, documents[index].text) for index in order]
        body: dict[str, Any] = {"query": question, "texts" if self.api == "tei" else "documents": texts}
        if self.model:
            body["model"] = self.model
        if self.api == "tei":
            body["raw_scores"] = True
        size = sum(len(text) for text in texts) // 64 + _BYTES_OF_ANSWER * len(texts)
        if self._server is None:
            self._server = self.connect(self.url.rstrip("/").removesuffix("/rerank"))
        (answer,) = self._server.post_all("/rerank", [body], size, check_deadline)
        scores = dict(zip(order, _scores(answer, len(texts)), strict=True))
        bounded = all(0.0 <= score <= 1.0 for score in scores.values())
        return [
            DocumentScore(scores[index] if bounded else sigmoid(scores[index]), scores[index])
            for index in range(len(documents))
        ]


def _scores(answer: Mapping[str, Any], count: int) -> list[float]:
    """Return the score of each text, in the order they were sent.

    Raises:
        RerankingError: a text has no score or more than one.
    """
    results = answer.get("results")
    found: dict[int, float] = {}
    for entry in results if isinstance(results, list) else []:
        index = entry.get("index") if isinstance(entry, Mapping) else None
        score = entry.get("relevance_score", entry.get("score")) if isinstance(entry, Mapping) else None
        if type(index) is int and isinstance(score, int | float) and index not in found:
            found[index] = float(score)
    if found.keys() != set(range(count)):
        raise RerankingError(
            f"endpoint: the server scored {len(found)} of {count} passages; check url and api (cohere or tei)"
        )
    return [found[index] for index in range(count)]
