"""One browser for all tests of the viewer that need one."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent.parent / "_scan")]

from browser import CHROMIUM, FLAGS, Page, opened_page, require_browser


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    playwright = require_browser()
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any) -> Iterator[Page]:
    with opened_page(chromium) as fresh:
        yield fresh
        assert not fresh.errors, fresh.errors
