"""The files of the page over HTTP. `tests/integration/page` uses it in a browser."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import webbrowser
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from rag_posfix.demo_data import load_passages, load_questions
from rag_posfix.settings import Settings
from rag_posfix_api.app import create_app
from rag_posfix_api.page import routes
from rag_posfix_api.server import bind, make_server, open_page, page_address
from tests.support.order_biased import OrderBiasedGenerator
from tests.support.serving import BRIDGE, ListRetriever, client_for, limits, make_pipeline
from tests.support.waiting import wait_until

STATIC = Path(routes.__file__).with_name("static")
POLICY = {
    "default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "img-src 'self' data:",
    "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
}  # fmt: skip


def test_the_page_has_a_strict_policy_and_is_asked_again_each_time():
    response = client_for().get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert set(response.headers["content-security-policy"].split("; ")) == POLICY
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["cache-control"] == "no-cache"
    again = client_for().get("/", headers={"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("file", [path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.*")])
def test_every_file_is_served_with_its_type_and_the_policy(file):
    response = client_for(api_key="k").get(f"/page/{file}")
    assert response.status_code == 200
    assert response.content == (STATIC / file).read_bytes()
    assert "content-security-policy" in response.headers
    kinds = {".js": "javascript", ".css": "text/css", ".svg": "image/svg+xml", ".json": "application/json"}
    assert kinds.get(Path(file).suffix, "") in response.headers["content-type"]


@pytest.mark.parametrize(
    "path", ["nothing.js", "", "vendor", "../routes.py", "%2e%2e/routes.py", "..%2froutes.py", "/etc/passwd", "%00"]
)
def test_nothing_else_is_served(path):
    response = client_for(api_key="k").get(f"/page/{path}")
    assert response.status_code in (401, 404)
    assert "import" not in response.text


def test_the_page_needs_no_key_and_the_service_does():
    keyed = client_for(api_key="k")
    assert keyed.get("/").status_code == 200
    assert keyed.get("/page/page.js").status_code == 200
    assert keyed.get("/v1/models").status_code == 401
    assert keyed.get("/pages").status_code == 401
    assert "model" not in keyed.get("/page/service.json").text


def test_the_page_learns_what_the_service_can_do():
    plain = {"ready": True, "key": False, "attention": False, "index": False}
    found = client_for().get("/page/service.json").json()
    assert found == plain
    assert client_for(make_pipeline(OrderBiasedGenerator()), api_key="k").get("/page/service.json").json() == {
        **found, "key": True, "attention": True,
    }  # fmt: skip
    assert client_for(make_pipeline(retriever=ListRetriever(BRIDGE))).get("/page/service.json").json()["index"] is True
    loading = TestClient(create_app(Settings(), None, limits())).get("/page/service.json").json()
    assert (loading["ready"], loading["attention"]) == (False, False)


def test_the_page_names_no_other_host():
    for path in (*STATIC.glob("*.html"), *STATIC.glob("*.js"), *STATIC.glob("*.css")):
        addresses = re.findall(r"https?://[^\s\"'`)]+", path.read_text("utf-8"))
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}, path.name


def test_vendored_files_are_those_of_their_packages():
    table = (STATIC / "vendor" / "README.md").read_text("utf-8")
    rows = re.findall(r"\| `([\w.-]+\.js)` \| .*? \| [\d.]+ \| .*? \| \[MIT\]\(([\w.-]+)\) \| `(\w{64})` \|", table)
    assert {name for name, _, _ in rows} == {path.name for path in (STATIC / "vendor").glob("*.js")}
    for name, license_file, digest in rows:
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == digest
        assert "Permission is hereby granted" in (STATIC / "vendor" / license_file).read_text("utf-8")


def test_the_example_is_one_of_the_demos():
    example = json.loads((STATIC / "example.json").read_text("utf-8"))
    question = next(one for one in load_questions() if one.question == example["question"])
    assert (tuple(example["answers"]), example["gold"]) == (tuple(question.answers), question.gold)
    texts = {passage.id: passage.page_content for passage in load_passages()}
    assert all(texts[document["id"]] == document["text"] for document in example["documents"])
    assert example["gold"] in [document["id"] for document in example["documents"]]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000/"),
        ("0.0.0.0", "http://127.0.0.1:8000/"),
        ("192.0.2.7", "http://192.0.2.7:8000/"),
        ("::1", "http://[::1]:8000/"),
        ("::", "http://[::1]:8000/"),
    ],
)
def test_the_address_of_the_page_is_one_of_this_machine(host, expected):
    assert page_address(host, 8000) == expected
    assert page_address(host, 8000, "https") == expected.replace("http:", "https:")


def test_the_page_is_opened_once_when_the_service_is_ready(monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    listener = bind("127.0.0.1", 0)
    address = page_address(*listener.getsockname()[:2])
    server = make_server(Settings(), limits(), make_pipeline(), on_ready=lambda: open_page(address))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: bool(opened))
        wait_until(lambda: server.server_state.total_requests == 0)
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()
    assert opened == [address]


def test_without_a_browser_the_address_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    open_page("http://127.0.0.1:8000/")
    wait_until(lambda: bool(caplog.text))
    assert "open http://127.0.0.1:8000/ in one" in caplog.text
