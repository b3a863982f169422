"""What a reader does on the page at /: asks, waits for both answers, pastes passages, takes the code."""

from __future__ import annotations

from tests.integration.chromium import wait_for

TORVANE = "The Torvane lighthouse stands on Gannet Head, at the southern end of Tull Bay"
"""What the generator answers from content: the first sentence of passage B of the example."""
MARAVEL = "The Maravel lighthouse stands on Cape Sorrin, at the northern end of Tull Bay"


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


def code_in(page, language):
    page.locator(f"[data-language={language}]").click()
    return page.locator("#code").text_content()


def paste(page, *texts):
    page.get_by_role("button", name="Paste").click()
    page.get_by_label("Passages, one per block").fill("\n\n".join(texts))
    page.get_by_role("button", name="Use these passages").click()
