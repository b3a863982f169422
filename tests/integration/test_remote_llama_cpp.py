"""A real llama.cpp server with the packaged weights as the generator."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from langchain_core.documents import Document

from rag_posfix.contracts.generator import collected_usage, sum_usage
from rag_posfix.contracts.request import Sampling
from rag_posfix.errors import PromptTooLongError
from rag_posfix.files import default_cache_dir
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.checkpoint import PACKAGED
from rag_posfix.generation.remote.generator import RemoteGenerator, open_remote
from rag_posfix.pipeline.build import build_pipeline
from rag_posfix.pipeline.pipeline import Pipeline, Question
from rag_posfix.reranking import YesNoReranker
from rag_posfix.settings import RemoteSettings, Settings
from tests.support.command_line import command_line
from tests.support.redis_server import free_port

pytestmark = [pytest.mark.weights, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
HOW = (
    "no llama.cpp server: pip install xllamacpp here, or in another environment whose python is named by "
    "LLAMA_CPP_PYTHON, or put llama-server on the PATH"
)
FERRY = Document("The ferry Ostrilla sank in 1963.", id="ferry", metadata={"relevance_score": 0.9})
HARBOUR = Document("The harbour froze in 1901.", id="harbour", metadata={"relevance_score": 0.2})
QUESTION = "In which year did the ferry Ostrilla sink?"
PASSAGES = (
    Document("The ferry Ostrilla sank in 1963.", id="ferry"),
    Document("The harbour of Arvo froze in 1901.", id="harbour"),
    Document("Bread is baked in ovens.", id="bread"),
    Document("The lighthouse keeper kept a diary of the weather.", id="keeper"),
)


def program() -> list[str]:
    """The beginning of a server's command line; skips without a server."""
    python = os.environ.get("LLAMA_CPP_PYTHON")
    if python is None and importlib.util.find_spec("xllamacpp") is not None:
        python = sys.executable
    if python is not None:
        return [python, str(ROOT / "tests" / "integration" / "llama_cpp_server.py")]
    binary = shutil.which("llama-server")
    if binary is None:
        pytest.skip(HOW)
    return [binary]


@contextmanager
def serving(folder: Path, slots: int, *options: str) -> Iterator[str]:
    """Serve the packaged weights as ``smollm2`` with a window of 2,048 tokens; yield the base URL."""
    port = free_port()
    gguf = PACKAGED["smollm2"].files(default_cache_dir())[0]
    command = [
        *program(), "--model", str(gguf), "--alias", "smollm2", "--port", str(port), "--ctx-size", str(2048 * slots),
        "--parallel", str(slots), "--threads", "1", "--no-repack", *options,
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}/v1"
    try:
        deadline = time.monotonic() + 240
        while True:
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "the server did not start"
            try:
                if httpx2.get(f"{url}/models", timeout=5).status_code == 200:
                    break
            except httpx2.TransportError:
                time.sleep(0.3)
        yield url
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Four prompts at a time, and a prefix cache."""
    with serving(tmp_path_factory.mktemp("llama"), 4) as url:
        yield url


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Every prompt by itself from its first token, so that equal prompts have bit-equal logits."""
    with serving(tmp_path_factory.mktemp("alone"), 1, "--no-cache-prompt") as url:
        yield url


def settings_of(url: str, folder: Path, context_window: int = 2048) -> Settings:
    remote = RemoteSettings(context_window=context_window, timeout_seconds=300)
    return Settings(model=f"openai:smollm2@{url}", mitigation="none", order="reverse", cache_dir=folder, remote=remote)


def raw_scores(generator: Any, documents: Sequence[Document], question: str) -> dict[str, float]:
    judged = YesNoReranker(generator=generator).compress_documents(documents, question)
    return {str(document.id): document.metadata["reranking"]["raw_score"] for document in judged}


@pytest.fixture
def pipeline(alone: str, tmp_path: Path) -> Iterator[Pipeline]:
    with closing(build_pipeline(settings_of(alone, tmp_path))) as built:
        yield built


