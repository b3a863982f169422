"""Passages of an index or a collection, conversations, and keys on the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import httpx2
import pytest
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda

pytest.importorskip("playwright", reason="playwright is not installed; `pip install playwright`")

from rag_posfix.pipeline.pipeline import Defaults
from rag_posfix.retrieval.base import as_retriever
from tests.integration.chromium import checked_page, wait_for
from tests.integration.page.question_page import (
    TORVANE,
    answers,
    ask,
    code_in,
    has_no_horizontal_scroll,
    open_page,
    wait_for_answer,
)
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.order_biased import OrderBiasedGenerator
from tests.support.serving import BRIDGE, HARBOUR, make_pipeline, serving

pytestmark = pytest.mark.slow


def test_a_wrong_key_is_refused_under_its_field(browser, generator):
    with serving(make_pipeline(generator), api_key="secret-key") as url, checked_page(browser, expected="401") as page:
        page.goto(url)
        page.get_by_label("API key").fill("wrong")
        page.get_by_role("button", name="Use key").click()
        wait_for(page, "document.getElementById('key-problem').innerText !== ''")
        assert page.locator("#key-problem").inner_text() == "The service does not accept this key."
        assert page.locator(".top .quiet").inner_text() == "This service needs an API key."
        assert has_no_horizontal_scroll(page)
        page.get_by_label("API key").fill("secret-key")
        page.get_by_role("button", name="Use key").click()
        wait_for(page, "document.querySelector('button.primary').disabled === false")
        assert not page.locator("#key-problem").is_visible()


def test_a_key_is_asked_for_and_kept_in_memory_only(browser, generator):
    with serving(make_pipeline(generator), api_key="secret-key") as url, checked_page(browser) as page:
        page.goto(url)
        page.get_by_label("API key").fill("secret-key")
        assert page.locator("button.primary").is_disabled()
        page.get_by_role("button", name="Use key").click()
        wait_for(page, "document.querySelector('button.primary').disabled === false")
        assert not page.get_by_label("API key").is_visible()
        ask(page)
        assert answers(page)["default"] == TORVANE
        curl = code_in(page, "curl")
        assert '-H "Authorization: Bearer $RAG_POSFIX_KEY"' in curl
        assert "secret-key" not in curl
        done = subprocess.run(
            [sys.executable, "-c", code_in(page, "Python")], env={**os.environ, "RAG_POSFIX_KEY": "secret-key"},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert (done.stdout, done.stderr) == (TORVANE + "\n", "")
        stored = page.evaluate(
            "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        )
        assert "secret-key" not in stored
        page.reload()
        assert page.get_by_label("API key").input_value() == ""


def test_passages_come_from_a_collection(browser, generator):
    with (
        serving(make_pipeline(generator, embeddings=LetterEmbeddings())) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
        checked_page(browser) as page,
    ):
        documents = [{"id": f"d{i}", "text": f"Found {i}. More."} for i in range(4)]
        for name in ("harbour-pilots", "other"):
            assert client.post("/v1/collections", json={"name": name}).status_code == 201
        added = client.post("/v1/collections/harbour-pilots/documents", json={"documents": documents})
        assert added.json()["added"] == 4
        open_page(page, url)
        page.get_by_role("button", name="Collection").click()
        page.get_by_role("spinbutton", name="Passages").fill("3")
        page.get_by_role("button", name="Find passages for the question").click()
        wait_for(page, "document.querySelectorAll('.card').length === 3")
        ask(page)
        assert answers(page)["none"].startswith("Found ")


class Cached(OrderBiasedGenerator):
    """Says of each question that half of its prompt was cached."""

    def generate(self, request):
        generation = super().generate(request)
        tokens = generation.usage.prompt_tokens
        return replace(generation, usage=replace(generation.usage, prompt_tokens=tokens, cached_tokens=tokens // 2))


def send(page, question):
    page.get_by_role("button", name="Conversation", exact=True).click()
    page.get_by_label("Question", exact=True).fill(question)
    page.click("button.primary")
    wait_for(page, "[...document.querySelectorAll('.turn')].at(-1)?.ariaBusy === 'false'")


def test_a_conversation_shows_query_cache_and_sources_of_every_turn(browser):
    bridge = Document(BRIDGE, id="b", metadata={"title": "Bridges", "source": "arvo.pdf", "page": 3})
    retriever = RunnableLambda(lambda question: [bridge])
    with serving(make_pipeline(Cached(), retriever=as_retriever(retriever))) as url, checked_page(browser) as page:
        open_page(page, url)
        send(page, "When was the bridge built?")
        send(page, "Who <b>designed</b> it?")
        turns = page.locator(".turn")
        assert turns.count() == 2
        searched = page.locator(".turn .searched span").all_inner_texts()
        assert searched == ["When was the bridge built?", "When was the bridge built? / Who <b>designed</b> it?"]
        cached, whole = re.fullmatch(
            r"(\d+) of (\d+) tokens of the prompt were cached", turns.nth(1).locator(".cached span").inner_text()
        ).groups()
        assert int(cached) == int(whole) // 2 > 0
        assert turns.nth(1).locator(".turn-sources li").all_inner_texts() == ["Bridges, arvo.pdf, page 3"]
        assert page.locator(".turn .said").nth(1).inner_text() == "Who <b>designed</b> it?"
        page.get_by_role("button", name="New conversation").click()
        assert turns.count() == 0
        send(page, "Who designed it?")
        assert page.locator(".turn .searched span").all_inner_texts() == ["Who designed it?"]


def test_a_conversation_over_the_passages_of_the_page_has_the_earlier_turns_as_history(page, generator):
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    send(page, "Which lighthouse?")
    send(page, "And the other?")
    first, second = bodies
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == page.locator(".turn .words").first.inner_text()
    assert second["documents"] == first["documents"]
    assert len(first["documents"]) == 6
    assert page.locator(".turn .searched:visible").count() == 0  # nothing was searched for
    assert "Torvane Lighthouse" in page.locator(".turn-sources li").all_inner_texts()
    assert has_no_horizontal_scroll(page)


def retrieving(generator, *texts):
    """A served pipeline over a retriever, which is what ``serve --index`` makes."""
    documents = [
        Document(text, id=f"r{i}", metadata={"title": f"File {i}", "source": f"/srv/files/f{i}.pdf", "page": i + 1})
        for i, text in enumerate(texts)
    ]
    return make_pipeline(generator, retriever=as_retriever(RunnableLambda(lambda question: documents)))


def test_with_an_index_the_page_opens_with_it_and_shows_what_was_retrieved(browser, generator):
    bodies = []
    with serving(retrieving(generator, BRIDGE, HARBOUR)) as url, checked_page(browser) as page:
        page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
        open_page(page, url)
        page.get_by_text("Ask the documents of this service").wait_for()
        assert page.locator(".card").count() == 0
        assert page.get_by_label("Question", exact=True).input_value() == ""
        page.get_by_label("Question", exact=True).fill("When was the bridge of Arvo built?")
        ask(page)
        chats = [body for body in bodies if "messages" in body]
        assert [("documents" in body, body["posfix"]["mitigation"]) for body in chats] == [
            (False, "none"), (False, "default"),
        ]  # fmt: skip
        assert page.locator(".card .title").all_inner_texts() == ["File 0, f0.pdf, page 1", "File 1, f1.pdf, page 2"]
        assert page.locator(".card .passage-text").first.inner_text() == BRIDGE
        assert answers(page)["none"] == BRIDGE.split(". ")[0]
        wait_for(page, "document.querySelectorAll('.card .bar').length === 4")
        page.get_by_role("button", name="Move passage B up").click()
        wait_for_answer(page, HARBOUR.split(". ")[0])
        assert page.inner_text(".answer.default .verdict") == "Unchanged by the move."
        assert [document["text"] for document in bodies[-1]["documents"]] == [HARBOUR, BRIDGE]
        assert '"documents"' not in code_in(page, "curl")  # the service retrieves for the program too
        assert page.locator(".gold-mark:visible").count() == 0  # which passage has the answer is not known
        # Another question is retrieved for again.
        page.get_by_label("Question", exact=True).fill("And the harbour?")
        ask(page)
        assert "documents" not in [body for body in bodies if "messages" in body][-1]
        assert page.get_by_label("Passages from").input_value() == "index"
        page.get_by_role("button", name="Example").click()
        wait_for(page, "document.querySelectorAll('.card').length === 6")
        page.get_by_role("button", name="Index").click()
        wait_for(page, "document.querySelectorAll('.card').length === 0")


def test_a_refusal_names_the_passage_that_was_left_out_and_what_reads_it(browser, generator):
    found = [Document(BRIDGE, id="b", metadata={"relevance_score": 0.13, "source": "arvo.pdf"})]
    defaults = Defaults(min_relevance=0.2)
    pipeline = make_pipeline(
        generator, retriever=as_retriever(RunnableLambda(lambda question: found)), defaults=defaults
    )
    with serving(pipeline) as url, checked_page(browser) as page:
        open_page(page, url)
        page.get_by_label("Question", exact=True).fill("How do I bake bread?")
        ask(page)
        for name in ("none", "default"):
            assert "no model was asked" in page.inner_text(f".answer.{name} footer")
        warning = page.locator(".answer.default .warning").inner_text()
        assert "arvo.pdf, with similarity 0.13, at least 0.20 is needed" in warning
        assert "--min-relevance off" in warning
        send(page, "How do I bake bread?")
        assert "--min-relevance off" in page.locator(".turn .warning").inner_text()


def test_passages_without_text_are_shown_and_not_moved(browser, generator):
    pipeline = retrieving(generator, BRIDGE, HARBOUR)
    with serving(pipeline, source_text=False) as url, checked_page(browser) as page:
        open_page(page, url)
        page.get_by_label("Question", exact=True).fill("When was the bridge of Arvo built?")
        ask(page)
        page.get_by_text("does not send the text of its passages").wait_for()
        assert page.locator(".card .title").all_inner_texts() == ["File 0, f0.pdf, page 1", "File 1, f1.pdf, page 2"]
        assert page.get_by_role("button", name="Try every place").count() == 0


def test_the_page_of_the_api_works_with_a_key(browser, generator):
    with serving(make_pipeline(generator), api_key="secret-key") as url, checked_page(browser) as page:
        page.goto(f"{url}/docs")
        page.get_by_role("button", name="Authorize").click()
        page.get_by_label("Value").first.fill("secret-key")
        page.get_by_role("button", name="Apply credentials").first.click()
        page.get_by_role("button", name="Close", exact=True).first.click()
        models = page.locator(".opblock", has_text="/v1/models").first
        models.click()
        models.get_by_role("button", name="Try it out").click()
        models.get_by_role("button", name="Execute").click()
        models.locator(".live-responses-table tbody td.response-col_status", has_text="200").wait_for()
        assert '"id": "fake"' in models.locator(".live-responses-table").inner_text()
