"""A real browser: Debian's Chromium, driven by playwright; a skip says which of them is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Chromium: on Debian apt-get install chromium")
    with sync_api.sync_playwright() as driver:
        # in containers and as root Chromium has no sandbox
        running = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        running.close()


class Opened:
    """Pages of one test, and all that they complain of or ask for."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def open(self, url: str, **context: Any) -> Page:
        page = self._browser.new_context(**context).new_page()
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(url)
        page.wait_for_selector("html[data-drawn]", timeout=60_000)
        return page


@pytest.fixture
def opened(browser: Browser) -> Iterator[Opened]:
    """Pages of a test, which must not complain; closed at its end."""
    found = Opened(browser)
    yield found
    for context in browser.contexts:
        context.close()
    assert found.complaints == []
