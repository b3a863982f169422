"""Takes the screenshots of docs/page.md: ``python -m docs.page_images http://127.0.0.1:8000``, with a running service.

``python -m docs.page_images report/report.html`` takes the one of docs/measure.md, of a report of ``measure``.

Needs the extra ``dev`` and a Chromium. Answers are those of the served model.
"""

from __future__ import annotations

import io
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

IMAGES = Path(__file__).with_name("images")
WAIT_SECONDS = 600
WIDTH, REPORT_WIDTH, REPORT_HEIGHT = 1080, 1200, 1070
PLACES = """() => {
  const {x, y, width, height} = document.querySelector('.places').getBoundingClientRect();
  return {x: x - 20, y: y + scrollY - 20, width: width + 40, height: height + 40};
}"""


def main(address: str) -> None:
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        if address.endswith(".html"):
            _save_report(browser, Path(address))
            return
        light = _opened(browser, address, viewport={"width": WIDTH, "height": 900})
        _ask(light)
        light.get_by_label("Move passage B up").click()
        light.wait_for_timeout(1000)
        _settle(light)
        light.locator("h1").hover()
        _save(light, "page-light.png", clip={"x": 0, "y": 0, "width": WIDTH, "height": 1180})
        _every_place(light)
        _save(light, "page-curve.png", clip=light.evaluate(PLACES))
        dark = _opened(browser, address, viewport={"width": WIDTH, "height": 900}, color_scheme="dark")
        _ask(dark)
        dark.locator(".answer.default .chip").first.focus()
        _save(dark, "page-dark.png", clip={"x": 0, "y": 0, "width": WIDTH, "height": 1180})
        narrow = _opened(browser, address, viewport={"width": 360, "height": 740})
        _ask(narrow)
        _save(narrow, "page-360.png", clip={"x": 0, "y": 0, "width": 360, "height": 1180})
        browser.close()


def _save_report(browser: Browser, report: Path) -> None:
    page = browser.new_page(viewport={"width": REPORT_WIDTH, "height": 900})
    page.goto(report.resolve().as_uri())
    _wait(page, "[...document.querySelectorAll('.chart')].every((place) => place.querySelector('svg'))")
    _save(page, "measure-report.png", clip={"x": 0, "y": 0, "width": REPORT_WIDTH, "height": REPORT_HEIGHT})


def _opened(browser: Browser, address: str, **context: Any) -> Page:
    page = browser.new_context(**context).new_page()
    page.set_default_timeout(WAIT_SECONDS * 1000)
    page.goto(address)
    _wait(page, "document.querySelector('button.primary')?.disabled === false")
    return page


def _ask(page: Page) -> None:
    page.click("button.primary")
    _settle(page)


def _settle(page: Page) -> None:
    _wait(
        page,
        "[...document.querySelectorAll('.answer .text')].every((one) => one.ariaBusy === 'false') && "
        "document.querySelectorAll('.answer .words span').length > 0",
    )
    page.wait_for_timeout(500)


def _every_place(page: Page) -> None:
    page.get_by_role("button", name="Try every place").click()
    _wait(page, "document.querySelector('[role=status]').innerText === 'Every place has been tried.'")
    page.get_by_text("Answers by place").click()


def _wait(page: Page, expression: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not page.evaluate(expression):
        if time.monotonic() > deadline:
            sys.exit(f"the page did not get there within {WAIT_SECONDS} s: {expression}")
        page.wait_for_timeout(100)


def _save(page: Page, name: str, clip: Any) -> None:
    """Save a screenshot with 128 colours, which makes it a third as large."""
    taken = page.screenshot(full_page=True, clip=clip)
    Image.open(io.BytesIO(taken)).convert("RGB").quantize(128).save(IMAGES / name, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
