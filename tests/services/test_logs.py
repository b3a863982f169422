"""The log of the service: what each line has, and what no line has."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from rag_posfix.contracts.request import Chunk, GenerationRequest
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.settings import ServiceSettings, Settings
from rag_posfix_api import server
from rag_posfix_api.http.metrics import REQUEST_ID, JsonFormatter, TextFormatter, configure_logging
from tests.support.serving import BRIDGE, CHAT, ListRetriever, WordReranker, chat, make_pipeline, running
from tests.support.toy_encoder import ToyEncoder
from tests.support.waiting import wait_until

MARK = "xyzzy"
"""Stands in every part of the requests that must not be in the log."""

KEY = {"authorization": f"Bearer key-{MARK}"}


@contextmanager
def logged(formatter: logging.Formatter, level: int = logging.INFO) -> Iterator[Callable[[], list[str]]]:
    """Format records as the service does while they happen; yield a function that returns the lines so far."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(level)
    # The client of this test is no part of the service.
    client = logging.getLogger("httpx2")
    client_level = client.level
    client.setLevel(logging.WARNING)
    try:
        yield lambda: stream.getvalue().splitlines()
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        client.setLevel(client_level)


class Breaking(FakeGenerator):
    """Fails with a text that quotes the prompt, if the question says so."""

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        if "break" in self.encoder.decode(request.layout.tokens(request.layout.question)):
            raise ZeroDivisionError(f"cannot answer {MARK}")
        yield from super().stream(request)


def send_marked_requests(client: httpx2.Client) -> None:
    """Send requests of every kind with the mark wherever a client can write."""

    def post(path: str, body: Any, **headers: str) -> httpx2.Response:
        return client.post(path, json=body, headers={**KEY, "user-agent": MARK, **headers})

    passage = {"id": MARK, "title": MARK, "text": f"{MARK} is a word. It opens doors."}
    for stream in (False, True):
        post(CHAT, chat(f"What is {MARK}?", documents=[passage], stream=stream, user=MARK, stop=[f"{MARK}!"]))
        post(CHAT, chat(f"Please break {MARK}", documents=[passage], stream=stream))
    post(CHAT, chat(f"What is {MARK}?"))
    post(f"{CHAT}?q={MARK}", chat(MARK, order=MARK))
    post(CHAT, {"messages": [{"role": MARK, "content": MARK}]})
    post("/v1/rerank", {"query": MARK, "documents": [MARK, MARK]})
    post("/v1/messages", {"model": MARK, "max_tokens": 5, "messages": [{"role": "user", "content": MARK}]})
    post(f"/{MARK}", {})
    post(CHAT, chat(MARK), authorization=f"Bearer wrong-{MARK}")
    client.get(f"/v1/models/{MARK}", headers=KEY)
    # The parser of HTTP refuses this method, so it leaves no line of a request.
    client.request(MARK.upper(), "/", headers={**KEY, "x-request-id": f"{MARK} {MARK}"})
    client.post(CHAT, content=f'{{"{MARK}', headers={**KEY, "content-type": "application/json"})


def test_no_line_holds_a_prompt_a_document_an_answer_or_a_key():
    pipeline = make_pipeline(Breaking(ToyEncoder()), reranker=WordReranker(), retriever=ListRetriever(f"{MARK} here."))
    with (
        logged(JsonFormatter()) as objects, logged(TextFormatter()) as texts,
        running(pipeline, api_key=f"key-{MARK}") as (url, _),
    ):  # fmt: skip
        with httpx2.Client(base_url=url, timeout=60) as client:
            send_marked_requests(client)
        for lines in (objects, texts):
            wait_until(lambda lines=lines: sum("rag_posfix_api.access" in line for line in lines()) == 13)
    for lines in (objects, texts):
        text = "\n".join(lines())
        assert "ZeroDivisionError" in text, "failures are told by their type"
        assert MARK not in text.lower()


def test_a_line_of_a_request_has_time_level_logger_message_id_route_status_and_seconds():
    with logged(JsonFormatter()) as lines, running(make_pipeline()) as (url, _):
        httpx2.post(url + CHAT, json=chat(documents=[BRIDGE]), headers={"x-request-id": "r-7"}, timeout=60)
        wait_until(lambda: any("r-7" in line for line in lines()))
    (line,) = [json.loads(line) for line in lines() if "r-7" in line]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert (line["level"], line["logger"], line["message"]) == ("info", "rag_posfix_api.access", "request")
    assert (line["request_id"], line["method"], line["route"], line["status"]) == ("r-7", "POST", CHAT, 200)
    assert line["seconds"] > 0
    assert set(line["stage_seconds"]) == {"assemble", "queue", "prefill", "decode"}


