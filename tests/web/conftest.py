"""A headless Chromium for the page's tests: Debian's, or whatever the machine has; nothing is downloaded."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
from tests.web.support_browser import HeadlessBrowser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

OpenPage: TypeAlias = Callable[..., Any]
Expect: TypeAlias = Callable[[Any], Any]


@pytest.fixture(scope="session")
def browser() -> Iterator[HeadlessBrowser]:
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium here: install it (apt-get install chromium)")
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed: make test installs it")
    browser = HeadlessBrowser(found)
    yield browser
    browser.close()


@pytest.fixture
def expect(browser: HeadlessBrowser) -> Expect:
    return browser.expect


@pytest.fixture
def open_page(browser: HeadlessBrowser) -> Iterator[OpenPage]:
    """Opens pages that must not complain: `open_page(address, width=390)`; `may_fail` for one that loses its node."""
    pages: list[Any] = []
    complaints: list[str] = []

    def open_one(address: object, path: str = "/", *, width: int = 1280, may_fail: bool = False, **context: Any) -> Any:
        page = browser.open(complaints, width=width, takes_console=not may_fail, **context)
        pages.append(page)
        page.goto(f"http://{address}{path}")
        return page

    yield open_one
    for page in pages:
        page.context.close()
    assert complaints == []