@pytest.fixture
def generator(server: str) -> Iterator[RemoteGenerator]:
    with closing(open_remote(f"openai:smollm2@{server}", context_window=2048)) as opened:
        yield opened


def test_answers_whole_and_streamed_are_equal_cited_and_cached(pipeline: Pipeline):
    question = Question(QUESTION, documents=[FERRY, HARBOUR], sampling=Sampling(max_tokens=24))
    *pieces, last = list(pipeline.stream(question))
    assert last.answer is not None
    assert "1963" in last.answer.text
    assert len(pieces) > 3
    assert "".join(one.text for one in [*pieces, last]) == last.answer.text
    assert [("ferry" in one.document_ids, one.origin) for one in last.answer.citations] == [(True, "quote")]
    assert last.answer.finish_reason == "stop"
    assert pipeline.ask(Question(QUESTION, documents=[HARBOUR, FERRY], sampling=Sampling(max_tokens=24))).cached
    whole = pipeline.ask(
        Question(QUESTION, documents=[FERRY, HARBOUR], sampling=Sampling(max_tokens=24), use_cache=False)
    )
    assert whole.text == last.answer.text
    assert whole.usage.prompt_tokens > 60


def test_a_stream_that_is_closed_frees_the_server(pipeline: Pipeline):
    question = Question(
        "Tell a very long story about the ferry.", documents=[FERRY], sampling=Sampling(max_tokens=1500)
    )
    stream = pipeline.stream(question)
    next(stream)
    stream.close()
    again = pipeline.ask(Question(QUESTION, documents=[FERRY], sampling=Sampling(max_tokens=2), use_cache=False))
    assert again.text


def test_a_prompt_beyond_the_servers_window_is_told_as_that(server: str, tmp_path: Path):
    settings = settings_of(server, tmp_path, context_window=100_000)
    long = Document("word " * 4000, metadata={"relevance_score": 1.0})
    with closing(build_pipeline(settings)) as built, pytest.raises(PromptTooLongError, match="CONTEXT_WINDOW"):
        built.ask(Question(QUESTION, documents=[long]))


def test_verify_shows_what_the_server_gives(server: str, capsysbinary):
    code, shown, _ = command_line(capsysbinary)("verify", "--model", f"openai:smollm2@{server}")
    assert code == 0
    assert "passages are judged by: chat completions with log-probabilities" in shown
    assert "log-probabilities of prompts: no" in shown, "completions with echo do not score the prompt"
    assert "context window: 2048" in shown, "that of a slot"
    assert int(re.search(r"(\d+) tokens of a repeated prompt", shown)[1]) > 500
    runs = dict(re.findall(r"(\w+)\W+(yes|no)\b", shown.partition("arrangements")[2]))
    assert {runs[name] for name in ("yes_no", "listwise", "none", "canonical_rotations")} == {"yes"}
    assert {runs[name] for name in ("likelihood", "in_context", "context_experts")} == {"no"}


def test_it_judges_as_the_local_engine_does(generator: RemoteGenerator, float32_engine: Engine):
    """llama.cpp rounds activations to 8 bits for weights of 4 bits: that moved twelve log-odds by up to .33.

    The same weights as float32 in GGUF differ by up to .013, and the local engine in bfloat16 by up to .24.
    """
    here, there = (raw_scores(each, PASSAGES, QUESTION) for each in (float32_engine, generator))
    assert there == pytest.approx(here, abs=0.5)
    assert max(here, key=lambda name: here[name]) == max(there, key=lambda name: there[name]) == "keeper"


def test_the_prefix_cache_serves_passages_in_another_order_with_another_question(generator: RemoteGenerator):
    raw_scores(generator, PASSAGES[:2], QUESTION)
    with collected_usage() as spent:
        raw_scores(generator, PASSAGES[1::-1], "Who kept a diary?")
    usage = sum_usage(spent)
    assert usage.cached_tokens > usage.prompt_tokens / 2
