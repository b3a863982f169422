"""The page at / in a real Chromium: no console errors and no request to another host in any test."""

from __future__ import annotations

import ast
import json
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

from rag_posfix.retrieval.base import as_retriever
from tests.support.chromium import checked_page, chromium, wait_for
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.order_biased import OrderBiasedGenerator
from tests.support.serving import BRIDGE, HARBOUR, make_pipeline, serving

TORVANE = "The Torvane lighthouse stands on Gannet Head, at the southern end of Tull Bay"
"""What the generator answers from content: the first sentence of passage B of the example."""
MARAVEL = "The Maravel lighthouse stands on Cape Sorrin, at the northern end of Tull Bay"


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def generator():
    return OrderBiasedGenerator()


@pytest.fixture(scope="module")
def url(generator):
    with serving(make_pipeline(generator)) as url:
        yield url


@pytest.fixture
def page(browser, url):
    with checked_page(browser) as page:
        open_page(page, url)
        yield page


def open_page(page, url):
    page.goto(url)
    wait_for(page, "document.querySelector('button.primary')?.disabled === false")


def ask(page):
    page.click("button.primary")
    settle(page)


def settle(page):
    wait_for(
        page,
        "[...document.querySelectorAll('.answer .text')].every((one) => one.ariaBusy === 'false') && "
        "document.querySelectorAll('.answer .words span').length > 0",
    )


def answers(page):
    return {name: page.inner_text(f".answer.{name} .words") for name in ("none", "default")}


def letters(page):
    return "".join(page.locator(".card:not(.sortable-fallback) .letter").all_inner_texts())


def wait_for_answer(page, text):
    wait_for(page, "(text) => document.querySelector('.answer.none .words').innerText === text", arg=text)
    settle(page)


def has_no_horizontal_scroll(page):
    return page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_both_columns_stream(page, generator):
    generator.gate.clear()
    try:
        page.click("button.primary")
        for name in ("none", "default"):
            wait_for(
                page,
                "(name) => document.querySelector(`.answer.${name} .words`).innerText.trim() === 'The ' + "
                "(name === 'none' ? 'Maravel' : 'Torvane')",
                arg=name,
            )
            assert page.get_attribute(f".answer.{name} .text", "aria-busy") == "true"
    finally:
        generator.gate.set()
    settle(page)
    assert answers(page) == {"none": MARAVEL, "default": TORVANE}
    # What one column has and the other has not is underlined, word by word.
    assert page.locator(".answer.none .differs").all_inner_texts() == ["Maravel", "Cape Sorrin,", "northern"]
    assert page.locator(".answer.default .differs").all_inner_texts() == ["Torvane", "Gannet Head,", "southern"]


def test_the_keyboard_moves_a_passage_and_both_columns_are_asked_again(page):
    ask(page)
    handle = page.get_by_role("button", name="Move passage B, Torvane Lighthouse, place 2 of 6")
    handle.focus()
    page.keyboard.press("ArrowUp")
    wait_for_answer(page, TORVANE)
    assert letters(page) == "BACDEF"
    assert page.inner_text("[role=status]") == "Passage B is now at place 1 of 6."
    focused = page.evaluate("document.activeElement.ariaLabel")
    assert focused == "Move passage B, Torvane Lighthouse, place 1 of 6"
    assert page.inner_text(".answer.none .verdict") == "Changed by the move."
    assert page.inner_text(".answer.default .verdict") == "Unchanged by the move."
    assert page.locator(".answer.none .words .changed").all_inner_texts() == ["Torvane", "Gannet Head,", "southern"]
    assert page.locator(".answer.none .removed").all_inner_texts() == ["Maravel", "Cape Sorrin,", "northern"]
    assert page.locator(".answer.default .changed").count() == 0
    page.keyboard.press("End")
    wait_for_answer(page, MARAVEL)
    assert letters(page) == "ACDEFB"
    page.keyboard.press("Home")
    wait_for_answer(page, TORVANE)


