"""Order-free answers of a model on a server: this service with SmolLM2 is the server, and the model really judges."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.contracts.request import MitigationChoice, Sampling
from rag_posfix.generation.engine import Engine
from rag_posfix.pipeline.build import build_pipeline
from rag_posfix.pipeline.pipeline import Defaults, Pipeline, Question
from rag_posfix.reranking import LikelihoodReranker, YesNoReranker
from rag_posfix.settings import CacheSettings, Settings
from tests.support.serving import serving

pytestmark = [pytest.mark.weights, pytest.mark.timeout(600), pytest.mark.slow]

QUESTION = "In which year did the ferry Ostrilla sink?"
PASSAGES = (
    Document("The ferry Ostrilla sank in 1963.", id="ferry"),
    Document("The harbour of Arvo froze in 1901.", id="harbour"),
    Document("The mill burned down in 1888.", id="mill"),
    Document("Bread is baked in ovens.", id="bread"),
)


@pytest.fixture(scope="module")
def server(float32_engine: Engine) -> Iterator[str]:
    defaults = Defaults(mitigation=MitigationChoice("none"), allow_ungrounded=True)
    assembler = Assembler(float32_engine.encoder, float32_engine.context_window)
    with serving(Pipeline(float32_engine, assembler, defaults=defaults)) as url:
        yield f"openai:default@{url}/v1"


@pytest.fixture
def build(server: str, tmp_path: Path) -> Iterator[Callable[..., Pipeline]]:
    opened: list[Pipeline] = []

    def built(**changes: Any) -> Pipeline:
        settings = {"model": server, "mitigation": "none", "order": "reverse", "cache_dir": tmp_path, **changes}
        opened.append(build_pipeline(Settings(**settings)))
        return opened[-1]

    yield built
    for pipeline in opened:
        pipeline.close()


def answers_in_three_orders(pipeline: Pipeline, documents: tuple[Document, ...]) -> list[Any]:
    sampling = Sampling(max_tokens=3)
    return [
        pipeline.ask(Question(QUESTION, documents=order, sampling=sampling, use_cache=False))
        for order in itertools.islice(itertools.permutations(documents), 0, None, 2)
    ]


@pytest.mark.parametrize(
    ("reranker", "mitigation", "n_read", "kept"),
    [
        ("yes_no", "none", 3, False),
        ("yes_no:top_n=2", "none", 2, True),
        ("yes_no:mass=0.7", "repeated_passages", None, True),
    ],
)
def test_answers_are_the_same_in_three_orders_of_the_passages(
    build, reranker: str, mitigation: str, n_read: int | None, kept: bool
):
    pipeline = build(reranker=reranker, mitigation=mitigation, cache=CacheSettings(enabled=kept))
    answers = answers_in_three_orders(pipeline, PASSAGES[:3])
    assert len(answers) == 3
    assert len({answer.text for answer in answers}) == 1
    assert len({tuple((document.id, document.score) for document in answer.documents) for answer in answers}) == 1
    scores = [document.score for document in answers[0].documents]
    assert scores == sorted(scores)
    assert len(set(scores)) == len(scores), "the model tells the passages apart"
    assert n_read in (None, len(scores))
    assert not any(answer.warnings for answer in answers)


def test_rotations_vote_and_do_not_depend_on_the_order(build):
    answers = answers_in_three_orders(build(reranker="yes_no", mitigation="canonical_rotations:rows=3"), PASSAGES[:3])
    assert len({answer.text for answer in answers}) == 1
    assert answers[0].usage.completion_tokens > 3, "three rows wrote"


def test_a_server_judges_as_the_engine_does(build, float32_engine: Engine):
    remote = build().generator
    here, there = (
        {document.id: document.metadata["reranking"]["raw_score"] for document in ranked}
        for ranked in (
            YesNoReranker(generator=generator).compress_documents(PASSAGES, QUESTION)
            for generator in (float32_engine, remote)
        )
    )
    assert max(here.values()) - min(here.values()) > 0.1
    assert there == pytest.approx(here, abs=0.02)


def test_likelihoods_rank_the_right_passage_first(build):
    ranked = LikelihoodReranker(generator=build().generator).compress_documents(PASSAGES, QUESTION)
    assert ranked[0].id == "ferry"
    assert all(0 < document.metadata["relevance_score"] < 1 for document in ranked)


def test_judgements_are_kept_and_their_tokens_are_counted(build):
    pipeline = build(reranker="yes_no")
    sampling = Sampling(max_tokens=4)
    first, again, longer = (
        pipeline.ask(Question(QUESTION, documents=documents, sampling=sampling, use_cache=False))
        for documents in (PASSAGES[:2], PASSAGES[1::-1], PASSAGES[:3])
    )
    assert first.usage.prompt_tokens > 2 * again.usage.prompt_tokens
    assert 0 < longer.usage.prompt_tokens - again.usage.prompt_tokens < first.usage.prompt_tokens
    with closing(build(reranker="yes_no", mitigation="none")) as other:
        assert other.ask(Question(QUESTION, documents=PASSAGES[:2], sampling=sampling)).text == first.text
