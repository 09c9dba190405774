"""Fixtures with a headless Chromium, Debian's or any other on the machine, in its own thread.

Playwright's synchronous interface keeps an event loop running in its thread, where no later test could run its own
loop.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--no-sandbox",  # tests may run as root, and open only their own nodes' pages
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT_MS = 20_000
OpenPage: TypeAlias = Callable[..., Any]
Expect: TypeAlias = Callable[[Any], Any]
PLAIN = (type(None), bool, int, float, str, bytes, dict)


class Driven:
    """A playwright object whose calls run in playwright's thread; the results are wrapped, too."""

    def __init__(self, thread: ThreadPoolExecutor, thing: Any) -> None:
        self._thread = thread
        self._thing = thing

    def __getattr__(self, name: str) -> Any:
        found = self._thread.submit(getattr, self._thing, name).result()
        return self._driven(found)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        plain = [argument._thing if isinstance(argument, Driven) else argument for argument in arguments]
        return self._driven(self._thread.submit(self._thing, *plain, **named).result())

    def _driven(self, found: Any) -> Any:
        if isinstance(found, PLAIN):
            return found
        if isinstance(found, list):
            return [self._driven(one) for one in found]
        return Driven(self._thread, found)


class HeadlessBrowser:
    """Chromium. `open` returns a page; `expect` waits for what the page should show."""

    def __init__(self, executable: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="browser")
        self.expect: Callable[[Any], Any] = Driven(self._thread, self._thread.submit(self._start, executable).result())

    def _start(self, executable: str) -> Any:
        from playwright.sync_api import expect, sync_playwright

        expect.set_options(timeout=WAIT_MS)
        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        return expect

    def open(self, complaints: list[str], *, width: int, takes_console: bool, **context: Any) -> Any:
        """Open a page in its own context; its errors are added to `complaints`."""

        def made() -> Any:
            page = self._browser.new_context(viewport={"width": width, "height": 850}, **context).new_page()
            page.set_default_timeout(WAIT_MS)
            page.on("pageerror", lambda error: complaints.append(f"pageerror: {error}"))
            page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
            if takes_console:
                page.on("console", lambda message: self._heard(message, complaints))
            return page

        return Driven(self._thread, self._thread.submit(made).result())

    @staticmethod
    def _heard(message: Any, complaints: list[str]) -> None:
        if message.type in ("error", "warning"):
            complaints.append(f"console: {message.text}")

    def close(self) -> None:
        self._thread.submit(self._browser.close).result()
        self._thread.submit(self._playwright.stop).result()
        self._thread.shutdown()


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
    """Open pages that must not report errors: `open_page(address, width=390)`; `may_fail` if a page loses its node."""
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
