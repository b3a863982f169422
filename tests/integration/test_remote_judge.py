"""Order-free answers of a model on a server: this service with a small random model is the server, which judges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.contracts.request import MitigationChoice, Sampling
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.tokenizer import Tokenizer
from rag_posfix.pipeline.build import build_pipeline
from rag_posfix.pipeline.pipeline import Defaults, Pipeline, Question
from rag_posfix.reranking import LikelihoodReranker, YesNoReranker
from rag_posfix.settings import CacheSettings, Settings
from tests.support.serving import serving
from tests.support.tiny import loaded_model
from tests.support.tool_models import QWEN, stock_tool_tokenizer

pytestmark = pytest.mark.slow

QUESTION = "In which year did the ferry Ostrilla sink?"
PASSAGES = (
    Document("The ferry Ostrilla sank in 1963.", id="ferry"),
    Document("The harbour of Arvo froze in 1901.", id="harbour"),
    Document("The mill burned down in 1888.", id="mill"),
    Document("Bread is baked in ovens.", id="bread"),
)


@pytest.fixture(scope="module")
def judge() -> Engine:
    """A random model to which Yes and No, tokens of their own, are likely after every prompt: a server lists both."""
    words = ["Yes", "No"]
    tokenizer = stock_tool_tokenizer(QWEN)
    tokenizer.add_tokens(words)
    loaded = loaded_model(vocab_size=len(tokenizer), max_position_embeddings=2048, mlp_bias=True)
    with torch.no_grad():
        # One state is large after every prompt, and both words read it beside what they read anyway.
        loaded.model.model.layers[-1].mlp.down_proj.bias[0] += 3
        loaded.model.lm_head.weight[tokenizer.convert_tokens_to_ids(words), 0] += 2
    return Engine(loaded, Tokenizer(tokenizer), "tiny", "tiny")


@pytest.fixture(scope="module")
def server(judge: Engine) -> Iterator[str]:
    defaults = Defaults(mitigation=MitigationChoice("none"), allow_ungrounded=True)
    assembler = Assembler(judge.encoder, judge.context_window)
    with serving(Pipeline(judge, assembler, defaults=defaults)) as url:
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


def test_a_server_judges_as_the_engine_does(build, judge: Engine):
    remote = build().generator
    here, there = (
        {document.id: document.metadata["reranking"]["raw_score"] for document in ranked}
        for ranked in (
            YesNoReranker(generator=generator).compress_documents(PASSAGES, QUESTION) for generator in (judge, remote)
        )
    )
    assert max(here.values()) - min(here.values()) > 0.1
    assert there == pytest.approx(here, abs=0.02)


def test_a_server_scores_questions_as_the_engine_does(build, judge: Engine):
    here, there = (
        {document.id: math.log(document.metadata["relevance_score"]) for document in ranked}
        for ranked in (
            LikelihoodReranker(generator=generator).compress_documents(PASSAGES, QUESTION)
            for generator in (judge, build().generator)
        )
    )
    assert len(set(there.values())) == len(PASSAGES)
    assert there == pytest.approx(here, abs=1), "the means differ by the tokens across the ends of the question"


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
