"""Texts of the page: what is copied runs, what is shown is text, and it can be read on small and dark screens."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest

pytest.importorskip("playwright", reason="playwright is not installed; `pip install playwright`")

from tests.integration.chromium import checked_page, wait_for
from tests.integration.page.question_page import (
    answers,
    ask,
    code_in,
    open_page,
    paste,
)

pytestmark = pytest.mark.slow

NASTY = 'It\'s <b>bold</b> & "quoted" \\ $HOME `x` é 🙂.\nSecond line'


def test_the_copied_texts_run(page):
    paste(page, NASTY, "Another passage. It is short.")
    page.fill("#question", "What's \"bold\"? 'this' \\")
    python = code_in(page, "Python")
    done = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    expected = NASTY.split(". ")[0] + "\n"
    assert done.stdout == expected
    curl = subprocess.run(["bash", "-c", code_in(page, "curl") + " -sS"], capture_output=True, text=True, timeout=60)
    assert curl.stderr == ""
    assert json.loads(curl.stdout)["choices"][0]["message"]["content"] + "\n" == expected
    tree = ast.parse(code_in(page, "langchain"))
    (call,) = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "ChatOpenAI"
    ]
    given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert given["extra_body"]["documents"][0] == {"id": "passage-1", "text": NASTY}
    assert given["extra_body"]["posfix"] == {"mitigation": "default", "order": "original"}


def test_passages_and_answers_are_shown_as_text(page):
    script = "<img src=x onerror=document.title='run'><script>document.title='run'</script> is in it. Yes."
    paste(page, script, "Nothing. Else.")
    page.fill("#question", "<b>What</b> is in it?")
    ask(page)
    assert page.locator(".passage-text").first.inner_text() == script
    assert answers(page)["none"] == script.split(". ")[0]
    assert page.locator(".card img, .card script, .answer img, .answer script").count() == 0
    assert page.title() == "rag_posfix"


def answer_with(page, pattern, body):
    page.route(pattern, lambda route: route.fulfill(json=body))


def test_an_error_is_shown_in_its_column(browser, url):
    with checked_page(browser) as page:
        open_page(page, url)
        cut = 'data: {"error": {"message": "the model failed", "code": "generation_failed"}}\n\n'
        page.route("**/v1/chat/completions", lambda route: route.fulfill(body=cut, content_type="text/event-stream"))
        page.click("button.primary")
        page.get_by_text("the model failed").first.wait_for()
        assert page.locator(".answer .error:visible").all_inner_texts() == ["the model failed"] * 2


def test_the_page_waits_until_the_model_is_loaded(browser, url):
    with checked_page(browser) as page:
        loading = {"ready": False, "key": False, "attention": False}
        answer_with(page, "**/page/service.json", loading)
        page.goto(url)
        page.get_by_text("The model is being loaded").wait_for()
        assert page.locator("button.primary").is_disabled()
        page.unroute("**/page/service.json")
        wait_for(page, "document.querySelector('button.primary').disabled === false")


def test_every_control_has_a_name(page):
    ask(page)
    nameless = page.evaluate(
        "[...document.querySelectorAll('button, input, select, textarea')].filter((one) => "
        "!(one.innerText.trim() || one.ariaLabel || one.labels?.length)).map((one) => one.outerHTML)"
    )
    assert nameless == []
    assert page.locator("h1").count() == 1
    assert page.get_attribute("html", "lang") == "en"
