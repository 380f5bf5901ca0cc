"""Chromium without a screen, driven by Playwright, for tests of pages.

    with opened(address) as (page, asked):
        page.get_by_label("Text").fill("a red circle")

What this module imports at its top is the standard library: `.ci/run` installs Chromium through it.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from support.project import system_packages

PROGRAM = "chromium"


def missing() -> str | None:
    """Return the reason why Chromium cannot run here, or None; `.ci/run` installs it."""
    return system_packages.missing((PROGRAM,), (PROGRAM,))


@contextlib.contextmanager
def opened(address: str, width: int = 1280, height: int = 900) -> Iterator[tuple[Any, list[str]]]:
    """Open a page, and yield it with the addresses that it asks for, which grow."""
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox"] if os.getuid() == 0 else []  # Chromium refuses root otherwise
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=system_packages.find(PROGRAM), args=arguments)
        try:
            page, asked = browser.new_page(viewport={"width": width, "height": height}), list[str]()
            page.on("request", lambda request: asked.append(request.url))
            page.goto(address)
            yield page, asked
        finally:
            browser.close()