def test_the_mouse_drags_a_passage(page):
    ask(page)
    start, end = (page.locator(".handle").nth(place).bounding_box() for place in (1, 0))
    page.mouse.move(start["x"] + 8, start["y"] + 8)
    page.mouse.down()
    page.mouse.move(start["x"] + 10, start["y"] - 10, steps=4)
    page.mouse.move(end["x"] + 10, end["y"] - 8, steps=12)
    page.wait_for_timeout(200)
    page.mouse.up()
    wait_for_answer(page, TORVANE)
    assert letters(page) == "BACDEF"
    assert page.locator(".sortable-fallback").count() == 0


def test_buttons_move_and_shuffle(page):
    ask(page)
    page.get_by_role("button", name="Move passage A down").click()
    wait_for_answer(page, TORVANE)
    assert letters(page) == "BACDEF"
    assert page.get_by_role("button", name="Move passage B up").is_disabled()
    page.get_by_role("button", name="Shuffle").click()
    wait_for(page, "document.querySelector('[role=status]').innerText === 'Passages shuffled.'")
    shuffled = letters(page)
    assert shuffled != "BACDEF"
    assert sorted(shuffled) == list("ABCDEF")


def test_without_asking_again_a_move_asks_nothing(page, generator):
    ask(page)
    page.get_by_label("ask again after each move").uncheck()
    asked = len(generator.asked)
    page.get_by_role("button", name="Move passage A down").click()
    page.wait_for_timeout(800)
    assert len(generator.asked) == asked


def test_citations_light_up_their_passage(page):
    ask(page)
    chip = page.locator(".answer.default .chip")
    assert chip.all_inner_texts() == ["B"]
    assert chip.get_attribute("aria-label") == "Passage B: Torvane Lighthouse"
    assert page.locator(".card.lit").count() == 0
    chip.focus()
    assert page.locator(".card.lit .letter").all_inner_texts() == ["B"]
    page.locator(".answer.none .words .cited").first.hover()
    page.locator("h1").hover()
    page.locator("#question").focus()
    page.locator(".answer.none .words .cited").first.hover()
    assert page.locator(".card.lit .letter").all_inner_texts() == ["A"]


def test_bars_show_the_share_of_each_passage(page):
    assert page.locator(".bars").first.is_hidden()
    ask(page)
    # 1 / (1 + 1/2 + ... + 1/6) = 60/147 for the first place, 30/147 for the second.
    wait_for(page, "document.querySelector('.bar.none em').innerText === '41 %'")
    assert page.locator(".bar.none em").all_inner_texts()[:2] == ["41 %", "20 %"]
    assert page.locator(".bar.none").first.get_attribute("aria-label") == "unmodified: 41 % of the attention"
    bar, whole = page.evaluate(
        "(() => { const bar = document.querySelector('.bar.none span');"
        "return [bar.style.width, parseFloat(getComputedStyle(bar.parentNode).width)] })()"
    )
    assert (float(bar.rstrip("%")), whole > 100) == (pytest.approx(100 * 60 / 147, abs=0.1), True)


@pytest.mark.parametrize("measure", ["weights", "attention"])
def test_bars_of_the_default_method_say_what_they_are(page, generator, measure):
    generator.weighted = measure == "weights"
    try:
        ask(page)
        wait_for(page, "document.querySelector('.bar.default em').innerText !== ''")
        assert f"order-invariant: share of the {measure}" in " ".join(page.inner_text("#passages-bars").split())
        share = page.locator(".bar.default em").first.inner_text()
        name = page.locator(".bar.default").first.get_attribute("aria-label")
        assert name == f"order-invariant: {share} of the {measure}"
    finally:
        generator.weighted = False


def test_a_generator_without_attention_has_no_bars(browser):
    with serving(make_pipeline()) as url, checked_page(browser) as page:
        open_page(page, url)
        ask(page)
        assert page.locator(".bars").first.is_hidden()


