"""A real Chromium without a window, and a page in it that tells what it must not do."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run Chromium with a new, empty profile, or skip the test with the reason.

    pytest-playwright keeps its browser open for the session, and with it an event loop: an asynchronous test after one
    of a page fails with "Cannot run the event loop while another loop is running".
    """
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("no Chromium on the PATH; install it with `apt-get install chromium`")
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=path) as browser:
        yield browser


@contextmanager
def checked_page(browser: Browser, *, expected: str | None = None, **context: Any) -> Iterator[Page]:
    """Yield a page of a new context; fail at the end if it logged an error or asked another host for anything.

    Args:
        expected: A text of errors that may be logged.
    """
    outside: list[str] = []
    errors: list[str] = []

    def note(text: str) -> None:
        if expected is None or expected not in text:
            errors.append(text)

    def let_through(route: Route) -> None:
        if urlsplit(route.request.url).hostname in ("127.0.0.1", "localhost"):
            route.fallback()
        else:
            outside.append(route.request.url)
            route.abort()

    opened = browser.new_context(**{"viewport": {"width": 1100, "height": 900}, **context})
    try:
        opened.route(lambda url: url.startswith("http"), let_through)
        page = opened.new_page()
        page.set_default_timeout(30_000)
        page.on("console", lambda message: message.type in ("error", "warning") and note(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield page
        assert (outside, errors) == ([], [])
    finally:
        opened.close()


def wait_for(page: Page, expression: str, arg: Any = None, seconds: float = 30) -> None:
    """Wait until an expression of JavaScript is true. ``Page.wait_for_function`` needs eval, which policies forbid."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression, arg):
        assert time.monotonic() < deadline, f"not true within {seconds:g} s: {expression}"
        page.wait_for_timeout(30)