def test_the_failure_of_a_request_is_logged_under_its_id_in_every_thread():
    pipeline = make_pipeline(Breaking(ToyEncoder()))
    with logged(JsonFormatter()) as lines, running(pipeline) as (url, _):
        for stream in (False, True):
            headers = {"x-request-id": f"r-{stream}"}
            body = chat("Please break", documents=[BRIDGE], stream=stream)
            httpx2.post(url + CHAT, json=body, headers=headers, timeout=60)
        wait_until(lambda: sum("rag_posfix_api.access" in line for line in lines()) == 2)
    found = [json.loads(line) for line in lines()]
    failures = [line for line in found if line["message"] == "request failed: ZeroDivisionError"]
    assert [line["request_id"] for line in failures] == ["r-False", "r-True"]


def test_lines_beside_requests_have_no_id():
    with logged(JsonFormatter()) as lines:
        logging.getLogger("x").info("hello %s", "world", extra={"fields": {"n": 1}})
    (line,) = map(json.loads, lines())
    assert (line["message"], line["n"], line["level"]) == ("hello world", 1, "info")
    assert "request_id" not in line


def failing() -> None:
    raise ZeroDivisionError(f"quotes {MARK}")


def test_an_exception_that_is_logged_during_a_request_is_shown_without_its_message():
    """A library may log an exception whose text quotes a prompt."""
    for formatter in (JsonFormatter(), TextFormatter()):
        with logged(formatter) as lines:
            token = REQUEST_ID.set("r-1")
            try:
                failing()
            except ZeroDivisionError:
                logging.getLogger("library").exception("it failed")
            finally:
                REQUEST_ID.reset(token)
        text = "\n".join(lines())
        assert "ZeroDivisionError" in text
        assert "failing" in text, "the places are there"
        assert MARK not in text


def test_an_exception_beside_requests_has_its_traceback():
    with logged(JsonFormatter()) as lines:
        try:
            failing()
        except ZeroDivisionError:
            logging.getLogger("x").exception("bad")
    (line,) = map(json.loads, lines())
    assert f"ZeroDivisionError: quotes {MARK}" in line["traceback"]


def test_the_text_format_has_one_line_for_a_record_that_nobody_can_forge():
    with logged(TextFormatter()) as lines:
        logging.getLogger("x").warning("a\nb\r%s", "c", extra={"fields": {"route": "/v1", "n": 2, "t": "d\ne"}})
    (line,) = lines()
    assert line.endswith(r' warning x a\nb\rc route="/v1" n=2 t="d\ne"')


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The root logger without handlers; what it had comes back."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    root.handlers.clear()
    yield root
    root.handlers[:] = before
    root.setLevel(level)
    for library in ("faiss", "sentence_transformers"):
        logging.getLogger(library).setLevel(logging.NOTSET)


@pytest.mark.parametrize(("log_format", "begins"), [("json", '{"time"'), ("text", "20")])
def test_logs_go_to_stderr_in_the_format_that_is_asked_for(
    log_format: Any, begins: str, capsys: pytest.CaptureFixture[str], root_logger: logging.Logger
):
    configure_logging(log_format)
    logging.getLogger("x").info("hello")
    logging.getLogger("x").debug("not at this level")
    logging.getLogger("faiss.loader").info("Could not load library")  # libraries do not tell how they were loaded
    logging.getLogger("sentence_transformers.base.model").info("No device provided, using cpu")
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith(begins)
    assert "hello" in line


class Stop(Exception):
    """Ends ``run`` where it would begin to serve."""


@pytest.mark.parametrize(
    ("given", "setting", "expected"),
    [(None, "json", JsonFormatter), (None, "text", TextFormatter), ("text", "json", TextFormatter)],
)
def test_the_option_goes_before_the_setting(
    given: Any, setting: Any, expected: type, monkeypatch: pytest.MonkeyPatch, root_logger: logging.Logger
):
    def stop(*arguments: Any, **options: Any) -> Any:
        raise Stop

    monkeypatch.setattr(server, "make_server", stop)
    with pytest.raises(Stop):
        server.run(Settings(), service=ServiceSettings(port=0, log_format=setting), log_format=given)
    (handler,) = root_logger.handlers
    assert type(handler.formatter) is expected