def test_every_place_draws_the_curve(page):
    page.get_by_label("Accepted answers").fill("gannet  head; 1883")
    page.get_by_role("button", name="Try every place").click()
    wait_for(page, "document.querySelectorAll('#curve circle.dot.default').length === 6 * 2 + 1")
    wait_for(page, "document.querySelector('[role=status]').innerText === 'Every place has been tried.'")
    assert page.locator("#curve title").text_content() == (
        "unmodified: right at 1 of 6 places (1); order-invariant: right at 6 of 6 places (1, 2, 3, 4, 5, 6)"
    )
    lines = {
        name: page.locator(f"#curve polyline.{name}").first.get_attribute("points").split()
        for name in ("none", "default")
    }
    heights = {name: [float(pair.split(",")[1]) for pair in line] for name, line in lines.items()}
    assert heights["default"] == [min(heights["none"])] * 6
    assert heights["none"] == [min(heights["none"])] + [max(heights["none"])] * 5
    # Attention to the passage at place i, in the second panel: it falls with the place.
    attention = page.locator("#curve polyline.none").nth(1).get_attribute("points").split()
    falling = [float(pair.split(",")[1]) for pair in attention]
    assert falling == sorted(falling)
    page.get_by_text("Answers by place").click()
    rows = page.locator("tbody tr").all_inner_texts()
    assert [row.split("\t")[1] for row in rows] == [TORVANE] + [MARAVEL] * 5
    assert letters(page) == "ABCDEF"


def test_every_place_needs_an_accepted_answer(page):
    page.get_by_label("Accepted answers").fill(" ")
    page.get_by_role("button", name="Try every place").click()
    assert "type an accepted answer" in page.get_by_role("alert").inner_text()


NASTY = 'It\'s <b>bold</b> & "quoted" \\ $HOME `x` é 🙂.\nSecond line'


def code_in(page, language):
    page.locator(f"[data-language={language}]").click()
    return page.locator("#code").text_content()


def paste(page, *texts):
    page.get_by_role("button", name="Paste").click()
    page.get_by_label("Passages, one per block").fill("\n\n".join(texts))
    page.get_by_role("button", name="Use these passages").click()


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


def test_the_langchain_text_runs(page):
    code = code_in(page, "langchain")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, TORVANE + "\n"), done.stderr


