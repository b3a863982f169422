"""A Chromium, and the page of a service whose generator answers from the first passage or from content."""

from __future__ import annotations

import pytest

from tests.support.order_biased import OrderBiasedGenerator
from tests.support.serving import make_pipeline, serving


@pytest.fixture(scope="package")
def browser():
    from tests.integration.chromium import chromium  # needs playwright, without which the modules skip their tests

    with chromium() as browser:
        yield browser


@pytest.fixture(scope="package")
def generator():
    return OrderBiasedGenerator()


@pytest.fixture(scope="package")
def url(generator):
    with serving(make_pipeline(generator)) as url:
        yield url


@pytest.fixture
def page(browser, url):
    from tests.integration.chromium import checked_page
    from tests.integration.page.question_page import open_page

    with checked_page(browser) as page:
        open_page(page, url)
        yield page
