"""A real llama.cpp server with the packaged weights as the generator."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx2
import pytest
from langchain_core.documents import Document

from rag_posfix.contracts.request import Sampling
from rag_posfix.errors import PromptTooLongError
from rag_posfix.evaluation import evaluate_permutations
from rag_posfix.evaluation.answers.experiment import parse_arrangement
from rag_posfix.evaluation.data.questions import PositionExample
from rag_posfix.folders import default_cache_dir
from rag_posfix.generation.model.checkpoint import PACKAGED
from rag_posfix.pipeline.build import build_pipeline
from rag_posfix.pipeline.pipeline import Pipeline, Question
from rag_posfix.settings import RemoteSettings, Settings
from tests.support.redis_server import free_port
from tests.support.tiny_evaluation import Alphabetical

pytestmark = [pytest.mark.weights, pytest.mark.slow, pytest.mark.timeout(600)]

HOW = (
    "no llama.cpp server: put llama-server on the PATH, or pip install 'llama-cpp-python[server]==0.3.36' (compiles, "
    "10 to 60 minutes) here, or in another environment whose python is named by LLAMA_CPP_PYTHON"
)
FERRY = Document("The ferry Ostrilla sank in 1963.", id="ferry", metadata={"relevance_score": 0.9})
HARBOUR = Document("The harbour froze in 1901.", id="harbour", metadata={"relevance_score": 0.2})
QUESTION = "In which year did the ferry Ostrilla sink?"


def command(gguf: Path, port: int) -> list[str]:
    """The command line of a server; skips without one."""
    binary = shutil.which("llama-server")
    if binary is not None:
        options = ["--alias", "smollm2", "--ctx-size", "2048", "--threads", "1", "--parallel", "1"]
        return [binary, "--model", str(gguf), "--host", "127.0.0.1", "--port", str(port), *options]
    python = os.environ.get("LLAMA_CPP_PYTHON")
    if python is None and importlib.util.find_spec("llama_cpp") is not None:
        python = sys.executable
    if python is None:
        pytest.skip(HOW)
    options = ["--model_alias", "smollm2", "--n_ctx", "2048", "--n_threads", "1"]
    where = ["--host", "127.0.0.1", "--port", str(port)]
    return [python, "-m", "llama_cpp.server", "--model", str(gguf), *where, *options]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    folder = tmp_path_factory.mktemp("llama")
    gguf = PACKAGED["smollm2"].files(default_cache_dir())[0]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command(gguf, port), cwd=folder, env=environment, stdout=log, stderr=log)
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
        process.wait(30)


@pytest.fixture
def pipeline(server: str, tmp_path: Path) -> Iterator[Pipeline]:
    settings = Settings(
        model=f"openai:smollm2@{server}",
        mitigation="none",
        order="reverse",
        cache_dir=tmp_path,
        remote=RemoteSettings(context_window=2048, timeout_seconds=300),
    )
    with closing(build_pipeline(settings)) as built:
        yield built


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


def test_limits_stop_strings_and_seeds_reach_the_server(pipeline: Pipeline):
    def ask(**sampling) -> tuple[str, str]:
        question = Question(QUESTION, documents=[FERRY], sampling=Sampling(**sampling), use_cache=False)
        answer = pipeline.ask(question)
        return answer.text, answer.finish_reason

    assert ask(max_tokens=2)[1] == "length"
    text, reason = ask(max_tokens=24, stop=("1963",))
    assert ("1963" in text, reason) == (False, "stop")
    assert ask(max_tokens=8, temperature=1.5, seed=7) == ask(max_tokens=8, temperature=1.5, seed=7)


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
    remote = RemoteSettings(context_window=100_000, timeout_seconds=300)
    settings = Settings(model=f"openai:smollm2@{server}", mitigation="none", cache_dir=tmp_path, remote=remote)
    long = Document("word " * 4000, metadata={"relevance_score": 1.0})
    with closing(build_pipeline(settings)) as built, pytest.raises(PromptTooLongError, match="CONTEXT_WINDOW"):
        built.ask(Question(QUESTION, documents=[long]))


def test_order_evaluation(server: str):
    example = PositionExample(
        id="1", question=QUESTION, answers=("1963",), gold=(FERRY,),
        distractors=(HARBOUR, Document("The mill burned in 1888.", id="mill")),
    )  # fmt: skip
    record = evaluate_permutations(
        [example], [parse_arrangement("/reverse/none")], orders=3, documents=3, max_tokens=16, reranker=Alphabetical(),
        settings=Settings(model=f"openai:smollm2@{server}", remote=RemoteSettings(timeout_seconds=300)),
    )  # fmt: skip
    found = record.to_json()["mitigations"]["/reverse/none"]
    assert found["flip_rate"] == 0.0
    assert found["log_probability"] is None