def test_the_text_is_copied(browser, url):
    with checked_page(browser, permissions=["clipboard-read", "clipboard-write"]) as page:
        open_page(page, url)
        code = code_in(page, "curl")
        page.get_by_role("button", name="Copy").click()
        page.get_by_role("button", name="Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == code


def test_the_page_of_the_api_shows_every_group_of_routes_and_tries_one_out(browser, url):
    with checked_page(browser) as page:
        page.goto(url + "/docs")
        page.locator("#operations-info-info").click()
        page.get_by_role("button", name="Try it out").click()
        page.get_by_role("button", name="Execute").click()
        page.locator(".live-responses-table .response-col_status", has_text="200").wait_for()
        shown = set(page.locator(".opblock-tag").evaluate_all("(tags) => tags.map((tag) => tag.dataset.tag)"))
        assert {"chat", "rerank", "collections", "keys", "evaluation"} <= shown


def test_passages_and_answers_are_shown_as_text(page):
    script = "<img src=x onerror=document.title='run'><script>document.title='run'</script> is in it. Yes."
    paste(page, script, "Nothing. Else.")
    page.fill("#question", "<b>What</b> is in it?")
    ask(page)
    assert page.locator(".passage-text").first.inner_text() == script
    assert answers(page)["none"] == script.split(". ")[0]
    assert page.locator(".card img, .card script, .answer img, .answer script").count() == 0
    assert page.title() == "rag_posfix"


def test_it_works_at_360_pixels(browser, url):
    with checked_page(browser, viewport={"width": 360, "height": 740}) as page:
        open_page(page, url)
        assert has_no_horizontal_scroll(page)
        ask(page)
        paste(page, "w" * 400 + ". x", "short. passage")
        ask(page)
        page.get_by_label("Accepted answers").fill("x")
        page.get_by_role("button", name="Try every place").click()
        wait_for(page, "document.querySelector('[role=status]').innerText === 'Every place has been tried.'")
        code_in(page, "Python")
        assert has_no_horizontal_scroll(page)
        tops = [page.locator(f".answer.{name}").bounding_box()["y"] for name in ("none", "default")]
        assert tops[1] > tops[0] + 40  # one below the other


def contrast(page, text, ground):
    """The WCAG contrast ratio of two CSS variables."""

    def luminance(name):
        value = page.evaluate("(name) => getComputedStyle(document.documentElement).getPropertyValue(name)", name)
        channels = [int(value.strip().lstrip("#")[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(text), luminance(ground)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("scheme", "ground"), [("light", "rgb(251, 250, 248)"), ("dark", "rgb(22, 23, 22)")])
def test_light_and_dark_follow_the_system_and_can_be_read(browser, url, scheme, ground):
    with checked_page(browser, color_scheme=scheme) as page:
        open_page(page, url)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
        pairs = [("--ink", "--paper"), ("--quiet", "--paper"), ("--quiet", "--raised"), ("--accent", "--paper"),
                 ("--on-accent", "--accent"), ("--ink", "--tint")]  # fmt: skip
        assert {pair: contrast(page, *pair) >= 4.5 for pair in pairs} == dict.fromkeys(pairs, True)


def test_a_key_is_asked_for_and_kept_in_memory_only(browser, generator):
    with serving(make_pipeline(generator), api_key="secret-key") as url, checked_page(browser) as page:
        page.goto(url)
        page.get_by_label("API key").fill("secret-key")
        assert page.locator("button.primary").is_disabled()
        page.get_by_role("button", name="Use key").click()
        wait_for(page, "document.querySelector('button.primary').disabled === false")
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


def answer_with(page, pattern, body):
    page.route(pattern, lambda route: route.fulfill(json=body))


def test_passages_come_from_a_collection(browser, generator):
    with (
        serving(make_pipeline(generator, embeddings=LetterEmbeddings())) as url,
        httpx2.Client(base_url=url) as client,
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


def test_without_collections_there_is_no_picker(page):
    assert page.get_by_role("button", name="Collection").count() == 0


class Cached(OrderBiasedGenerator):
    """Says of each question that half of its prompt was cached."""

    def generate(self, request):
        generation = super().generate(request)
        tokens = generation.usage.prompt_tokens
        return replace(generation, usage=replace(generation.usage, prompt_tokens=tokens, cached_tokens=tokens // 2))


def send(page, question):
    page.get_by_label("Question of the conversation").fill(question)
    page.get_by_role("button", name="Send").click()
    wait_for(page, "[...document.querySelectorAll('.turn')].at(-1)?.ariaBusy === 'false'")


def test_a_conversation_shows_query_cache_and_sources_of_every_turn(browser):
    bridge = Document(BRIDGE, id="b", metadata={"title": "Bridges", "source": "arvo.pdf", "page": 3})
    retriever = RunnableLambda(lambda question: [bridge])
    with serving(make_pipeline(Cached(), retriever=as_retriever(retriever))) as url, checked_page(browser) as page:
        open_page(page, url)
        page.get_by_label("Passages from").select_option(label="the served index")
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
        assert page.locator("select").last.input_value() == "index"
        page.get_by_role("button", name="Example").click()
        wait_for(page, "document.querySelectorAll('.card').length === 6")
        page.get_by_role("button", name="Index").click()
        wait_for(page, "document.querySelectorAll('.card').length === 0")


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
