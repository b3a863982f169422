"""Bodies that are small in bytes and large in values, and conversations of many turns."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from fastapi.testclient import TestClient

from rag_posfix.errors import GenerationCancelled
from rag_posfix_api.http.errors import RequestError
from rag_posfix_api.http.middleware import MAX_VALUES, check_shape
from rag_posfix_api.runtime.admission import Ticket
from tests.support.serving import BRIDGE, CHAT, chat, client_for, make_pipeline

OPEN = b'{"messages":[{"role":"user","content":"hi"}],"documents":['
JSON = {"content-type": "application/json"}


def client() -> TestClient:
    return client_for()


def sent(content: bytes) -> tuple[int, dict[str, Any]]:
    response = client().post(CHAT, content=content, headers=JSON)
    return response.status_code, response.json()["error"]


@pytest.mark.parametrize("entry", [b"{},", b'"",', b"1,", b"[],", b'{"a":1},', b'"\\"",'])
def test_a_body_of_a_million_values_is_refused_before_it_is_parsed(entry: bytes):
    started = time.process_time()
    status, error = sent(OPEN + entry * (3 * 1024**2 // len(entry)) + b"{}]}")
    assert (status, error["code"]) == (413, "too_many_values")
    assert str(MAX_VALUES) in error["message"]
    assert time.process_time() - started < 2  # it was 24 s


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_a_body_in_another_encoding_is_refused_before_it_is_parsed(encoding: str):
    """In UTF-16 the escape of a quote is not seen in the bytes, so the count would take structure for text."""
    body = '{"messages":[{"role":"user","content":"\\""}],"y":[' + "{}," * 500_000 + "{}]}"
    status, error = sent(body.encode(encoding))
    assert (status, error["code"]) == (400, "invalid_request")
    assert error["message"].startswith("the body is no JSON")


def test_a_byte_order_mark_of_utf_8_is_no_error():
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "documents": [BRIDGE]})
    assert client().post(CHAT, content=body.encode("utf-8-sig"), headers=JSON).status_code == 200


def test_marks_inside_of_strings_are_no_values():
    text = '[{,:\\\\", ' * MAX_VALUES
    assert check_shape(json.dumps({"a": text, "b": [text]}).encode()) < 10
    assert check_shape(json.dumps({"a": "\\", "b": '\\"'}).encode()) < 10


def test_as_many_values_as_allowed_and_one_more():
    check_shape(b"[" + b"1," * (MAX_VALUES - 2) + b"1]")
    with pytest.raises(RequestError, match=f"at most {MAX_VALUES}"):
        check_shape(b"[" + b"1," * MAX_VALUES + b"1]")


def test_validation_stops_at_the_first_wrong_entry():
    status, error = sent(OPEN + b"{}," * 999 + b"{}]}")
    assert (status, error["param"]) == (422, "documents[0]")
    assert "more)" not in error["message"]


@pytest.mark.parametrize("field", ["model", "order", "mitigation", "role", "unknown"])
def test_a_name_of_a_megabyte_is_not_sent_back(field: str):
    name = "n" * 1024**2
    body = chat(documents=[BRIDGE])
    if field == "role":
        body["messages"] = [{"role": name, "content": "hi"}]
    elif field == "unknown":
        body["mitigation"] = {"name": "none", name: 1}
    else:
        body[field] = name
    response = client().post(CHAT, json=body)
    assert 400 <= response.status_code < 500
    assert len(response.content) < 2000


@pytest.mark.parametrize("over", ["gone", "late"])
def test_an_end_of_the_request_reaches_assembly(over: str):
    """Assembly takes no check as an argument; it reads the one of the running job."""
    import contextvars

    from rag_posfix.cancellation import set_cancel_check

    ticket = Ticket(600 if over == "gone" else 0, time.monotonic(), cancelled=over == "gone")
    context = contextvars.copy_context()
    context.run(set_cancel_check, ticket.check)
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant")] * 3
    error, message = (GenerationCancelled, "went away") if over == "gone" else (RequestError, "longer than")
    with pytest.raises(error, match=message):
        context.run(make_pipeline().assembler.assemble, "Why?", (), history=turns)


@pytest.mark.parametrize(
    "method",
    ["{broken", '{"name":"head_scaling","low":' + "1" * 5000 + "}", '{"a":' * 30 + "1" + "}" * 30, "{" + "x" * 10**6],
)
def test_inline_parameters_of_methods_are_bounded_and_never_status_500(method: str):
    stack = {"name": "stack", "parameters": {"methods": [method]}}
    orders = (f"profile:slots={method}", "profile:slots=" + "1" * 5000, "profile:slots=" + "[" * 50 + "]" * 50)
    for fields in ({"mitigation": stack}, *({"order": order} for order in orders)):
        response = client().post(CHAT, json=chat(documents=[BRIDGE], **fields))
        assert response.status_code == 400
        assert len(response.content) < 1000
