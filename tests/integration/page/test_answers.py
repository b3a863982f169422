"""The example of the page: both answers, moved passages, bars and the curve."""

from __future__ import annotations

import pytest

pytest.importorskip("playwright", reason="playwright is not installed; `pip install playwright`")

from tests.integration.chromium import wait_for
from tests.integration.page.question_page import (
    MARAVEL,
    TORVANE,
    answers,
    ask,
    letters,
    settle,
    wait_for_answer,
)

pytestmark = pytest.mark.slow


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
    # What one column has and the other has not is bold, word by word.
    assert page.locator(".answer.none .differs").all_inner_texts() == ["Maravel", "Cape Sorrin,", "northern"]
    assert page.locator(".answer.default .differs").all_inner_texts() == ["Torvane", "Gannet Head,", "southern"]


def test_answers_are_stopped_and_what_was_written_stays(page, generator):
    generator.gate.clear()
    try:
        page.click("button.primary")
        wait_for(page, "document.querySelector('.answer.none .words').innerText.trim() === 'The Maravel'")
        page.get_by_role("button", name="Stop", exact=True).click()
        settle(page)
        assert answers(page)["none"].strip() == "The Maravel"
        assert not page.get_by_role("button", name="Stop", exact=True).is_visible()
    finally:
        generator.gate.set()


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
