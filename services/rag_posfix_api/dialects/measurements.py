"""Measurements: the answers over several orders of the documents, and the attention to each passage.

Two formats of this service: POST /v1/evaluate/order and POST /v1/posfix/attention.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter
from langchain_core.documents import Document
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from rag_posfix.caching.answers.tiered import tenant_salt
from rag_posfix.cancellation import check_cancelled
from rag_posfix.contracts.answer import Answer, Question
from rag_posfix.contracts.generator import Generator, sum_usage
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix_api.dialects.answering import DroppedOutput
from rag_posfix_api.dialects.requests import (
    WHOLE,
    Documents,
    Mitigation,
    RequestModel,
    Seed,
    mitigation_choice,
    to_documents,
)
from rag_posfix_api.http.errors import OPENAI, RequestError
from rag_posfix_api.http.middleware import CleanRoute, SafeJSONResponse
from rag_posfix_api.runtime.service import ReadyCall

MAX_ORDERS = 24

evaluation = APIRouter(tags=["evaluation"], route_class=CleanRoute)
attention = APIRouter(tags=["attention"], route_class=CleanRoute)


class OrderEvaluationRequest(RequestModel):
    """A question and its documents."""

    model_config = ConfigDict(extra="forbid")

    question: str = Field(json_schema_extra={"pattern": r"\S"})
    documents: Documents = Field(min_length=2)
    orders: Annotated[int, Field(ge=2, le=MAX_ORDERS), WHOLE] = Field(
        default=6, description="The original, the reverse, and random ones."
    )
    seed: Seed = Field(default=0, description="Seed of the random orders.")
    mitigation: Mitigation | None = Field(default=None, description="The default method if null.")
    max_tokens: Annotated[int, Field(ge=1, le=4096), WHOLE] | None = None


OrderName = Literal["original", "reverse", "random"]


class OrderAnswer(BaseModel):
    """The answer of one order."""

    order: OrderName
    documents: list[int] = Field(description="Indices of the documents in the request, in prompt order.")
    answer: int = Field(description="Index of the answer in ``answers``.")
    changed: bool = Field(description="Whether it is not the answer of the original order.")


class DistinctAnswer(BaseModel):
    """An answer, and how many orders gave it."""

    text: str
    orders: int


class OrderUsage(BaseModel):
    """Token counts, summed over the orders."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class OrderEvaluation(BaseModel):
    """How the answer depends on the order."""

    object: Literal["order_evaluation"] = "order_evaluation"
    mitigation: str
    flip_rate: float = Field(description="Share of the orders other than the original whose answer is another.")
    answers: list[DistinctAnswer]
    orders: list[OrderAnswer]
    usage: OrderUsage
    warnings: list[str] = Field(description="What failed without failing a question, such as a reranker.")


@evaluation.post("/v1/evaluate/order", responses=OPENAI.responses(400, 401, 403, 413, 422, 429, 500, 502, 503, 504))
async def evaluate_order(body: OrderEvaluationRequest, call: ReadyCall) -> OrderEvaluation:
    """Answer one question over several orders of its documents, greedily and without the answer cache.

    All orders together have the time limit of one request.
    """
    if not body.question.strip():
        raise RequestError("question is empty; give at least one visible character", param="question")
    call.fields.documents = len(body.documents)
    pipeline = call.service.pipeline
    documents = to_documents(body.documents, call.service.limits.max_documents)
    sampling = pipeline.defaults.sampling
    if body.max_tokens is not None:
        sampling = replace(sampling, max_tokens=body.max_tokens)
    orders = orders_of(len(documents), body.orders, body.seed)

    def ask(order: Sequence[int]) -> Answer:
        question = Question(
            body.question,
            documents=[documents[index] for index in order],
            mitigation=mitigation_choice(body.mitigation),
            order="original",
            sampling=sampling,
            use_cache=False,
        )
        answer = pipeline.ask(question)
        call.record(answer)
        return answer

    answers = await call.compute(lambda: [ask(order) for _, order in orders])
    flip_rate, texts, text_indices = summarize([answer.text for answer in answers])
    return OrderEvaluation(
        mitigation=answers[0].mitigation,
        flip_rate=flip_rate,
        answers=[DistinctAnswer(text=text, orders=text_indices.count(index)) for index, text in enumerate(texts)],
        orders=[
            OrderAnswer(order=name, documents=list(order), answer=index, changed=index != 0)
            for (name, order), index in zip(orders, text_indices, strict=True)
        ],
        usage=OrderUsage(**asdict(sum_usage([answer.usage for answer in answers]))),
        warnings=list(dict.fromkeys(warning for answer in answers for warning in answer.warnings)),
    )


