"""The answers to one question over several orders of its documents: POST /v1/evaluate/order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from rag_posfix.contracts.answer import Answer, Question
from rag_posfix_api.dialects.errors import OPENAI
from rag_posfix_api.dialects.requests import (
    WHOLE,
    Documents,
    Mitigation,
    RequestModel,
    Seed,
    mitigation_choice,
    to_documents,
)
from rag_posfix_api.http.clean_json import CleanRoute
from rag_posfix_api.http.errors import InvalidRequestError
from rag_posfix_api.http.facts import Facts, RequestFacts
from rag_posfix_api.runtime.jobs import Job
from rag_posfix_api.runtime.order_evaluation import EvaluatedOrder, orders_of, summarize
from rag_posfix_api.runtime.service import ReadyService, Service

MAX_ORDERS = 24

router = APIRouter(tags=["evaluation"], route_class=CleanRoute)


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


class OrderAnswer(BaseModel):
    """The answer of one order."""

    order: Literal["original", "reverse", "random"]
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


@router.post(
    "/v1/evaluate/order",
    operation_id="evaluate_order",
    response_model=OrderEvaluation,
    responses=OPENAI.responses(400, 401, 403, 413, 422, 429, 500, 502, 503, 504),
)
async def evaluate_order(
    body: OrderEvaluationRequest, request: Request, service: ReadyService, facts: RequestFacts
) -> OrderEvaluation:
    """Answer one question over several orders of its documents, greedily and without the answer cache.

    All orders together have the time limit of one request.
    """
    if not body.question.strip():
        raise InvalidRequestError("question is empty; give at least one visible character", param="question")
    facts.documents = len(body.documents)
    questions = _questions(service, body)
    with service.chat.open() as job:
        answers = await job.until_gone(
            request.receive, lambda: _answers(service, facts, job, [question for _, question in questions])
        )
    return _evaluation([order for order, _ in questions], answers)


def _questions(service: Service, body: OrderEvaluationRequest) -> list[tuple[EvaluatedOrder, Question]]:
    documents = to_documents(body.documents, service.limits.max_documents)
    sampling = service.pipeline.defaults.sampling
    if body.max_tokens is not None:
        sampling = replace(sampling, max_tokens=body.max_tokens)
    return [
        (
            order,
            Question(
                body.question,
                documents=[documents[index] for index in order.documents],
                mitigation=mitigation_choice(body.mitigation),
                order="original",
                sampling=sampling,
                use_cache=False,
            ),
        )
        for order in orders_of(len(documents), body.orders, body.seed)
    ]


async def _answers(service: Service, facts: Facts, job: Job, questions: list[Question]) -> list[Answer]:
    pipeline = service.pipeline
    answers = []
    for question in questions:
        answers.append(await job.call(partial(pipeline.ask, question)))
        service.record(answers[-1], facts)
    return answers


def _evaluation(orders: list[EvaluatedOrder], answers: list[Answer]) -> OrderEvaluation:
    summary = summarize([answer.text for answer in answers])
    return OrderEvaluation(
        mitigation=answers[0].mitigation,
        flip_rate=summary.flip_rate,
        answers=[
            DistinctAnswer(text=text, orders=summary.answers.count(index))
            for index, text in enumerate(summary.distinct)
        ],
        orders=[
            OrderAnswer.model_validate(
                {"order": order.name, "documents": order.documents, "answer": answer, "changed": answer != 0}
            )
            for order, answer in zip(orders, summary.answers, strict=True)
        ],
        usage=OrderUsage(
            prompt_tokens=sum(answer.usage.prompt_tokens for answer in answers),
            completion_tokens=sum(answer.usage.completion_tokens for answer in answers),
            cached_tokens=sum(answer.usage.cached_tokens for answer in answers),
        ),
        warnings=list(dict.fromkeys(warning for answer in answers for warning in answer.warnings)),
    )
