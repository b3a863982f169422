"""The real vLLM engine as the server: it judges as the local engine does, and its prefix cache serves every order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from langchain_core.documents import Document

from rag_posfix.contracts.generator import collected_usage, sum_usage
from rag_posfix.contracts.request import Sampling
from rag_posfix.files import default_cache_dir
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.checkpoint import PACKAGED
from rag_posfix.generation.remote.generator import RemoteGenerator, open_remote
from rag_posfix.pipeline.build import build_pipeline
from rag_posfix.pipeline.pipeline import Question
from rag_posfix.reranking import LikelihoodReranker, YesNoReranker
from rag_posfix.settings import CacheSettings, RemoteSettings, Settings
from tests.integration.vllm_server import vllm_python, vllm_server

pytestmark = [pytest.mark.weights, pytest.mark.slow, pytest.mark.timeout(900)]

QUESTION = "In which year did the ferry Ostrilla sink?"
FILLER = (
    " Its crew kept a diary of the weather, the tides and the cargo of every crossing, and read it aloud at night."
)
PASSAGES = (
    Document("The ferry Ostrilla sank in 1963." + FILLER * 3, id="ferry"),
    Document("The harbour of Arvo froze in 1901." + FILLER * 4, id="harbour"),
    Document("The mill burned down in 1888." + FILLER * 2, id="mill"),
)


@pytest.fixture(scope="module")
def server(float32_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    vllm_python()  # skips
    weights = default_cache_dir() / "models" / PACKAGED["smollm2"].folder_name
    with vllm_server(weights, tmp_path_factory.mktemp("vllm")) as model:
        yield model


@pytest.fixture
def generator(server: str) -> Iterator[RemoteGenerator]:
    with closing(open_remote(server, context_window=2048)) as opened:
        yield opened


def test_the_probe_finds_what_vllm_gives(generator: RemoteGenerator):
    facts = generator.probe()
    assert facts.judgements == "chat completions with log-probabilities"
    assert facts.prompt_log_probs
    assert facts.context_window == 2048
    assert (facts.cached_tokens or 0) > 100


def test_it_judges_as_the_local_engine_does(generator: RemoteGenerator, float32_engine: Engine):
    here, there = (
        {document.id: document.metadata["reranking"]["raw_score"] for document in ranked}
        for ranked in (
            YesNoReranker(generator=each).compress_documents(PASSAGES, QUESTION)
            for each in (float32_engine, generator)
        )
    )
    assert there == pytest.approx(here, abs=0.05)


def test_the_prefix_cache_serves_passages_in_another_order_with_another_question(generator: RemoteGenerator):
    judge = YesNoReranker(generator=generator)
    judge.compress_documents(PASSAGES, QUESTION)
    with collected_usage() as spent:
        judge.compress_documents(PASSAGES[::-1], "Who kept a diary?")
    usage = sum_usage(spent)
    assert usage.cached_tokens > usage.prompt_tokens / 2


def test_likelihoods_are_right_also_when_the_prompt_was_cached(generator: RemoteGenerator, float32_engine: Engine):
    ranker = LikelihoodReranker(generator=generator)
    first, again = (
        {each.id: each.metadata["reranking"]["raw_score"] for each in ranker.compress_documents(PASSAGES, QUESTION)}
        for _ in range(2)
    )
    assert again == pytest.approx(first, abs=1e-3)
    assert max(first, key=lambda name: first[name]) == "ferry"


def test_answers_are_the_same_in_every_order(server: str, tmp_path: Path):
    settings = Settings(
        model=server, mitigation="none", reranker="yes_no:top_n=2", order="reverse", cache_dir=tmp_path,
        cache=CacheSettings(enabled=False), remote=RemoteSettings(context_window=2048),
    )  # fmt: skip
    sampling = Sampling(max_tokens=8)
    with closing(build_pipeline(settings)) as pipeline:
        answers = [
            pipeline.ask(Question(QUESTION, documents=order, sampling=sampling))
            for order in itertools.permutations(PASSAGES)
        ]
    assert len({answer.text for answer in answers}) == 1
    assert len({tuple(document.id for document in answer.documents) for answer in answers}) == 1
    assert not any(answer.warnings for answer in answers)