def orders_of(count: int, max_orders: int, seed: int) -> list[tuple[OrderName, tuple[int, ...]]]:
    """Return different orders of ``count`` >= 2 documents: the original, the reverse, and random permutations.

    An order is the indices of the documents in the request, in prompt order. There are fewer than ``max_orders`` where
    there are no more permutations.
    """
    original = tuple(range(count))
    orders: list[tuple[OrderName, tuple[int, ...]]] = [("original", original), ("reverse", original[::-1])]
    seen = {order for _, order in orders}
    possible = math.factorial(count) if count < 10 else math.inf
    draw = random.Random(seed)
    while len(orders) < min(max_orders, possible):
        order = tuple(draw.sample(original, count))
        if order not in seen:
            seen.add(order)
            orders.append(("random", order))
    return orders[:max_orders]


def summarize(texts: Sequence[str]) -> tuple[float, list[str], list[int]]:
    """Return how the answers of several orders differ. Answers that differ in white space alone are the same.

    Args:
        texts: The answer of each order, the original order first; at least two.

    Returns:
        The share of the other orders whose answer differs from the first, the distinct answers in the order of their
        first occurrence, and for each order the index of its answer among them.
    """
    distinct: dict[str, int] = {}
    indices = [distinct.setdefault(" ".join(text.split()), len(distinct)) for text in texts]
    flips = sum(index != indices[0] for index in indices[1:])
    return flips / (len(indices) - 1), list(distinct), indices


class AttentionRequest(RequestModel):
    """A question and the passages of its prompt."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = Field(default=None, description="The served model, or 'default'.")
    query: str = Field(json_schema_extra={"pattern": r"\S"}, description="The question.")
    documents: Documents
    order: str = Field(default="original", description="The order that the passages stand in; as they are given.")


class PassageShare(BaseModel):
    """A passage in the prompt."""

    id: str
    position: int
    attention: float = Field(description="Share of the attention to passages, 0 to 1.")


class AttentionResponse(BaseModel):
    """The attention of the prompt's last token to each passage, in the order of the prompt."""

    object: Literal["posfix.attention"] = "posfix.attention"
    model: str
    documents: list[PassageShare]
    dropped: list[DroppedOutput]
    prompt_tokens: int


@attention.post(
    "/v1/posfix/attention",
    response_model=AttentionResponse,
    responses=OPENAI.responses(400, 401, 403, 404, 413, 422, 429, 500, 503, 504),
)
async def passage_attention(body: AttentionRequest, call: ReadyCall) -> Response:
    """Return each passage's share of the attention of the prompt's last token. Nothing is generated.

    A generator that gives no attention, such as a remote one, is refused with 400 and the code ``unsupported``.
    """
    service, fields = call.service, call.fields
    service.check_model(body.model or "")
    if not body.query.strip():
        raise RequestError("query is empty; give at least one visible character", param="query")
    documents = to_documents(body.documents, service.limits.max_documents)
    fields.documents = len(documents)
    measure = partial(
        _measure_attention, service.pipeline, service.reader, service.model_id, body.query, documents, body.order
    )
    response, fields.order = await call.score(measure)
    fields.tokens = {"prompt": response.prompt_tokens}
    return SafeJSONResponse(response.model_dump())


def _measure_attention(
    pipeline: Pipeline,
    reader: Generator,
    model: str,
    question: str,
    documents: Sequence[Document],
    order: str,
) -> tuple[AttentionResponse, str]:
    """Return each passage's share of the attention of the prompt's last token, and the name of the order.

    Formula: share of passage i = a_i / sum_j a_j; a_i is the attention of the prompt's last token, summed over the
        tokens of passage i and averaged over layers and heads. The model is unmodified: mitigation ``none``.
    Cost: the prompt is read once, with space for one token of an answer.
    """
    check_cancelled()
    assembled = pipeline.assembler.assemble(question, documents, order=order, max_new_tokens=1)
    layout = assembled.layout
    masses: list[float] = []
    if layout.n_passages:
        (per_token,) = reader.passage_attention([layout], tenant_salt(pipeline.defaults.tenant), check_cancelled)
        masses = [mean * len(span) for mean, span in zip(per_token, layout.passages, strict=True)]
    total = sum(masses) or 1.0
    response = AttentionResponse(
        model=model,
        documents=[
            PassageShare(id=name, position=position, attention=mass / total)
            for position, (name, mass) in enumerate(zip(assembled.ids, masses, strict=True))
        ],
        dropped=[DroppedOutput(id=identity, reason=reason) for identity, reason in assembled.dropped],
        prompt_tokens=assembled.prompt_tokens,
    )
    return response, assembled.order
